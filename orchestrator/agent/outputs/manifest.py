"""Checkpoint manifests: hashes the files of a checkpoint, and verifies files against a manifest.

Reading gigabytes takes long, so one thread of low priority does it: neither heartbeats nor ranks wait for it.
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
AGAIN_S = 1.0


class GivenUp(Exception):
    """Hashing was cancelled because the agent leaves."""


class Hasher:
    """Thread that hashes checkpoints, one after the other."""

    def __init__(self, folder: Path) -> None:
        """`folder` is that of the job's checkpoints on this host; names in a manifest are relative to it."""
        self._folder = folder
        self._given_up = threading.Event()
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    async def manifest(self, path: Path, shape: Shape) -> tuple[ManifestEntry, ...] | None:
        """Return the manifest of the checkpoint at `path`; None when it has not, or does not keep, this shape."""
        return await self._in_thread(lambda: self._manifest(path, shape))

    async def fault(self, manifest: tuple[ManifestEntry, ...]) -> str:
        """Return the fault of the first file that differs from the manifest, empty when all match."""
        return await self._in_thread(lambda: self._fault(manifest))

    def close(self) -> None:
        """Cancel all hashing."""
        self._given_up.set()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, read: Callable[[], T]) -> T:
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "hash", _be_nice)
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, read)
            except RuntimeError as err:  # no thread can be started: the limit of processes is reached
                if self._given_up.is_set():
                    raise GivenUp from err
                self._thread.shutdown(wait=False, cancel_futures=True)  # what it could not begin
                self._thread = concurrent.futures.ThreadPoolExecutor(1, "hash", _be_nice)
            await asyncio.sleep(AGAIN_S)

    def _manifest(self, path: Path, shape: Shape) -> tuple[ManifestEntry, ...] | None:
        if inspect_shape(path) != shape:
            return None
        entries = []
        for part, size_bytes, mtime_ns in shape.files:
            file = path / part
            try:
                digest = self._sha256(file)
            except OSError:
                return None
            name = file.relative_to(self._folder).as_posix()
            entries.append(ManifestEntry(name, size_bytes, mtime_ns, digest))
        return tuple(entries) if inspect_shape(path) == shape else None

    def _fault(self, manifest: tuple[ManifestEntry, ...]) -> str:
        for entry in manifest:
            file = self._folder / entry.name
            try:
                size_bytes = file.stat().st_size
                if size_bytes != entry.size_bytes:
                    return f"{entry.name} has {size_bytes} bytes instead of {entry.size_bytes}"
                if self._sha256(file) != entry.sha256:
                    return f"{entry.name} has another sha256 than when it was saved"
            except OSError as err:
                return f"{entry.name}: {err.strerror}"
        return ""

    def _sha256(self, file: Path) -> str:
        digest, block = hashlib.sha256(), bytearray(BLOCK_BYTES)
        with file.open("rb", buffering=0) as source:
            while read_bytes := source.readinto(block):
                if self._given_up.is_set():
                    raise GivenUp
                digest.update(memoryview(block)[:read_bytes])
        return digest.hexdigest()


def _be_nice() -> None:
    """Lower the priority of this thread alone (on Linux a thread has its own, `man 2 setpriority`)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
