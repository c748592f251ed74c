"""What does a checkpoint consist of, and is what lies here the same? Its files with sizes and sha256.

Reading gigabytes takes long, so it is done in one thread of its own, of low priority: neither heartbeats nor ranks
wait for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from orchestrator.agent.outputs.checkpoint_formats import Shape, inspect_shape
from orchestrator.core.wire.messages import ManifestEntry

T = TypeVar("T")

BLOCK_BYTES = 1 << 20
NICENESS = 10


class GivenUp(Exception):
    """The reading was given up, since the agent leaves."""


class Hasher:
    """Reads checkpoints, one after the other."""

    def __init__(self, folder: Path) -> None:
        """`folder` is `checkpoints/` of the job, below which pieces have their names."""
        self._folder = folder
        self._given_up = threading.Event()
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    async def manifest(self, path: Path, shape: Shape) -> tuple[ManifestEntry, ...] | None:
        """Return the pieces of the checkpoint at `path`; None when it has not, or does not keep, this shape."""
        return await self._in_thread(lambda: self._manifest(path, shape))

    async def fault(self, pieces: tuple[ManifestEntry, ...]) -> str:
        """Return what is wrong with the first piece that is not here as it should be, empty when all are."""
        return await self._in_thread(lambda: self._fault(pieces))

    def close(self) -> None:
        """Give up what is being read."""
        self._given_up.set()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, read: Callable[[], T]) -> T:
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "hash", _be_nice)
        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    def _manifest(self, path: Path, shape: Shape) -> tuple[ManifestEntry, ...] | None:
        if inspect_shape(path) != shape:
            return None
        pieces = []
        for name, size_bytes, mtime_ns in shape.files:
            file = path / name
            try:
                digest = self._sha256(file)
            except OSError:
                return None
            pieces.append(
                ManifestEntry(file.relative_to(self._folder).as_posix(), size_bytes, mtime_ns, digest)
            )
        return tuple(pieces) if inspect_shape(path) == shape else None

    def _fault(self, pieces: tuple[ManifestEntry, ...]) -> str:
        for piece in pieces:
            file = self._folder / piece.name
            try:
                size_bytes = file.stat().st_size
                if size_bytes != piece.size_bytes:
                    return f"{piece.name} has {size_bytes} bytes instead of {piece.size_bytes}"
                if self._sha256(file) != piece.sha256:
                    return f"{piece.name} has another sha256 than when it was saved"
            except OSError as err:
                return f"{piece.name}: {err.strerror}"
        return ""

    def _sha256(self, file: Path) -> str:
        digest, block = hashlib.sha256(), bytearray(BLOCK_BYTES)
        with file.open("rb", buffering=0) as source:
            while count := source.readinto(block):
                if self._given_up.is_set():
                    raise GivenUp
                digest.update(memoryview(block)[:count])
        return digest.hexdigest()


def _be_nice() -> None:
    """Lower the priority of this thread alone (on Linux a thread has its own, `man 2 setpriority`)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
