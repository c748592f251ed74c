"""When is a checkpoint whole whose files are written on several hosts? Pure: what the hosts said in, versions out.

Hosts do not say which versions of a name belong together, only how many steps had been made when each was written.
Counts are taken from file times, and a write in the background may end many steps after it began; so two hosts' words
are of one version when their counts are nearer to each other than to the next version's.

A checkpoint that is one file is whole as soon as one host has it: only a folder can have files of several hosts in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.wire.messages import Piece

DOUBTS_MAX = 1000
"""How many nodes' doubts are kept in mind."""

NEAR_STEPS = 2
"""How far apart two hosts' counts of one version may be in any case."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one host has of a checkpoint: in the folder `root/checkpoints`, made when `count` steps had been made."""

    node: str
    root: str
    count: int
    pieces: tuple[Piece, ...]

    def is_all_of(self, name: str) -> bool:
        """Tell whether no other host can have more of the checkpoint: it is one file, and no folder of several."""
        return tuple(piece.name for piece in self.pieces) == (name,)


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a checkpoint, at home or on its way; `number` never repeats in a job.

    `placed` are the nodes that its attempt was on. A node of these that has no part in it is `settled` once it is
    known that no part of it will be heard of. `apart_steps`: how long the version before it was the newest one.
    """

    number: int
    name: str
    attempt: int
    placed: tuple[str, ...]
    settled: tuple[str, ...]
    apart_steps: int
    parts: tuple[Part, ...]

    @property
    def count(self) -> int:
        """The steps that had certainly been made when it was written."""
        return min(part.count for part in self.parts)

    @property
    def until(self) -> int:
        """The steps that had been made when its last part was complete."""
        return max(part.count for part in self.parts)

    @property
    def node(self) -> str:
        """The host that was the first to report it."""
        return self.parts[0].node

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All files that it consists of."""
        return tuple(piece for part in self.parts for piece in self.taken_from(part.node))

    def part_of(self, node: str) -> Part | None:
        """Return what a host has of it."""
        return next((part for part in self.parts if part.node == node), None)

    def taken_from(self, node: str) -> tuple[Piece, ...]:
        """Return the files that are fetched from a host: of those that several have, the first to report gives."""
        before: set[str] = set()
        for part in self.parts:
            if part.node == node:
                return tuple(piece for piece in part.pieces if piece.name not in before)
            before.update(piece.name for piece in part.pieces)
        raise AssertionError(f"{node} has no part in {self.name}")

    def takes(self, new: Version) -> bool:
        """Tell whether a host's word, as a version just begun by it, may be of this version."""
        apart = abs(self.count - new.count)
        near = apart <= NEAR_STEPS or 2 * apart < self.apart_steps
        is_free = new.node in self.placed and self.part_of(new.node) is None
        return near and is_free and new.attempt == self.attempt

    def is_before(self, new: Version) -> bool:
        """Tell whether a version just begun by one host's word is later than this one. Each host tells its versions
        in order, and a script that makes no steps has all of them at count 0."""
        if new.attempt != self.attempt:
            return new.attempt > self.attempt
        known = self.part_of(new.node)
        return new.count > self.count if known is None else new.parts[0] != known and new.count >= known.count

    def is_missed_by(self, new: Version) -> bool:
        """Tell whether a host's word shows that its own part in this version was written over before it was told."""
        later = new.attempt == self.attempt and new.count > self.count
        return later and new.node not in self.settled and self.part_of(new.node) is None

    def mistaken(self, new: Version) -> tuple[Part, ...]:
        """Return the parts that were taken for this version's and are of a later one: nearer to what a host, that has
        a part in this one, says now."""
        known = self.part_of(new.node)
        if known is None or new.attempt != self.attempt:
            return ()
        return tuple(
            part
            for part in self.parts
            if part.node != new.node and abs(part.count - new.count) < abs(part.count - known.count)
        )

    def joined(self, *parts: Part) -> Version:
        """Return this version with more parts."""
        return dataclasses.replace(self, parts=(*self.parts, *parts))

    def is_whole(self, arrived: tuple[str, ...]) -> bool:
        """Tell whether nothing is missing once the parts of these nodes have come."""
        there = all(part.node in arrived for part in self.parts)
        return there and all(node in arrived or node in self.settled for node in self.placed)


