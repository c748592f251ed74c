"""Is a loop of machine code that nothing can leave seen, and nobody harmed by the look? Real processes, compiled loops."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.node import procfs, tracer
from orchestrator.wire.messages import Doing
from tests.support.watch import SAY_READY, watching

pytestmark = pytest.mark.slow

CC_S_MAX = 60.0
FOUND_S_MAX = 30.0
ANSWER_S_MAX = 30.0
LOOKS = 50

GO = SAY_READY.replace("\n", "; ").removesuffix("; ") + "\n"

SOURCE = """
volatile int flag;
volatile long number;
__attribute__((noinline)) void turn(void) { number++; }

void nothing(void) { for (;;) ; }
void count(void) { volatile long x = 0; for (;;) x++; }
void divide(void) { volatile double x = 1; for (;;) x = x / 3 + number; }
void until_set(void) { while (!flag) ; }
void for_long(void) { for (volatile long x = 0; x < 1L << 62; x++) ; }
void with_a_call(void) { for (;;) turn(); }
"""

ENDLESS = ("nothing", "count", "divide")
OPEN = ("until_set", "for_long", "with_a_call")

COMPUTES = """
import os, signal, sys
turns = 0
def answer(signum, frame): os.write(1, b"%d\\n" % turns)
def leave(signum, frame): os._exit(7)
signal.signal(signal.SIGUSR1, answer)
signal.signal(signal.SIGTERM, leave)
os.write(1, b"ready\\n")
while turns >= 0:
    turns += 1
"""

REAPS = """
import os, signal, subprocess, sys, threading, time
from orchestrator.node import tracer

child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.returncode = 0
child.stdout.readline()
done = threading.Event()

def look():
    while not done.is_set():
        tracer.is_trapped(child.pid)

looker = threading.Thread(target=look)
looker.start()
answers, halts, ends, until_s = 0, 0, [], time.monotonic() + 30
os.set_blocking(child.stdout.fileno(), False)
os.kill(child.pid, signal.SIGUSR1)
while not ends and time.monotonic() < until_s:
    pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
    halts += pid != 0 and os.WIFSTOPPED(status)
    if pid and not os.WIFSTOPPED(status) and not os.WIFCONTINUED(status):
        ends.append(os.waitstatus_to_exitcode(status))
    if not ends and child.stdout.readline():
        answers += 1
        os.kill(child.pid, signal.SIGTERM if answers >= 200 and halts else signal.SIGUSR1)
done.set()
looker.join()
if not ends:
    os.kill(child.pid, signal.SIGKILL)
print(answers >= 200, halts > 0, ends)
"""
"""Waits for all its children at once, as the agent does, while a thread of it looks at one that is sent signals."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the loops of `SOURCE`, compiled."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc) to make loops of machine code")
    folder = tmp_path_factory.mktemp("loops")
    source, library = folder / "loops.c", folder / "loops.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True, timeout=CC_S_MAX)
    return library


@contextmanager
def running(script: str) -> Iterator[subprocess.Popen[str]]:
    """Start a script, wait for its first line, and kill it after the block if it still runs."""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def call(library: Path, function: str) -> str:
    """Return a script that calls a function of the library with the GIL held."""
    return f"import ctypes\nprint('ready', flush=True)\nctypes.PyDLL('{library}').{function}()\n"


def state(process: subprocess.Popen[str]) -> str:
    """Return the kernel's letter for a process."""
    stat = procfs.look(process.pid)
    assert stat is not None
    return stat.state


def await_stopped(process: subprocess.Popen[str]) -> None:
    """Wait until a process is in state T."""
    deadline_s = time.monotonic() + FOUND_S_MAX
    while state(process) != "T":
        assert time.monotonic() < deadline_s


