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
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from orchestrator.agent.outputs.written_folders import WrittenFolders
from orchestrator.core import codec
from orchestrator.core.checkpoints import names, reading, tree
from orchestrator.core.checkpoints.save import Closing, GroupReading, Piece

SILENT_S = 2.0
REWRITTEN_S, REWRITTEN_BYTES_PER_S = 5.0, 50e6
"""A file that is overwritten before the ranks' next step is reported by its format alone: at most this often, and at most this
many bytes in a second, since each is copied."""

UNFINISHED_S_MAX = 60.0
"""A group that does not settle, and has not changed for this time, is not waited for."""

ALIKE_DONE_MAX = 100
DONE_MAX = 1_000
"""How many checkpoints whose names differ only in numbers, and how many in all, one scan reports."""

Stamp = tuple[int, int]
Steps: TypeAlias = Mapping[int, int]
"""By rank of this node: how many steps it has made."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Time and circumstances of a scan: the monotonic clock, and what the ranks here have done. `steps`: returns their steps, from
    any thread."""

    now_s: float
    steps: Callable[[], Steps]
    ended: bool = False
    ended_well: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """A group as it has been since a scan. `order`: of that scan; `steps`: those of the ranks when it ended; `is_early`: whether it
    was written before the first step, None where that was made between that scan and the previous one."""

    pieces: tuple[Piece, ...]
    since_s: float
    order: int
    steps: dict[int, int]
    is_early: bool | None


