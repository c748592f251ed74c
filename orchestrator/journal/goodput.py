"""Goodput: how each rank spent its time, from the journal alone, and how much of it advanced the training.

The terms are those of Google's ml-goodput-measurement: goodput is the productive share, badput the rest by its kind.
Pure, except `read`: entries in, spans out. Rules, in the order of a job's phases:

1. Queued: from the job's submission to its first attempt, and whenever it has no machines.
2. Startup: the first attempt, and one after a queue or a resume, until its first new step. Recovering: any other attempt
   until its first new step, and the time since the verdict before it.
3. Productive or wasted: from an attempt's first new step to the last progress that its verdict names, except for the time
   in which checkpoints that were kept stopped the ranks, as the agents have measured it. The share of its
   steps that no later attempt repeated is productive, the rest is wasted: a restart loses the last ones.
   A job without a step has no goodput, since its startup cannot be separated from its work.
4. Detecting: from the last progress to the verdict.
5. Stopping: from the verdict on, at the end of the job and before a return to the queue.
6. The time between a job's end and its resume is not counted.
7. A failure is charged with what it cost: its wasted and detecting time, and all time up to the next new step.

All ranks of an attempt share its time, and so their spans are equal. Spares are not ranks: their idle time is extra.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.brain.model import decisions as d
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.journal import facts_file, journal_file
from orchestrator.journal.job_record import AttemptHistory, IdleKind, IdlePeriod, Record

CANCEL, RESUME, RESTART = "cancel", "resume", "restart"
"""Causes of losses that no failure has: a person wanted the end, or the work was done. Of the first two, repeated steps are the only loss."""


class TimeKind(str, enum.Enum):
    """Kind of a rank's time; as text its value."""

    __str__ = str.__str__

    QUEUED = "queued"  # waiting for machines
    STARTUP = "startup"  # agents, setup, imports, rendezvous, up to the first new step
    PRODUCTIVE = "productive"  # steps that were kept
    WASTED = "wasted"  # steps that were repeated after a restart
    CHECKPOINT = "checkpoint"  # no steps because of a checkpoint that was kept
    DETECTING = "detecting"  # from the last progress to the verdict
    RECOVERING = "recovering"  # from the verdict to the first new step
    STOPPING = "stopping"
    IDLE = "idle"  # spares


STEPPING = (TimeKind.PRODUCTIVE, TimeKind.WASTED)
WORK = (*STEPPING, TimeKind.CHECKPOINT)


@dataclass(frozen=True, slots=True)
class Loss:
    """End of an attempt, which lost time is charged to: the verdict's kind and its node, empty for none or several; without a
    verdict `cancel`, `restart` or `resume`, and no node."""

    attempt: int
    cause: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """Uninterrupted time of a rank of one kind. `attempt` is 0 before the first; times are seconds since 1970. Spares are
    numbered after the ranks."""

    rank: int
    attempt: int
    kind: TimeKind
    begin_wall_s: float
    end_wall_s: float
    # The ranks from `rank` on that did the same
    ranks: int = 1
    loss: Loss | None = None

    @property
    def rank_s(self) -> float:
        """Its seconds, of all its ranks together."""
        return self.ranks * (self.end_wall_s - self.begin_wall_s)