def taker(versions: tuple[Version | None, ...], new: Version) -> Version | None:
    """Return which of these versions of its name a host's word is of: that of the nearest count; None for none."""
    takers = [version for version in versions if version is not None and version.takes(new)]
    return min(takers, key=lambda version: abs(version.count - new.count), default=None)


def following(before: Version | None, number: int, name: str, attempt: int, part: Part) -> Version:
    """Return the version that a host's word begins; `before` is the one of the same name before it, if any."""
    same = before is not None and before.attempt == attempt
    apart_steps = part.count - before.count if before is not None and same else part.count
    return Version(number, name, attempt, (part.node,), (), apart_steps, (part,))


@dataclass(frozen=True, slots=True)
class Doubt:
    """A node's ranks have written to a checkpoint, and ended before that was known to be whole."""

    node: str
    attempt: int
    name: str


@dataclass(frozen=True, slots=True)
class Gaps:
    """What will not be heard of: nodes that were `lost` or have fallen `silent`, with the last attempt of which they
    have not told all, and doubts."""

    lost: dict[str, int]
    silent: dict[str, int]
    doubts: tuple[Doubt, ...]


@dataclass(slots=True)
class Words:
    """What nodes have said about what they have reported: up to which attempt and count, and what they stopped.

    Of a node that was lost, nothing that is said later counts for the attempts before. Nobody waits for one that has
    fallen silent, but it may come back and tell all.
    """

    scanned: dict[str, tuple[int, int]]
    stopped: dict[str, int]
    lost: dict[str, int]
    silent: dict[str, int]
    doubts: list[Doubt]

    @property
    def gaps(self) -> Gaps:
        return Gaps(dict(self.lost), dict(self.silent), tuple(self.doubts))

    def has_told_all(self, node: str, version: Version) -> bool:
        """Tell whether the node has reported whatever part it has in a version."""
        if self.is_lost(node, version.attempt) or self._is_doubtful(node, version):
            return False
        scanned = self.scanned.get(node, (0, -1))
        return self.stopped.get(node, 0) >= version.attempt or scanned > (version.attempt, version.until)

    def is_lost(self, node: str, attempt: int) -> bool:
        """Tell whether what the node says of this attempt comes too late."""
        return self.lost.get(node, 0) >= attempt

    def why_never(self, version: Version) -> str:
        """Say why nobody will ever know whether a version is whole; empty while that is not so."""
        for node in version.placed:
            if node in version.settled or version.part_of(node) is not None:
                continue
            if max(self.lost.get(node, 0), self.silent.get(node, 0)) >= version.attempt:
                return f"{node} was lost, and nobody knows whether it had a part in it"
            if self._is_doubtful(node, version):
                return f"the ranks on {node} ended before their part in it was known to be whole"
        return ""

    def may_tell(self, version: Version) -> bool:
        """Tell whether a part of a version may yet be heard of, be it against what its node has said."""
        return any(
            version.part_of(node) is None
            and max(self.stopped.get(node, 0), self.lost.get(node, 0)) < version.attempt
            for node in version.placed
        )

    def settle(self, version: Version) -> Version:
        """Return the version with all nodes entered that are settled by now."""
        settled = tuple(
            node for node in version.placed if node in version.settled or self.has_told_all(node, version)
        )
        return version if settled == version.settled else dataclasses.replace(version, settled=settled)

    def note_scanned(self, node: str, attempt: int, count: int) -> bool:
        """Enter how far a node has told; return whether it is further than before."""
        further = (attempt, count) > self.scanned.get(node, (0, -1))
        if further:
            self.scanned[node] = (attempt, count)
        return further

    def note_stopped(self, stopped: Mapping[str, int]) -> None:
        """Enter the last attempt that nodes have stopped."""
        for node, attempt in stopped.items():
            self.stopped[node] = max(attempt, self.stopped.get(node, 0))

    def note_lost(self, node: str, attempt: int) -> None:
        """Enter that a node was lost in an attempt; one that had stopped it had told all."""
        self.silent.pop(node, None)
        if self.stopped.get(node, 0) < attempt:
            self.lost[node] = max(attempt, self.lost.get(node, 0))

    def note_doubt(self, doubt: Doubt) -> None:
        """Enter a node's doubt; old ones are forgotten when there are very many."""
        if doubt not in self.doubts:
            self.doubts = [*self.doubts[1 - DOUBTS_MAX :], doubt]

    def _is_doubtful(self, node: str, version: Version) -> bool:
        return Doubt(node, version.attempt, version.name) in self.doubts
