"""Who may act for a job? The one process that holds the lock in its folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator

from orchestrator.wire.paths import JobDir

LOCK_S_MAX = 1.0
"""How long to wait for the lock: whoever only looks at it holds it for an instant."""


@contextlib.contextmanager
def locked(job: JobDir) -> Iterator[bool]:
    """Hold the job's lock, or learn within `LOCK_S_MAX` that another supervisor does."""
    fd = os.open(job.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _lock(fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    deadline_s = time.monotonic() + LOCK_S_MAX
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
            continue
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        return True
