"""Completion of a checkpoint: when every rank of the gang has continued, and the state of the checkpoint then. Pure.

A node has continued when one of these holds:
- its agent reports it of its own ranks;
- heartbeats show that every rank there has made a step since, and that its agent has scanned twice after that and found
  nothing unreported. Heartbeats from before the last change count if ranks count the same steps as those that saved;
- its ranks have all ended, with code 0 or each with more steps than were made when the checkpoint was written, and it has
  stopped the attempt, and so has made a last scan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

from orchestrator.core.checkpoints import names, reading
from orchestrator.core.checkpoints.save import (
    Closing,
    Content,
    Format,
    GroupReading,
    Part,
    Piece,
    Place,
    Save,
    SaveState,
)
from orchestrator.core.wire import reports

SCANS_MIN = 2
SCANS_KEPT = 32

SAME_COUNT_SHARE = 0.9
"""Ranks whose steps are at least this share of another rank's steps count the same steps."""

PATTERN_MIN = 2
"""A file that this many checkpoints all have is expected in the next one."""

GONE_ON = (Closing.STEPS, Closing.END, Closing.SILENCE)


@dataclass(frozen=True, slots=True)
class Gang:
    """The nodes of an attempt, those that have stopped it, those that were lost with it, and those whose ranks have all
    ended with code 0. `made`: the fewest steps of a rank, of each node whose ranks have all ended."""

    attempt: int
    base_step: int
    world_size: int
    nodes: tuple[str, ...]
    stopped: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    made: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be reported of the attempt."""
        return set(self.nodes) <= self.stopped | self.lost

    def ended_behind(self, save: Save) -> set[str]:
        """Return the nodes whose ranks ended after the step at which a checkpoint was written."""
        steps = max((part.steps for part in save.parts), default=0)
        open_ = {part.host for part in save.parts if part.closed_by not in GONE_ON}
        return {node for node in self.stopped - open_ if self.made.get(node, 0) > steps > 0}

    def have_gone_on(self, gone_on: Collection[str]) -> bool:
        """Return whether all nodes have continued; False without nodes."""
        return bool(self.nodes) and set(self.nodes) <= {*gone_on, *(self.done & self.stopped)}


@dataclass(frozen=True, slots=True)
class Found:
    """State of a checkpoint, what completed it, why it is incomplete, and whether it is to be moved away."""

    state: SaveState
    closed_by: Closing
    why: str
    is_damaged: bool = False


@dataclass(slots=True)
class Beats:
    """The last heartbeats of a node in an attempt."""

    latest: reports.Heartbeat
    # By the number of its agent's scans: the fewest steps of a rank at the last heartbeat with that number
    steps: dict[int, int] = field(default_factory=dict)

    def add(self, heartbeat: reports.Heartbeat) -> None:
        """Add the next heartbeat; one with fewer scans is from another agent."""
        if heartbeat.looks < self.latest.looks or heartbeat.attempt != self.latest.attempt:
            self.steps.clear()
        self.latest = heartbeat
        self.steps[heartbeat.looks] = min((rank.steps for rank in heartbeat.ranks if rank.steps), default=0)
        while len(self.steps) > SCANS_KEPT:
            del self.steps[min(self.steps)]

    def looks_at(self, steps: int) -> int | None:
        """Return how many scans there had been when every rank had made more steps than these; None if that is not known, also
        where ranks count other steps."""
        passed = ((looks, made) for looks, made in self.steps.items() if made > steps)
        looks, made = next(passed, (0, 0))
        return looks if 0 < made * SAME_COUNT_SHARE <= steps else None


@dataclass(slots=True)
class Watch:
    """The nodes that have continued since the last change of an open checkpoint."""

    # By node: the steps of its ranks and its agent's scans at the first heartbeat since
    since: dict[str, tuple[dict[int, int], int]] = field(default_factory=dict)
    gone_on: set[str] = field(default_factory=set)
    # Of the ranks of the host that reported last, at the last byte
    steps: int = 0

    def changed(self, save: Save, beats: Mapping[str, Beats]) -> None:
        """Note that the checkpoint has changed: nodes that continued after this write stay; of the others, those whose agents
        report it of their own part, and those whose `beats` show it."""
        last = save.parts[-1]
        is_same = 0 < last.steps == self.steps
        self.gone_on = {node for node in self.gone_on if is_same and node != last.host} | {
            part.host
            for part in save.parts
            if part.closed_by in GONE_ON
            and (part is last or not save.is_slot or 0 < part.steps == last.steps)
        }
        self.since.clear()
        self.steps = last.steps
        for node, known in beats.items():
            looks = known.looks_at(last.steps)
            if looks is not None:
                self.since[node] = {}, looks
                self.beat(node, known.latest)

    def beat(self, node: str, heartbeat: reports.Heartbeat) -> bool:
        """Add a heartbeat; return whether it shows that its node has continued."""
        if node in self.gone_on:
            return False
        if node not in self.since:
            self.since[node] = {rank.rank: rank.steps for rank in heartbeat.ranks}, heartbeat.looks
            return False
        steps, looks = self.since[node]
        moved = all(
            rank.steps > max(steps.get(rank.rank, 0), self._steps_min(rank))
            for rank in heartbeat.ranks
            if rank.steps
        )
        has_looked = looks < 0 or (heartbeat.looks >= looks + SCANS_MIN and not heartbeat.has_unfinished)
        if moved and has_looked:
            self.gone_on.add(node)
        return moved and has_looked

    def _steps_min(self, rank: reports.RankHeartbeat) -> int:
        """Return how many steps a rank must have made for its heartbeat to be from after the change, and not delayed on its way;
        0 for a rank that counts other steps than the ranks that saved."""
        return self.steps if rank.steps >= SAME_COUNT_SHARE * self.steps else 0


def opened(number: int, report: reports.SaveSeen, world_size: int) -> Save:
    """Return a new checkpoint of which only the name is known."""
    return Save(
        number, report.key, report.series, report.main, report.attempt, world_size, 0, Format.UNKNOWN, Content.OTHER,
        True, SaveState.OPEN,
    )  # fmt: skip


def brief(save: Save) -> Save:
    """Return a checkpoint without its files, for the brain."""
    return replace(save, pieces=(), parts=(), cites=())


def merged(save: Save) -> GroupReading:
    """Return the combined reading of all parts of an open checkpoint."""
    return reduce(reading.merged, (part.reading for part in save.parts))


def pieces_of(parts: Iterable[Part]) -> dict[str, tuple[str, Piece]]:
    """Return the files of a checkpoint with the host that has each; if several hosts have one, the host with the most steps,
    else the first."""
    pieces: dict[str, tuple[str, Piece]] = {}
    for part in sorted(parts, key=lambda part: -part.steps):
        for piece in part.pieces:
            pieces.setdefault(piece.name, (part.host, piece))
    return pieces


def places(parts: Iterable[Part], here: Path, is_far: Callable[[str], bool]) -> tuple[Place, ...]:
    """Return the locations of the files of a checkpoint; the shared job folder comes first. `is_far`: whether a host's files
    have to be copied."""
    parts = tuple(parts)
    pieces, far = pieces_of(parts), []
    for part in parts:
        own = tuple(name for name, (host, _) in pieces.items() if host == part.host)
        if own and is_far(part.host):
            far.append(Place(part.host, part.root, own))
    if not far:
        return (Place("", str(here)),)
    near = tuple(piece for piece in pieces if all(piece not in place.names for place in far))
    return (*([Place("", str(here), near)] if near else []), *far)


def with_digests(save: Save, digests: Mapping[tuple[str, int, int], str]) -> Save:
    """Return a checkpoint with the sha256 of its files, for files whose stamps are unchanged."""

    def known(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        return tuple(replace(piece, sha256=digests.get(piece.stamp, piece.sha256)) for piece in pieces)

    parts = tuple(replace(part, pieces=known(part.pieces)) for part in save.parts)
    return replace(save, pieces=known(save.pieces), parts=parts)


def parts_of(save: Save) -> tuple[Part, ...]:
    """Return the parts of a checkpoint; for one that was closed, and is reported again, as far as its locations and files show."""
    if save.parts:
        return save.parts
    state = GroupReading(
        save.format, save.content, save.fits_any_size, is_proved=True, step=save.stated, cites=save.cites
    )
    return tuple(
        Part(place.host, place.root, save.steps, pieces, state, save.closed_by)
        for place in save.places
        if place.host and (pieces := tuple(piece for piece in save.pieces if piece.name in place.names))
    )


def judge(save: Save, watch: Watch, gang: Gang, saves: Iterable[Save] = ()) -> Found:
    """Return the present state of an open checkpoint. `saves`: the checkpoints of the job, of which those of its series count.

    A file that all earlier checkpoints have is expected until a step or an end shows that everything is written. After that,
    a thread may still write it: if `PATTERN_MIN` checkpoints of this attempt have it, it is expected until the next one begins.
    """
    series = [one for one in saves if one.series == save.series]
    closed = [one for one in series if one.pieces and one.state not in (SaveState.OPEN, SaveState.TORN)]
    earlier = [one for one in closed if one.number < save.number]
    is_followed = any(one.number > save.number and one.attempt == save.attempt for one in series)
    before = earlier[-1] if earlier else None
    state = merged(save)
    pieces = pieces_of(save.parts)
    sizes = {name: piece.size_bytes for name, (_, piece) in pieces.items()}
    damage = reading.fault(state, sizes) or _stale_need(save, state)
    fault = damage or _mixed(save, pieces) or _lacks_rank(save, sizes, before)
    lack = _lacks(save, sizes, earlier)
    own = [one for one in earlier if one.attempt == save.attempt]
    is_slow = len(own) >= PATTERN_MIN and not is_followed and not gang.have_gone_on(())
    closed_by = next((part.closed_by for part in save.parts if part.closed_by in GONE_ON), Closing.STEPS)
    is_written = closed_by is not Closing.SILENCE or is_followed or gang.have_gone_on(())
    have_gone_on = gang.have_gone_on(watch.gone_on | gang.ended_behind(save))
    if not fault and (is_slow or not (is_written and have_gone_on)):
        fault = lack
    if have_gone_on and not fault:
        return Found(SaveState.WHOLE, closed_by, "")
    if not gang.is_over:
        return Found(SaveState.OPEN, Closing.NONE, fault)
    if fault:
        torn = SaveState.GONE if state.is_unsure else SaveState.TORN
        return Found(torn, Closing.NONE, fault, is_damaged=True)
    stale = [name for part in save.parts for name in part.stale if names.is_save_file(name)]
    if stale:
        why = f"the attempt ended while it was written: {stale[0]} is still from the previous checkpoint"
        return Found(SaveState.TORN, Closing.NONE, why, is_damaged=save.is_named)
    if reading.has_last_word(state, sizes, gang.world_size):
        return Found(SaveState.WHOLE, Closing.LAST_WORD, "")
    alike = [one for one in earlier if _shape(p.name for p in one.pieces) == _shape(sizes)]
    if state.is_proved and (before in alike or len(alike) >= PATTERN_MIN):
        return Found(SaveState.WHOLE, Closing.LIKENESS, "")
    lost = sorted(gang.lost & set(gang.nodes) - watch.gone_on)
    why = "the attempt ended while it was written"
    why = f"{lost[0]} was lost before it reported whether it has a part of it" if lost else why
    return Found(SaveState.TORN, Closing.NONE, why, is_damaged=save.is_named)


def _stale_need(save: Save, state: GroupReading) -> str:
    """Return the fault of a file from the previous checkpoint that a rewritten file refers to, or the other way round."""
    stale = {name for part in save.parts for name in part.stale}
    old = next(
        (need for need in state.needs if need.name in stale and need.by and need.by not in stale), None
    )
    if old is None:
        return reading.outdated(state, stale)
    return f"{old.name} is still from the previous checkpoint; {old.by} is new"


def _mixed(save: Save, pieces: dict[str, tuple[str, Piece]]) -> str:
    """Return the fault of a name that is overwritten repeatedly, whose parts on several hosts may be of different writes."""
    hosts = {host for host, _ in pieces.values()}
    steps = {part.steps for part in save.parts if part.host in hosts}
    if not save.is_slot or len(hosts) < 2 or (len(steps) == 1 and 0 not in steps):
        return ""
    return "its parts were written at different steps"


def _lacks(save: Save, sizes: Collection[str], earlier: Sequence[Save]) -> str:
    """Return the fault of a checkpoint that lacks a file which each earlier checkpoint of the same world size has."""
    shapes = [_shape(p.name for p in one.pieces) for one in earlier if one.world_size == save.world_size]
    missed = set.intersection(*shapes) - _shape(sizes) if shapes else set[str]()
    saved = (piece.name for one in earlier[-1:] for piece in one.pieces if names.is_save_file(piece.name))
    lost = next((name for name in saved if _shape([name]) <= missed), "")
    return f"it has no file like {lost} of the previous checkpoint" if lost else ""


def _lacks_rank(save: Save, sizes: Collection[str], before: Save | None) -> str:
    """Return the fault of a file that fewer ranks have in this checkpoint than in the previous one of this attempt."""
    if before is None or before.attempt != save.attempt:
        return ""
    own = names.ranks_in(_shape(sizes))
    for series, ranks in names.ranks_in(_shape(piece.name for piece in before.pieces)).items():
        lost = ranks - own.get(series, ranks)
        if lost and "shard" not in series:
            return f"it has no file like that of rank {min(lost)} in the previous checkpoint"
    return ""


def _shape(found: Iterable[str]) -> set[str]:
    """Return names without counters; the numbers of ranks and parts stay."""
    return {names.without_count(name) for name in found}
