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

from orchestrator.core.checkpoints import file_groups, validation
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointFile,
    CheckpointState,
    CompletionReason,
    Content,
    FileLocation,
    Format,
    GroupReading,
    HostPart,
)
from orchestrator.core.wire import reports

SCANS_MIN = 2
SCANS_KEPT = 32

SAME_STEPS_SHARE = 0.9
"""Ranks whose steps are at least this share of another rank's steps count the same steps."""

PATTERN_MIN = 2
"""A file that this many checkpoints all have is expected in the next one."""

CONTINUED = (CompletionReason.STEPS, CompletionReason.END, CompletionReason.NO_WRITES)


@dataclass(frozen=True, slots=True)
class CheckpointGang:
    """The nodes of an attempt, those that have stopped it, those that were lost with it, and those whose ranks have all
    ended with code 0. `fewest_steps`: the fewest steps of a rank, of each node whose ranks have all ended."""

    attempt: int
    base_step: int
    world_size: int
    nodes: tuple[str, ...]
    stopped: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    fewest_steps: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be reported of the attempt."""
        return set(self.nodes) <= self.stopped | self.lost

    def ended_after(self, checkpoint: Checkpoint) -> set[str]:
        """Return the nodes whose ranks ended after the step at which a checkpoint was written."""
        steps = max((part.steps for part in checkpoint.parts), default=0)
        open_ = {part.host for part in checkpoint.parts if part.closed_by not in CONTINUED}
        return {node for node in self.stopped - open_ if self.fewest_steps.get(node, 0) > steps > 0}

    def have_all_continued(self, continued: Collection[str]) -> bool:
        """Return whether all nodes have continued; False without nodes."""
        return bool(self.nodes) and set(self.nodes) <= {*continued, *(self.done & self.stopped)}


@dataclass(frozen=True, slots=True)
class Assessment:
    """State of a checkpoint, what completed it, why it is incomplete, and whether it is to be moved away."""

    state: CheckpointState
    closed_by: CompletionReason
    why: str
    is_damaged: bool = False


@dataclass(slots=True)
class HeartbeatHistory:
    """The last heartbeats of a node in an attempt."""

    latest: reports.Heartbeat
    # By the number of its agent's scans: the fewest steps of a rank at the last heartbeat with that number
    steps: dict[int, int] = field(default_factory=dict)

    def add(self, heartbeat: reports.Heartbeat) -> None:
        """Add the next heartbeat; one with fewer scans is from another agent."""
        if heartbeat.scans < self.latest.scans or heartbeat.attempt != self.latest.attempt:
            self.steps.clear()
        self.latest = heartbeat
        self.steps[heartbeat.scans] = min((rank.steps for rank in heartbeat.ranks if rank.steps), default=0)
        while len(self.steps) > SCANS_KEPT:
            del self.steps[min(self.steps)]

    def scans_at(self, steps: int) -> int | None:
        """Return how many scans there had been when every rank had made more steps than these; None if that is not known, also
        where ranks count other steps."""
        passed = ((looks, made) for looks, made in self.steps.items() if made > steps)
        looks, made = next(passed, (0, 0))
        return looks if 0 < made * SAME_STEPS_SHARE <= steps else None


@dataclass(slots=True)
class ContinuationTracker:
    """The nodes that have continued since the last change of an open checkpoint."""

    # By node: the steps of its ranks and its agent's scans at the first heartbeat since
    since: dict[str, tuple[dict[int, int], int]] = field(default_factory=dict)
    continued: set[str] = field(default_factory=set)
    # Of the ranks of the host that reported last, at the last byte
    steps: int = 0

    def note_change(self, checkpoint: Checkpoint, beats: Mapping[str, HeartbeatHistory]) -> None:
        """Note that the checkpoint has changed: nodes that continued after this write stay; of the others, those whose agents
        report it of their own part, and those whose `beats` show it."""
        last = checkpoint.parts[-1]
        is_same = 0 < last.steps == self.steps
        self.continued = {node for node in self.continued if is_same and node != last.host} | {
            part.host
            for part in checkpoint.parts
            if part.closed_by in CONTINUED
            and (part is last or not checkpoint.is_overwritten or 0 < part.steps == last.steps)
        }
        self.since.clear()
        self.steps = last.steps
        for node, known in beats.items():
            looks = known.scans_at(last.steps)
            if looks is not None:
                self.since[node] = {}, looks
                self.add_heartbeat(node, known.latest)

    def add_heartbeat(self, node: str, heartbeat: reports.Heartbeat) -> bool:
        """Add a heartbeat; return whether it shows that its node has continued."""
        if node in self.continued:
            return False
        if node not in self.since:
            self.since[node] = {rank.rank: rank.steps for rank in heartbeat.ranks}, heartbeat.scans
            return False
        steps, looks = self.since[node]
        moved = all(
            rank.steps > max(steps.get(rank.rank, 0), self._steps_min(rank)) for rank in heartbeat.ranks if rank.steps
        )
        has_looked = looks < 0 or (heartbeat.scans >= looks + SCANS_MIN and not heartbeat.has_unfinished)
        if moved and has_looked:
            self.continued.add(node)
        return moved and has_looked

    def _steps_min(self, rank: reports.RankHeartbeat) -> int:
        """Return how many steps a rank must have made for its heartbeat to be from after the change, and not delayed on its way;
        0 for a rank that counts other steps than the ranks that saved."""
        return self.steps if rank.steps >= SAME_STEPS_SHARE * self.steps else 0


def new_checkpoint(number: int, report: reports.CheckpointSeen, world_size: int) -> Checkpoint:
    """Return a new checkpoint of which only the name is known."""
    return Checkpoint(
        number, report.key, report.series, report.main, report.attempt, world_size, 0, Format.UNKNOWN, Content.OTHER,
        True, CheckpointState.OPEN,
    )  # fmt: skip


def summarize(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint without its files, for the brain."""
    return replace(checkpoint, files=(), parts=(), cites=())


