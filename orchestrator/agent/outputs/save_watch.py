"""Watch over a folder in which ranks save during an attempt: which groups of files they have written, and when they are done.

- What is there when the attempt begins, and does not change, belongs to earlier ones.
- A group is reported when it is the same in two looks and every rank of this node has made an optimizer step after its
  last byte. A script without steps has only the clock: nothing may have been written for `SILENT_S`.
- What was written before the first step (a vocabulary, a config) is no save, unless the script makes no steps at all: that
  is known when it writes a second save of the series, or ends.
- When the ranks have ended, all that is new is reported, with how it is known that its writing was over, if it is.
- The keys of groups begin with the watch's `prefix`, which tells equal names in several folders apart.
- Of saves that are done at once, the newest of those with like names count: the others are said to be left out.

Not thread-safe: one thread looks.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.outputs.written_folders import WrittenFolders
from orchestrator.agent.ranks.step_counter import MTIME_LAG_NS
from orchestrator.core import codec
from orchestrator.core.checkpoints import names, reading, tree
from orchestrator.core.checkpoints.save import Closing, GroupReading, Piece

SILENT_S = 2.0
UNFINISHED_S_MAX = 60.0
"""A group that does not settle, and has not changed for this time, keeps nobody waiting."""

ALIKE_DONE_MAX = 100
DONE_MAX = 1_000
"""How many saves whose names differ only in numbers, and how many in all, one look reports."""

Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Clock:
    """The steps of this node's ranks when a look begins, by its wall clock, in ns. `stepped_ns`: since when every rank
    that makes steps has made one, 0 without steps; `first_ns`: when the first step of any rank was made, 0: none."""

    now_ns: int
    stepped_ns: int = 0
    first_ns: int = 0
    ended: bool = False
    ended_well: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A group that was written in this attempt. `stale`: its files that are still those of the save before; `steps`: those that
    the rank which wrote it had made, None where no hook has seen that."""

    group: names.Group
    pieces: tuple[Piece, ...]
    reading: GroupReading
    closed_by: Closing
    stale: tuple[str, ...]
    steps: int | None = None

    @property
    def written_ns(self) -> int:
        return max(piece.mtime_ns for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class _Done:
    """A group that is to be reported."""

    group: names.Group
    pieces: tuple[Piece, ...]
    closed_by: Closing


@dataclass(slots=True)
class SaveWatch:
    """The files of one folder as they were last seen. `folders`: how it is looked into if it holds much else; else files count
    that fit `glob`. `leaves`: the glob of files that another watch has."""

    root: Path
    glob: str
    prefix: str = ""
    folders: WrittenFolders | None = None
    leaves: str = ""
    attempt: int = 0
    baseline: dict[str, Stamp] = field(default_factory=dict)
    reported: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    # Of names that are written again and again: their files when they were reported last without a fault
    before: dict[str, dict[str, Stamp]] = field(default_factory=dict)
    # Of the last look: groups by key, and what it could not see
    seen: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    cut: str = ""
    is_unfinished: bool = False
    # Groups of a script that makes no steps, by series
    early: dict[str, set[tuple[Piece, ...]]] = field(default_factory=dict)
    # When the first step was made, and since when all ranks have made one, at the last look
    first_ns: int = 0
    stepped_ns: int = 0

    def begin(self, attempt: int) -> None:
        """Begin an attempt: what is there now belongs to earlier ones."""
        found = self.folders.begin() if self.folders is not None else tree.look(self.root, self.glob)
        self.attempt = attempt
        self.baseline = {name: _stamp(piece) for name, piece in found.files.items()}
        self.reported, self.before, self.seen, self.early = {}, {}, {}, {}
        self.is_unfinished = False
        self.first_ns = self.stepped_ns = 0

    def look(self, clock: Clock, written: Mapping[str, int] | None = None) -> list[Change]:
        """Return the groups whose writing seems to be over, those that were written first at the front. `written`: the files
        that hooks have seen ranks write, and at which step."""
        found = self._found(written or {})
        self.first_ns, self.stepped_ns = clock.first_ns, clock.stepped_ns
        self.cut = found.cut or ", ".join(found.unreadable)
        groups = names.group(found.files)
        done, unfinished = list[_Done](), False
        for key, group in groups.items():
            pieces = tuple(found.files[name] for name in sorted(group.names))
            if all(self.baseline.get(piece.name) == _stamp(piece) for piece in pieces):
                continue
            if not any(map(names.is_save_file, group.names)) and self.glob == "*":
                continue
            is_still, self.seen[key] = self.seen.get(key) == pieces, pieces
            if self.reported.get(key) == pieces:
                continue
            closed_by = self._closing(group, pieces, clock) if is_still or clock.ended else None
            if closed_by is None or (closed_by is Closing.NONE and not clock.ended):
                age_ns = clock.now_ns - max(piece.mtime_ns for piece in pieces)
                unfinished = unfinished or (closed_by is not None and age_ns < UNFINISHED_S_MAX * 1e9)
                unfinished = unfinished or not is_still
                continue
            done.append(_Done(group, pieces, closed_by))
            self.reported[key] = pieces
        self.is_unfinished = unfinished
        counted = _newest(done)
        if left_out := len(done) - len(counted):
            self.cut = (
                f"{left_out:,} of {len(done):,} saves that were written at once are left out, the oldest"
            )
        return [self._change(one, found, written or {}) for one in counted]

    def _found(self, written: Mapping[str, int]) -> tree.Tree:
        """Return what is there; files that come into sight only now are old, unless a rank has written them."""
        if self.folders is None:
            return tree.look(self.root, self.glob)
        found, shown = self.folders.look(written)
        if self.leaves:
            found.files = {name: one for name, one in found.files.items() if not tree.fits(name, self.leaves)}
        self.baseline |= {name: _stamp(found.files[name]) for name in shown if name in found.files}
        return found

    def _change(self, done: _Done, found: tree.Tree, written: Mapping[str, int]) -> Change:
        group, pieces = done.group, done.pieces
        state = reading.read(self.root, group, found.files, found.pointed)
        stale = tuple(self._stale(group.key, pieces))
        if group.is_slot and not reading.fault(state, {piece.name: piece.size_bytes for piece in pieces}):
            self.before[group.key] = {piece.name: _stamp(piece) for piece in pieces}
        steps = [written[piece.name] for piece in pieces if piece.name in written]
        return Change(group, pieces, state, done.closed_by, stale, max(steps, default=None))

    def _closing(self, group: names.Group, pieces: tuple[Piece, ...], clock: Clock) -> Closing | None:
        """Return how it is known that nothing more is written to a group, `NONE` if it is not; None for one that does
        not count."""
        written_ns = max(piece.mtime_ns for piece in pieces)
        if clock.first_ns and written_ns + MTIME_LAG_NS < clock.first_ns:
            return None
        if clock.stepped_ns > written_ns + MTIME_LAG_NS:
            return Closing.STEPS
        if clock.ended_well:
            return Closing.END
        if clock.first_ns:
            return Closing.NONE
        versions = self.early.setdefault(group.series, set())
        versions.add(pieces)
        is_silent = written_ns + SILENT_S * 1e9 < clock.now_ns
        if clock.ended or (is_silent and len(versions) > 1):
            return Closing.SILENCE if is_silent else Closing.NONE
        return None

    def _stale(self, key: str, pieces: tuple[Piece, ...]) -> Iterator[str]:
        """Yield the files of a group that are still those of an earlier attempt, or of the save before under this name.

        A save that is written in the background may be reported in part: its files are not those of another save.
        """
        before = self.before.get(key, {})
        for piece in pieces:
            if before.get(piece.name, self.baseline.get(piece.name)) == _stamp(piece):
                yield piece.name

    def dump(self) -> codec.Json:
        """Return what another agent needs to go on if this one dies, for JSON."""
        return {
            "root": str(self.root),
            "attempt": self.attempt,
            "first_ns": self.first_ns,
            "stepped_ns": self.stepped_ns,
            "baseline": self.baseline,
            "reported": {key: codec.pack(pieces) for key, pieces in self.reported.items()},
            "before": self.before,
        }

    def load(self, data: codec.Json) -> None:
        """Go on where another agent left off. Raises CodecError, KeyError."""
        self.attempt = int(data["attempt"])
        self.first_ns, self.stepped_ns = int(data["first_ns"]), int(data["stepped_ns"])
        self.baseline = codec.unpack(dict[str, tuple[int, int]], data["baseline"])
        self.reported = codec.unpack(dict[str, tuple[Piece, ...]], data["reported"])
        self.before = codec.unpack(dict[str, dict[str, tuple[int, int]]], data["before"])


def _newest(done: list[_Done]) -> list[_Done]:
    """Return the newest of those with like names, as many as are reported, those that were written first at the front."""
    kept, counts = list[_Done](), collections.Counter[str]()
    done.sort(key=lambda one: max(piece.mtime_ns for piece in one.pieces))
    for one in reversed(done):
        name = re.sub(r"\d+", "#", one.group.main)
        counts[name] += 1
        if counts[name] <= ALIKE_DONE_MAX and len(kept) < DONE_MAX:
            kept.append(one)
    return kept[::-1]


def _stamp(piece: Piece) -> Stamp:
    return piece.size_bytes, piece.mtime_ns
