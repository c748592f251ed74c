"""A copier that copies real files when it is told to: what is not as it was expected does not come."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.backends.api import Copy, CopyResult, Direction
from orchestrator.core.checkpoints import disk


@dataclass(slots=True)
class FakeCopier:
    """Remembers copies by key until `arrive` ends them. A host's folders are folders of this machine."""

    begun: dict[str, Copy] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    _ended: list[CopyResult] = field(default_factory=list)

    def copy(self, copy: Copy) -> None:
        assert copy.key not in self.begun, "a key names one copy"
        self.begun[copy.key] = copy

    def drop(self, key: str) -> None:
        self.begun.pop(key, None)
        self._ended = [done for done in self._ended if done.copy.key != key]
        self.dropped.append(key)

    def copied(self) -> list[CopyResult]:
        ended, self._ended = self._ended, []
        return ended

    def progress(self) -> dict[str, int]:
        return dict.fromkeys(self.begun, 1)

    def of(self, which: str) -> Copy:
        """Return the first copy under way with this key, or of this host."""
        return next(copy for copy in self.begun.values() if which in (copy.key, copy.node))

    def arrive(self, which: str, error: str = "") -> None:
        """End a copy, named by its key or its host."""
        copy = self.begun.pop(self.of(which).key)
        self._ended.append(CopyResult(copy, error or self._move(copy)))

    def arrive_all(self) -> None:
        """End all copies that are under way."""
        for key in list(self.begun):
            self.arrive(key)

    def _move(self, copy: Copy) -> str:
        there = Path(copy.remote_dir)
        source, target = (there, copy.local_dir) if copy.direction is Direction.FETCH else (copy.local_dir, there)
        for piece in copy.expected:
            if not disk.matches_record(source, piece):
                return f"{piece.name} was written again on {copy.node} before it was copied"
            (target / piece.name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / piece.name, target / piece.name)
        return ""
