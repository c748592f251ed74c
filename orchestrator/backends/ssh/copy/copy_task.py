"""State of one copy, common to rsync and SFTP: its progress, its tries, how it is given up; and the rate limit of all copies."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.backends.api import Copy, Direction
from orchestrator.core.checkpoints.checkpoint import CheckpointFile
from orchestrator.core.errors import Cancelled, HostError

STALL_S_MAX = 60.0
"""A copy without a byte of progress for this long is broken off, and begun again over a connection that works."""


class ConnectionBroken(Exception):
    """The connection broke or is silent: the copy is to be tried again."""


class UnsupportedTool(Exception):
    """The files cannot be copied by this tool, but perhaps by another."""


class RateLimit:
    """Limit on the speed of all copies together."""

    def __init__(self, mb_s: float | None) -> None:
        """`mb_s`: in 10^6 bytes a second, None for no limit."""
        self.bytes_per_s = None if mb_s is None else mb_s * 1e6
        self._free_s = 0.0
        self._lock = threading.Lock()

    def pause_s(self, size_bytes: int) -> float:
        """Return how long to wait until this number of bytes may have been copied."""
        if self.bytes_per_s is None:
            return 0.0
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + size_bytes / self.bytes_per_s
            return self._free_s - time.monotonic()


class CopyTask:
    """One copy, waiting or under way. One thread copies; any other may read `done_bytes` and call `cancel`."""

    def __init__(self, copy: Copy, limit: RateLimit) -> None:
        self.copy = copy
        self.limit = limit
        self.done_bytes = 0
        # Of its tries, for the queue
        self.due_s = time.monotonic()
        self.tries = self.best_bytes = 0
        self.unreachable_since_s: float | None = None  # since when there is no connection
        self.sent_files: list[str] = []  # files that are whole on the host
        self._damaged: list[str] = []  # files that came damaged once already
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._abort: Callable[[], object] | None = None

    @property
    def lane(self) -> tuple[str, Direction]:
        return self.copy.node, self.copy.direction

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the copy at once, whatever it waits for."""
        self._cancelled.set()
        with self._lock:
            if self._abort is not None:
                self._abort()

    def raise_if_cancelled(self) -> None:
        """Raise Cancelled when the copy is no longer wanted."""
        if self._cancelled.is_set():
            raise Cancelled

    @contextlib.contextmanager
    def abort_with(self, abort: Callable[[], object]) -> Iterator[None]:
        """Call `abort` if the copy is given up within the block."""
        with self._lock:
            previous, self._abort = self._abort, abort
        try:
            self.raise_if_cancelled()
            yield
        finally:
            with self._lock:
                self._abort = previous

    def advance(self, more_bytes: int) -> None:
        """Add copied bytes to the progress, and wait as long as the rate limit requires. Raises Cancelled."""
        self.done_bytes += more_bytes
        self._cancelled.wait(self.limit.pause_s(more_bytes))
        self.raise_if_cancelled()

    def damage_error(self, name: str) -> Exception:
        """Return what it means that a file came with other bytes than it has on its host: once more, or never."""
        if name in self._damaged:
            return HostError(f"{name} arrived damaged from {self.copy.node} twice")
        self._damaged.append(name)
        return ConnectionBroken(f"{name} was damaged in transit")


def is_same_file(path: Path, entry: CheckpointFile) -> bool:
    """Tell, from its size and its time to the nanosecond, whether a file is that piece, and need not be copied."""
    try:
        stat = path.stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (entry.size_bytes, entry.mtime_ns)
