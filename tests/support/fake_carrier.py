"""A job folder at home, hosts that write checkpoints, and a carrier that copies when it is told to."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.backends.api import Copied, Copy, Direction
from orchestrator.brain.model import events as e
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m
from orchestrator.supervisor.transfers.checkpoint_fetch import CheckpointFetch

GANG = ("n0", "n1", "n2")
ALONE = ("n0",)
Files: TypeAlias = dict[str, bytes]


@dataclass
class World:
    """A job folder at home, hosts with files, and a carrier that copies when it is told to."""

    job: JobDir
    keep: int | None = None
    resume: str = ""
    files: dict[str, Files] = field(default_factory=lambda: {node: {} for node in GANG})
    news: list[e.Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    copies: dict[str, Copy] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    carry: CheckpointFetch = field(init=False)
    clock_ns: int = 1_700_000_000_123_456_789

    def __post_init__(self) -> None:
        self.job.checkpoints.mkdir(parents=True, exist_ok=True)
        self.revive()

    def revive(self) -> None:
        """A new supervisor takes over: copies of the old one are no more."""
        self.copies.clear()
        self.carry = CheckpointFetch(self.job, self, self.keep, lambda: self.resume, lambda deed: deed())

    def copy(self, copy: Copy) -> None:
        """Begin a copy, as a carrier does."""
        assert copy.key not in self.copies
        self.copies[copy.key] = copy

    def drop(self, key: str) -> None:
        """Give up a copy."""
        del self.copies[key]
        self.dropped.append(key)

    def copied(self) -> list[Copied]:
        return []

    def progress(self) -> dict[str, int]:
        return {}

    def take(self) -> tuple[e.Event, ...]:
        """Return what the brain is to learn since the last call."""
        news, self.carry.news = self.carry.news, []
        self.news += news
        self.notes += self.carry.notes
        self.carry.notes = []
        return tuple(news)

    def write(self, node: str, files: Files) -> tuple[m.ManifestEntry, ...]:
        """Let a host write files; return them as its agent would report them."""
        self.clock_ns += 1
        self.files[node].update(files)
        return tuple(
            m.ManifestEntry(name, len(data), self.clock_ns, hashlib.sha256(data).hexdigest())
            for name, data in files.items()
        )

    def found(
        self,
        node: str,
        name: str,
        count: int,
        pieces: tuple[m.ManifestEntry, ...],
        attempt: int = 1,
        placed: tuple[str, ...] = GANG,
    ) -> tuple[e.Event, ...]:
        report = m.ManifestReported(attempt, name, count, pieces)
        self.carry.found(1.0, node, f"/far/{node}", report, placed)
        return self.take()

    def save(
        self, node: str, name: str, count: int, data: bytes, attempt: int = 1, placed: tuple[str, ...] = GANG
    ) -> tuple[e.Event, ...]:
        """A host writes a checkpoint of one file and reports it."""
        return self.found(node, name, count, self.write(node, {name: data}), attempt, placed)

    def save_in(
        self, node: str, name: str, count: int, data: bytes, attempt: int = 1, placed: tuple[str, ...] = GANG
    ) -> tuple[e.Event, ...]:
        """A host writes its file of a checkpoint that is a folder, and reports it."""
        return self.found(node, name, count, self.write(node, {f"{name}/{node}.pt": data}), attempt, placed)

    def scanned(self, node: str, count: int, attempt: int = 1) -> tuple[e.Event, ...]:
        self.carry.scanned(1.0, node, attempt, count)
        return self.take()

    def stopped(self, node: str, attempt: int = 1) -> tuple[e.Event, ...]:
        self.carry.stopped(1.0, node, attempt)
        return self.take()

    def tell_all(self, *nodes: str, count: int = 10**9, attempt: int = 1) -> None:
        """All nodes, or these, have told of what was complete at that many steps."""
        for node in nodes or GANG:
            self.scanned(node, count, attempt)

    def arrive(self, which: str, error: str = "") -> tuple[e.Event, ...]:
        """End a copy, named by its key or its host, as a carrier would: what is not as it was reported does not come."""
        copy = self.copies.pop(next(key for key, one in self.copies.items() if which in (key, one.node)))
        if copy.direction is Direction.FETCH:
            assert copy.remote_dir == f"/far/{copy.node}/checkpoints"
            for piece in copy.expected:
                data = self.files[copy.node].get(piece.name)
                if data is None or hashlib.sha256(data).hexdigest() != piece.sha256:
                    error = error or f"{piece.name} was written again"
                    continue
                path = copy.local_dir / piece.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                os.utime(path, ns=(piece.mtime_ns, piece.mtime_ns))
        self.carry.copied(1.0, Copied(copy, error))
        return self.take()

    def arrive_all(self) -> None:
        while self.copies:
            self.arrive(next(iter(self.copies)))

    def home(self, name: str) -> Files:
        """What is at home under a name."""
        path = self.job.checkpoints / name
        if not path.is_dir():
            return {name: path.read_bytes()} if path.exists() else {}
        return {
            str(one.relative_to(self.job.checkpoints)): one.read_bytes()
            for one in path.rglob("*")
            if one.is_file()
        }

    def kinds(self) -> list[str]:
        return [type(event).__name__.removeprefix("Checkpoint") for event in self.news]

    def waits(self) -> tuple[str, ...]:
        """Return the paths of which the brain waits for an end."""
        waits: dict[str, None] = {}
        for event in self.news:
            if isinstance(event, e.CheckpointFetchStarted):
                assert event.path not in waits
                waits[event.path] = None
            elif isinstance(event, (e.CheckpointFound, e.CheckpointInvalidated)):
                waits.pop(event.path, None)
        return tuple(waits)

    def path(self, name: str) -> str:
        return str(self.job.checkpoints / name)