def answer(process: subprocess.Popen[str]) -> int:
    """Return how many turns a process that computes says it has made."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], ANSWER_S_MAX)[0], "it does not answer"
    return int(process.stdout.readline())


@pytest.mark.parametrize("function", ENDLESS)
def test_a_loop_that_nothing_leaves_is_known(library: Path, function: str) -> None:
    with running(call(library, function)) as process:
        deadline_s = time.monotonic() + FOUND_S_MAX
        while not tracer.is_trapped(process.pid)[0]:
            assert time.monotonic() < deadline_s
        assert state(process) == "R"


@pytest.mark.parametrize("function", OPEN)
def test_of_a_loop_that_may_be_left_nothing_is_said(library: Path, function: str) -> None:
    with running(call(library, function)) as process:
        assert not any(tracer.is_trapped(process.pid)[0] for _ in range(LOOKS))
        assert state(process) == "R"


@pytest.mark.parametrize(
    "work",
    ["sum(range(10**10))", "__import__('re').match('(a+)+$', 'a' * 64 + 'b')", "exec('while True: pass')"],
)
def test_of_what_python_computes_nothing_is_said(work: str) -> None:
    with running(f"print('ready', flush=True)\n{work}") as process:
        assert not any(tracer.is_trapped(process.pid)[0] for _ in range(LOOKS))
        assert state(process) == "R"


def test_who_is_looked_at_goes_on_and_gets_all_its_signals() -> None:
    with running(COMPUTES) as process:
        answers = []
        for _ in range(LOOKS):
            process.send_signal(signal.SIGUSR1)
            assert not tracer.is_trapped(process.pid)[0]
            answers.append(answer(process))
        assert answers == sorted(answers)
        assert answers[-1] > answers[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 7


def test_signals_from_all_sides_get_through_while_looks_go_on() -> None:
    with running(COMPUTES) as process:
        done = threading.Event()

        def look() -> None:
            while not done.is_set():
                tracer.is_trapped(process.pid)[0]

        looker = threading.Thread(target=look)
        looker.start()
        try:
            for _ in range(LOOKS):
                os.kill(process.pid, signal.SIGUSR1)  # Popen would take a halt for the end of its process
                assert answer(process) >= 0
        finally:
            done.set()
            looker.join()
        assert state(process) == "R"


def test_a_stopped_process_stays_stopped_and_goes_on_when_it_is_told() -> None:
    with running(COMPUTES) as process:
        process.send_signal(signal.SIGSTOP)
        await_stopped(process)
        assert not any(tracer.is_trapped(process.pid)[0] for _ in range(3))
        await_stopped(process)  # the kernel stops it anew
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGUSR1)
        assert answer(process) >= 0


@pytest.mark.parametrize("how", ["os._exit(7)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_who_ends_while_it_is_looked_at_ends_as_it_would(how: str) -> None:
    script = f"import os, signal\nprint('ready', flush=True)\nsum(range(10**6))\n{how}\n"
    for _ in range(5):
        with running(script) as process:
            deadline_s = time.monotonic() + FOUND_S_MAX
            while state(process) not in "ZX":
                tracer.is_trapped(process.pid)[0]
                assert time.monotonic() < deadline_s
            assert not tracer.is_trapped(process.pid)[0]
            assert process.wait() == (7 if "exit" in how else -signal.SIGKILL)


def test_whoever_reaps_all_children_takes_no_halt_for_an_end_and_costs_nobody_a_signal() -> None:
    argv = [sys.executable, "-c", REAPS, COMPUTES]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=FOUND_S_MAX * 2)
    assert told.stdout == "True True [7]\n", told


def test_a_sleep_is_slept_to_its_end() -> None:
    script = "import time\nprint('ready', flush=True)\nbegan_s = time.monotonic()\ntime.sleep(0.5)\nprint(time.monotonic() - began_s)"
    with running(script) as process:
        assert not any(tracer.is_trapped(process.pid)[0] for _ in range(10))
        assert process.stdout is not None
        assert float(process.stdout.readline()) >= 0.5


def test_who_is_not_there_is_not_trapped_and_nothing_is_lacking() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert tracer.is_trapped(process.pid) == (False, "")


def test_where_ptrace_is_refused_it_is_said_why() -> None:
    assert tracer.is_trapped(os.getpid()) == (
        False,
        "ptrace: operation not permitted",
    )  # nobody may trace itself


@pytest.mark.parametrize("loader", ["PyDLL", "CDLL"])
def test_a_rank_in_such_a_loop_is_proved_to_be_at_once(tmp_path: Path, library: Path, loader: str) -> None:
    script = f"import ctypes\nlibrary = ctypes.{loader}({str(library)!r})\n{GO}def spin():\n    library.count()\nspin()\n"
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.SPINS, certain=True)
        assert (found.why, found.ends_s) == ("in a loop of machine code that nothing in it can leave", None)
        assert found.where == "train.py:5 spin"
        assert watch.count <= 4  # two on a quiet machine


@pytest.mark.parametrize("function", OPEN)
def test_a_rank_in_a_loop_with_a_way_out_is_not_proved_to_stay(
    tmp_path: Path, library: Path, function: str
) -> None:
    script = f"import ctypes\n{GO}ctypes.PyDLL({str(library)!r}).{function}()\n"
    with watching(tmp_path, script) as watch:
        for _ in range(3):
            found = watch.look()[0]
            assert not found.certain
        assert found.doing is Doing.BLOCKED or "GIL" not in found.why
