"""Kernel waits of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.agent.hang import kernel_wait, sample
from orchestrator.agent.hang.kernel_wait import Wait
from orchestrator.core.status_types import Frame
from tests.support.unprivileged import unprivileged

SEEN_S_MAX = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="this kernel does not tell calls"),
]


@contextmanager
def running(code: str, folder: Path | None = None, *args: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", code, *args], cwd=folder, stdin=subprocess.PIPE)
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def until(pid: int, seen: Callable[[Wait], bool]) -> Wait:
    """Look until the main thread waits so."""
    deadline_s = time.monotonic() + SEEN_S_MAX
    while not seen(found := kernel_wait.read_wait(pid, pid)):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ("import time; time.sleep(50)", ("clock_nanosleep", "select", "pselect6")),
        ("import select; select.select([], [], [], 50)", ("select", "pselect6")),
    ],
)
def test_sleep_is_distinguished_from_other_waits(code: str, calls: tuple[str, ...]) -> None:
    with running(code) as pid:
        found = until(pid, lambda wait: wait.is_sleeping)
        assert found.call in calls
        assert not found.is_unlimited


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ("import threading; e = threading.Event(); e.wait(50)", ("futex",)),
        ("import os, select; r, w = os.pipe(); select.select([r], [], [], 50)", ("select", "pselect6")),
        (
            "import os, select; r, w = os.pipe(); p = select.poll(); p.register(r); p.poll(50000)",
            ("poll", "ppoll"),
        ),
        (
            "import os, select; r, w = os.pipe(); p = select.epoll(); p.register(r, 1); p.poll(50)",
            ("epoll_wait", "epoll_pwait", "epoll_pwait2"),
        ),
    ],
)
def test_timed_wait_is_no_sleep_and_reports_limit(code: str, calls: tuple[str, ...]) -> None:
    """A wait with a time limit is no sleep and is reported as one that ends."""
    with running(code) as pid:
        found = until(pid, lambda wait: wait.call in calls and wait.limit_s is not None)
        assert not found.is_sleeping
        assert found.limit_s in ((50.0,) if found.call in ("poll", "epoll_wait", "epoll_pwait") else (0.0,))
        assert found.call != "poll" or "a pipe" in found.target


def test_endless_futex_is_a_lock() -> None:
    """A futex without a time limit is a lock."""
    with running("import threading; a = threading.Lock(); a.acquire(); a.acquire()") as pid:
        assert until(pid, lambda wait: wait.call == "futex").is_unlimited


def test_stdin_pipe_wait_is_named() -> None:
    """Reading standard input that is a pipe is named."""
    with running("import os; os.read(0, 1)") as pid:
        found = until(pid, lambda wait: wait.call == "read" and wait.fds == (0,))
        assert found.target == "standard input, a pipe"


def test_connection_is_named_by_its_peer() -> None:
    """A connection is named by its other end."""
    code = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with running(code, None, str(port)) as pid:
            found = until(pid, lambda wait: wait.call == "recvfrom")
            assert found.target == f"the connection to 127.0.0.1:{port}"


def test_fifo_is_named_when_opened_and_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "shard-17.bin")
    code = "open('data/shard-17.bin', 'rb', 0).read(1)"
    with running(code, tmp_path) as pid:
        found = until(pid, lambda wait: wait.call in ("open", "openat"))
        assert found.target == "data/shard-17.bin"
        fd = os.open(tmp_path / found.target, os.O_WRONLY)
        try:
            assert until(pid, lambda wait: wait.call == "read").target == "data/shard-17.bin"
        finally:
            os.close(fd)


def test_signal_interrupted_wait_is_distinguished_from_restarted_one() -> None:
    for code, frail in (
        ("import ctypes; ctypes.CDLL(None).sleep(50)", True),
        ("import signal; signal.pause()", True),
        ("import time; time.sleep(50)", False),
        ("import ctypes\nwhile True: ctypes.CDLL(None).usleep(300_000)", False),
        ("import threading; threading.Event().wait()", False),
    ):
        with running(code) as pid:
            until(pid, lambda wait: wait.is_sleeping or wait.call in ("pause", "futex"))
            assert kernel_wait.ends_on_signal(pid, pid) is frail
    with running("import select; select.select([], [], [])") as pid:
        found = until(pid, lambda wait: "select" in wait.call)
        assert (found.is_sleeping, found.is_unlimited, kernel_wait.describe_wait(found)) == (
            False,
            True,
            "in select()",
        )


def test_child_wait_is_distinguished_from_running() -> None:
    code = "import os, time\nif os.fork() == 0: time.sleep(99)\nos.wait()"
    with running(code) as pid:
        assert until(pid, lambda wait: wait.call == "wait4").is_unlimited
    with running("while True: pass") as pid:
        assert until(pid, lambda wait: wait.is_running).call == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_unreadable_fact_is_named(tmp_path: Path) -> None:
    """A fact that may not be read is named."""
    with running("import time; time.sleep(50)") as pid:
        until(pid, lambda wait: wait.is_sleeping)
        with unprivileged(tmp_path):
            found = kernel_wait.read_wait(pid, pid)
        assert (found.call, found.limit_s, found.is_sleeping) == ("", None, False)
        assert "/syscall: " in found.unavailable


def test_exited_process_waits_for_nothing() -> None:
    assert kernel_wait.read_wait(1 << 22, 1 << 22) == Wait("", "", (), None, False, "", "")


def test_frames_source_line_is_read_from_file(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("while True:\n    x = 1\nx = 2\n")
    started_s = time.time() + 60
    found = [sample.read_line(os.getpid(), Frame(str(file), row, "f"), started_s) for row in (2, 3, 4)]
    assert found == ["x = 1", "x = 2", ""]


def test_newer_or_missing_source_file_is_not_trusted(tmp_path: Path) -> None:
    """A file younger than its process is not trusted, nor is a missing one."""
    file = tmp_path / "train.py"
    file.write_text("pass\n")
    assert sample.read_line(os.getpid(), Frame(str(file), 1, "f"), time.time() - 60) == ""
    assert sample.read_line(os.getpid(), Frame(str(tmp_path / "no.py"), 1, "f"), time.time()) == ""
