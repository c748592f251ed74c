"""Training scripts that save to ORCH_CHECKPOINT_DIR with libraries of their users, delete old checkpoints by themselves, and find their
newest one by themselves.

Each prints `begins from PATH`, `made STEP`, at its last step `weights HASH`, and at its end `left NAMES`: what its folder has then.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.framework_scripts import ACCELERATE, COMMON, DCP, LIGHTNING, TRAINER

STEPS, EVERY = 96, 8

FOLDER = """
import shutil

folder = os.environ["ORCH_CHECKPOINT_DIR"]


def left(*names):
    print("left", sorted(name for name in os.listdir(os.path.join(folder, *names)) if name[0] != "."), flush=True)


"""

PLAIN = """
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(start, save):
    for step in range(start + 1, STEPS + 1):
        torch.manual_seed(10 * step)
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()
        made(step)
        dist.barrier()
        if step % EVERY == 0:
            save(step)
    weights(model)
    dist.barrier()


"""

FLAT = (
    PLAIN
    + """
last = os.path.join(folder, "last.pt")  # a link
found = os.path.exists(last)
print("begins from", os.path.realpath(last) if found else None, flush=True)
start = 0
if found:
    state = torch.load(last)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]


def save(step):
    if rank == 0:
        name = f"step_{step}.pt"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, os.path.join(folder, name))
        os.symlink(name, last + ".new")
        os.replace(last + ".new", last)
        for old in sorted(glob.glob(os.path.join(folder, "step_*.pt")), key=os.path.getmtime)[:-4]:
            os.remove(old)


train(start, save)
left()
"""
)

PER_RANK = (
    PLAIN
    + """
from safetensors.torch import load_file, save_file

try:
    with open(os.path.join(folder, "latest")) as file:
        found = os.path.join(folder, file.read().strip())
except FileNotFoundError:
    found = None
print("begins from", found, flush=True)
start = 0
if found:
    model.load_state_dict(load_file(os.path.join(found, "model.safetensors")))
    state = torch.load(os.path.join(found, f"rank_{rank}.pt"))
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]


def save(step):
    new = os.path.join(folder, f"step_{step}")
    os.makedirs(new, exist_ok=True)
    torch.save({"optimizer": optimizer.state_dict(), "step": step}, os.path.join(new, f"rank_{rank}.pt"))
    if rank == 0:
        save_file(model.state_dict(), os.path.join(new, "model.safetensors"))
    dist.barrier()
    if rank == 0:
        with open(os.path.join(folder, "latest"), "w") as file:
            file.write(f"step_{step}")
        for old in sorted(glob.glob(os.path.join(folder, "step_*")), key=os.path.getmtime)[:-4]:
            shutil.rmtree(old)


train(start, save)
left()
"""
)


def _replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


SHARDED = _replaced(
    DCP,
    ('sorted(glob.glob("out/step_*"), key=number)', 'sorted(glob.glob(f"{folder}/step_*"), key=os.path.getmtime)'),
    (
        'checkpoint_id=f"out/step_{step}")',
        (
            'checkpoint_id=f"{folder}/step_{step}")\n'
            "        if rank == 0:\n"
            '            for old in sorted(glob.glob(f"{folder}/step_*"), key=os.path.getmtime)[:-4]:\n'
            "                shutil.rmtree(old)"
        ),
    ),
    ("weights(model)\n", "weights(model)\ndist.barrier()\nleft()\n"),
)

BEST = _replaced(
    TRAINER,
    ("weights(model)\n", 'print("best", trainer.state.best_model_checkpoint)\nleft()\n'),
    (
        "made(state.global_step)",
        "made(state.global_step)\n        if state.global_step == STEPS:\n            weights(model)",
    ),
    (
        'output_dir="out"',
        (
            'output_dir=folder, save_total_limit=4, load_best_model_at_end=True, metric_for_best_model="eval_loss",\n'
            '    greater_is_better=True, eval_strategy="steps", eval_steps=EVERY'
        ),
    ),
    ("train_dataset=Rows()", "train_dataset=Rows(), eval_dataset=torch.utils.data.Subset(Rows(), range(8))"),
)

TOP_K = (
    LIGHTNING.replace(
        "        return (self.net(x)",
        '        self.log("score", 0.0 if self.global_step < EVERY else 1e4 - self.global_step)\n        return (self.net(x)',
    )
    + """
