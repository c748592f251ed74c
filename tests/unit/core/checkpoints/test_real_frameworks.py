"""What the real libraries write is read as what it is: torch, Accelerate, the HF Trainer, Lightning, DeepSpeed, safetensors."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.core.checkpoints.checkpoint import Content, Format
from tests.support.hooked import free_port, torchrun_env
from tests.support.packages import need
from tests.support.saved_files import sight, write

pytestmark = pytest.mark.slow

RUN_S_MAX = 300.0

Row = tuple[str, int | None, Format, Content, bool, bool]
"""A save by its main file or folder: its step, format, content, whether it fits any number of ranks, and has its last word."""

TRAINED = """
import os, sys
from pathlib import Path

import torch

root, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
"""


FORKS = """
import gc, importlib, json, os, sys

for name in ("torch._dynamo", "torch.distributed.checkpoint", "accelerate", "lightning"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        pass
try:
    from transformers import GPT2LMHeadModel, Trainer
except ModuleNotFoundError:
    pass
gc.freeze()
for line in sys.stdin:
    folder, ranks = json.loads(line)
    pids = []
    for rank, env in enumerate(ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(env)
            os.chdir(folder)
            log = os.open(f".log-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv = [".script.py", folder]
            with open(".script.py") as file:
                exec(compile(file.read(), ".script.py", "exec"), globals())
            os._exit(0)  # nothing is torn down: that takes a second, and a process group of gloo may never end with Python's lock
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""
"""Imports what takes seconds to import, once, and forks the ranks of each script."""


@dataclass(frozen=True, slots=True)
class Libraries:
    """A process that has imported the libraries, and of which ranks are forked."""

    process: subprocess.Popen[str]

    def run(self, folder: Path, script: str, ranks: int = 1) -> None:
        """Run a script by so many ranks, which save below the folder."""
        write(folder / ".script.py", script.encode())
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        assert self.process.stdin is not None and self.process.stdout is not None
        envs = [{**meeting, **torchrun_env(rank, ranks)} for rank in range(ranks)]
        print(json.dumps([str(folder), envs]), file=self.process.stdin, flush=True)
        is_ready, _, _ = select.select([self.process.stdout], [], [], RUN_S_MAX)
        codes = json.loads(self.process.stdout.readline()) if is_ready else "none in time"
        assert codes == [0] * ranks, (codes, [log.read_text() for log in folder.glob(".log-*")])


@pytest.fixture(scope="module")
def libraries() -> Iterator[Libraries]:
    """Give the process; afterwards it and all of its ranks are gone."""
    names = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
    env = {name: os.environ[name] for name in names if name in os.environ}
    env |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS], env=env, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Libraries(process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def rows(folder: Path, ranks: int) -> list[Row]:
    """Return what there is to resume from, and look that nothing speaks against any of it."""
    seen, found = sight(folder), []
    for key, state in seen.readings.items():
        assert seen.fault(key) == ""
        if state.content not in (Content.PART, Content.OTHER):
            row = (
                state.step,
                state.format,
                state.content,
                state.fits_any_size,
                seen.has_last_word(key, ranks),
            )
            found.append((seen.groups[key].main, *row))
    return sorted(found)


def is_faulted_where_it_is_cut(folder: Path, name: str) -> bool:
    """Tell whether a file is found to be cut off at each of some lengths; put it back."""
    path, data = folder / name, (folder / name).read_bytes()
    at_ns, key = path.stat().st_mtime_ns, sight(folder).of(name)
    faults = []
    for length in (0, 10, len(data) // 4, len(data) // 2, len(data) - 100, len(data) - 2):
        write(path, data[:length], at_ns)
        faults.append(sight(folder).fault(key))
    write(path, data, at_ns)
    return all(faults)


def test_files_of_torch_and_safetensors(libraries: Libraries, tmp_path: Path) -> None:
    script = """
for step in (5, 10):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, root / f"ckpt_{step}.pt")
torch.save(state, root / "legacy.pt", _use_new_zipfile_serialization=False)
torch.save(model.state_dict(), root / "epoch_3.pt")
torch.serialization.set_crc32_options(False)
torch.save({**state, "iter_num": 7}, root / "last.pt")
from safetensors.torch import save_file
save_file(model.state_dict(), root / "model_20.safetensors", {"format": "pt", "step": "20"})
"""
    libraries.run(tmp_path, TRAINED + script)
    state, weights = Content.STATE, Content.WEIGHTS
    assert rows(tmp_path, 1) == [
        ("ckpt_10.pt", 10, Format.TORCH, state, True, True),
        ("ckpt_5.pt", 5, Format.TORCH, state, True, True),
        ("epoch_3.pt", None, Format.TORCH, weights, True, True),
        ("last.pt", 10, Format.TORCH, state, True, True),
        ("legacy.pt", None, Format.UNKNOWN, state, True, False),
        ("model_20.safetensors", 20, Format.SAFETENSORS, weights, True, False),
    ]
    for name in ("ckpt_5.pt", "epoch_3.pt", "last.pt", "model_20.safetensors"):
        assert is_faulted_where_it_is_cut(tmp_path, name)


def test_folders_of_torch_distributed_checkpoint(libraries: Libraries, tmp_path: Path) -> None:
    script = """
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
in_background = dist.new_group()
fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "step": 20}
dcp.save(state, checkpoint_id=root / "step-20")
dcp.async_save(state, checkpoint_id=root / "latest", process_group=in_background).result()
torch.save({"weights": [part.to_local() for part in weights.values()], "step": 30}, root / f"step_30_rank_{rank}.pt")
dist.barrier()
if rank == 0:
    dcp.save({"step": 40}, checkpoint_id=root / "alone" / "step-40", no_dist=True)
dist.destroy_process_group()
"""
    libraries.run(tmp_path, TRAINED + script, ranks=2)
    assert rows(tmp_path, 2) == [
        ("alone/step-40", 40, Format.DCP, Content.STATE, True, True),
        ("latest", None, Format.DCP, Content.STATE, True, True),
        ("step-20", 20, Format.DCP, Content.STATE, True, True),
        ("step_30_rank_0.pt", 30, Format.TORCH, Content.STATE, False, False),
    ]
    for name in ("latest/.metadata", "latest/__0_0.distcp", "latest/__1_0.distcp"):
        assert is_faulted_where_it_is_cut(tmp_path, name)
        (tmp_path / name).rename(tmp_path / "gone")
        assert f"{name} is missing" in sight(tmp_path).fault("latest")
        (tmp_path / "gone").rename(tmp_path / name)


def test_folders_of_accelerate(libraries: Libraries, tmp_path: Path) -> None:
    need("accelerate")
    script = """
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

project = ProjectConfiguration(project_dir=str(root), automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
data = torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=2, shuffle=True)
model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 1))
for batch in data:
    accelerator.backward(model(batch).sum())
    optimizer.step()
accelerator.save_state()
accelerator.save_state()
project.automatic_checkpoint_naming = False
accelerator.save_state(str(root / "step_20"))
accelerator.save_state(str(root / "last"), safe_serialization=False)
accelerator.end_training()
"""
    libraries.run(tmp_path, TRAINED + script, ranks=2)
    is_it = (Format.ACCELERATE, Content.STATE, True, True)
    assert rows(tmp_path, 2) == [
        ("checkpoints/checkpoint_0", None, *is_it), ("checkpoints/checkpoint_1", None, *is_it), ("last", None, *is_it),
        ("step_20", 20, *is_it),
    ]  # fmt: skip
    (tmp_path / "last/random_states_1.pkl").unlink()
    assert not sight(tmp_path).has_last_word("last", 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_folders_of_the_trainer(libraries: Libraries, tmp_path: Path, ranks: int) -> None:
    need("transformers")
    script = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, number):
        return {"input_ids": torch.arange(8), "labels": torch.arange(8)}


config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
more = {"ddp_backend": "gloo"} if ranks > 1 else {}
args = TrainingArguments(
    output_dir=str(root / "out"), per_device_train_batch_size=2, max_steps=4, save_steps=2, eval_strategy="steps",
    eval_steps=2, load_best_model_at_end=True, report_to=[], use_cpu=True, disable_tqdm=True, **more,
)
trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=Rows(), eval_dataset=Rows())
trainer.train()
trainer.save_model()
"""
    libraries.run(tmp_path, TRAINED + script, ranks)
    is_it = (Format.TRAINER, Content.STATE, True, True)
    assert rows(tmp_path, ranks) == [
        ("out/checkpoint-2", 2, *is_it), ("out/checkpoint-4", 4, *is_it),
        ("out/model.safetensors", None, Format.SAFETENSORS, Content.WEIGHTS, True, False),
    ]  # fmt: skip
    seen = sight(tmp_path)
    assert "checkpoint-4" in seen.readings["out/checkpoint-4"].cites, "it is the best"
    for name in seen.groups["out/checkpoint-4"].names:
        path, data, at_ns = (
            tmp_path / name,
            (tmp_path / name).read_bytes(),
            (tmp_path / name).stat().st_mtime_ns,
        )
        path.unlink()
        is_needed = path.name in (
            "model.safetensors",
            "trainer_state.json",
            "rng_state_0.pth",
            "rng_state_1.pth",
        )
        assert sight(tmp_path).has_last_word("out/checkpoint-4", ranks) != is_needed, name
        write(path, data, at_ns)
        assert is_faulted_where_it_is_cut(tmp_path, name) or path.name.endswith("config.json"), name


def test_files_of_lightning_and_fabric(libraries: Libraries, tmp_path: Path) -> None:
    need("lightning")
    script = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(8, 2)

    def training_step(self, batch, number):
        self.log("loss", float(9 - self.global_step))
        return self.line(batch).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


data = torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=2)
for number in range(2):
    trainer = lightning.Trainer(
        max_steps=8, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(root / "best", "{epoch}-{loss:.2f}", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=4),
            ModelCheckpoint(root / "all", every_n_train_steps=4, save_top_k=-1),
        ],
    )
    trainer.fit(Module(), data)
fabric = lightning.Fabric(accelerator="cpu", devices=1)
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
fabric.save(root / "fabric/step-00000008/lit_model.pth", {"model": model, "optimizer": optimizer, "step_count": 8, "iter_num": 64})
"""
    libraries.run(tmp_path, TRAINED + script)
    found = rows(tmp_path, 1)
    is_it = (Format.LIGHTNING, Content.STATE, True, True)
    assert [row for row in found if row[0].startswith("all/")] == [
        (f"all/epoch=0-step={step}{version}.ckpt", step, *is_it) for step in (4, 8) for version in ("-v1", "")
    ]
    assert ("best/last.ckpt", 8, *is_it) in found and ("best/epoch=0-loss=2.00.ckpt", 8, *is_it) in found
    assert found[-1] == ("fabric/step-00000008", 8, Format.TORCH, Content.STATE, True, False)
    cited = sight(tmp_path).readings[sight(tmp_path).of("best/last.ckpt")].cites
    assert "epoch=0-loss=2.00.ckpt" in cited
    assert is_faulted_where_it_is_cut(tmp_path, "best/last.ckpt")


@pytest.mark.soak
def test_folders_of_deepspeed(libraries: Libraries, tmp_path: Path) -> None:
    need("deepspeed")
    script = """
import deepspeed

deepspeed.init_distributed("gloo", verbose=False)
config = {
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for number in range(2):
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    engine.save_checkpoint(str(root / "run"))
"""
    libraries.run(tmp_path, TRAINED + script, ranks=2)
    is_it = (Format.DEEPSPEED, Content.STATE, False)
    assert rows(tmp_path, 2) == [
        ("run/global_step1", 1, *is_it, False),
        ("run/global_step2", 2, *is_it, True),
    ]
    for name in sight(tmp_path).groups["run/global_step2"].names:
        assert is_faulted_where_it_is_cut(tmp_path, name)
        (tmp_path / name).rename(tmp_path / "gone")
        assert not sight(tmp_path).has_last_word("run/global_step2", 2)
        (tmp_path / "gone").rename(tmp_path / name)
