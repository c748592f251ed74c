"""Who may act for a job? The one process that holds the lock in its folder; and one command at a time resumes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.wire.paths import JobDir

LOCK_S_MAX = 1.0
"""How long to wait for the lock: whoever only looks at it holds it for an instant."""

RESUME_S_MAX = 60.0
"""How long to wait for another command that resumes the job: sbatch may be slow to answer it."""


@contextlib.contextmanager
def locked(job: JobDir) -> Iterator[bool]:
    """Hold the job's lock, or learn within `LOCK_S_MAX` that another supervisor does."""
    fd = os.open(job.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _lock(fd, LOCK_S_MAX)
    finally:
        os.close(fd)


@contextlib.contextmanager
def resuming(job: JobDir, limit_s: float = RESUME_S_MAX) -> Iterator[bool]:
    """Hold the right to resume the job, or learn within `limit_s` that another command has it."""
    fd = os.open(job.resume_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _lock(fd, limit_s)
    finally:
        os.close(fd)


def is_held(lock: Path) -> bool:
    """Tell whether somebody holds a lock. Raises FileNotFoundError and PermissionError where it cannot be looked at."""
    fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _lock(fd: int, limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
            continue
        who = f"{os.getpid()} {socket.gethostname()}\n".encode()
        with contextlib.suppress(OSError):  # a full disk; written over what is there, it needs no room
            os.pwrite(fd, who, 0)
            os.ftruncate(fd, len(who))
        return True
