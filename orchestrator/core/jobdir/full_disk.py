"""What if a disk is full, or no descriptor left? That costs nothing but time: what cannot be done waits, and is tried again.

Printing never fails for it: what does not fit into a log is kept, within a limit, and comes before the next line.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeVar

T = TypeVar("T")

RETRY_S = 1.0
"""How often a full disk is tried again."""

WAIT_S_MAX = 30 * 86_400.0
"""How long anybody waits for room; a job is over long before."""

KEPT_BYTES_MAX = 64 << 10
"""How much of what is printed is kept; past it the newest goes, since the cause was said first."""

LEFT_BYTES_MIN = 64 << 10
"""A disk that has less than this is full: the next file does not fit."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def is_full(err: OSError) -> bool:
    """Tell whether a disk refused since it is full, or since its user has used up his share of it."""
    return err.errno in _FULL


def is_exhausted(err: OSError) -> bool:
    """Tell whether something failed since this process or its host has no descriptor or no memory left at the moment."""
    return err.errno in _EXHAUSTED


def is_used_up(folder: Path) -> bool:
    """Tell whether the disk of a folder is full, as far as it says so: of quotas it may know nothing."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    no_bytes = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < LEFT_BYTES_MIN
    return no_bytes or (disk.f_files > 0 and disk.f_favail == 0)


def wait_for(deed: Callable[[], T]) -> T:
    """Do what needs room on a disk, again and again while that is full; return what it returns. This blocks."""
    deadline_s = time.monotonic() + WAIT_S_MAX
    while True:
        try:
            return deed()
        except OSError as err:
            if not is_full(err) or time.monotonic() > deadline_s:
                raise
        time.sleep(RETRY_S)


class Patience:
    """Lets what is done within it fail for want of a descriptor or of memory: whoever uses it tries again. Told once."""

    def __init__(self) -> None:
        self._is_waiting = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, err: BaseException | None, frames: object) -> bool:
        if err is None:
            self._is_waiting = False
            return False
        if not isinstance(err, OSError) or not is_exhausted(err):
            return False
        if not self._is_waiting:
            print(f"some work waits, see `ulimit -n`: {err.strerror}", flush=True)
        self._is_waiting = True
        return True


class PatientLog(io.RawIOBase):
    """An open log that takes all that is written. What the disk has no room for is kept, and written before the next."""

    name = "log"

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._kept = b""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        if os.getpid() != self._pid:  # a child, and what is kept is the parent's
            self._begin()
        with self._lock:
            if len(self._kept) + len(data) <= KEPT_BYTES_MAX or not self._kept:
                self._kept += data
            self._push()
        return len(data)

    def flush(self) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._push()

    def _push(self) -> None:
        try:
            while self._kept:
                self._kept = self._kept[os.write(self._fd, self._kept) :]
        except OSError as err:
            if not is_full(err):
                self._kept = b""
                raise


def print_patiently() -> None:
    """Let what this process and its forks print wait for room on the disk of their log."""
    sys.stdout, sys.stderr = _patient(sys.stdout), _patient(sys.stderr)


def _patient(stream: TextIO) -> TextIO:
    if stream is None:  # closed by whoever started us
        return stream
    stream.flush()
    log = PatientLog(stream.fileno())
    # What is printed may hold what a rank or an agent said, in characters that no encoding has.
    return io.TextIOWrapper(log, stream.encoding, "backslashreplace", line_buffering=True)
