"""Sparse time index of a rank's log: when which byte was written, so that readers can merge logs and seek in them.

The file holds records of 16 bytes, `<QQ`: a wall time in ns and an offset. A record says that every byte before the
offset had been written by that time. Rules: one writer, the node's agent; offsets rise strictly and times never fall (a
clock that was set back waits until it has caught up), so a search by either is binary; a torn last record does not
count; an index that is missing or behind its log is normal, and its readers say so instead of guessing.
"""

from __future__ import annotations

import bisect
import os
import struct
from collections.abc import Callable
from pathlib import Path

from orchestrator.core.jobdir import ownership

_RECORD = struct.Struct("<QQ")
_NEVER = (1 << 64) - 1
_BLOCK_BYTES = 256 * _RECORD.size


class LogIndex:
    """Writer of an index. After a crash, open the same path again. Raises OSError when it is opened only."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._time_ns = 0
        self._size_bytes = 0
        self._keep(_count(self._fd))

    def record(self, time_ns: int, size_bytes: int) -> None:
        """Record that the log had `size_bytes` at `time_ns`; does nothing while the log has not grown.

        A log that shrank takes the records beyond its new end with it. A disk that refuses costs a time stamp, not
        the job: the next call tries again.
        """
        if size_bytes < self._size_bytes:
            self._keep(_find_first(self._fd, _count(self._fd), lambda _, offset: offset > size_bytes))
        if size_bytes <= self._size_bytes:
            return
        time_ns = max(time_ns, self._time_ns)
        try:
            written_bytes = os.write(self._fd, _RECORD.pack(time_ns, size_bytes))
            if written_bytes < _RECORD.size:
                os.ftruncate(self._fd, _count(self._fd) * _RECORD.size)
                return
        except OSError:
            return
        self._time_ns, self._size_bytes = time_ns, size_bytes

    def close(self) -> None:
        """Close the file; notes after this are a mistake."""
        os.close(self._fd)

    def _keep(self, count: int) -> None:
        """Cut the file to its first `count` records and continue from the last of them."""
        if os.fstat(self._fd).st_size != count * _RECORD.size:
            os.ftruncate(self._fd, count * _RECORD.size)
        self._time_ns, self._size_bytes = _record(self._fd, count - 1) if count else (0, 0)


def offset_at(path: Path, time_ns: int) -> int:
    """Return the offset before which every byte was written by `time_ns`; 0 without an index or before its start."""
    fd = _open(path)
    if fd is None:
        return 0
    try:
        after = _find_first(fd, _count(fd), lambda noted_ns, _: noted_ns > time_ns)
        return _record(fd, after - 1)[1] if after else 0
    finally:
        os.close(fd)


class IndexCursor:
    """Returns the times of bytes, at offsets that never fall. Opens the file per block, so a thousand cursors hold none open."""

    __slots__ = ("_at", "_block", "_ended", "_path", "_record_next", "_until", "time_ns")

    def __init__(self, path: Path | None) -> None:
        """`path` is None for a log without an index."""
        self._path = path
        self._block = b""
        self._at = 0
        self._record_next: int | None = None
        self._ended = path is None
        self._until = 0
        self.time_ns = 0
        """The latest time seen so far, 0 before the first."""

    def span(self, offset: int) -> tuple[int, int] | None:
        """Return when the byte at `offset` had been written (ns) and the offset up to which that time holds.

        None when the index does not reach that far; it is read again only after `refresh`.
        """
        while offset >= self._until:
            if self._at >= len(self._block) and not self._fill(offset):
                return None
            noted_ns, self._until = _RECORD.unpack_from(self._block, self._at)
            self._at += _RECORD.size
            self.time_ns = max(self.time_ns, noted_ns)
        return self.time_ns, self._until

    def refresh(self) -> None:
        """Read new records at the next call, since the index may have grown."""
        self._ended = self._path is None

    def _fill(self, offset: int) -> bool:
        """Read the next block of records, the first time from the one that covers `offset`; False at the end."""
        fd = None if self._ended or self._path is None else _open(self._path)
        if fd is None:
            self._ended = True
            return False
        try:
            if self._record_next is None:
                self._record_next = _find_first(fd, _count(fd), lambda _, end: end > offset)
            block = os.pread(fd, _BLOCK_BYTES, self._record_next * _RECORD.size)
        finally:
            os.close(fd)
        count = len(block) // _RECORD.size
        self._block, self._at = block[: count * _RECORD.size], 0
        self._record_next += count
        self._ended = count == 0
        return count > 0


def _open(path: Path) -> int | None:
    try:
        return ownership.open_inside(path)
    except FileNotFoundError:
        return None


def _count(fd: int) -> int:
    return os.fstat(fd).st_size // _RECORD.size


def _record(fd: int, number: int) -> tuple[int, int]:
    """Return one record; a record that was cut away in the meantime lies after every time and offset."""
    data = os.pread(fd, _RECORD.size, number * _RECORD.size)
    if len(data) < _RECORD.size:
        return _NEVER, _NEVER
    time_ns, offset = _RECORD.unpack(data)
    return time_ns, offset


def _find_first(fd: int, count: int, beyond: Callable[[int, int], bool]) -> int:
    """Return the number of the first record that is `beyond(time_ns, offset)`, `count` when none is."""
    return bisect.bisect_left(range(count), True, key=lambda number: beyond(*_record(fd, number)))