def merge_readings(checkpoint: Checkpoint) -> GroupReading:
    """Return the combined reading of all parts of an open checkpoint."""
    return reduce(validation.merge_readings, (part.reading for part in checkpoint.parts))


def collect_files(parts: Iterable[HostPart]) -> dict[str, tuple[str, CheckpointFile]]:
    """Return the files of a checkpoint with the host that has each; if several hosts have one, the host with the most steps,
    else the first."""
    pieces: dict[str, tuple[str, CheckpointFile]] = {}
    for part in sorted(parts, key=lambda part: -part.steps):
        for piece in part.files:
            pieces.setdefault(piece.name, (part.host, piece))
    return pieces


def close(checkpoint: Checkpoint, assessment: Assessment, locations: tuple[FileLocation, ...]) -> Checkpoint:
    """Return a checkpoint with its assessment, its locations, and what its parts say together; it has no parts any more."""
    state, pieces = merge_readings(checkpoint), [piece for _, piece in collect_files(checkpoint.parts).values()]
    stalls_s = [part.stall_s for part in checkpoint.parts if part.stall_s is not None]
    return replace(
        checkpoint, state=assessment.state, closed_by=assessment.closed_by, why=assessment.why,
        is_damaged=assessment.is_damaged, format=state.format, content=state.content, fits_any_size=state.fits_any_size,
        stated=state.step, cites=state.cites, written_ns=max((piece.mtime_ns for piece in pieces), default=0),
        files=tuple(pieces), parts=(), locations=locations, stall_s=max(stalls_s, default=checkpoint.stall_s),
    )  # fmt: skip


