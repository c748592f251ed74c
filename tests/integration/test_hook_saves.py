"""Asynchronous saves, under real torch: what is written is the state of the call, and whoever needs it written waits for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.agent.ranks.hook import layout
from tests.support.forked import Forge
from tests.support.hooked import Rank, gang, gang_envs, lay_out, outputs

WRITE_S = 1.0

COMMON = f"""
import os, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter, load, save
from torch.distributed.checkpoint.state_dict import get_state_dict

folder = Path(os.environ["SAVED"])
class Slow(FileSystemWriter):
    def write_data(self, plan, planner):
        time.sleep({WRITE_S})
        return super().write_data(plan, planner)
class Broken(FileSystemWriter):
    def write_data(self, plan, planner):
        raise OSError("no room")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
if os.environ["WORLD_SIZE"] != "1":
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
def step(count=1):
    for _ in range(count):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
def state():
    weights, moments = get_state_dict(model, optimizer)
    return {{"model": weights, "optimizer": moments}}
def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
def weights():
    return [local(part.detach()).clone() for part in model.parameters()]
def is_there(name):
    return (folder / name / ".metadata").exists()
def timed(act, *args, **options):
    begin = time.monotonic()
    result = act(*args, **options)
    print(f"{{act.__name__}} {{time.monotonic() - begin:.2f}} s", result is None)
def saved(name, kind=Slow, **options):
    timed(save, state(), storage_writer=kind(folder / name), **options)
"""

LOOP = """
at = {}
for number in range(1, 4):
    step(5)
    at[number] = weights()
    saved(f"step-{number}")
    step(5)
for number, expected in at.items():
    found = state()
    load(found, checkpoint_id=folder / f"step-{number}")
    assert all(torch.equal(one, local(other)) for one, other in zip(expected, found["model"].values())), number
    moments = found["optimizer"]["state"]["0.weight"]
    assert moments["step"] == number * 10 - 5, moments["step"]
saved("last")
assert not is_there("last")
if dist.is_initialized():
    timed(destroy_process_group)
    assert is_there("last")
print("well")
"""

OWN = """
step()
saved("one")
own = dist.new_group(backend="gloo")
future = dcp.async_save(state(), checkpoint_id=folder / "two", process_group=own)
assert is_there("one")
saved("three")
assert is_there("three")
future.result()
destroy_process_group()
print("well")
"""

AS_TORCH = """
step()
own = dist.new_group(backend="gloo")
saved("one", process_group=own)
thread = threading.Thread(target=saved, args=("two",))
thread.start()
thread.join()
timed(save, state(), Slow(folder / "three"))
saved("four", no_dist=True) if dist.get_rank() == 0 else None
dist.barrier()
saved("five")
assert not is_there("five")
destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=int(os.environ["RANK"]), world_size=2)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved("six")
assert not is_there("six")
destroy_process_group()
print("well", is_there("six"))
"""

NO_GROUP = """
make = dist.new_group
if dist.get_rank() == 1:
    def refuse(*args, **options):
        make(*args, **options)
        raise RuntimeError("no gloo")
    dist.new_group = refuse
step()
for number in (1, 2):
    saved(f"step-{number}")
destroy_process_group()
print("well")
"""

RAISES = """
step()
kind = Broken if dist.get_rank() == 1 else FileSystemWriter
saved("one", kind)
try:
    saved("two")
except dcp.CheckpointException as err:
    print("raised", repr(err.failures))
saved("three")
load({"model": state()["model"]}, checkpoint_id=folder / "three")
dist.barrier()
saved("four", kind)
dist.barrier()
print("well")
"""

UNCOPIED = """
class Odd:
    def __deepcopy__(self, memo):
        raise TypeError("no copy")