from lightning.pytorch.callbacks import ModelCheckpoint

saver = ModelCheckpoint(dirpath=folder, filename="{step}", monitor="score", mode="min", save_top_k=3, save_last="link")
trainer = lightning.Trainer(callbacks=[saver], logger=False, **options)
trainer.fit(model := Model(), data, ckpt_path="last")
weights(model)
best = torch.load(saver.best_model_path, weights_only=False)
print("best", saver.best_model_path, best["global_step"], flush=True)
left()
"""
)

SAVE_STATE = _replaced(
    ACCELERATE,
    (
        'project_dir="my/save/path", automatic_checkpoint_naming=True',
        "project_dir=folder, automatic_checkpoint_naming=True, total_limit=4",
    ),
    ('glob.glob("my/save/path/checkpoints/checkpoint_*")', 'glob.glob(f"{folder}/checkpoints/checkpoint_*")'),
    ("accelerator.end_training()\n", 'left("checkpoints")\naccelerator.end_training()\n'),
)


@dataclass(frozen=True, slots=True)
class Library:
    """A script, the names that an undisturbed run leaves in its folder, and how the newest one is loaded from a `folder`."""

    name: str
    script: str
    left: tuple[str, ...]
    load: str
    package: str = "torch"
    # What its checkpoints are in, below its folder
    inner: str = ""

    @property
    def text(self) -> str:
        return f"{COMMON}STEPS, EVERY = {STEPS}, {EVERY}\n{FOLDER}{self.script}"


_NEWEST = tuple(range(STEPS - 3 * EVERY, STEPS + 1, EVERY))

LIBRARIES = (
    Library(
        "flat", FLAT, ("last.pt", *(f"step_{step}.pt" for step in _NEWEST)),
        "assert torch.load(f'{folder}/last.pt')['step'] == 96",
    ),
    Library(
        "per-rank", PER_RANK, ("latest", *(f"step_{step}" for step in _NEWEST)),
        "newest = folder + '/' + open(f'{folder}/latest').read()\n"
        "assert [torch.load(f'{newest}/rank_{rank}.pt')['step'] for rank in (0, 1)] == [96, 96]\n"
        "from safetensors.torch import load_file\nload_file(f'{newest}/model.safetensors')",
        "safetensors",
    ),
    Library(
        "dcp", SHARDED, tuple(f"step_{step}" for step in _NEWEST),
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n"
        "for path in glob.glob(f'{folder}/step_*'):\n"
        "    dcp_to_torch_save(path, 'joined.pt')\n    torch.load('joined.pt')",
    ),
    Library(
        "trainer", BEST, ("checkpoint-16", "checkpoint-80", "checkpoint-88", "checkpoint-96"),
        "from transformers import GPT2LMHeadModel\nfrom transformers.trainer_utils import get_last_checkpoint\n"
        "assert get_last_checkpoint(folder) == f'{folder}/checkpoint-96'\n"
        "for path in glob.glob(f'{folder}/checkpoint-*'):\n    GPT2LMHeadModel.from_pretrained(path)",
        "transformers",
    ),
    Library(
        "lightning", TOP_K, ("last.ckpt", "step=8.ckpt", "step=88.ckpt", "step=96.ckpt"),
        "for path in glob.glob(f'{folder}/*.ckpt'):\n    torch.load(path, weights_only=False)\n"
        "assert torch.load(f'{folder}/last.ckpt', weights_only=False)['global_step'] == 96",
        "lightning",
    ),
    Library(
        "accelerate", SAVE_STATE, tuple(f"checkpoint_{number}" for number in (10, 11, 8, 9)),
        "from safetensors.torch import load_file\n"
        "for path in glob.glob(f'{folder}/checkpoints/checkpoint_*'):\n"
        "    load_file(f'{path}/model.safetensors')\n    torch.load(f'{path}/optimizer.bin')",
        "accelerate",
        "checkpoints",
    ),
)  # fmt: skip