def locate_files(
    parts: Iterable[HostPart], local_folder: Path, is_remote: Callable[[str], bool]
) -> tuple[FileLocation, ...]:
    """Return the locations of the files of a checkpoint; the shared job folder comes first. `is_remote`: whether a host's files
    have to be copied."""
    parts = tuple(parts)
    pieces, remote = collect_files(parts), []
    for part in parts:
        own = tuple(name for name, (host, _) in pieces.items() if host == part.host)
        if own and is_remote(part.host):
            remote.append(FileLocation(part.host, part.root, own))
    if not remote:
        return (FileLocation("", str(local_folder)),)
    near = tuple(piece for piece in pieces if all(piece not in place.names for place in remote))
    return (*([FileLocation("", str(local_folder), near)] if near else []), *remote)


def set_digests(checkpoint: Checkpoint, digests: Mapping[tuple[str, int, int], str]) -> Checkpoint:
    """Return a checkpoint with the sha256 of its files, for files whose stamps are unchanged."""

    def update_digests(pieces: tuple[CheckpointFile, ...]) -> tuple[CheckpointFile, ...]:
        return tuple(replace(piece, sha256=digests.get(piece.stamp, piece.sha256)) for piece in pieces)

    parts = tuple(replace(part, files=update_digests(part.files)) for part in checkpoint.parts)
    return replace(checkpoint, files=update_digests(checkpoint.files), parts=parts)


def rebuild_parts(checkpoint: Checkpoint) -> tuple[HostPart, ...]:
    """Return the parts of a checkpoint; for one that was closed, and is reported again, as far as its locations and files show."""
    if checkpoint.parts:
        return checkpoint.parts
    state = GroupReading(
        checkpoint.format,
        checkpoint.content,
        checkpoint.fits_any_size,
        is_proved=True,
        step=checkpoint.stated,
        cites=checkpoint.cites,
    )
    return tuple(
        HostPart(place.host, place.root, checkpoint.steps, pieces, state, checkpoint.closed_by)
        for place in checkpoint.locations
        if place.host and (pieces := tuple(piece for piece in checkpoint.files if piece.name in place.names))
    )


def assess(
    checkpoint: Checkpoint,
    watch: ContinuationTracker,
    gang: CheckpointGang,
    checkpoints: Iterable[Checkpoint] = (),
) -> Assessment:
    """Return the present state of an open checkpoint. `checkpoints`: the checkpoints of the job, of which those of its series count.

    A file that all earlier checkpoints have is expected until a step or an end shows that everything is written. After that,
    a thread may still write it: if `PATTERN_MIN` checkpoints of this attempt have it, it is expected until the next one begins.
    """
    series = [one for one in checkpoints if one.series == checkpoint.series]
    closed = [one for one in series if one.files and one.state not in (CheckpointState.OPEN, CheckpointState.TORN)]
    earlier = [one for one in closed if one.number < checkpoint.number]
    is_followed = any(one.number > checkpoint.number and one.attempt == checkpoint.attempt for one in series)
    previous = earlier[-1] if earlier else None
    state = merge_readings(checkpoint)
    pieces = collect_files(checkpoint.parts)
    sizes = {name: piece.size_bytes for name, (_, piece) in pieces.items()}
    damage = validation.find_fault(state, sizes) or _find_stale_file(checkpoint, state)
    fault = damage or _find_mixed_steps(checkpoint, pieces) or _find_missing_rank(checkpoint, sizes, previous)
    missing_file = _find_missing_file(checkpoint, sizes, earlier)
    same_attempt = [one for one in earlier if one.attempt == checkpoint.attempt]
    is_slow = len(same_attempt) >= PATTERN_MIN and not is_followed and not gang.have_all_continued(())
    closed_by = next(
        (part.closed_by for part in checkpoint.parts if part.closed_by in CONTINUED), CompletionReason.STEPS
    )
    is_written = closed_by is not CompletionReason.NO_WRITES or is_followed or gang.have_all_continued(())
    has_continued = gang.have_all_continued(watch.continued | gang.ended_after(checkpoint))
    if not fault and (is_slow or not (is_written and has_continued)):
        fault = missing_file
    if has_continued and not fault:
        return Assessment(CheckpointState.WHOLE, closed_by, "")
    if not gang.is_over:
        return Assessment(CheckpointState.OPEN, CompletionReason.NONE, fault)
    if fault:
        torn = CheckpointState.GONE if state.is_unsure else CheckpointState.TORN
        return Assessment(torn, CompletionReason.NONE, fault, is_damaged=True)
    stale = [name for part in checkpoint.parts for name in part.stale if file_groups.is_checkpoint_file(name)]
    if stale:
        why = f"the attempt ended while it was written: {stale[0]} is still from the previous checkpoint"
        return Assessment(CheckpointState.TORN, CompletionReason.NONE, why, is_damaged=checkpoint.is_named)
    if validation.is_format_complete(state, sizes, gang.world_size):
        return Assessment(CheckpointState.WHOLE, CompletionReason.FINAL_FILE, "")
    alike = [one for one in earlier if _name_patterns(p.name for p in one.files) == _name_patterns(sizes)]
    if state.is_proved and (previous in alike or len(alike) >= PATTERN_MIN):
        return Assessment(CheckpointState.WHOLE, CompletionReason.SAME_FILE_SET, "")
    lost = sorted(gang.lost & set(gang.nodes) - watch.continued)
    why = "the attempt ended while it was written"
    why = f"{lost[0]} was lost before it reported whether it has a part of it" if lost else why
    return Assessment(CheckpointState.TORN, CompletionReason.NONE, why, is_damaged=checkpoint.is_named)


