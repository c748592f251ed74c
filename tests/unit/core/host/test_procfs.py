"""What /proc says of processes that the test itself has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.core.host import procfs
from orchestrator.core.host.procfs import Proc

pytestmark = pytest.mark.slow

MARK = b"ORCH_TEST_MARK=procfs%d\0ORCH_TEST_PART=1" % os.getpid()


def test_process_sees_itself() -> None:
    stat = procfs.stat(os.getpid())
    assert stat is not None
    assert (stat.ppid, stat.pgrp, stat.session) == (os.getppid(), os.getpgrp(), os.getsid(0))
    assert stat.state == "R"
    assert stat.cpu_s > 0
    assert stat.rss_bytes > 1 << 20
    assert procfs.is_alive(Proc(os.getpid(), stat.start_ticks))


def test_name_with_parentheses_and_spaces_is_parsed(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "60"])
    try:
        stat = procfs.stat(process.pid)
        assert stat is not None
        assert stat.ppid == os.getpid()
    finally:
        process.kill()
        process.wait()


def test_reused_pid_is_not_alive() -> None:
    stat = procfs.stat(os.getpid())
    assert stat is not None
    assert not procfs.is_alive(Proc(os.getpid(), stat.start_ticks - 1))


def test_zombie_is_not_alive_and_reaped_is_gone() -> None:
    process = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and left a zombie
    stat = procfs.stat(process.pid)
    assert stat is not None
    assert stat.state == "Z"
    assert not procfs.is_alive(Proc(process.pid, stat.start_ticks))
    process.wait()
    assert procfs.stat(process.pid) is None
    assert procfs.wchan(process.pid) == ""
    assert not procfs.catches_signal(process.pid, signal.SIGTERM)


def test_ended_main_thread_leaves_other_threads_state() -> None:
    script = (
        "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print(1, flush=True)\nctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            until_s = time.monotonic() + 10.0
            seen = ("", "")
            while seen != ("Z", "S") and time.monotonic() < until_s:  # both take a moment
                time.sleep(0.01)
                stat = procfs.stat(process.pid)
                seen = (stat.state if stat else "", procfs.state_of_threads(process.pid))
            assert seen == ("Z", "S")
        finally:
            process.kill()


@pytest.fixture
def family() -> Iterator[subprocess.Popen[bytes]]:
    """A shell with a marked environment, a child shell and a grandchild; says one line when all are there."""
    env = {**os.environ, **dict(entry.split("=") for entry in MARK.decode().split("\0"))}
    process = subprocess.Popen(
        ["/bin/sh", "-c", "sh -c 'sleep 60 & echo ready; wait'; true"],
        env=env,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_descendants_are_found_to_the_grandchildren(family: subprocess.Popen[bytes]) -> None:
    found = procfs.descendants(family.pid)
    assert len(found) == 2
    child = procfs.stat(found[0])
    grandchild = procfs.stat(found[1])
    assert child is not None and grandchild is not None
    assert (child.ppid, grandchild.ppid) == (family.pid, found[0])
    assert procfs.descendants(found[1]) == []


def test_processes_of_job_are_found_by_whole_mark(family: subprocess.Popen[bytes]) -> None:
    """The processes of a job are found by its environment mark, compared completely."""
    whole = [family.pid, *procfs.descendants(family.pid)]
    assert sorted(proc.pid for proc in procfs.find_by_env(MARK)) == sorted(whole)
    assert all(procfs.is_alive(proc) for proc in procfs.find_by_env(MARK))
    assert procfs.find_by_env(MARK + b"0") == []
    assert procfs.find_by_env(b"ORCH_TEST_MARK=procfs") == []


def test_sleeping_process_reports_its_wait(family: subprocess.Popen[bytes]) -> None:
    assert procfs.wchan(family.pid) != "0"


def test_caught_signal_is_distinguished_from_deadly_one() -> None:
    code = "import signal; signal.signal(signal.SIGUSR1, lambda *a: None); print(1, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert procfs.catches_signal(process.pid, signal.SIGUSR1)
    assert not procfs.catches_signal(process.pid, signal.SIGUSR2)
    assert not procfs.blocks_signal(process.pid, signal.SIGUSR1)
    assert not procfs.has_pending(process.pid, signal.SIGUSR1)
    process.communicate(b"\n")


def test_boot_has_an_id() -> None:
    assert len(procfs.boot_id()) == 36
