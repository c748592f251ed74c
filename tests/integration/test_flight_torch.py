"""Torch's own window in real ranks: who is in which collective, does Python run, and who is slow by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from orchestrator.agent.ranks import flight_recorder
from orchestrator.agent.ranks.flight_recorder import FlightRecord, WorkerServerClient
from tests.support.forked import Forge
from tests.support.hooked import Rank, gang, gang_envs, lay_out

WORLD_SIZE = 4
STEPS = 12
SLOW_S = 0.2
READY_S_MAX = 240.0  # four imports of torch on a busy machine
T = TypeVar("T")

HANGS = f"""
import ctypes, os, sys, time, torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
class Slow(torch.nn.Linear):
    def forward(self, x):
        if rank == 2:
            time.sleep({SLOW_S})
        end_s = time.process_time() + ({SLOW_S} if rank == 3 else 0)
        while time.process_time() < end_s:
            pass
        return super().forward(x)
model = torch.nn.parallel.DistributedDataParallel(Slow(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({STEPS}):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
if rank < 2:
    dist.all_reduce(torch.ones(2, 5), group=pair)
if rank == 1:
    ctypes.PyDLL(None).sleep(3600)  # one call into C, which never lets go
dist.all_reduce(torch.ones(1000))
"""


def until(condition: Callable[[], T | None], what: str) -> T:
    deadline_s = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline_s:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {READY_S_MAX:g} s: {what}")


@dataclass(frozen=True, slots=True)
class Gang:
    """Ranks that hang, with what was found of them once they did."""

    ranks: list[Rank]
    pids: list[int]
    windows: list[WorkerServerClient]
    found: list[FlightRecord]


@pytest.fixture(scope="module")
def hanging(torch_forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    ranks = gang(tmp_path_factory.mktemp("gang"), WORLD_SIZE)
    windows = [WorkerServerClient(rank.dir) for rank in ranks]
    with contextlib.ExitStack() as stack:
        for window in windows:
            stack.callback(window.close)
        running = [stack.enter_context(one) for one in torch_forge.start_gang(ranks, HANGS)]
        for number, (rank, window) in enumerate(zip(ranks, windows, strict=True)):
            size = 10 if number == 1 else 1000  # of what it has entered last
            shape = "float32[2,5]" if size == 10 else "float32[1000]"
            until(lambda w=window, s=shape: _is_in(w.query(), s), f"rank {number} enters {shape}")  # type: ignore[misc]
            assert rank.last_step().step == STEPS
        time.sleep(flight_recorder.CALL_S_MAX)  # so that rank 1 is in its call for good
        asked = [window.start_query(threads_pid=0) for window in windows]
        found = [one.result(60.0) for one in asked]
        yield Gang(ranks, [one.pid for one in running], windows, found)


def _is_in(found: FlightRecord, shape: str) -> bool:
    return bool(found.entries) and found.entries[-1].shape == shape


def test_rank_missing_from_collective_is_identified(hanging: Gang) -> None:
    """A rank that has not entered the collective in which the others wait is identified."""
    last = {}
    for number, (rank, found) in enumerate(zip(hanging.ranks, hanging.found, strict=True)):
        assert found.unavailable == ""
        groups = rank.reader().groups()
        for one in found.collectives(groups, WORLD_SIZE, time.time_ns()):
            last[number, one.label] = one
    whole = [last[number, "default group"] for number in range(WORLD_SIZE)]
    assert {one.ranks for one in whole} == {(0, 1, 2, 3)}
    assert {one.what for one in whole} == {"all_reduce"}
    assert [one.number - whole[0].number for one in whole] == [0, -1, 0, 0]
    assert [one.done for one in whole] == [False, True, False, False]
    assert [one.shape for one in whole if not one.done] == ["float32[1000]"] * 3
    pair = [last[number, "group 1"] for number in (0, 1)]
    assert [(one.ranks, one.number, one.shape, one.done) for one in pair] == [((0, 1), 1, "float32[2,5]", True)] * 2
    assert all(one.entered_s >= flight_recorder.CALL_S_MAX for one in last.values())


def test_blocking_native_code_is_seen_repeatedly(hanging: Gang) -> None:
    """Native code that blocks Python is seen, and is still seen later."""
    assert hanging.found[1].gil_held is True
    for _ in range(12):  # more often than torch has threads to answer
        assert hanging.windows[1].query(threads_pid=0).gil_held is True
    assert hanging.windows[1].query().entries
    assert until(lambda: hanging.windows[0].query(threads_pid=0).gil_held is False, "Python runs in rank 0")


def test_slow_rank_is_distinguished_from_waiting_ranks(hanging: Gang) -> None:
    own = []
    for rank, found in zip(hanging.ranks, hanging.found, strict=True):
        one = flight_recorder.local_compute_s(
            rank.reader().step_ends(flight_recorder.COMPUTE_STEPS_MAX + 1), found.entries
        )
        assert one is not None
        own.append(one)
    assert min(own[2], own[3]) >= SLOW_S * 0.9
    assert max(own[0], own[1]) <= min(own[2], own[3]) * 0.75, own
    assert min(rank.reader().median_step_s() or 0.0 for rank in hanging.ranks) >= SLOW_S


def test_stopped_rank_is_reported_as_silent_in_time(hanging: Gang) -> None:
    os.kill(hanging.pids[3], signal.SIGSTOP)
    try:
        until(lambda: _stands_still(hanging.pids[3]), "every thread is stopped")
        began_s = time.monotonic()
        found = hanging.windows[3].start_query(threads_pid=0).result(60.0)
        assert "no answer within 1 s" in found.unavailable
        assert time.monotonic() - began_s < 5 * flight_recorder.CALL_S_MAX
    finally:
        os.kill(hanging.pids[3], signal.SIGCONT)
    until(lambda: hanging.windows[3].query().entries, "rank 3 answers again")


def _stands_still(pid: int) -> bool:
    """Threads stop one after the other, each when it is next run: the one that answers may well be the last."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def test_rank_in_rendezvous_answers_in_deep_folder(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    rank = lay_out(deep)
    script = rank.script("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    env = {**rank.env, **gang_envs()[0]}
    process = subprocess.Popen([sys.executable, script], env=env, start_new_session=True)
    try:
        window = WorkerServerClient(rank.dir)
        assert until(lambda: window.query(0).threads, "the stacks of its threads")
    finally:
        process.kill()
        process.wait()


HARSH = """
import os, signal, sys, time, torch, multiprocessing
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
child.start()
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.01)
"""


def _goes_away(rank: Rank, pid: int, handler: str) -> bool:
    try:
        flight_recorder._send_request(rank.dir, pid, handler).close()
    except BlockingIOError:  # more than wait in its queue
        return False
    return True


def test_disconnecting_client_never_ends_a_rank(torch_forge: Forge, tmp_path: Path) -> None:
    """The script has set PIPE to its default action, which kills a process that writes to a closed connection."""
    rank = lay_out(tmp_path)
    with torch_forge.start(rank, HARSH, **gang_envs(1)[0], GO=str(tmp_path / "go")) as process:
        window = WorkerServerClient(rank.dir)
        until(lambda: window.query().pid == process.pid, "an answer")
        for handler in ("fr_trace_json", "dump_traceback") * 7:
            until(lambda asks=handler: _goes_away(rank, process.pid, asks), "a connection")  # type: ignore[misc]
        until(lambda: not window.query().unavailable, "an answer once its queue has room")
        assert [path.name for path in rank.dir.glob("*.socket")] == [f"torch-{process.pid}.socket"]
        (tmp_path / "go").touch()
        assert process.wait() == 0
        assert list(rank.dir.glob("*.socket")) == []