def _find_stale_file(checkpoint: Checkpoint, state: GroupReading) -> str:
    """Return the fault of a file from the previous checkpoint that a rewritten file refers to, or the other way round."""
    stale = {name for part in checkpoint.parts for name in part.stale}
    old = next((need for need in state.needs if need.name in stale and need.by and need.by not in stale), None)
    if old is None:
        return validation.find_stale_metadata(state, stale)
    return f"{old.name} is still from the previous checkpoint; {old.by} is new"


def _find_mixed_steps(checkpoint: Checkpoint, pieces: dict[str, tuple[str, CheckpointFile]]) -> str:
    """Return the fault of a name that is overwritten repeatedly, whose parts on several hosts may be of different writes."""
    hosts = {host for host, _ in pieces.values()}
    steps = {part.steps for part in checkpoint.parts if part.host in hosts}
    if not checkpoint.is_overwritten or len(hosts) < 2 or (len(steps) == 1 and 0 not in steps):
        return ""
    return "its parts were written at different steps"


def _find_missing_file(checkpoint: Checkpoint, sizes: Collection[str], earlier: Sequence[Checkpoint]) -> str:
    """Return the fault of a checkpoint that lacks a file which each earlier checkpoint of the same world size has."""
    shapes = [_name_patterns(p.name for p in one.files) for one in earlier if one.world_size == checkpoint.world_size]
    missed = set.intersection(*shapes) - _name_patterns(sizes) if shapes else set[str]()
    saved = (piece.name for one in earlier[-1:] for piece in one.files if file_groups.is_checkpoint_file(piece.name))
    lost = next((name for name in saved if _name_patterns([name]) <= missed), "")
    return f"it has no file like {lost} of the previous checkpoint" if lost else ""


def _find_missing_rank(checkpoint: Checkpoint, sizes: Collection[str], previous: Checkpoint | None) -> str:
    """Return the fault of a file that fewer ranks have in this checkpoint than in the previous one of this attempt."""
    if previous is None or previous.attempt != checkpoint.attempt:
        return ""
    own = file_groups.find_ranks(_name_patterns(sizes))
    for series, ranks in file_groups.find_ranks(_name_patterns(piece.name for piece in previous.files)).items():
        lost = ranks - own.get(series, ranks)
        if lost and "shard" not in series:
            return f"it has no file like that of rank {min(lost)} in the previous checkpoint"
    return ""


def _name_patterns(found: Iterable[str]) -> set[str]:
    """Return names without counters; the numbers of ranks and parts stay."""
    return {file_groups.mask_numbers(name) for name in found}
