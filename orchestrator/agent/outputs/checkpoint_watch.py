"""Which checkpoints are complete? The simplest honest rule, applied to whatever matches the job's glob.

An entry (a file or a folder) counts as complete when it is not being written any more, no file in it is torn and no
piece of it is missing. That it is not being written is known when every rank here has made an optimizer step after its
last byte (so the call that saved it has returned, whoever made it), or when all ranks ended with code 0. What neither
is known of when the ranks are gone must prove itself by its format. A script without steps has only the clock: its
entry must have stood unchanged for `SETTLE_S`.

Temporary names never count, nor does a link to another entry. Under the default glob `*` one series counts, see
`series`, so that a metrics file or the weights at the end are never resumed from.
"""

from __future__ import annotations

import glob
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.outputs import checkpoint_series
from orchestrator.agent.outputs.checkpoint_formats import (
    Shape,
    Wholeness,
    inspect_shape,
    is_half_rewritten,
    is_temporary,
    proves_itself,
    wholeness,
)

SETTLE_S = 2.0
ENTRIES_MAX = 10_000
"""Entries looked at in one scan."""

DEPTH_MAX = 4
"""How deep checkpoints are looked for by default: `lightning_logs/version_0/checkpoints/epoch=0-step=10.ckpt`."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A complete checkpoint and the time of its last byte."""

    path: Path
    mtime_ns: int


Stamp = tuple[int, int, int]
"""What tells that a checkpoint was not written again: time of its last byte, size, number of files."""


