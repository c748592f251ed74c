"""What is common to all ways of copying: how far a copy is, how fast it may be, and how it is given up."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.backends.api import Copy
from orchestrator.core.wire.messages import ManifestEntry

STALL_S_MAX = 60.0
"""A copy of which not a byte came for so long is given up, and begun again over a line that works."""


class Broken(Exception):
    """The line broke, or nothing comes over it: to be tried again."""


class Failed(Exception):
    """It cannot be copied, in words for a person."""


class Unfit(Exception):
    """It cannot be copied in this way, maybe in another."""


class GivenUp(Exception):
    """Nobody wants the copy any more."""


class CopyTask:
    """One copy under way. One thread copies; any other may look at `done_bytes`, and `give_up`."""

    def __init__(self, copy: Copy, bytes_per_s: float | None) -> None:
        self.copy = copy
        self.bytes_per_s = bytes_per_s
        self.done_bytes = 0
        self.sent: list[str] = []  # files that are whole on the host
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
        """Raise GivenUp when nobody wants the copy any more."""
        if self._given_up.is_set():
            raise GivenUp

    @contextlib.contextmanager
    def ended_by(self, abort: Callable[[], object]) -> Iterator[None]:
        """Let `abort` end what is done within, when the copy is given up."""
        with self._lock:
            before, self._abort = self._abort, abort
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._abort = before

    def wait(self, wait_s: float) -> None:
        """Wait, unless the copy is given up. Raises GivenUp."""
        self._given_up.wait(wait_s)
        self.check()

    def begin(self) -> None:
        """Count anew: what was done before is found again, or done again."""
        self.done_bytes = self._paced_bytes = 0
        self._began_s = time.monotonic()

    def advance(self, more_bytes: int) -> None:
        """Enter that so much was copied, and wait as long as the limit asks for. Raises GivenUp."""
        self.done_bytes += more_bytes
        self._paced_bytes += more_bytes
        if self.bytes_per_s is None:
            self.check()
            return
        ahead_s = self._paced_bytes / self.bytes_per_s - (time.monotonic() - self._began_s)
        self.wait(max(0.0, ahead_s))

    def skip(self, there_bytes: int) -> None:
        """Enter that so much need not be copied."""
        self.done_bytes += there_bytes


def fits(path: Path, piece: ManifestEntry) -> bool:
    """Tell, from size and time alone, whether a file is the piece that is wanted."""
    try:
        stat = path.stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (piece.size_bytes, piece.mtime_ns)


def mark(path: Path, piece: ManifestEntry) -> None:
    """Give a file the time of its piece, to the nanosecond, which not every way of copying can."""
    os.utime(path, ns=(piece.mtime_ns, piece.mtime_ns))
