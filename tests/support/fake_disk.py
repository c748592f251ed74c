"""A disk that can be full: what `os.write` and `os.pwrite` put there has so much room, and `os.fdatasync` may refuse.

Who waits for room gets it with the third try.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from orchestrator.core.jobdir import full_disk

TRIES = 2


@dataclass(slots=True)
class FakeDisk:
    """The room that is left: None for as much as is wanted. `late`: only `os.fdatasync` tells, as over NFS. `at_wait` is
    called whenever somebody waits for room."""

    room_bytes: int | None = None
    late: bool = False
    waits: int = 0
    at_wait: Callable[[], object] = lambda: None

    def put(self, write: Callable[[bytes], int], data: bytes) -> int:
        """Write what there is room for, as a disk does."""
        if self.room_bytes is None or self.late:
            return write(data)
        if self.room_bytes == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        put_bytes = write(bytes(data[: self.room_bytes]))
        self.room_bytes -= put_bytes
        return put_bytes


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDisk:
    """Put such a disk below this process."""
    disk, write, pwrite, sync = FakeDisk(), os.write, os.pwrite, os.fdatasync

    def fdatasync(fd: int) -> None:
        if disk.late and disk.room_bytes is not None:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        sync(fd)

    monkeypatch.setattr(os, "write", lambda fd, data: disk.put(lambda some: write(fd, some), data))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: disk.put(lambda some: pwrite(fd, some, at), data))
    monkeypatch.setattr(os, "fdatasync", fdatasync)

    def sleep(_: float) -> None:
        disk.waits += 1
        disk.at_wait()
        if disk.waits % TRIES == 0:
            disk.room_bytes = None

    monkeypatch.setattr(full_disk, "sleep", sleep)
    return disk
