"""Stacks of real processes that run, wait, stand still, fork and end under the hook, without torch."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from orchestrator.agent.hang import python_stacks
from orchestrator.agent.hang.python_stacks import RankStack
from orchestrator.core.host import procfs
from tests.support.hooked import (
    STACK_SIGNAL,
    STACKS_S_MAX,
    Rank,
    ask_for_stacks,
    bare_env,
    gang,
    lay_out,
    take_stacks,
)

pytestmark = pytest.mark.slow

START_S_MAX = 10.0
READY_S_MAX = 60.0  # a busy machine


@contextmanager
def running(rank: Rank, text: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the rank that has said `ready`."""
    argv = [sys.executable, "-u", str(rank.script(text))]
    process = subprocess.Popen(argv, env=rank.env, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], READY_S_MAX)[0], "it never begins"
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()


HOLDS_THE_GIL = """
def train_step():
    sum(range(10**12))  # one call into C, which never lets go
print("ready")
train_step()
"""
WAITS_FOR_THE_GIL = """
import threading
def train_step():
    while True:
        pass
threading.Timer(0.2, sum, [range(10**12)]).start()
print("ready")
train_step()
"""
SLEEPS = """
import time
def train_step():
    time.sleep(60)
print("ready")
train_step()
"""
FORKS = """
import os, time
def work():
    time.sleep(60)
def wait():
    os.wait()
if os.fork() == 0:
    work()
print("ready")
wait()
"""


def take_until(process: subprocess.Popen[bytes], rank: Rank, *words: str) -> list[RankStack]:
    """Take stacks until each process shows its word: it may just have said `ready` and not be there yet."""
    deadline = time.monotonic() + START_S_MAX
    found: list[RankStack] = []
    while time.monotonic() < deadline and process.poll() is None:
        found = take_stacks(process.pid, rank)
        if len(found) == len(words) and all(word in one.text for word, one in zip(words, found, strict=True)):
            return found
        time.sleep(python_stacks.POLL_S)
    raise AssertionError(f"{words} not in {found}")


