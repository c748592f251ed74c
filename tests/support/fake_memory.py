"""A node's folder for checkpoints in memory, without copies: numbered files of the disk are links in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.core.checkpoints import disk, tree
from orchestrator.core.checkpoints.checkpoint import Checkpoint, FileLocation
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import orders, reports


@dataclass
class FakeMemory:
    """What an agent uses of `CheckpointMemory`, and what it was asked."""

    folder: Path
    on_disk: Path
    report: Callable[[reports.ReliableReport], None] = lambda _: None
    addresses: tuple[str, ...] = ("10.0.0.1:4000",)
    is_empty: bool = True
    fault: str = ""
    full: str = ""
    between_scans: Any = None
    is_drained: bool = False
    # The folder of the next attempt, and why it is not in memory
    next_folder: tuple[Path, str] | None = None
    asked: list[object] = field(default_factory=list)

    def drop_links(self) -> None: ...

    def open(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        self.asked.append(("open", checkpoint))
        self.is_empty = False
        if self.next_folder is not None:
            self.folder, self.fault = self.next_folder
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in tree.scan(self.on_disk).files:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(self.on_disk / name)
        if checkpoint is None or not all(disk.matches_record(self.folder, piece) for piece in checkpoint.files):
            return checkpoint
        return replace(checkpoint, locations=(FileLocation("", str(self.folder)),))

    def copy(self, order: orders.CopyCheckpoint) -> None:
        self.asked.append(order)

    def poll(self) -> None:
        self.asked.append("poll")

    def discard(self, checkpoint: Checkpoint) -> None:
        self.asked.append(("discard", checkpoint))

    def full_text(self) -> str:
        return self.full

    def drain(self) -> bool:
        self.asked.append("drain")
        return self.is_drained

    def close(self) -> None:
        self.asked.append("close")


def fake_memory(folder: Path) -> FakeMemory:
    """Return the memory of the job with this folder."""
    base = folder.with_name(f"{folder.name}-memory")
    (base / "checkpoints").mkdir(parents=True, exist_ok=True)
    JobDir(folder).checkpoints.mkdir(parents=True, exist_ok=True)
    return FakeMemory(base / "checkpoints", JobDir(folder).checkpoints)