@dataclass(frozen=True, slots=True)
class Goodput:
    """All spans of a job, by rank and time; those of a rank follow one another without gaps but for the time between the
    job's end and a resume."""

    spans: tuple[Span, ...]
    # Of each checkpoint, where it is known; the median number of steps between two, and what one takes
    stalls_s: tuple[float, ...] = ()
    interval_steps: int = 0
    step_s: float = 0.0

    @property
    def ranks(self) -> int:
        """How many ranks have worked last."""
        return next((span.ranks for span in reversed(self.spans) if span.kind in WORK), 0)

    @property
    def work_rank_s(self) -> float:
        """The time in which ranks made steps."""
        return sum(span.rank_s for span in self.spans if span.kind in WORK)

    @property
    def failures(self) -> int:
        """How many attempts that had made steps ended by a failure."""
        worked = {span.attempt for span in self.spans if span.kind in WORK}
        return sum(one.attempt in worked and one.cause not in (CANCEL, RESUME, RESTART) for one in self.losses())

    def rank_seconds(self) -> dict[TimeKind, float]:
        """Return the sum of all ranks' seconds by kind; every kind is there."""
        sums = dict.fromkeys(TimeKind, 0.0)
        for span in self.spans:
            sums[span.kind] += span.rank_s
        return sums

    @property
    def ratio(self) -> float | None:
        """The productive share of all time but that of spares, 0 to 1; None where no step was made."""
        sums = self.rank_seconds()
        has_steps = sums[TimeKind.PRODUCTIVE] + sums[TimeKind.WASTED] > 0
        return sums[TimeKind.PRODUCTIVE] / (sum(sums.values()) - sums[TimeKind.IDLE]) if has_steps else None

    def losses(self) -> dict[Loss, float]:
        """Return the rank-seconds that each failure cost, in order."""
        sums: dict[Loss, float] = {}
        for span in self.spans:
            if span.loss is not None:
                sums[span.loss] = sums.get(span.loss, 0.0) + span.rank_s
        return sums

    def since(self, wall_s: float) -> Goodput:
        """Return the goodput after a time."""
        later = (span for span in self.spans if span.end_wall_s > wall_s)
        return replace(self, spans=tuple(replace(span, begin_wall_s=max(span.begin_wall_s, wall_s)) for span in later))


def read(job: JobDir, submitted_wall_s: float) -> Goodput:
    """Return how the ranks of a job spent their time, with equal ranks in one span. A running job is counted up to its
    supervisor's last entry. Raises JournalError when the journal is damaged."""
    record = facts_file.read(job)
    with journal_file.checked_replay(job.journal):
        return from_record(record, submitted_wall_s)


