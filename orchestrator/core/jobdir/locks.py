"""File locks (flock) of a job: how one is taken, whether it is held, and by which process.

Rules: a lock's file is its owner's alone (0600), since a file that can be read can be locked; the holder writes its pid
and host into it; on a disk without locks neither question has an answer, so each raises.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import ClusterError, OwnershipLostError
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir

POLL_S = 0.05

LOCK_S_MAX = 1.0
"""How long to wait for a lock: a process that only checks it holds it for an instant."""

HOLDER_BYTES_MAX = 400

_WITHOUT_LOCKS = frozenset((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL))


def open_file(path: Path) -> int:
    """Open a lock's file, and create it where it is missing. Raises OSError, also for a symbolic link."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(OSError):  # another user's, or a disk without modes
        os.fchmod(fd, 0o600)
    return fd


def acquire(fd: int, limit_s: float, poll_s: float = POLL_S) -> bool:
    """Take the lock of an open file; False when another holds it for `limit_s`. A check holds it for an instant.

    Raises OSError when the disk keeps no locks.
    """
    deadline_s = time.monotonic() + limit_s
    while not _flock(fd, fcntl.LOCK_EX):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(poll_s)
    return True


@contextlib.contextmanager
def hold(path: Path, limit_s: float = LOCK_S_MAX) -> Iterator[bool]:
    """Hold a lock and sign its file, or yield False when another holds it for `limit_s`. Raises OSError, see `take`."""
    fd = open_file(path)
    try:
        is_mine = acquire(fd, limit_s)
        if is_mine:
            sign(fd)
        yield is_mine
    finally:
        os.close(fd)


def is_held(path: Path) -> bool:
    """Return whether a process holds a lock; a lock without a file is free. Raises OSError where that cannot be seen: for
    another user's lock, and on a disk without locks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        return not _flock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def sign(fd: int) -> None:
    """Write the pid and host of this process into the lock file."""
    who = f"{os.getpid()} {os.uname().nodename}\n".encode()
    with contextlib.suppress(OSError):  # a full disk; written over what is there, it needs no room
        os.pwrite(fd, who, 0)
        os.ftruncate(fd, len(who))


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Process that signed a lock last."""

    pid: int
    host: str


def read_holder(path: Path) -> LockHolder | None:
    """Return the process that signed a lock last; None when that cannot be read."""
    try:
        words = ownership.read_regular(path)[:HOLDER_BYTES_MAX].decode(errors="replace").split()
    except OSError:
        return None
    return LockHolder(int(words[0]), words[1]) if len(words) == 2 and words[0].isdecimal() else None


class LockSignature:
    """Signature of this process in a lock that it holds, for disks that do not show locks to other machines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._who = read_holder(path)

    def require(self) -> None:
        """Raise NotOursError where another has signed since; an unreadable signature counts as its own."""
        if self._who is not None and read_holder(self._path) not in (None, self._who):
            raise OwnershipLostError(f"another process has taken over the job{holder_text(self._path)}")


def holder_text(path: Path) -> str:
    """Return a lock's holder for a message, such as ` (pid 12 on login1)`; empty when that is not known."""
    who = read_holder(path)
    return f" (pid {who.pid} on {who.host})" if who else ""


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        if err.errno not in _WITHOUT_LOCKS:
            raise
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        why = f"this file system does not support file locks ({err.strerror}), which orch needs"
        raise OSError(errno.ENOLCK, why, name) from err
    return True


RESUME_S_MAX = 60.0
"""How long to wait for another command that resumes the job: sbatch may be slow to answer it."""


@contextlib.contextmanager
def hold_command_lock(job: JobDir, limit_s: float = RESUME_S_MAX) -> Iterator[None]:
    """Hold the resume lock for a command that must not run beside a resume or another such command. Raises ClusterError when
    another command holds it for `limit_s`, and OSError."""
    with hold(job.resume_lock, limit_s) as is_mine:
        if not is_mine:
            what = f"another command is working on the job{holder_text(job.resume_lock)}"
            raise ClusterError(what, job.id, "wait until it has finished, then try again")
        yield


@contextlib.contextmanager
def hold_ended_job(job: JobDir) -> Iterator[None]:
    """Hold the resume lock of an ended job, so that it is not resumed meanwhile. Raises ClusterError if it has not ended, or
    another command holds the lock, and OSError."""
    with hold_command_lock(job, 0.0):
        if not job.ended.exists():
            raise ClusterError("the job was resumed, so it has not ended", job.id, f"see orch status {job.id}")
        yield
