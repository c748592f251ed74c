"""Checkpoint watch: finds the entries that match the job's glob and are complete checkpoints.

An entry (a file or a folder) is complete when its writing is over, no file in it is torn and no piece of it is missing.
Its writing is over when every rank here has made an optimizer step after its last byte (so the call that saved it has
returned, in any rank), or when all ranks ended with code 0. When the ranks are gone and neither holds, its format must
prove that it is whole. A script without steps has only the clock: its entry must not have changed for `SETTLE_S`.

Temporary names never count, nor does a link to another entry. Under the default glob `*` one series counts, see
`checkpoint_series`, so that a job never resumes from a metrics file or from final weights.
"""

from __future__ import annotations

import contextlib
import glob
import os
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
    is_unreadable,
    proves_itself,
    wholeness,
)

SETTLE_S = 2.0
ENTRIES_MAX = 10_000
"""Entries read in one scan."""

DEPTH_MAX = 4
"""How deep the default glob searches: `lightning_logs/version_0/checkpoints/epoch=0-step=10.ckpt`."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A complete checkpoint and the time of its last byte."""

    path: Path
    mtime_ns: int


Stamp = tuple[int, int, int]
"""Identity of a checkpoint that was not rewritten: time of its last byte (ns), size in bytes, number of files."""


@dataclass(slots=True)
class CheckpointWatch:
    """Watch over one folder; every checkpoint is reported once, and once more when rewritten."""

    folder: Path
    pattern: str
    # Hosts that share no disk have other pieces of the same folder: here some may be missing.
    in_parts: bool = False
    reported: dict[Path, Shape] = field(default_factory=dict)
    # All entries of the last scan.
    seen: dict[Path, Shape] = field(default_factory=dict)
    # All that was ever reported, by path, also by earlier attempts and agents.
    whole: dict[str, Stamp] = field(default_factory=dict)

    def begin(self) -> None:
        """Ignore the entries present now: they belong to earlier attempts."""
        self.reported = self._entries()
        self.seen = dict(self.reported)

    def listed(self) -> dict[Path, Shape]:
        """Return the entries that count now, complete or not."""
        return self._counted(self._entries())

    def scan(self, stepped_ns: int, now_ns: int) -> list[FoundCheckpoint]:
        """Return the checkpoints that became complete, oldest first.

        `stepped_ns`: when every rank that makes steps had made one, 0 if there was none; wall clock of this node.
        """
        complete: list[FoundCheckpoint] = []
        for path, shape in self.listed().items():
            is_unchanged = self.seen.get(path) == shape
            self.seen[path] = shape
            if not is_unchanged or self.reported.get(path) == shape:
                continue
            settled = shape.mtime_ns < stepped_ns or (
                not stepped_ns and shape.mtime_ns + SETTLE_S * 1e9 < now_ns
            )
            if settled and self._may_be_whole(path, shape):
                complete.append(self._mark_reported(path, shape))
        return sorted(complete, key=_mtime_ns)

    def last_scan(self, stepped_ns: int, all_ended_well: bool) -> tuple[list[FoundCheckpoint], list[Path]]:
        """Return the checkpoints that are complete after the end of all ranks, and reported ones that are spoiled."""
        complete: list[FoundCheckpoint] = []
        entries = self._entries()
        counted = self._counted(entries)
        spoiled = [path for path in self.reported if path not in entries and not is_unreadable(path)]
        for path, shape in entries.items():
            before = self.reported.get(path)
            if before == shape:
                continue
            proven = shape.mtime_ns < stepped_ns or all_ended_well or proves_itself(path, shape)
            if path in counted and proven and self._may_be_whole(path, shape):
                complete.append(self._mark_reported(path, shape))
            elif before is not None and not is_unreadable(path):
                spoiled.append(path)
        for path in spoiled:
            self.whole.pop(str(path), None)
        return sorted(complete, key=_mtime_ns), spoiled

    def doubtful(self) -> list[FoundCheckpoint]:
        """Return the folders that were written and are not known to be whole, after the last scan."""
        return [
            FoundCheckpoint(path, shape.mtime_ns)
            for path, shape in self.listed().items()
            if self.reported.get(path) != shape and path.is_dir()
        ]

    def torn(self) -> list[Path]:
        """Return the entries that were cut off in writing, when no rank runs: by their formats, or because they were whole
        and have changed."""
        entries, cut_off = self._entries(), (Wholeness.TORN, Wholeness.UNFINISHED)
        changed = [
            path
            for path, shape in entries.items()
            if self.whole.get(str(path), _stamp(shape)) != _stamp(shape) and not is_unreadable(path)
        ]
        return [
            path
            for path, shape in entries.items()
            if wholeness(path, shape) in cut_off or (path in changed and not proves_itself(path, shape))
        ]

    def prune(self, keep: int, has_step_between: Callable[[int, int], bool]) -> list[Path]:
        """Delete all but the newest `keep` of each series that counts; return the deleted paths.

        Only checkpoints known to be whole are deleted, or count as kept, and only those in the job's own checkpoint
        folder. The target of a link in the same folder stays.
        """
        own = _real(self.folder)
        shapes = {
            path: shape
            for path, shape in self.listed().items()
            if _real(path).is_relative_to(own) and self.whole.get(str(path)) == _stamp(shape)
        }
        siblings = {sibling for path in shapes for sibling in path.parent.iterdir()}
        targets = [_real(path) for path in siblings if path.is_symlink()]
        members = checkpoint_series.members_of(shapes)
        old = [member.path for member in checkpoint_series.old(members, keep, has_step_between)]
        free = [path for path in old if not any(to.is_relative_to(_real(path)) for to in targets)]
        deleted = [path for path in free if _delete(path)]
        for path in deleted:
            self.reported.pop(path, None)
            self.seen.pop(path, None)
            self.whole.pop(str(path), None)
        return deleted

    def _mark_reported(self, path: Path, shape: Shape) -> FoundCheckpoint:
        self.reported[path] = shape
        self.whole[str(path)] = _stamp(shape)
        return FoundCheckpoint(path, shape.mtime_ns)

    def _may_be_whole(self, path: Path, shape: Shape) -> bool:
        """Tell whether a finished entry shows no fault."""
        proof = wholeness(path, shape)
        if proof is Wholeness.TORN or is_half_rewritten(self.reported.get(path), shape):
            return False
        return self.in_parts or proof is not Wholeness.UNFINISHED

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
        targets = {_real(path) for path in entries if path not in links} if links else set()
        doubles = {path for path in links if _real(path) in targets}
        return {path: shape for path, shape in entries.items() if path not in doubles}


def _matching(pattern: str) -> list[Path]:
    paths = map(Path, sorted(glob.glob(pattern))[:ENTRIES_MAX])  # noqa: PTH207 -- Path.glob takes no absolute pattern
    return [path for path in paths if not path.name.startswith(".") and not is_temporary(path.name)]


def _mtime_ns(checkpoint: FoundCheckpoint) -> int:
    return checkpoint.mtime_ns


def _stamp(shape: Shape) -> Stamp:
    return shape.mtime_ns, shape.size_bytes, len(shape.files)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # `Path.resolve` refuses links in a circle


def _delete(path: Path) -> bool:
    """Delete an entry; tell whether it is gone. It is renamed first where it can be: what cannot be deleted of it must not
    look like a checkpoint."""
    hidden = path.with_name(f".{path.name}.deleted")
    try:
        path.rename(hidden)
    except OSError:
        hidden = path
    if hidden.is_dir() and not hidden.is_symlink():
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            hidden.unlink()
    return not os.path.lexists(path)