def test_loop_holding_gil_shows_its_line(tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    with running(rank, HOLDS_THE_GIL) as process:
        for _ in range(2):  # the second answer is the new one only
            (stack,) = take_until(process, rank, 'train.py", line 3 in train_step')
            assert stack.pid == process.pid
            assert stack.text.count("most recent call first") == 1
        assert process.poll() is None


def test_thread_waiting_for_gil_shows_its_line(tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    with running(rank, WAITS_FOR_THE_GIL) as process:
        time.sleep(0.5)
        (stack,) = take_stacks(process.pid, rank)
        assert "in train_step\n" in stack.text


def test_forked_children_answer_individually(tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    with running(rank, FORKS) as process:
        parent, child = take_until(process, rank, "in wait\n", "in work\n")
        assert "in work\n" not in parent.text
        assert "in wait\n" not in child.text
        assert rank.files() == ["files.txt", f"stacks-{process.pid}.txt", "steps"]


def test_process_without_handler_is_described_not_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"], env=bare_env())
    try:
        settled_by = time.monotonic() + START_S_MAX
        while not ((stat := procfs.stat(process.pid)) and stat.state == "S") and time.monotonic() < settled_by:
            time.sleep(0.01)  # a process that is still being loaded may be in state D
        (stack,) = take_stacks(process.pid, lay_out(tmp_path))
        assert "no Python stack" in stack.text
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_stopped_process_is_reported_at_once(tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    with running(rank, SLEEPS) as process:
        os.kill(process.pid, 19)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        asked = ask_for_stacks(process.pid, rank)
        found = python_stacks.poll_stacks(asked)
        assert found is not None
        assert found[0].state == "T"
        assert found[0].text.startswith("stopped (state T)")
        assert not procfs.has_pending(process.pid, STACK_SIGNAL)


CALLS = """
import threading, time
print("ready")
class Made:
    def __init__(self, number): self.number = number
    def __call__(self, *words): return self.number
until_s = time.monotonic() + 3
while time.monotonic() < until_s:
    max(range(100), key=Made(1))
    threads = [threading.Thread(target=sum, args=(range(1000),)) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""
ENDS = """
import time
print("ready")
time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("signum", "text"),
    [(STACK_SIGNAL + 1, CALLS), *[(STACK_SIGNAL + 1, ENDS)] * 5, *[(STACK_SIGNAL, ENDS)] * 4],
    ids=["running calls", *("running ends" for _ in range(5)), *("asleep ends" for _ in range(4))],
)
def test_repeated_dumps_are_harmless_during_callbacks_and_exit(tmp_path: Path, signum: int, text: str) -> None:
    """Very many stack signals do no harm while C calls Python or the process ends."""
    rank = lay_out(tmp_path)
    with running(rank, text) as process:
        deadline = time.monotonic() + START_S_MAX
        while process.poll() is None and time.monotonic() < deadline:
            os.kill(process.pid, signum)
            time.sleep(0.0003)  # else it comes to nothing else
        assert process.returncode == 0


RUNS = f"""
import os, signal
signal.signal({STACK_SIGNAL}, lambda *_: os._exit(7))  # as if `faulthandler` had died of frames that are not complete
def train_step():
    while True:
        max(range(100), key=lambda number: -number)
print("ready")
train_step()
"""


def test_running_thread_is_dumped_by_python_signal(tmp_path: Path) -> None:
    """A thread that runs is asked by the signal that Python answers."""
    rank = lay_out(tmp_path)
    with running(rank, RUNS) as process:
        for _ in range(10):
            take_until(process, rank, "in train_step\n")
        assert process.poll() is None


def test_thread_with_unwritable_stack_is_not_in_c(tmp_path: Path) -> None:
    """A thread that cannot write its stack is not taken to be in C code."""
    rank = lay_out(tmp_path)
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as a full disk\n"
    with running(rank, full + RUNS) as process:
        for _ in range(3):
            (stack,) = take_stacks(process.pid, rank)
            assert stack.text.startswith("no Python stack available")
        assert process.poll() is None


TRAINS_IN_A_THREAD = f"""
import os, signal, threading, time
signal.signal({STACK_SIGNAL}, lambda *_: os._exit(7))
child = os.fork()
while child == 0:
    time.sleep(0.01)
def train_step():
    while True:
        max(range(100), key=lambda number: -number)
threading.Thread(target=train_step).start()
print("ready")
while True:
    time.sleep(0.01)
"""


def test_thread_refused_a_signal_gets_none_later(
    tmp_path: Path,
) -> None:
    """A thread that was refused a signal gets none while another process is waited for."""
    rank = lay_out(tmp_path)
    with running(rank, TRAINS_IN_A_THREAD) as process:
        pid, child = python_stacks.rank_pids(process.pid)
        tid = max(int(task.name) for task in (procfs.PROC / str(pid) / "task").iterdir())
        for _ in range(20):  # until it is stopped before it has answered
            asked = python_stacks.request_stacks((pid, child), rank.dir, STACK_SIGNAL, trainer=(pid, tid))
            os.kill(child, signal.SIGSTOP)
            time.sleep(python_stacks.POLL_S)
            if python_stacks.poll_stacks(asked) is None:
                break
            os.kill(child, signal.SIGCONT)
            time.sleep(python_stacks.POLL_S)
        for _ in range(50):
            assert python_stacks.poll_stacks(asked) is None
            time.sleep(python_stacks.POLL_S)
        assert process.poll() is None
        stack, _ = python_stacks.collect_stacks(asked)
        assert stack.text.startswith("a thread other than the main one runs")


def test_eight_ranks_answer_concurrently_without_threads(tmp_path: Path) -> None:
    ranks = gang(tmp_path, 8)
    threads = threading.active_count()
    with ExitStack() as open_ranks:
        pids = [open_ranks.enter_context(running(rank, SLEEPS)).pid for rank in ranks]
        asked = [ask_for_stacks(pid, rank) for pid, rank in zip(pids, ranks, strict=True)]
        deadline = time.monotonic() + STACKS_S_MAX
        found = [python_stacks.poll_stacks(one) for one in asked]
        while not all(found) and time.monotonic() < deadline:
            time.sleep(python_stacks.POLL_S)
            found = [old or python_stacks.poll_stacks(one) for old, one in zip(found, asked, strict=True)]
        texts = [one[0].text for one in found if one]
        assert len(texts) == len(ranks)
        assert all('train.py", line ' in text for text in texts)
        assert threading.active_count() == threads
