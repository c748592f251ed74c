"""Record of a job, built from its journal entry by entry: the facts, the history of each attempt, the reports received.

Pure, and plain data: it can be saved at one position of the journal and continued from there, see `facts_file`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace

from orchestrator.brain.fold_events import fold
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts, News
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.scheduling import placement
from orchestrator.core.wire import orders, reports
from orchestrator.journal import journal_file
from orchestrator.journal.journal_file import ClockStamp, JournalEntry

SPARE_NEWS = (
    e.AgentUp, e.AgentDied, e.AgentDisconnected, e.AllocationBegan, d.BeginAttempt, d.Place, d.EndJob, orders.Dismiss,
)  # fmt: skip
"""News and orders after which other nodes may be spares."""


class IdleKind(enum.Enum):
    """Why a job had no machines."""

    HOSTS = "hosts"  # other jobs had them
    QUEUE = "queue"  # between two allocations
    OVER = "over"  # the job had ended, and was resumed later


@dataclass(slots=True)
class IdlePeriod:
    """Period in which a job had no machines, by the job clock; `until_at` is None while it lasts."""

    kind: IdleKind
    since_at: float
    until_at: float | None = None

    @property
    def end_at(self) -> float:
        """When it ended, infinite while it lasts."""
        return math.inf if self.until_at is None else self.until_at


@dataclass(slots=True)
class AttemptHistory:
    """One attempt as the post-mortem shows it: decisions and observations. `_wall_s`: seconds since 1970; `_at`: job clock;
    steps are the job's."""

    begun: d.BeginAttempt
    began_wall_s: float
    ranks: int = 0
    # Less than the step of the checkpoint once its script is seen to begin at another one
    base_step: int = 0
    # What its ranks had read at their first step; None: not known
    read: e.CheckpointRead | None = None
    ended_wall_s: float | None = None
    first_step_at: float | None = None
    # When its ranks had formed their process group; None: not known
    group_at: float | None = None
    running_at: float | None = None
    last_step: int | None = None
    judged: d.Judge | None = None
    finished: d.Finish | None = None  # without a verdict
    job_ended: d.EndJob | None = None
    requeued_at: float | None = None
    queued_s: float | None = None  # how long the job then waited in the queue for other nodes
    notices: list[d.Notice] = field(default_factory=list)
    # The last suspicion, if no step was made after it
    suspected: d.Notice | None = None
    # The ways in which nodes have started their ranks, each with whether as forks
    starts: dict[str, bool] = field(default_factory=dict)
    # Ranks that ended with a code other than 0 after they were told to stop, each with its node
    late_exits: list[tuple[str, reports.Exited]] = field(default_factory=list)
    # By the attempt's steps at a checkpoint: when it was closed (job clock), and for how long ranks made no steps because of it
    stalls: dict[int, tuple[float, float]] = field(default_factory=dict)

    def wall_s(self, at: float) -> float:
        """Return a time (job clock) of the attempt in seconds since 1970."""
        return self.began_wall_s + at - self.begun.at

    @property
    def restart_at(self) -> float | None:
        """When the attempt began to work (job clock): at its first step, or at its ranks' start if it makes no
        steps."""
        return self.first_step_at if self.first_step_at is not None else self.running_at


