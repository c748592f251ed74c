"""Training scripts of frameworks as their documentation shows them: each saves and resumes as the framework does, and knows
nothing of orch.

A script prints `begins from PATH`, `made STEP` after each step, and at its end `weights HASH`. It draws the same data and random
numbers at each step however often it was begun, as far as its framework promises that. A step takes a while, and a save of some
twenty megabytes can be hit.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS, EVERY = 40, 8

COMMON = """
import glob, hashlib, os, re, time
import torch

torch.set_num_threads(1)
PACE_S = float(os.environ.get("PACE_S", "0.25"))


def made(step):
    time.sleep(PACE_S)
    print("made", step, flush=True)


def weights(model):
    parts = [part.detach() for part in model.parameters()]
    parts = [part.to_local() if hasattr(part, "to_local") else part for part in parts]
    print("weights", hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest(), flush=True)


def number(path):
    return int(re.findall(r"[0-9]+", os.path.basename(path))[-1])


"""

TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        row = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        made(state.global_step)


set_seed(7)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=16, n_embd=192, n_layer=4, n_head=4))
args = TrainingArguments(
    output_dir="out", max_steps=STEPS, save_steps=EVERY, per_device_train_batch_size=4, learning_rate=1e-3,
    use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, logging_steps=EVERY, seed=7,
)
trainer = Trainer(model=model, args=args, train_dataset=Rows(), callbacks=[Tell()])
last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
print("begins from", last, flush=True)
trainer.train(resume_from_checkpoint=last)
weights(model)
"""

LIGHTNING = """
import lightning
from torch.utils.data import DataLoader, TensorDataset

lightning.seed_everything(7)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1))

    def on_train_start(self):
        print("begins from", trainer.ckpt_path, flush=True)

    def training_step(self, batch, index):
        (x,) = batch
        return (self.net(x) - x.sum(1, keepdim=True)).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, index):
        made(self.global_step)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


rows = TensorDataset(torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))
data = DataLoader(rows, batch_size=4, shuffle=True)
options = dict(accelerator="cpu", devices=2, strategy="ddp", max_epochs=STEPS // EVERY, enable_progress_bar=False)
"""

LIGHTNING_DEFAULT = (
    LIGHTNING
    + """
trainer = lightning.Trainer(**options)
trainer.fit(model := Model(), data)
weights(model)
"""
)

LIGHTNING_LAST = (
    LIGHTNING
    + """
from lightning.pytorch.callbacks import ModelCheckpoint

trainer = lightning.Trainer(callbacks=[ModelCheckpoint(dirpath="my/path/", save_last=True)], **options)
trainer.fit(model := Model(), data, ckpt_path="last")
weights(model)
"""
)

LIGHTNING_NEWEST = (
    LIGHTNING
    + """
found = sorted(glob.glob("lightning_logs/version_*/checkpoints/*.ckpt"), key=os.path.getmtime)
trainer = lightning.Trainer(**options)
trainer.fit(model := Model(), data, ckpt_path=found[-1] if found else None)
weights(model)
"""
)

ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

set_seed(7)
project = ProjectConfiguration(project_dir="my/save/path", automatic_checkpoint_naming=True)
loading = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=loading)
model = torch.nn.Sequential(torch.nn.Linear(16, 1024), torch.nn.Dropout(), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
rows = torch.utils.data.TensorDataset(torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))
data = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
accelerator.register_for_checkpointing(scheduler)
start = 0
found = sorted(glob.glob("my/save/path/checkpoints/checkpoint_*"), key=number)
print("begins from", found[-1] if found else None, flush=True)
if found:
    accelerator.load_state()  # the highest number
    start = project.iteration = number(found[-1]) + 1
for epoch in range(start, STEPS // EVERY):
    data.set_epoch(epoch)
    for index, (x,) in enumerate(data):
        optimizer.zero_grad()
        accelerator.backward((model(x) - x.sum(1, keepdim=True)).pow(2).mean())
        optimizer.step()
        made(epoch * EVERY + index + 1)
    scheduler.step()
    accelerator.save_state()
weights(model)
accelerator.end_training()
"""

DCP = """
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(16, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1))
fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
start = 0
found = sorted(glob.glob("out/step_*"), key=number)
print("begins from", found[-1] if found else None, flush=True)
if found:
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=found[-1])
    start = number(found[-1])
for step in range(start + 1, STEPS + 1):
    torch.manual_seed(10 * step + rank)
    x = torch.randn(4, 16)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
    optimizer.step()
    made(step)
    if step % EVERY == 0:
        dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=f"out/step_{step}")
weights(model)
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class Framework:
    """A script, and what it saves: globs below where ranks start. `resumes`: it begins from what it has saved."""

    name: str
    script: str
    place: str
    package: str = "torch"
    resumes: bool = True

    @property
    def text(self) -> str:
        return f"{COMMON}STEPS, EVERY = {STEPS}, {EVERY}\n{self.script}"


FRAMEWORKS = (
    Framework("trainer", TRAINER, "out/checkpoint-*", "transformers"),
    Framework("lightning", LIGHTNING_DEFAULT, "lightning_logs/version_*/checkpoints/*.ckpt", "lightning", False),
    Framework("lightning-last", LIGHTNING_LAST, "my/path/*.ckpt", "lightning"),
    Framework("lightning-newest", LIGHTNING_NEWEST, "lightning_logs/version_*/checkpoints/*.ckpt", "lightning"),
    Framework("accelerate", ACCELERATE, "my/save/path/checkpoints/checkpoint_*", "accelerate"),
    Framework("dcp", DCP, "out/step_*"),
)
