"""Hosts whose ranks save into memory, in a world where anything may happen next: real agents' memories and a real tracker with
real files, without processes, threads of agents or TLS. Everything is by the seed.

What a host is told waits in its inbox, what it reports in its outbox: a broken line loses the first, not the second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.outputs import checkpoint_memory, peer_files
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import (
    CheckpointFile,
    CompletionReason,
    Content,
    Format,
    GroupReading,
    HostPart,
)
from orchestrator.core.host import interfaces
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import reports
from tests.support import fake_host

ROOM = 1 << 40
READING = GroupReading(Format.TORCH, Content.STATE, fits_any_size=True, is_proved=True)


class Crash(BaseException):
    """An agent is killed in the middle of a copy."""


class Inline:
    """Executor that does what it is given at once."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(work(*args))
        except Exception as err:
            future.set_exception(err)
        return future

    def shutdown(self, **_: object) -> None:
        pass


@dataclasses.dataclass(slots=True)
class Save:
    """What ranks write as one checkpoint."""

    id: int
    attempt: int
    key: str
    series: str
    main: str
    step: int
    names: dict[str, str]  # by node
    todo: list[str]
    stamps: set[tuple[str, int, int]]


class Host:
    """One host and its agent."""

    def __init__(self, name: str, folder: Path, job: JobDir, ships: bool) -> None:
        self.name, self.shm, self.job, self.ships = name, folder, job, ships
        self.is_alive, self.is_low, self.incarnation = True, False, 0
        self.memory: checkpoint_memory.CheckpointMemory | None = None
        for path in (folder, job.checkpoints, job.node(name)):
            path.mkdir(parents=True, exist_ok=True)

    def boot(self) -> None:
        """Start an agent; what another one had in memory is gone."""
        self.die()
        config = fake_host.config(
            self.name, root=str(self.job.root), memory_bytes=1 << 20, memory_dir=str(self.shm), peer_key="k",
            peer_certificate="c",
        )  # fmt: skip
        self.incarnation += 1
        self.inbox: list[tuple[str, Any]] = []
        self.outbox: list[Any] = []
        self.last: Any = None
        self.unseen: dict[str, Save] = {}
        self.unhashed: list[reports.CheckpointSeen] = []
        self.scans = 0
        self.memory = checkpoint_memory.CheckpointMemory(
            config, self.job, self.outbox.append, lambda _: None, lambda: None
        )
        self.memory._thread = Inline()  # type: ignore[assignment]

    def die(self) -> None:
        """End the agent, with all that is in memory."""
        if self.memory is not None and self.memory._lock_fd is not None:
            os.close(self.memory._lock_fd)
        self.memory = None
        shutil.rmtree(self.shm, ignore_errors=True)
        self.shm.mkdir()

    def roots(self) -> list[Path]:
        """Return the folders with files of checkpoints, but for a shared one."""
        assert self.memory is not None
        own = [self.memory.folder, *self.memory._neighbours()]
        return [*own, self.job.checkpoints] if self.ships else own

    def scan(self) -> None:
        """Report what ranks have written, as it is now."""
        assert self.memory is not None
        self.scans += 1
        for save in self.unseen.values():
            piece = stat_of(self.memory.folder, save.names[self.name])
            if piece is not None:
                part = HostPart(self.name, str(self.memory.folder), save.step, (piece,), READING, CompletionReason.NONE)
                seen = reports.CheckpointSeen(save.attempt, save.key, save.series, save.main, part)
                self.outbox.append(seen)
                self.unhashed.append(seen)
        self.unseen = {}

    def hash(self) -> None:
        """Report the sha256 of what was reported, as far as it is still there."""
        seen = self.unhashed.pop(0)
        with contextlib.suppress(OSError):
            pieces = disk.hash_files(Path(seen.part.root), seen.part.files)
            if pieces is not None:
                self.outbox.append(reports.CheckpointHashed(seen.attempt, seen.key, pieces))

    def stop(self, attempt: int) -> None:
        """End an attempt with a last scan."""
        self.scan()
        while self.unhashed:
            self.hash()
        self.outbox.append(("stopped", attempt))


@contextlib.contextmanager
def patched(hosts: dict[str, Host], trouble: dict[str, int]) -> Iterator[None]:
    """Have agents copy without TLS, and into trouble: `crash` and `break` say at which file, 0 for never."""
    patch, put_file = pytest.MonkeyPatch(), disk.put_file

    def count(what: str) -> bool:
        trouble[what] = max(0, (left := trouble.get(what, 0)) - 1)
        return left == 1

    def put(source: Path, target: Path, **how: bool) -> None:
        if count("crash"):
            raise Crash
        put_file(source, target, **how)

    def fetch(
        addresses: tuple[str, ...],
        token: str,
        pem: str,
        root: str,
        files: list[CheckpointFile],
        stage: Path,
        pace: object,
    ) -> str:
        host = hosts[addresses[0].partition(":")[0]] if addresses else None
        if host is None or host.memory is None:
            return "nobody listens"
        for piece in files:
            if count("crash"):
                raise Crash
            source = Path(root) / piece.name
            if count("break") or not disk.matches_record(Path(root), piece):
                return "the connection has ended"
            if piece.sha256 not in ("", disk.sha256(source)):
                return "differs"
            (stage / piece.name).parent.mkdir(parents=True, exist_ok=True)
            disk.copy_file(source, stage / piece.name)
        return ""

    def rooms(folder: Path) -> list[int]:
        is_low = any(host.is_low and folder.is_relative_to(host.shm) for host in hosts.values())
        return [0 if is_low else ROOM, ROOM]

    class Server:
        def __init__(self, *_: object) -> None:
            self.server_address = "", 1

    with patch.context() as here:
        here.setattr(os, "fsync", lambda _: None)
        here.setattr(disk, "put_file", put)
        here.setattr(peer_files, "fetch", fetch)
        here.setattr(peer_files, "PeerServer", Server)
        here.setattr(interfaces, "list_addresses", list)
        here.setattr(checkpoint_memory, "find_rooms", rooms)
        yield


def stat_of(root: Path, name: str) -> CheckpointFile | None:
    """Return the record of a file as it is, None if there is none."""
    try:
        about = (root / name).stat()
    except OSError:
        return None
    return CheckpointFile(name, about.st_size, about.st_mtime_ns)
