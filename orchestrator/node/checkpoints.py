"""Which checkpoints are complete? The simplest honest rule, applied to whatever matches the job's glob.

An entry (a file or a folder) counts as complete when it is not being written any more, no file in it is torn and no
piece of it is missing. That it is not being written is known when every rank here has made an optimizer step after its
last byte (so the call that saved it has returned, whoever made it), or when all ranks ended with code 0. What neither
is known of when the ranks are gone must prove itself by its format. A script without steps has only the clock: its
entry must have stood unchanged for `SETTLE_S`.

Temporary names never count. Under the default glob `*` only what looks like a checkpoint counts, so that a metrics
file or a picture beside it is never resumed from.
"""

from __future__ import annotations

import glob
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.node.formats import (
    METADATA,
    SUFFIXES,
    Shape,
    Wholeness,
    is_half_rewritten,
    is_temporary,
    look,
    proves_itself,
    wholeness,
)

SETTLE_S = 2.0
ENTRIES_MAX = 10_000
"""Entries looked at in one scan."""


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint and the time of its last byte."""

    path: Path
    mtime_ns: int


@dataclass(slots=True)
class CheckpointWatch:
    """Looks again and again at one folder; every checkpoint is reported once, and once more when rewritten.

    `in_parts`: hosts that share no disk have the other pieces of a folder, so that here some may be missing.
    """

    folder: Path
    pattern: str
    in_parts: bool = False
    reported: dict[Path, Shape] = field(default_factory=dict)
    seen: dict[Path, Shape] = field(default_factory=dict)

    def begin(self) -> None:
        """Take what is there now as known: it belongs to attempts before."""
        self.reported = dict(self._entries())
        self.seen = dict(self.reported)

    def scan(self, stepped_ns: int, now_ns: int) -> list[Found]:
        """Return what became complete, oldest first.

        `stepped_ns`: when every rank that makes steps had made one, 0 if there was none; wall clock of this node.
        """
        found: list[Found] = []
        for path, shape in self._entries():
            still = self.seen.get(path) == shape
            self.seen[path] = shape
            if not still or self.reported.get(path) == shape:
                continue
            settled = shape.mtime_ns < stepped_ns or (
                not stepped_ns and shape.mtime_ns + SETTLE_S * 1e9 < now_ns
            )
            if settled and self._may_be_whole(path, shape):
                self.reported[path] = shape
                found.append(Found(path, shape.mtime_ns))
        return sorted(found, key=lambda one: one.mtime_ns)

    def last_scan(self, stepped_ns: int, all_ended_well: bool) -> tuple[list[Found], list[Path]]:
        """Return what is complete now that all ranks are gone, and what was reported before but is spoiled."""
        found: list[Found] = []
        spoiled: list[Path] = []
        present = dict(self._entries())
        for path, shape in present.items():
            if self.reported.get(path) == shape:
                continue
            proven = shape.mtime_ns < stepped_ns or all_ended_well
            proven = proven or (wholeness(path, shape) is Wholeness.WHOLE and proves_itself(path, shape))
            if proven and self._may_be_whole(path, shape):
                found.append(Found(path, shape.mtime_ns))
            elif path in self.reported:
                spoiled.append(path)
        spoiled += [path for path in self.reported if path not in present]
        return sorted(found, key=lambda one: one.mtime_ns), spoiled

    def doubtful(self, found: list[Found]) -> list[Found]:
        """Return the folders that were written to and are not known to be whole, now that all ranks are gone; `found`
        are those that the last scan has found."""
        known = {one.path for one in found}
        return [
            Found(path, shape.mtime_ns)
            for path, shape in self._entries()
            if self.reported.get(path) != shape and path not in known and path.is_dir()
        ]

    def torn(self) -> list[Path]:
        """Return the entries that were certainly cut off while they were written."""
        cut_off = (Wholeness.TORN, Wholeness.UNFINISHED)
        return [path for path, shape in self._entries() if wholeness(path, shape) in cut_off]

    def prune(self, keep: int) -> list[Path]:
        """Delete all but the newest `keep` of what this watch knows to be complete; return what was deleted.

        Only entries directly in the job's own checkpoint folder are ever deleted.
        """
        known = sorted(self.reported.items(), key=lambda item: item[1].mtime_ns)
        old = [path for path, shape in known if path.parent == self.folder and self.seen.get(path) == shape]
        gone = old[: max(0, len(old) - keep)]
        for path in gone:
            _delete(path)
            self.reported.pop(path, None)
            self.seen.pop(path, None)
        return gone

    def _may_be_whole(self, path: Path, shape: Shape) -> bool:
        """Tell whether nothing speaks against an entry that is not written any more."""
        known = wholeness(path, shape)
        if known is Wholeness.TORN or is_half_rewritten(self.reported.get(path), shape):
            return False
        return self.in_parts or known is not Wholeness.UNFINISHED

    def _entries(self) -> list[tuple[Path, Shape]]:
        """Return the non-empty entries that match, with their shapes."""
        full = str(Path(glob.escape(str(self.folder))) / self.pattern)  # an absolute pattern stays as it is
        entries: list[tuple[Path, Shape]] = []
        names = sorted(glob.glob(full))  # noqa: PTH207 -- Path.glob takes no absolute pattern
        for name in names[:ENTRIES_MAX]:
            path = Path(name)
            if path.name.startswith(".") or is_temporary(path.name):
                continue
            shape = look(path)
            if shape.size_bytes and (self.pattern != "*" or _plausible(path, shape)):
                entries.append((path, shape))
        return entries


def _plausible(path: Path, shape: Shape) -> bool:
    """Tell whether the entry looks like a checkpoint: some file of it has a name of the trade."""
    names = [path.name] if path.is_file() else [Path(name).name for name, _, _ in shape.files]
    return any(name == METADATA or Path(name).suffix in SUFFIXES for name in names)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