@dataclass(frozen=True, slots=True)
class Change:
    """A group that was written in this attempt. `stale`: its files that are still those of the previous checkpoint; `steps`: those that
    the rank which wrote it had made, as its hook notes, or at the end of the scan that saw it first."""

    group: names.Group
    pieces: tuple[Piece, ...]
    reading: GroupReading
    closed_by: Closing
    stale: tuple[str, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class _Done:
    """A group that is to be reported."""

    group: names.Group
    seen: Seen
    closed_by: Closing
    # At which it was written, as hooks note; -1: not known
    step: int = -1

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.seen.pieces

    @property
    def order(self) -> tuple[int, int, list[int], str]:
        """Its place among others, those that were written first at the front."""
        numbers = [int(digits) for digits in re.findall(r"[0-9]{1,15}", self.group.main)]
        return self.seen.order, self.step, numbers, self.group.main


@dataclass(slots=True)
class SaveWatch:
    """The files of one folder as they were last seen. `folders`: how it is scanned if it holds much else; else files count
    that fit `glob`. `leaves`: the glob of files that another watch has."""

    root: Path
    glob: str
    prefix: str = ""
    folders: WrittenFolders | None = None
    leaves: str = ""
    attempt: int = 0
    baseline: dict[str, Stamp] = field(default_factory=dict)
    reported: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    # Of names that are overwritten: their files when they were last reported without a fault
    before: dict[str, dict[str, Stamp]] = field(default_factory=dict)
    # Of the last scan: groups by key, and what it could not see
    seen: dict[str, Seen] = field(default_factory=dict)
    cut: str = ""
    is_unfinished: bool = False
    # Groups of a script that makes no steps, by series
    early: dict[str, set[tuple[Piece, ...]]] = field(default_factory=dict)
    looks: int = 0
    # A group has changed in the last scan, which another agent would have to know; a step had been made when it ended
    has_changed: bool = False
    _stepped: bool = False
    # Of names that are overwritten and do not settle: when their format is read next
    _due_s: dict[str, float] = field(default_factory=dict)

    def begin(self, attempt: int) -> None:
        """Begin an attempt: files that exist now belong to earlier ones."""
        found = self.folders.begin() if self.folders is not None else tree.look(self.root, self.glob)
        self.attempt = attempt
        self.baseline = {name: _stamp(piece) for name, piece in found.files.items()}
        self.reported, self.before, self.seen, self.early = {}, {}, {}, {}
        self.is_unfinished = self._stepped = False
        self._due_s = {}

    def look(self, moment: Moment, written: Mapping[str, int] | None = None) -> list[Change]:
        """Return the groups that seem to be complete, those that were written first at the front. `written`: the files
        that hooks have seen ranks write, and at which step."""
        written, begun = written or {}, moment.steps()
        found = self._found(written)
        after = dict(moment.steps())
        self.cut = found.cut or ", ".join(found.unreadable)
        self.looks += 1
        done, unfinished, self.has_changed = list[_Done](), False, False
        for key, group in names.group(found.files).items():
            pieces = tuple(found.files[name] for name in sorted(group.names))
            if all(self.baseline.get(piece.name) == _stamp(piece) for piece in pieces):
                continue
            if not any(map(names.is_save_file, group.names)) and self.glob == "*":
                continue
            seen = self.seen.get(key)
            is_still = seen is not None and seen.pieces == pieces
            if seen is None or not is_still:
                is_early = None if any(after.values()) and not self._stepped else not any(after.values())
                seen = self.seen[key] = Seen(pieces, moment.now_s, self.looks, after, is_early)
                self.has_changed = True
            if self.reported.get(key) == pieces:
                continue
            step = max((written[piece.name] for piece in pieces if piece.name in written), default=-1)
            is_noted = all(name in written for name in filter(names.is_save_file, group.names))
            since = step if is_noted else -1
            closed_by = (
                self._closing(group, seen, step, since, begun, moment) if is_still or moment.ended else None
            )
            if group.is_slot and self._is_rewritten(group, seen, found, closed_by, moment):
                closed_by = Closing.LAST_WORD
            if closed_by is None or (closed_by is Closing.NONE and not moment.ended):
                is_fresh = moment.now_s - seen.since_s < UNFINISHED_S_MAX
                unfinished = unfinished or not is_still or (closed_by is not None and is_fresh)
                continue
            done.append(_Done(group, seen, closed_by, step))
            self.reported[key] = pieces
        self.is_unfinished, self._stepped = unfinished, any(after.values())
        counted = _newest(done)
        if left_out := len(done) - len(counted):
            self.cut = f"{left_out:,} of {len(done):,} checkpoints written at once are left out, the oldest"
        return [self._change(one, found) for one in counted]

    def _is_rewritten(
        self,
        group: names.Group,
        seen: Seen,
        found: tree.Tree,
        closed_by: Closing | None,
        moment: Moment,
    ) -> bool:
        """Return whether a name that is overwritten and does not settle is to be reported now, since its format shows that it is
        complete."""
        if moment.ended or closed_by not in (None, Closing.NONE) or seen.is_early is not False:
            self._due_s.pop(group.key, None)
            return False
        if moment.now_s < self._due_s.setdefault(group.key, moment.now_s + REWRITTEN_S):
            return False
        state = reading.read(self.root, group, found.files, found.pointed)
        sizes = {piece.name: piece.size_bytes for piece in seen.pieces}
        rest_s = sum(sizes.values()) / REWRITTEN_BYTES_PER_S
        self._due_s[group.key] = moment.now_s + max(REWRITTEN_S, rest_s)
        return not reading.fault(state, sizes) and reading.has_last_word(state, sizes, 1)

    def _found(self, written: Mapping[str, int]) -> tree.Tree:
        """Return the files that exist; those that become visible only now are old, unless a rank has written them."""
        if self.folders is None:
            return tree.look(self.root, self.glob)
        found, shown = self.folders.look(written)
        if self.leaves:
            found.files = {name: one for name, one in found.files.items() if not tree.fits(name, self.leaves)}
        self.baseline |= {name: _stamp(found.files[name]) for name in shown if name in found.files}
        return found

    def _change(self, done: _Done, found: tree.Tree) -> Change:
        group, pieces = done.group, done.pieces
        state = reading.read(self.root, group, found.files, found.pointed)
        stale = tuple(self._stale(group.key, pieces))
        sizes = {piece.name: piece.size_bytes for piece in pieces}
        if group.is_slot and not reading.fault(state, sizes) and not reading.outdated(state, stale):
            self.before[group.key] = {piece.name: _stamp(piece) for piece in pieces}
        steps = done.step if done.step >= 0 else max(done.seen.steps.values(), default=0)
        return Change(group, pieces, state, done.closed_by, stale, steps)

    def _closing(
        self, group: names.Group, seen: Seen, step: int, since: int, begun: Steps, moment: Moment
    ) -> Closing | None:
        """Return why nothing more is written to a group, `NONE` if that is not known; None for a group that does not count.
        `step`: at which a file of it was opened, `since`: the last of them, -1: not known; `begun`: the steps when this scan began;
        ranks that make none do not count."""
        stepping = {rank: count for rank, count in begun.items() if count}
        is_early = seen.is_early if seen.is_early is not None else step == 0
        if stepping and is_early:
            return None
        if stepping and all(
            count > (since if since >= 0 else seen.steps.get(rank, 0)) for rank, count in stepping.items()
        ):
            return Closing.STEPS
        if moment.ended_well:
            return Closing.END
        if stepping:
            return Closing.NONE
        versions = self.early.setdefault(group.series, set())
        versions.add(seen.pieces)
        is_silent = moment.now_s - seen.since_s >= SILENT_S
        if moment.ended or (is_silent and len(versions) > 1):
            return Closing.SILENCE if is_silent else Closing.NONE
        return None

    def _stale(self, key: str, pieces: tuple[Piece, ...]) -> Iterator[str]:
        """Yield the files of a group that are still those of an earlier attempt, or of the previous checkpoint under this name.

        A checkpoint that is written in the background may be reported in part: its files are not those of another checkpoint.
        """
        before = self.before.get(key, {})
        for piece in pieces:
            if before.get(piece.name, self.baseline.get(piece.name)) == _stamp(piece):
                yield piece.name

    def dump(self) -> codec.Json:
        """Return what another agent needs to continue if this one dies, for JSON."""
        return {
            "root": str(self.root),
            "attempt": self.attempt,
            "seen": codec.pack(self.seen),
            "baseline": self.baseline,
            "reported": {key: codec.pack(pieces) for key, pieces in self.reported.items()},
            "before": self.before,
            "folders": None if self.folders is None else self.folders.dump(),
        }

    def load(self, data: codec.Json) -> None:
        """Continue where another agent stopped. Raises CodecError, KeyError."""
        self.attempt = int(data["attempt"])
        self.seen = codec.unpack(dict[str, Seen], data["seen"])
        self.baseline = codec.unpack(dict[str, tuple[int, int]], data["baseline"])
        self.reported = codec.unpack(dict[str, tuple[Piece, ...]], data["reported"])
        self.before = codec.unpack(dict[str, dict[str, tuple[int, int]]], data["before"])
        if self.folders is not None:
            self.folders.load(data["folders"])


def _newest(done: list[_Done]) -> list[_Done]:
    """Return the newest of those with like names, as many as are reported, those that were written first at the front."""
    kept, counts = list[_Done](), collections.Counter[str]()
    for one in sorted(done, key=lambda one: one.order, reverse=True):
        name = re.sub(r"\d+", "#", one.group.main)
        counts[name] += 1
        if counts[name] <= ALIKE_DONE_MAX and len(kept) < DONE_MAX:
            kept.append(one)
    return kept[::-1]


def _stamp(piece: Piece) -> Stamp:
    return piece.size_bytes, piece.mtime_ns
