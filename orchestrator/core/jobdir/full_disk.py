"""Full disks and exhausted descriptors: work waits and is retried, so that it costs only time.

Printing never fails on a full disk: output that does not fit is kept, up to a limit, and written before the next line.
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
from time import sleep
from typing import TextIO, TypeVar

T = TypeVar("T")

RETRY_S = 1.0
"""How often a full disk is tried again."""

WAIT_S_MAX = 30 * 86_400.0
"""How long a caller waits for space; a job ends long before."""

KEPT_BYTES_MAX = 64 << 10
"""How much output is kept; beyond it the newest is dropped, since the cause was printed first."""

LEFT_BYTES_MIN = 64 << 10
"""A disk that has less than this is full: the next file does not fit."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNAVAILABLE = frozenset({errno.EROFS, errno.EACCES, errno.ESTALE})
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def is_full(err: OSError) -> bool:
    """Return whether a disk refused because it is full, or because its user has used up his quota."""
    return err.errno in _FULL


def is_unavailable(err: OSError) -> bool:
    """Return whether a disk cannot be written at the moment: it is full, mounted read-only, or lost by its server. A failed
    write can be repeated later."""
    return is_full(err) or err.errno in _UNAVAILABLE


def is_exhausted(err: OSError) -> bool:
    """Return whether something failed because this process or its host is out of descriptors or memory at the moment."""
    return err.errno in _EXHAUSTED


def is_disk_full(folder: Path) -> bool:
    """Return whether the disk of a folder is full, as far as statvfs says: it may not know of quotas."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    no_bytes = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < LEFT_BYTES_MIN
    return no_bytes or (disk.f_files > 0 and disk.f_favail == 0)


def retry_while_full(action: Callable[[], T]) -> T:
    """Repeat `action` while its disk is full, and return its result. Blocks for up to `WAIT_S_MAX`, and reports that once."""
    began_s, waits = time.monotonic(), False
    while True:
        try:
            done = action()
        except OSError as err:
            waited_s = time.monotonic() - began_s
            if not is_full(err) or waited_s > WAIT_S_MAX:
                raise
            if not waits:
                _log("the disk is full: waiting for free space")
            waits = True
            sleep(RETRY_S)
            continue
        if waits:
            _log(f"the disk has free space again after {time.monotonic() - began_s:.0f} s")
        return done


def _log(text: str) -> None:
    print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), text, file=sys.stderr, flush=True)


class DeferExhaustion:
    """Context that suppresses errors for lack of descriptors or memory; the caller repeats the block. Prints one line."""

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
            print(f"some work waits until it can be tried again, see `ulimit -n`: {err.strerror}", flush=True)
        self._is_waiting = True
        return True


class BufferedLog(io.RawIOBase):
    """Open log that accepts all writes; output that the disk has no space for is kept, and written before the next."""

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
        if os.getpid() != self._pid:  # a child: what is kept is the parent's
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


def buffer_output() -> None:
    """Make the output of this process and its forks wait for space on the disk of their log."""
    sys.stdout, sys.stderr = _buffered(sys.stdout), _buffered(sys.stderr)


def _buffered(stream: TextIO) -> TextIO:
    if stream is None:  # closed by the process that started this one
        return stream
    stream.flush()
    log = BufferedLog(stream.fileno())
    # The text may hold output of a rank or an agent, in characters that no encoding has.
    return io.TextIOWrapper(log, stream.encoding, "backslashreplace", line_buffering=True)