@dataclass(slots=True)
class CheckpointWatch:
    """Looks again and again at one folder; every checkpoint is reported once, and once more when rewritten.

    `in_parts`: hosts that share no disk have the other pieces of a folder, so that here some may be missing.
    `whole`: all that was reported, by its path, of earlier attempts and agents too.
    """

    folder: Path
    pattern: str
    in_parts: bool = False
    reported: dict[Path, Shape] = field(default_factory=dict)
    seen: dict[Path, Shape] = field(default_factory=dict)
    whole: dict[str, Stamp] = field(default_factory=dict)

    def begin(self) -> None:
        """Take what is there now as known: it belongs to attempts before."""
        self.reported = self._entries()
        self.seen = dict(self.reported)

    def listed(self) -> dict[Path, Shape]:
        """Return what counts of what is there now, complete or not."""
        return self._counted(self._entries())

    def scan(self, stepped_ns: int, now_ns: int) -> list[FoundCheckpoint]:
        """Return what became complete, oldest first.

        `stepped_ns`: when every rank that makes steps had made one, 0 if there was none; wall clock of this node.
        """
        found: list[FoundCheckpoint] = []
        for path, shape in self.listed().items():
            still = self.seen.get(path) == shape
            self.seen[path] = shape
            if not still or self.reported.get(path) == shape:
                continue
            settled = shape.mtime_ns < stepped_ns or (
                not stepped_ns and shape.mtime_ns + SETTLE_S * 1e9 < now_ns
            )
            if settled and self._may_be_whole(path, shape):
                found.append(self._found(path, shape))
        return sorted(found, key=lambda one: one.mtime_ns)

    def last_scan(self, stepped_ns: int, all_ended_well: bool) -> tuple[list[FoundCheckpoint], list[Path]]:
        """Return what is complete now that all ranks are gone, and what was reported before but is spoiled."""
        found: list[FoundCheckpoint] = []
        entries = self._entries()
        counted = self._counted(entries)
        spoiled = [path for path in self.reported if path not in entries]
        for path, shape in entries.items():
            before = self.reported.get(path)
            if before == shape:
                continue
            proven = shape.mtime_ns < stepped_ns or all_ended_well or proves_itself(path, shape)
            if path in counted and proven and self._may_be_whole(path, shape):
                found.append(self._found(path, shape))
            elif before is not None:
                spoiled.append(path)
        for path in spoiled:
            self.whole.pop(str(path), None)
        return sorted(found, key=lambda one: one.mtime_ns), spoiled

    def doubtful(self) -> list[FoundCheckpoint]:
        """Return the folders that were written to and are not known to be whole, after the last scan."""
        return [
            FoundCheckpoint(path, shape.mtime_ns)
            for path, shape in self.listed().items()
            if self.reported.get(path) != shape and path.is_dir()
        ]

    def torn(self) -> list[Path]:
        """Return the entries that were cut off while they were written, now that no rank is there: by their formats,
        or since they were known to be whole and have changed."""
        entries, cut_off = self._entries(), (Wholeness.TORN, Wholeness.UNFINISHED)
        changed = [
            path
            for path, shape in entries.items()
            if self.whole.get(str(path), _stamp(shape)) != _stamp(shape)
        ]
        return [
            path
            for path, shape in entries.items()
            if wholeness(path, shape) in cut_off or (path in changed and not proves_itself(path, shape))
        ]

    def prune(self, keep: int, has_step_between: Callable[[int, int], bool]) -> list[Path]:
        """Delete all but the newest `keep` of each series that counts; return what was deleted.

        Only what was found to be whole is deleted, or kept instead of it, and only what lies in the job's own checkpoint
        folder. What a link beside it leads to stays.
        """
        own = self.folder.resolve()
        shapes = {
            path: shape
            for path, shape in self.listed().items()
            if path.resolve().is_relative_to(own) and self.whole.get(str(path)) == _stamp(shape)
        }
        beside = {one for path in shapes for one in path.parent.iterdir()}
        linked = [path.resolve() for path in beside if path.is_symlink()]
        gone = [
            one.path
            for one in checkpoint_series.old(checkpoint_series.members_of(shapes), keep, has_step_between)
        ]
        gone = [path for path in gone if not any(link.is_relative_to(path.resolve()) for link in linked)]
        for path in gone:
            _delete(path)
            self.reported.pop(path, None)
            self.seen.pop(path, None)
            self.whole.pop(str(path), None)
        return gone

    def _found(self, path: Path, shape: Shape) -> FoundCheckpoint:
        self.reported[path] = shape
        self.whole[str(path)] = _stamp(shape)
        return FoundCheckpoint(path, shape.mtime_ns)

    def _may_be_whole(self, path: Path, shape: Shape) -> bool:
        """Tell whether nothing speaks against an entry that is not written any more."""
        known = wholeness(path, shape)
        if known is Wholeness.TORN or is_half_rewritten(self.reported.get(path), shape):
            return False
        return self.in_parts or known is not Wholeness.UNFINISHED

    def _counted(self, entries: dict[Path, Shape]) -> dict[Path, Shape]:
        if self.pattern != "*":
            return entries
        chosen = checkpoint_series.counted(entries)
        return {path: shape for path, shape in entries.items() if path in chosen}

    def _entries(self) -> dict[Path, Shape]:
        """Return the non-empty entries that match, with their shapes."""
        full = str(Path(glob.escape(str(self.folder))) / self.pattern)  # an absolute pattern stays as it is
        entries: dict[Path, Shape] = {}
        for _ in range(DEPTH_MAX):
            shapes = {path: inspect_shape(path) for path in _matching(full)}
            for path, shape in shapes.items():
                if shape.size_bytes and (self.pattern != "*" or checkpoint_series.is_plausible(path, shape)):
                    entries[path] = shape
            if entries or not any(
                checkpoint_series.holds_checkpoints(path, shape) for path, shape in shapes.items()
            ):
                break
            full += "/*"
        links = [path for path in entries if path.is_symlink()]
        targets = {path.resolve() for path in entries if path not in links} if links else set()
        return {
            path: shape
            for path, shape in entries.items()
            if path not in links or path.resolve() not in targets
        }


def _matching(pattern: str) -> list[Path]:
    paths = map(Path, sorted(glob.glob(pattern))[:ENTRIES_MAX])  # noqa: PTH207 -- Path.glob takes no absolute pattern
    return [path for path in paths if not path.name.startswith(".") and not is_temporary(path.name)]


def _stamp(shape: Shape) -> Stamp:
    return shape.mtime_ns, shape.size_bytes, len(shape.files)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
