"""Timeline of a job: its attempts and ranks over time, as paths for SVG. Pure: record and events in, geometry out.

Rules:
1. A rank has a row, an attempt of it up to six stretches: starting, until all ranks run; loading, until the first step;
   stepping; from the last progress to the verdict at fault or waiting; and stopping. A suspicion is shown
   as such.
2. All stretches of one kind are one path, so a long job does not make a large page. What is a point in time is a dot.
3. Of more than `RANKS_MAX` ranks, those that were at fault and the first of the others have a row.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.wire.reports import Exited
from orchestrator.journal.job_record import AttemptHistory
from orchestrator.report.charts import Tick, TimeScale

ROW_PX = 16
BAR_PX = 12
RANKS_MAX = 64
MARKS_MAX = 600
"""How many checkpoints, and how many suspicions, are shown: as many of the last."""


class Stretch(enum.Enum):
    """A phase of a rank, which is also the name of its colour."""

    STARTING = "starting"
    LOADING = "loading"
    STEPPING = "stepping"
    WAITING = "waiting"
    SUSPECTED = "suspected"
    AT_FAULT = "at-fault"
    STOPPING = "stopping"


class Mark(enum.Enum):
    """An event at a point in time."""

    CHECKPOINT = "checkpoint"
    SUSPICION = "suspicion"
    EXIT = "exit"
    CULPRIT = "culprit"


@dataclass(frozen=True, slots=True)
class Timeline:
    """The rows by name, the first two for the job, and what is drawn in them. `attempts`: where each begins."""

    rows: tuple[str, ...]
    stretches: Mapping[Stretch, Markup]
    marks: Mapping[Mark, Markup]
    attempts: tuple[Tick, ...]
    left_out: int

    @property
    def height_px(self) -> int:
        """How high it is."""
        return ROW_PX * len(self.rows)


@dataclass(frozen=True, slots=True)
class Suspected:
    """A current suspicion: its ranks, and its start in seconds since 1970."""

    ranks: Sequence[int]
    since_s: float


@dataclass(frozen=True, slots=True)
class _AttemptTimes:
    """The times of an attempt so far, in seconds since 1970."""

    history: AttemptHistory
    end_s: float
    suspected: Suspected | None = None

    @property
    def number(self) -> int:
        return self.history.begun.attempt

    @property
    def verdict(self) -> d.Verdict | None:
        return self.history.judged.verdict if self.history.judged else None

    def stretches(self, rank: int) -> Iterator[tuple[Stretch, float]]:
        """Yield the phases of a rank in order, each with its end."""
        history, verdict = self.history, self.verdict
        if history.running_at is not None:
            yield Stretch.STARTING, self.history.wall_s(history.running_at)
            if history.first_step_at is not None:
                yield Stretch.LOADING, self.history.wall_s(history.first_step_at)
        begun = Stretch.STEPPING if history.first_step_at is not None else Stretch.LOADING
        if history.running_at is None:
            begun = Stretch.STARTING
        if verdict is not None and history.judged is not None:
            yield begun, self.history.wall_s(verdict.since_s)
            is_culprit = rank in verdict.ranks
            yield Stretch.AT_FAULT if is_culprit else Stretch.WAITING, self.history.wall_s(history.judged.at)
            begun = Stretch.STOPPING
        elif self.suspected is not None:
            yield begun, self.suspected.since_s
            begun = Stretch.SUSPECTED if rank in self.suspected.ranks else Stretch.WAITING
        yield begun, self.end_s


def timeline(
    attempts: Sequence[AttemptHistory],
    news: Iterable[News],
    world_size: int,
    scale: TimeScale,
    *,
    is_running: bool,
    suspected: Suspected | None = None,
) -> Timeline:
    """Return the timeline of a job's attempts. `news`: its entries on checkpoints, suspicions and exits."""
    attempt_times = [_AttemptTimes(one, one.ended_wall_s or one.began_wall_s) for one in attempts]
    if attempt_times and is_running:
        attempt_times[-1] = _AttemptTimes(attempts[-1], scale.end_s, suspected)
    ranks = _ranks_shown(attempt_times, world_size)
    rows = {rank: number for number, rank in enumerate(ranks, 1)}
    stretches: dict[Stretch, list[str]] = {kind: [] for kind in Stretch}
    marks: dict[Mark, list[str]] = {kind: [] for kind in Mark}
    for times in attempt_times:
        for rank in ranks:
            _draw_row(times, rank, rows[rank], scale, stretches)
        if times.verdict is not None and times.history.judged is not None:
            at_s = times.history.wall_s(times.history.judged.at)
            marks[Mark.CULPRIT] += [_dot(scale, at_s, rows[rank]) for rank in times.verdict.ranks if rank in rows]
    for kind, at, row in _find_marks(news, rows):
        if (attempt_at_time := _attempt_at(attempt_times, at)) is not None:
            marks[kind].append(_dot(scale, attempt_at_time.history.wall_s(at), row))
    return Timeline(
        ("checkpoints", *(f"rank {rank}" for rank in ranks)),
        {kind: Markup("".join(parts)) for kind, parts in stretches.items() if parts},
        {kind: Markup("".join(parts[-MARKS_MAX:])) for kind, parts in marks.items() if parts},
        tuple(Tick(scale.x(one.history.began_wall_s) / 10, str(one.number)) for one in attempt_times),
        world_size - len(ranks),
    )  # fmt: skip