step()
odd = {"odd": Odd()} if dist.get_rank() == 1 else {}
timed(save, {**state(), **odd}, storage_writer=Slow(folder / "one"))
dist.barrier()
assert is_there("one") or dist.get_rank() == 0
destroy_process_group()
print("well")
"""


def run_fresh(ranks: list[Rank], text: str, **env: str) -> list[tuple[int, bytes]]:
    """Run a script on ranks that are new interpreters."""
    running = [
        subprocess.Popen(
            [sys.executable, rank.script(text)],
            env={**rank.env, **own, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank, own in zip(ranks, gang_envs(len(ranks)), strict=True)
    ]  # fmt: skip
    return [(one.returncode, log) for one, log in zip(running, outputs(running), strict=True)]


def times_s(log: str, function: str = "save") -> list[float]:
    return [float(found) for found in re.findall(rf"^{function} ([\d.]+) s", log, re.M)]


def run(forge: Forge, ranks: list[Rank], text: str, folder: Path, codes: tuple[int, ...] = (0, 0)) -> list[str]:
    """Run a script on forked ranks, whose hook notes nothing unless it says so; return their logs."""
    done = forge.run(ranks, COMMON + text, SAVED=str(folder / "saved"), **{layout.ASYNC_ENV: "1"})
    logs = [log.decode() for _, log in done]
    assert [code for code, _ in done] == list(codes[: len(ranks)]), "\n".join(logs)
    assert all("well" in log for log in logs), logs
    return logs


def notes(rank: Rank) -> str:
    path = rank.dir / layout.NOTES_FILE
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("count", [1, 2])
def test_state_of_the_call_is_written_while_steps_are_made(torch_forge: Forge, tmp_path: Path, count: int) -> None:
    ranks = [lay_out(tmp_path)] if count == 1 else gang(tmp_path)
    for rank, log in zip(ranks, run(torch_forge, ranks, LOOP, tmp_path), strict=True):
        assert times_s(log)[0] < WRITE_S, log
        assert not notes(rank), notes(rank)
        written = re.findall(r"written (\d+) \d '\S+/(\S+)/[^/]+.distcp'", (rank.dir / layout.FILES_FILE).read_text())
        assert written == [("5", "step-1"), ("15", "step-2"), ("25", "step-3"), ("30", "last")]
        groups = (rank.dir / layout.GROUPS_FILE).read_text() if count > 1 else '"column"'
        assert groups.count('"column"') == 1, groups
        assert times_s(log, "destroy_process_group")[0] > WRITE_S / 2 if count > 1 else True


def test_names_imported_by_a_new_interpreter_are_wrapped(tmp_path: Path) -> None:
    ranks = gang(tmp_path)
    for code, log in run_fresh(ranks, COMMON + LOOP, SAVED=str(tmp_path / "saved"), **{layout.ASYNC_ENV: "1"}):
        assert (code, "well" in log.decode()) == (0, True), log.decode()
        assert times_s(log.decode())[0] < WRITE_S, log.decode()


def test_without_the_setting_nothing_is_wrapped(torch_forge: Forge, tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    text = COMMON + "step()\nsaved('one')\nprint('_orch_hook.saves' in sys.modules, is_there('one'))\n"
    ((code, log),) = torch_forge.run([rank], text, SAVED=str(tmp_path / "saved"))
    assert (code, log.decode().splitlines()[-1]) == (0, "False True"), log.decode()


def test_after_own_async_save_everything_is_as_the_script_does_it(torch_forge: Forge, tmp_path: Path) -> None:
    for log in run(torch_forge, gang(tmp_path), OWN, tmp_path):
        first, last = times_s(log)
        assert first < WRITE_S <= last, log


def test_what_may_not_be_asynchronous_is_not(torch_forge: Forge, tmp_path: Path) -> None:
    logs = run(torch_forge, gang(tmp_path), AS_TORCH, tmp_path)
    for log, count in zip(logs, (4, 3), strict=True):
        assert all(one >= WRITE_S for one in times_s(log)[:count]), log
        assert all(one < WRITE_S for one in times_s(log)[count:]), log
        assert "well True" in log


def test_no_rank_is_asynchronous_where_one_has_no_group(torch_forge: Forge, tmp_path: Path) -> None:
    ranks = gang(tmp_path)
    for log in run(torch_forge, ranks, NO_GROUP, tmp_path):
        assert all(one >= WRITE_S for one in times_s(log)), log
    assert "no gloo" in notes(ranks[1])


def test_exception_is_raised_by_the_next_save_or_ends_the_script(torch_forge: Forge, tmp_path: Path) -> None:
    ranks = gang(tmp_path)
    for rank, log in zip(ranks, run(torch_forge, ranks, RAISES, tmp_path, codes=(1, 1)), strict=True):
        assert re.search(r"raised .*no room", log), log
        assert "no room" in rank.error().message
        assert "no room" in log.partition("well")[2]
    saved = {path.parent.name for path in (tmp_path / "saved").rglob(".metadata")}
    assert saved == {"three"}


def test_state_that_cannot_be_copied_is_written_at_once(torch_forge: Forge, tmp_path: Path) -> None:
    ranks = gang(tmp_path)
    logs = run(torch_forge, ranks, UNCOPIED, tmp_path)
    assert times_s(logs[0])[0] < WRITE_S <= times_s(logs[1])[0]
    assert "no copy" in notes(ranks[1])
    assert not notes(ranks[0])
