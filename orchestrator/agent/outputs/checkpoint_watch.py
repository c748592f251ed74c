"""Checkpoint watch of a folder during an attempt: which groups of files ranks have written, and when they are complete.

- Files that exist when the attempt begins, and do not change, belong to earlier attempts.
- A group is reported when it has not changed since a scan, and every rank of this node has made an optimizer step since that
  scan ended, or since its files were opened, where hooks have seen all of them opened.
- For a script without steps only the clock of this process counts: nothing may have been written for `SILENT_S`.
- A name that is overwritten repeatedly may never settle. If its format shows that it is complete, it is reported.
- What was written before the first step (a vocabulary, a config) is not a checkpoint, unless the script makes no steps at all:
  that is known when it writes a second checkpoint of the series, or ends.
- When the ranks have ended, everything new is reported, with the reason why it counts as complete, if there is one.
- File times only show whether a file has changed: a file server has another clock.
- The keys of groups begin with the watch's `prefix`, which distinguishes equal names in several folders.
- Of checkpoints that are complete at once, the newest of those with like names count: the others are reported as left out.

Not thread-safe: one thread scans.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from orchestrator.agent.outputs.written_folders import WrittenFolders
from orchestrator.core import codec
from orchestrator.core.checkpoints import disk, file_groups, tree, validation
from orchestrator.core.checkpoints.checkpoint import CheckpointFile, CompletionReason, GroupReading

SILENT_S = 2.0
REWRITTEN_S, REWRITTEN_BYTES_PER_S = 5.0, 50e6
"""A file that is overwritten before the ranks' next step is reported by its format alone: at most this often, and at most this
many bytes in a second, since each is copied."""

UNFINISHED_S_MAX = 60.0
"""A group that does not settle, and has not changed for this time, is not waited for."""

ALIKE_DONE_MAX = 100
DONE_MAX = 1_000
"""How many checkpoints whose names differ only in numbers, and how many in all, one scan reports."""

FileStamp = tuple[int, int]
StepsByRank: TypeAlias = Mapping[int, int]
"""By rank of this node: how many steps it has made."""


@dataclass(frozen=True, slots=True)
class ScanContext:
    """Time and circumstances of a scan: the monotonic clock, and what the ranks here have done. `steps`: returns their steps, from
    any thread."""

    now_s: float
    steps: Callable[[], StepsByRank]
    ended: bool = False
    ended_well: bool = False


@dataclass(frozen=True, slots=True)
class SeenGroup:
    """A group as it has been since a scan. `order`: of that scan; `steps`: those of the ranks when it ended; `is_early`: whether it
    was written before the first step, None where that was made between that scan and the previous one."""

    pieces: tuple[CheckpointFile, ...]
    since_s: float
    order: int
    steps: dict[int, int]
    is_early: bool | None


@dataclass(frozen=True, slots=True)
class GroupChange:
    """A group that was written in this attempt. `stale`: its files that are still those of the previous checkpoint; `steps`: those that
    the rank which wrote it had made, as its hook notes, or at the end of the scan that saw it first."""

    group: file_groups.FileGroup
    pieces: tuple[CheckpointFile, ...]
    reading: GroupReading
    closed_by: CompletionReason
    stale: tuple[str, ...]
    steps: int
    # As the hook notes; -1: not known
    noted_step: int = -1


@dataclass(frozen=True, slots=True)
class _FinishedGroup:
    """A group that is to be reported."""

    group: file_groups.FileGroup
    seen: SeenGroup
    closed_by: CompletionReason
    # At which it was written, as hooks note; -1: not known
    step: int = -1

    @property
    def pieces(self) -> tuple[CheckpointFile, ...]:
        return self.seen.pieces

    @property
    def order(self) -> tuple[int, int, list[int], str]:
        """Its place among others, those that were written first at the front."""
        numbers = [int(digits) for digits in re.findall(r"[0-9]{1,15}", self.group.main)]
        return self.seen.order, self.step, numbers, self.group.main


@dataclass(slots=True)
class CheckpointWatch:
    """The files of one folder as they were last seen. `folders`: how it is scanned if it holds much else; else files count
    that fit `glob`. `excluded_glob`: the glob of files that another watch has. `disk_folder`: of a folder in memory, the one on disk to
    which links replace its older files."""

    root: Path
    glob: str
    prefix: str = ""
    folders: WrittenFolders | None = None
    excluded_glob: str = ""
    disk_folder: Path | None = None
    attempt: int = 0
    baseline: dict[str, FileStamp] = field(default_factory=dict)
    reported: dict[str, tuple[CheckpointFile, ...]] = field(default_factory=dict)
    # Of names that are overwritten: their files when they were last reported without a fault
    last_complete: dict[str, dict[str, FileStamp]] = field(default_factory=dict)
    # Of the last scan: groups by key, and what it could not see
    seen: dict[str, SeenGroup] = field(default_factory=dict)
    incomplete_reason: str = ""
    is_unfinished: bool = False
    # Groups of a script that makes no steps, by series
    stepless_groups: dict[str, set[tuple[CheckpointFile, ...]]] = field(default_factory=dict)
    scans: int = 0
    # A group has changed in the last scan, which another agent would have to know; a step had been made when it ended
    has_changed: bool = False
    _stepped: bool = False
    # Of names that are overwritten and do not settle: when their format is read next
    _due_s: dict[str, float] = field(default_factory=dict)

    def begin(self, attempt: int) -> None:
        """Begin an attempt: files that exist now belong to earlier ones."""
        listing = self.folders.begin() if self.folders is not None else self._scan_files()
        self.attempt = attempt
        self.baseline = {name: _file_stamp(piece) for name, piece in listing.files.items()}
        self.reported, self.last_complete, self.seen, self.stepless_groups = {}, {}, {}, {}
        self.is_unfinished = self._stepped = False
        self._due_s = {}

    def scan(self, moment: ScanContext, written: Mapping[str, int] | None = None) -> list[GroupChange]:
        """Return the groups that seem to be complete, those that were written first at the front. `written`: the files
        that hooks have seen ranks write, and at which step."""
        written, steps_before = written or {}, moment.steps()
        listing = self._list_files(written)
        steps_after = dict(moment.steps())
        self.incomplete_reason = listing.cut or ", ".join(listing.unreadable)
        self.scans += 1
        done, unfinished, self.has_changed = list[_FinishedGroup](), False, False
        for key, group in file_groups.group_files(listing.files).items():
            pieces = tuple(listing.files[name] for name in sorted(group.names))
            if all(self.baseline.get(piece.name) == _file_stamp(piece) for piece in pieces):
                continue
            if not any(map(file_groups.is_checkpoint_file, group.names)) and self.glob == "*":
                continue
            seen = self.seen.get(key)
            is_still = seen is not None and seen.pieces == pieces
            if seen is None or not is_still:
                is_early = None if any(steps_after.values()) and not self._stepped else not any(steps_after.values())
                seen = self.seen[key] = SeenGroup(pieces, moment.now_s, self.scans, steps_after, is_early)
                self.has_changed = True
            if self.reported.get(key) == pieces:
                continue
            step = max((written[piece.name] for piece in pieces if piece.name in written), default=-1)
            is_noted = all(name in written for name in filter(file_groups.is_checkpoint_file, group.names))
            since = step if is_noted else -1
            closed_by = (
                self._find_completion(group, seen, step, since, steps_before, moment)
                if is_still or moment.ended
                else None
            )
            if group.is_overwritten and self._is_rewritten(group, seen, listing, closed_by, moment):
                closed_by = CompletionReason.FINAL_FILE
            if closed_by is None or (closed_by is CompletionReason.NONE and not moment.ended):
                is_fresh = moment.now_s - seen.since_s < UNFINISHED_S_MAX
                unfinished = unfinished or not is_still or (closed_by is not None and is_fresh)
                continue
            done.append(_FinishedGroup(group, seen, closed_by, step))
            self.reported[key] = pieces
        self.is_unfinished, self._stepped = unfinished, any(steps_after.values())
        counted = _select_newest(done)
        if left_out := len(done) - len(counted):
            self.incomplete_reason = (
                f"{left_out:,} of {len(done):,} checkpoints written at once are left out, the oldest"
            )
        return [self._make_change(one, listing) for one in counted]

    def _is_rewritten(
        self,
        group: file_groups.FileGroup,
        seen: SeenGroup,
        listing: tree.Tree,
        closed_by: CompletionReason | None,
        moment: ScanContext,
    ) -> bool:
        """Return whether a name that is overwritten and does not settle is to be reported now, since its format shows that it is
        complete."""
        if moment.ended or closed_by not in (None, CompletionReason.NONE) or seen.is_early is not False:
            self._due_s.pop(group.key, None)
            return False
        if moment.now_s < self._due_s.setdefault(group.key, moment.now_s + REWRITTEN_S):
            return False
        state = validation.read_group(self.root, group, listing.files, listing.pointed)
        sizes = {piece.name: piece.size_bytes for piece in seen.pieces}
        rest_s = sum(sizes.values()) / REWRITTEN_BYTES_PER_S
        self._due_s[group.key] = moment.now_s + max(REWRITTEN_S, rest_s)
        return not validation.find_fault(state, sizes) and validation.is_format_complete(state, sizes, 1)

    def _list_files(self, written: Mapping[str, int]) -> tree.Tree:
        """Return the files that exist; those that become visible only now are old, unless a rank has written them."""
        if self.folders is None:
            return self._scan_files()
        listing, appeared = self.folders.scan(written)
        if self.excluded_glob:
            listing.files = {
                name: one for name, one in listing.files.items() if not tree.matches_glob(name, self.excluded_glob)
            }
        self.baseline |= {name: _file_stamp(listing.files[name]) for name in appeared if name in listing.files}
        return listing

    def _scan_files(self) -> tree.Tree:
        """Return the files that match the glob. A reported file is the same behind a link to a disk that keeps only whole seconds."""
        listing = tree.scan(self.root, self.glob, self.disk_folder)
        pieces = itertools.chain.from_iterable(self.reported.values()) if self.disk_folder is not None else ()
        for old in pieces:
            now = listing.files.get(old.name)
            if now and now.size_bytes == old.size_bytes and disk.is_same_time(now.mtime_ns, old.mtime_ns):
                listing.files[old.name] = old
        return listing

    def _make_change(self, finished: _FinishedGroup, listing: tree.Tree) -> GroupChange:
        group, pieces = finished.group, finished.pieces
        state = validation.read_group(self.root, group, listing.files, listing.pointed)
        stale = tuple(self._find_stale_files(group.key, pieces))
        sizes = {piece.name: piece.size_bytes for piece in pieces}
        if (
            group.is_overwritten
            and not validation.find_fault(state, sizes)
            and not validation.find_stale_metadata(state, stale)
        ):
            self.last_complete[group.key] = {piece.name: _file_stamp(piece) for piece in pieces}
        steps = finished.step if finished.step >= 0 else max(finished.seen.steps.values(), default=0)
        return GroupChange(group, pieces, state, finished.closed_by, stale, steps, finished.step)

    def _find_completion(
        self,
        group: file_groups.FileGroup,
        seen: SeenGroup,
        step: int,
        since: int,
        steps_before: StepsByRank,
        moment: ScanContext,
    ) -> CompletionReason | None:
        """Return why nothing more is written to a group, `NONE` if that is not known; None for a group that does not count.
        `step`: at which a file of it was opened, `since`: the last of them, -1: not known; `steps_before`: the steps when this scan began;
        ranks that make none do not count."""
        stepping = {rank: count for rank, count in steps_before.items() if count}
        is_early = seen.is_early if seen.is_early is not None else step == 0
        if stepping and is_early:
            return None
        if stepping and all(
            count > (since if since >= 0 else seen.steps.get(rank, 0)) for rank, count in stepping.items()
        ):
            return CompletionReason.STEPS
        if moment.ended_well:
            return CompletionReason.END
        if stepping:
            return CompletionReason.NONE
        versions = self.stepless_groups.setdefault(group.series, set())
        versions.add(seen.pieces)
        is_silent = moment.now_s - seen.since_s >= SILENT_S
        if moment.ended or (is_silent and len(versions) > 1):
            return CompletionReason.NO_WRITES if is_silent else CompletionReason.NONE
        return None

    def _find_stale_files(self, key: str, pieces: tuple[CheckpointFile, ...]) -> Iterator[str]:
        """Yield the files of a group that are still those of an earlier attempt, or of the previous checkpoint under this name.

        A checkpoint that is written in the background may be reported in part: its files are not those of another checkpoint.
        """
        previous_stamps = self.last_complete.get(key, {})
        for piece in pieces:
            if previous_stamps.get(piece.name, self.baseline.get(piece.name)) == _file_stamp(piece):
                yield piece.name

    def dump(self) -> codec.Json:
        """Return what another agent needs to continue if this one dies, for JSON."""
        return {
            "root": str(self.root),
            "attempt": self.attempt,
            "seen": codec.pack(self.seen),
            "baseline": self.baseline,
            "reported": {key: codec.pack(pieces) for key, pieces in self.reported.items()},
            "before": self.last_complete,
            "folders": None if self.folders is None else self.folders.dump(),
        }

    def load(self, data: codec.Json) -> None:
        """Continue where another agent stopped. Raises CodecError, KeyError."""
        self.attempt = int(data["attempt"])
        self.seen = codec.unpack(dict[str, SeenGroup], data["seen"])
        self.baseline = codec.unpack(dict[str, tuple[int, int]], data["baseline"])
        self.reported = codec.unpack(dict[str, tuple[CheckpointFile, ...]], data["reported"])
        self.last_complete = codec.unpack(dict[str, dict[str, tuple[int, int]]], data["before"])
        if self.folders is not None:
            self.folders.load(data["folders"])


def _select_newest(done: list[_FinishedGroup]) -> list[_FinishedGroup]:
    """Return the newest of those with like names, as many as are reported, those that were written first at the front."""
    kept, counts = list[_FinishedGroup](), collections.Counter[str]()
    for one in sorted(done, key=lambda one: one.order, reverse=True):
        name = re.sub(r"\d+", "#", one.group.main)
        counts[name] += 1
        if counts[name] <= ALIKE_DONE_MAX and len(kept) < DONE_MAX:
            kept.append(one)
    return kept[::-1]


def _file_stamp(piece: CheckpointFile) -> FileStamp:
    return piece.size_bytes, piece.mtime_ns