@dataclass(slots=True)
class Record:
    """Result of reading a journal."""

    facts: Facts = field(default_factory=Facts)
    attempts: list[AttemptHistory] = field(default_factory=list)
    idle_periods: list[IdlePeriod] = field(default_factory=list)
    # When the number of spare slots changed (job clock), and to how many: what spares could run in ranks
    spares: list[tuple[float, int]] = field(default_factory=list)
    heartbeat_at: dict[str, float] = field(default_factory=dict)  # see `Brain`
    requeue: d.Requeue | None = None  # was decided, and no allocation has begun since
    last_report: dict[str, int] = field(default_factory=dict)  # the last reliable report, by incarnation
    last_n: int = 0  # the number of the last entry
    latest: ClockStamp | None = None

    def learn(self, entry: JournalEntry) -> None:
        """Take in the next entry of the journal."""
        before_at = self.facts.last_event_at
        self._record_entry(entry)
        _extend_history(self.attempts, entry)
        fold(self.facts, entry.news)
        self._record_idle(entry.news, before_at)
        content = journal_file.unwrap_message(entry.news)
        if isinstance(content, SPARE_NEWS):
            self._record_spares()
        if isinstance(content, d.BeginAttempt):
            self.attempts[-1].ranks = len(self.facts.ranks)
        # The facts may know all of several heartbeats before the first is entered: each counts for what it says.
        if not isinstance(content, reports.Heartbeat) or any(rank.steps for rank in content.ranks):
            self.keep_up(entry.news.at)
        if isinstance(content, reports.GpusChanged):
            self._amend_verdict()
        ends = isinstance(content, (reports.Stopped, reports.Exited, d.Judge, d.EndJob))
        if ends and (attempt := self._current()) is not None:
            attempt.ended_wall_s = entry.wall_s

    def keep_up(self, at: float) -> None:
        """Take the attempt's start and steps from the facts, as they are `at` (job clock)."""
        attempt, current = self._current(), self.facts.attempt
        if attempt is None or current is None:
            return
        attempt.running_at = current.running_at
        # It changes once the script is seen to have started from scratch.
        attempt.base_step = current.base_step
        if self.facts.steps_made:
            step = attempt.base_step + self.facts.steps_made
            if attempt.suspected is not None and step != attempt.last_step and at > attempt.suspected.at:
                attempt.suspected = None
            attempt.last_step = step
            if attempt.first_step_at is None:
                attempt.first_step_at = at
                attempt.group_at = max((rank.group_at for rank in self.facts.ranks.values()), default=0.0) or None

    @property
    def is_first_step(self) -> bool:
        """Return whether an attempt has made its first step and the journal does not say so yet: its time is to be
        journaled."""
        attempt = self._current()
        if attempt is None or attempt.first_step_at is not None:
            return False
        return self.facts.steps_made > 0

    def _current(self) -> AttemptHistory | None:
        current = self.facts.attempt
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and current is not None and last.begun.attempt == current.number else None

    def _amend_verdict(self) -> None:
        """Take the verdict on the attempt from the facts: a sick GPU that was seen late is evidence as well."""
        attempt, current = self._current(), self.facts.attempt
        if attempt is not None and attempt.judged is not None and current is not None and current.verdict is not None:
            attempt.judged = replace(attempt.judged, verdict=current.verdict)

    def _record_idle(self, news: News, before_at: float) -> None:
        """Record whether the job has machines. `before_at`: the previous contact; an allocation that was replaced without notice
        was lost about then."""
        facts, at = self.facts, self.facts.last_event_at
        last = self.idle_periods[-1] if self.idle_periods and self.idle_periods[-1].until_at is None else None
        kind = self._idle_kind()
        if last is not None and last.kind is not kind:
            last.until_at = at
        if kind is not None and (last is None or last.kind is not kind):
            self.idle_periods.append(IdlePeriod(kind, at))
        is_replaced = facts.attempt is not None and facts.attempt.allocation_lost_at == news.at
        if last is None and isinstance(news, e.AllocationBegan) and is_replaced:
            self.idle_periods.append(IdlePeriod(IdleKind.QUEUE, before_at, at))

    def _idle_kind(self) -> IdleKind | None:
        if self.facts.end is not None:
            return IdleKind.OVER
        if self.facts.requeued_at is not None:
            return IdleKind.QUEUE
        return IdleKind.HOSTS if placement.is_queued(self.facts) else None

    def _record_spares(self) -> None:
        """Record how many ranks the available spares could run."""
        facts = self.facts
        there = [] if facts.end is not None else facts.spares
        up = sum(node.agent_state is AgentState.UP for node in there)
        slots = up * facts.pool.ranks_each if facts.pool is not None else 0
        if slots != (self.spares[-1][1] if self.spares else 0):
            self.spares.append((facts.last_event_at, slots))

    def _record_entry(self, entry: JournalEntry) -> None:
        news = entry.news
        self.last_n = entry.n
        if self.latest is None or news.at >= self.latest.at:  # heartbeats are written late
            self.latest = ClockStamp(news.at, entry.wall_s, entry.mono_s, entry.machine)
        match news:
            case e.FromNode(node=node, report=reports.Heartbeat()):
                self.heartbeat_at.pop(node, None)
            case d.Requeue():
                self.requeue = news
            case e.AllocationBegan():
                self.requeue = None
            case _:
                pass
        if entry.seq:
            self.last_report[entry.incarnation] = entry.seq


def _extend_history(attempts: list[AttemptHistory], entry: JournalEntry) -> None:
    """Begin the history of an attempt, or extend the last one."""
    news = entry.news
    if isinstance(news, d.BeginAttempt):
        step = news.resume.step if news.resume else None
        attempts.append(AttemptHistory(news, entry.wall_s, step or 0))
    elif attempts:
        _add_to_history(attempts[-1], entry)


def _add_to_history(attempt: AttemptHistory, entry: JournalEntry) -> None:
    """Add a decision on an attempt, or a notice to people."""
    match entry.news:
        case d.Judge() as judged:
            attempt.judged = judged
        case d.Finish() as finished:
            attempt.finished = finished
        case d.EndJob() as ended:
            attempt.job_ended = ended
        case e.CheckpointChanged(at=at, save=saved) if (
            saved.stall_s is not None and saved.attempt == attempt.begun.attempt
        ):
            attempt.stalls.setdefault(saved.steps, (at, saved.stall_s))
        case e.CheckpointRead(attempt=number) as read if number == attempt.begun.attempt:
            attempt.read = read
        case e.FromNode(report=reports.Started(how=how, are_forks=are_forks)) if how:
            attempt.starts[how] = are_forks
        case e.FromNode(node=node, report=reports.Exited(ordered=True, attempt=attempt.begun.attempt) as exited) if (
            exited.code
        ):
            attempt.late_exits.append((node, exited))
        case d.Notice(topic=d.NoticeTopic.SUSPECT) as notice:  # long silences have many
            attempt.suspected = notice
        case d.Notice() as notice:
            attempt.notices.append(notice)
        case d.Requeue(at=at):
            attempt.requeued_at = at
        case e.AllocationBegan(at=at) if attempt.requeued_at is not None:
            attempt.queued_s = at - attempt.requeued_at
        case _:
            return
