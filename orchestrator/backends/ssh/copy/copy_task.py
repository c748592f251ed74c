"""State of one copy under way, common to rsync and SFTP: its progress, its rate limit, and how it is given up."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.backends.api import Copy
from orchestrator.core.checkpoints.save import Piece
from orchestrator.core.errors import Cancelled, HostError

STALL_S_MAX = 60.0
"""A copy without a byte of progress for this long is broken off, and begun again over a connection that works."""


class Broken(Exception):
    """The connection broke or is silent: the copy is to be tried again."""


class Unfit(Exception):
    """The files cannot be copied by this tool, but perhaps by another."""


class CopyTask:
    """One copy under way. One thread copies; any other may read `done_bytes` and call `give_up`."""

    def __init__(self, copy: Copy, bytes_per_s: float | None) -> None:
        self.copy = copy
        self.bytes_per_s = bytes_per_s
        self.done_bytes = 0
        self.sent: list[str] = []  # files that are whole on the host
        self._damaged: list[str] = []  # files that came damaged once already
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._abort: Callable[[], object] | None = None
        self._began_s = 0.0
        self._paced_bytes = 0

    @property
    def is_given_up(self) -> bool:
        return self._given_up.is_set()

    def give_up(self) -> None:
        """End the copy at once, whatever it waits for."""
        self._given_up.set()
        with self._lock:
            if self._abort is not None:
                self._abort()

    def check(self) -> None:
        """Raise Cancelled when the copy is no longer wanted."""
        if self._given_up.is_set():
            raise Cancelled

    @contextlib.contextmanager
    def ended_by(self, abort: Callable[[], object]) -> Iterator[None]:
        """Call `abort` if the copy is given up within the block."""
        with self._lock:
            before, self._abort = self._abort, abort
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._abort = before

    def wait(self, wait_s: float) -> None:
        """Wait, unless the copy is given up. Raises Cancelled."""
        self._given_up.wait(wait_s)
        self.check()

    def begin(self) -> None:
        """Reset the progress for another try."""
        self.done_bytes = self._paced_bytes = 0
        self._began_s = time.monotonic()

    def advance(self, more_bytes: int) -> None:
        """Add copied bytes to the progress, and wait as long as the rate limit requires. Raises Cancelled."""
        self.done_bytes += more_bytes
        self._paced_bytes += more_bytes
        if self.bytes_per_s is None:
            self.check()
            return
        ahead_s = self._paced_bytes / self.bytes_per_s - (time.monotonic() - self._began_s)
        self.wait(max(0.0, ahead_s))

    def damaged(self, name: str) -> Exception:
        """Return what it means that a file came with other bytes than it has on its host: once more, or never."""
        if name in self._damaged:
            return HostError(f"{name} came damaged from {self.copy.node} twice")
        self._damaged.append(name)
        return Broken(f"{name} was damaged on its way")

    def skip(self, skipped_bytes: int) -> None:
        """Add bytes to the progress that need not be copied."""
        self.done_bytes += skipped_bytes


def fits(path: Path, entry: Piece) -> bool:
    """Tell, from size and time alone, whether a file is that piece."""
    try:
        stat = path.stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (entry.size_bytes, entry.mtime_ns)


def mark(path: Path, entry: Piece) -> None:
    """Give a file the time of its piece to the nanosecond, which not every tool can."""
    os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
