"""The hook under real torch and its frameworks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.agent.ranks import failure
from orchestrator.agent.ranks.hook import layout
from orchestrator.agent.ranks.step_counter import NO_STEP
from tests.support.forked import Forge
from tests.support.hooked import RUN_S_MAX, WORLD_SIZE, gang, gang_envs, lay_out, take_stacks
from tests.support.torch_script import WITHOUT_DYNAMO

STEPS = 6

MODEL = """
import os, sys, torch
import torch.distributed as dist
steps = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(steps):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = f"""{MODEL}
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
{LOOP}
print("done", dist.get_rank())
dist.destroy_process_group()
"""
FSDP2 = f"""{MODEL}
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
{LOOP}
print("done", dist.get_rank())
dist.destroy_process_group()
"""
ACCELERATE = f"""{MODEL}
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
data = torch.utils.data.DataLoader(torch.ones(4 * steps * 2 * 2, 8), batch_size=4)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
print("done", accelerator.process_index)
accelerator.end_training()
"""
LIGHTNING = f"""{MODEL}
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, number):
        return self.model(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(
    strategy="ddp", devices=2, num_nodes=1, accelerator="cpu", max_steps=steps, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(1000, 8), batch_size=4))
print("done", trainer.global_rank)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "text",
    [DDP, *(pytest.param(text, marks=pytest.mark.soak) for text in (LIGHTNING, FSDP2, ACCELERATE))],
    ids=["ddp", "lightning", "fsdp2", "accelerate"],
)
def test_every_step_of_every_rank_is_counted(torch_forge: Forge, tmp_path: Path, text: str) -> None:
    ranks = gang(tmp_path)
    for number, (code, log) in enumerate(torch_forge.run(ranks, text, str(STEPS))):
        assert code == 0, log.decode()
        assert f"done {number}".encode() in log
    assert [rank.last_step().step for rank in ranks] == [STEPS] * WORLD_SIZE
    assert [rank.files() for rank in ranks] == [["files.txt", "groups.json", "steps", "steps-claim-0"]] * WORLD_SIZE
    readers = [rank.reader() for rank in ranks]
    assert all(reader.exiting_pid() == reader.read().pid and reader.has_formed_group() for reader in readers)
    counts = [[(end.step, end.total) for end in reader.step_ends(STEPS)] for reader in readers]
    assert counts[0] == counts[1]
    assert all(count for _, count in counts[0]), "a step of a gang enters collectives"


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_dataloader_workers_report_no_steps(torch_forge: Forge, tmp_path: Path, method: str) -> None:
    rank = lay_out(tmp_path)
    script = (
        f"{WITHOUT_DYNAMO}"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, number):\n"
        "        weight = torch.nn.Parameter(torch.ones(1))\n"
        "        weight.grad = torch.ones(1)\n"
        "        torch.optim.SGD([weight], lr=0.1).step()\n"
        "        return number\n"
        "if __name__ == '__main__':\n"
        f"    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context='{method}')\n"
        "    print(sum(batch.item() for batch in loader))\n"
    )
    assert torch_forge.run([rank], script) == [(0, b"6\n")]
    assert rank.last_step() == NO_STEP
    assert rank.files() == ["files.txt", "steps"]


def test_error_is_recorded_under_torch_hooks(torch_forge: Forge, tmp_path: Path) -> None:
    """An error is recorded under torch's own hooks, and the log stays theirs."""
    rank = lay_out(tmp_path)
    text = (
        "import torch, torch.distributed as dist\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n    raise RuntimeError('no')\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "main()\n"
    )
    ((code, log),) = torch_forge.run([rank], text)
    script = rank.script(text)
    bare = rank.run_bare([sys.executable, script])
    assert code == bare.returncode == 1
    assert b"[rank0]: RuntimeError: no" in log
    assert _without_times(log) == _without_times(bare.stdout)
    error = rank.error()
    assert (error.type, str(error.where)) == ("RuntimeError", f"{script}:5 main")


def _without_times(log: bytes) -> list[bytes]:
    """Leave out what differs from run to run: the time that `record` writes, and lines of torch's own loggers."""
    return [line for line in log.splitlines() if b"timestamp" not in line and not line.startswith((b"[W", b"E"))]


def test_error_of_first_process_is_preferred_to_newest(tmp_path: Path) -> None:
    """The error of the first process is read, or else the newest one."""
    assert failure.find_error(tmp_path, 1) is None
    for age_s, pid in enumerate((30, 10, 20)):
        path = tmp_path / layout.ERROR_FILE.format(pid)
        path.write_text(f'{{"type": "E{pid}", "message": "", "traceback": "", "where": null}}')
        os.utime(path, (1000 - age_s, 1000 - age_s))
    (tmp_path / layout.ERROR_FILE.format(5)).write_text("torn")
    found = [failure.find_error(tmp_path, pid) for pid in (10, 20, 5, 99)]
    assert [error.type for error in found if error is not None] == ["E10", "E20", "E30", "E30"]


def test_stack_dump_in_collective_does_not_disturb_it(torch_forge: Forge, tmp_path: Path) -> None:
    """Rank 1 comes late to an all_reduce; rank 0, a new interpreter, is asked for its stacks while it waits inside, and both
    end well."""
    late = (
        f"{WITHOUT_DYNAMO}{MODEL}dist.init_process_group('gloo')\n"
        "import pathlib, time\n"
        "while dist.get_rank() == 1 and not pathlib.Path(os.environ['GO']).exists(): time.sleep(0.01)\n"
        f"dist.all_reduce(torch.ones(1))\n{LOOP}dist.destroy_process_group()\n"
    )
    ranks, go, seen = gang(tmp_path), tmp_path / "go", ""
    envs = [{**own, "GO": str(go)} for own in gang_envs()]
    argv = [sys.executable, str(ranks[0].script(late)), str(STEPS)]
    with (
        torch_forge.start(ranks[1], late, str(STEPS), **envs[1]) as forked,
        subprocess.Popen(argv, env={**ranks[0].env, **envs[0]}) as new,
    ):
        deadline_s = time.monotonic() + RUN_S_MAX / 2
        while "all_reduce" not in seen and time.monotonic() < deadline_s:
            seen = "".join(stack.text for stack in take_stacks(new.pid, ranks[0]))
            time.sleep(0.1)
        go.touch()
        assert "all_reduce" in seen
        assert (new.wait(RUN_S_MAX), forked.wait()) == (0, 0), forked.output.read_text()
    assert [rank.last_step().step for rank in ranks] == [STEPS] * WORLD_SIZE
    assert all(rank.reader().groups() for rank in ranks)