def _ranks_shown(attempt_times: Sequence[_AttemptTimes], world_size: int) -> list[int]:
    """Return the ranks that have a row."""
    at_fault = [rank for one in attempt_times if one.verdict for rank in one.verdict.ranks if rank < world_size]
    first = dict.fromkeys([*at_fault, *range(min(world_size, RANKS_MAX))])
    return sorted(list(first)[:RANKS_MAX])


def _draw_row(times: _AttemptTimes, rank: int, row: int, scale: TimeScale, paths: Mapping[Stretch, list[str]]) -> None:
    begin = scale.x(times.history.began_wall_s)
    top = row * ROW_PX + (ROW_PX - BAR_PX) // 2
    for kind, end_s in times.stretches(rank):
        end = scale.x(end_s)
        if end > begin:
            paths[kind].append(f"M{begin} {top}H{end}v{BAR_PX}H{begin}Z")
            begin = end


def _find_marks(news: Iterable[News], rows: Mapping[int, int]) -> Iterator[tuple[Mark, float, int]]:
    """Yield marks with their time (job clock) and row."""
    checkpoints: set[int] = set()
    for one in news:
        match one:
            case e.CheckpointChanged() if (
                one.save.state is CheckpointState.WHOLE and one.save.number not in checkpoints
            ):
                checkpoints.add(one.save.number)
                yield Mark.CHECKPOINT, one.at, 0
            case e.FromNode(report=Exited(ordered=False, rank=rank, code=code)) if rank in rows and code != 0:
                yield Mark.EXIT, one.at, rows[rank]
            case d.Notice(topic=d.NoticeTopic.HANG | d.NoticeTopic.DESYNC, verdict=d.Verdict() as verdict):
                yield from ((Mark.SUSPICION, one.at, rows[rank]) for rank in verdict.ranks if rank in rows)
            case d.Notice(topic=d.NoticeTopic.SUSPECT, withdrawn=False):
                yield Mark.SUSPICION, one.at, 0
            case _:
                pass


def _attempt_at(attempt_times: Sequence[_AttemptTimes], at: float) -> _AttemptTimes | None:
    """Return the attempt at a time (job clock)."""
    return next((one for one in reversed(attempt_times) if one.history.begun.at <= at), None)


def _dot(scale: TimeScale, wall_s: float, row: int) -> str:
    """Return a path of no length: with round ends it is a dot, however the page stretches it."""
    return f"M{scale.x(wall_s)} {row * ROW_PX + ROW_PX // 2}h0"