def from_record(record: Record, submitted_wall_s: float | None = None) -> Goodput:
    """Return the same for a journal that was read. A running job is counted up to its last entry."""
    if record.latest is None:
        return Goodput(())
    until_at = record.latest.at
    if (
        record.idle_periods
        and record.idle_periods[-1].kind is IdleKind.OVER
        and record.idle_periods[-1].until_at is None
    ):
        until_at = record.idle_periods[-1].since_at
    builder = _TimelineBuilder(record, submitted_wall_s)
    builder.add_until(TimeKind.QUEUED, record.attempts[0].begun.at if record.attempts else until_at)
    kept_steps = _kept_steps(record.attempts)
    for number, attempt in enumerate(record.attempts):
        builder.begin_attempt(attempt)
        after = record.attempts[number + 1] if number + 1 < len(record.attempts) else None
        next_at = after.begun.at if after is not None else until_at
        done_at = record.facts.ended_well_at if after is None and record.facts.are_ranks_done else None
        _add_work(builder, attempt, next_at, kept_steps[number], done_at)
        _add_end(builder, attempt, next_at, continues=after is not None or record.facts.end is None)
    made = sum(one.last_step - one.base_step for one in record.attempts if one.last_step is not None)
    work_s = sum(span.end_wall_s - span.begin_wall_s for span in builder.spans if span.kind in STEPPING)
    gaps = [b - a for one in record.attempts for a, b in itertools.pairwise([0, *sorted(one.stalls)])]
    return Goodput(
        (*builder.spans, *_idle(record, builder.clock, until_at)),
        tuple(stall_s for one in record.attempts for _, stall_s in one.stalls.values()),
        sorted(gaps)[len(gaps) // 2] if gaps else 0,
        work_s / made if made > 0 else 0.0,
    )


class _WallClock:
    """Wall-clock time at each time of the job clock: as it was when the attempt began, or at the end. If the clock was set
    back since the previous attempt, the job clock counts."""

    def __init__(self, record: Record) -> None:
        assert record.latest is not None
        self._ats: list[float] = []
        self._walls_s: list[float] = []
        for at, wall_s in [(attempt.begun.at, attempt.began_wall_s) for attempt in record.attempts]:
            self._add_point(at, wall_s)
        self._add_point(record.latest.at, record.latest.wall_s)

    def _add_point(self, at: float, wall_s: float) -> None:
        wall_s = max(wall_s, self.wall_s(at)) if self._ats else wall_s
        self._ats.append(at)
        self._walls_s.append(wall_s)

    def wall_s(self, at: float) -> float:
        """Return seconds since 1970."""
        last = max(0, bisect.bisect_right(self._ats, at) - 1)
        return self._walls_s[last] + at - self._ats[last]

    def begin_at(self, submitted_wall_s: float | None) -> float:
        """Return when (job clock) the job was submitted: before its supervisor began, where it came to a queue."""
        if submitted_wall_s is None:
            return 0.0
        return min(0.0, self._ats[0] + submitted_wall_s - self._walls_s[0])


class _TimelineBuilder:
    """Builder of a job's spans, one after another. `failure`: what the time up to the next new step is charged to."""

    def __init__(self, record: Record, submitted_wall_s: float | None) -> None:
        self.spans: list[Span] = []
        self.clock = _WallClock(record)
        self.idle_periods = record.idle_periods
        self.failure: Loss | None = None
        self.is_fresh = True
        self._at = self.clock.begin_at(submitted_wall_s)
        self._attempt = 0
        self._ranks = record.attempts[0].ranks if record.attempts else len(record.facts.ranks)

    def begin_attempt(self, attempt: AttemptHistory) -> None:
        """Start an attempt."""
        self._attempt, self._ranks = attempt.begun.attempt, attempt.ranks

    def add_until(self, kind: TimeKind, until_at: float, loss: Loss | None = None) -> None:
        """Add time of a kind up to `until_at` (job clock), except for the idle periods."""
        for rest in self.idle_periods:
            if rest.since_at < until_at and rest.end_at > self._at:
                self._add(kind, rest.since_at, loss)
                self._add(None if rest.kind is IdleKind.OVER else TimeKind.QUEUED, min(rest.end_at, until_at), loss)
        self._add(kind, until_at, loss)

    def _add(self, kind: TimeKind | None, until_at: float, loss: Loss | None) -> None:
        if until_at <= self._at:
            return
        begin_s, end_s = self.clock.wall_s(self._at), self.clock.wall_s(until_at)
        if kind is not None and end_s > begin_s:  # seconds since 1970 have few digits behind the point
            self.spans.append(Span(0, self._attempt, kind, begin_s, end_s, self._ranks, loss))
        self._at = until_at


def _add_work(
    builder: _TimelineBuilder,
    attempt: AttemptHistory,
    next_at: float,
    kept_step: float,
    done_at: float | None,
) -> None:
    """Add the time of an attempt up to its verdict, or its end without one. `done_at`: when its last rank ended successfully;
    a script around the ranks may still run."""
    over_at, verdict = _over_at(attempt, next_at), _verdict(attempt)
    kept_share = _kept_share(attempt, kept_step)
    over_at, late_at = (over_at if done_at is None or verdict is not None else min(over_at, done_at)), over_at
    broke_at = over_at if verdict is None else min(over_at, max(attempt.begun.at, verdict.since_s))
    began_at = attempt.restart_at if kept_share is not None else None
    first = TimeKind.STARTUP if builder.is_fresh else TimeKind.RECOVERING
    builder.add_until(first, broke_at if began_at is None else min(began_at, broke_at), builder.failure)
    if began_at is not None and kept_share is not None and began_at < broke_at:
        kept_at = broke_at - (1.0 - kept_share) * (broke_at - began_at)
        for steps, (at, stall_s) in sorted(attempt.stalls.items()):
            if attempt.base_step + steps <= kept_step:
                builder.add_until(TimeKind.PRODUCTIVE, min(at, kept_at) - stall_s)
                builder.add_until(TimeKind.CHECKPOINT, min(at, kept_at))
        builder.add_until(TimeKind.PRODUCTIVE, kept_at)
        builder.add_until(TimeKind.WASTED, broke_at, _loss(attempt))
    builder.add_until(TimeKind.DETECTING, over_at, _loss(attempt))
    builder.add_until(TimeKind.STOPPING, late_at)


def _add_end(builder: _TimelineBuilder, attempt: AttemptHistory, next_at: float, continues: bool) -> None:
    """Add the time from an attempt's verdict or end up to the next attempt, or the end of the job."""
    loss = _loss(attempt)
    builder.failure = loss if loss.cause not in (CANCEL, RESUME) else None
    rest = _idle_after(builder.idle_periods, attempt, next_at)
    builder.is_fresh = rest is not None
    if rest is not None:
        builder.add_until(TimeKind.STOPPING, rest.since_at, builder.failure)
        builder.failure = None if rest.kind is IdleKind.OVER else builder.failure
        builder.add_until(TimeKind.STARTUP, next_at, builder.failure)
    elif continues and builder.failure is not None:
        builder.add_until(TimeKind.RECOVERING, next_at, builder.failure)
    else:
        builder.add_until(TimeKind.STOPPING, next_at, builder.failure)


def _over_at(attempt: AttemptHistory, next_at: float) -> float:
    """Return when (job clock) it was decided that an attempt is over."""
    ends = attempt.judged or attempt.finished or attempt.job_ended
    return next_at if ends is None else ends.at


def _verdict(attempt: AttemptHistory) -> d.Verdict | None:
    """Return the verdict on an attempt; of one that a person has ended, the hang or desync that was noticed."""
    if attempt.judged is not None:
        return attempt.judged.verdict
    noticed = [told for told in attempt.notices if told.topic in (d.NoticeTopic.HANG, d.NoticeTopic.DESYNC)]
    is_ended = attempt.finished is not None and attempt.finished.ending is not d.AttemptEnd.DONE
    return noticed[-1].verdict if noticed and is_ended and not noticed[-1].withdrawn else None


_CAUSES = {d.AttemptEnd.DONE: RESUME, d.AttemptEnd.CANCELLED: CANCEL, d.AttemptEnd.RESTART: RESTART}


def _loss(attempt: AttemptHistory) -> Loss:
    verdict = _verdict(attempt)
    if verdict is not None:
        return Loss(attempt.begun.attempt, verdict.kind.value, verdict.node)
    ending = attempt.finished.ending if attempt.finished is not None else d.AttemptEnd.DONE
    return Loss(attempt.begun.attempt, _CAUSES[ending])


def _idle_after(idle_periods: Sequence[IdlePeriod], attempt: AttemptHistory, next_at: float) -> IdlePeriod | None:
    """Return the idle period before the next attempt starts, on other machines or by a resume."""
    verdict = attempt.judged.verdict if attempt.judged is not None else None
    broke_at = verdict.since_s if verdict is not None else _over_at(attempt, next_at)
    since_at = max(attempt.begun.at, broke_at)
    later = (rest for rest in idle_periods if rest.kind is not IdleKind.HOSTS and rest.end_at >= since_at)
    return next((rest for rest in later if rest.since_at < next_at), None)


def _kept_steps(attempts: Sequence[AttemptHistory]) -> list[float]:
    """Return for each attempt the step up to which no later attempt repeated its steps. A checkpoint with an unknown step is
    assumed to repeat none."""
    limits, least = [], math.inf
    for attempt in reversed(attempts):
        limits.append(least)
        resume = attempt.begun.resume
        if resume is None or resume.step is not None or attempt.base_step:
            least = min(least, attempt.base_step)
    return limits[::-1]


def _kept_share(attempt: AttemptHistory, kept_step: float) -> float | None:
    """Return the share of an attempt's steps that was kept; None if it made none."""
    if attempt.last_step is None:
        return None
    made = max(1, attempt.last_step - attempt.base_step)
    return min(1.0, max(0.0, (kept_step - attempt.base_step) / made))


def _idle(record: Record, clock: _WallClock, until_at: float) -> Iterator[Span]:
    """Yield the time of spares."""
    first = max((attempt.ranks for attempt in record.attempts), default=0)
    begun = [attempt.begun.at for attempt in record.attempts]
    for (at, slots), (end_at, _) in itertools.pairwise([*record.spares, (until_at, 0)]):
        begin_s, end_s = clock.wall_s(at), clock.wall_s(end_at)
        if slots and end_s > begin_s:
            number = record.attempts[max(0, bisect.bisect_right(begun, at) - 1)].begun.attempt
            yield Span(first, number, TimeKind.IDLE, begin_s, end_s, slots)
