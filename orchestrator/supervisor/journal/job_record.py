"""The record of a job: all that its journal comes to, entry by entry. The facts, the history of each attempt, the
reports received.

Pure, and plain data: it can be written down at one place of the journal and taken up from there, see `facts_file`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.brain.fold_events import fold
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.core.checkpoints.choice import Passed
from orchestrator.supervisor.journal.journal_file import Entry, Stamp


@dataclass(frozen=True, slots=True)
class Told:
    """What was reported of an attempt while it ran: an alert, or that it was resolved."""

    what: str
    kind: str
    text: str
    wall_s: float


@dataclass(slots=True)
class AttemptHistory:
    """One attempt as the post-mortem shows it. `_wall_s`: seconds since 1970; `_at`: job clock; steps are the job's."""

    attempt: int
    why: str
    began_wall_s: float
    base_step: int
    resumed_from: str | None
    ended_wall_s: float | None = None
    first_step_at: float | None = None
    running_at: float | None = None
    last_step: int | None = None
    verdict: d.Verdict | None = None
    judged_at: float | None = None
    requeued_at: float | None = None
    queued_s: float | None = None  # how long the job then waited in the queue for other nodes
    notices: list[str] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)  # the ways in which nodes have started their ranks
    job_end: str | None = None
    ended_why: str | None = None
    # Newer saves than the one it started from, each with why not
    passed: tuple[Passed, ...] = ()
    # the step of the checkpoint that it was given; `base_step` is less once its script is seen to begin at another one
    resumed_step: int | None = None
    resumed_save: int = 0

    @property
    def restart_at(self) -> float | None:
        """When the attempt began to work (job clock): at its first step, or at its ranks' start if it makes no
        steps."""
        return self.first_step_at if self.first_step_at is not None else self.running_at


@dataclass(slots=True)
class Record:
    """What a journal comes to."""

    facts: Facts = field(default_factory=Facts)
    attempts: list[AttemptHistory] = field(default_factory=list)
    beaten_at: dict[str, float] = field(default_factory=dict)  # see `Brain`
    stopped: dict[str, int] = field(default_factory=dict)  # the last attempt that each node has stopped
    requeue: d.Requeue | None = None  # was decided, and no allocation has begun since
    received: dict[str, int] = field(default_factory=dict)  # the last reliable report, by incarnation
    last_n: int = 0  # the number of the last entry
    latest: Stamp | None = None

    def learn(self, entry: Entry) -> None:
        """Take in the next entry of the journal."""
        self._note(entry)
        _tell(self.attempts, entry)
        fold(self.facts, entry.news)
        # The facts may know all of several heartbeats before the first is entered: each counts for what it says.
        if not isinstance(entry.news, e.Heartbeat) or any(rank.steps for rank in entry.news.ranks):
            self.keep_up(entry.news.at)
        ends = isinstance(entry.news, (e.Stopped, e.Exited, d.Judge, d.EndJob))
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
        if self.facts.made:
            attempt.last_step = attempt.base_step + self.facts.made
            if attempt.first_step_at is None:
                attempt.first_step_at = at

    @property
    def is_first_step(self) -> bool:
        """Tell whether an attempt has made its first step and the journal does not say so yet: its time is to be
        journaled."""
        attempt = self._current()
        if attempt is None or attempt.first_step_at is not None:
            return False
        return self.facts.made > 0

    def _current(self) -> AttemptHistory | None:
        """Return the history of the facts' current attempt."""
        current = self.facts.attempt
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and current is not None and last.attempt == current.number else None

    def _note(self, entry: Entry) -> None:
        news = entry.news
        self.last_n = entry.n
        if self.latest is None or news.at >= self.latest.at:  # heartbeats are written late
            self.latest = Stamp(news.at, entry.wall_s, entry.mono_s, entry.machine)
        match news:
            case e.Heartbeat(node=node):
                self.beaten_at.pop(node, None)
            case e.Stopped(node=node, attempt=attempt):
                self.stopped[node] = attempt
            case d.Requeue():
                self.requeue = news
            case e.AllocationBegan():
                self.requeue = None
            case _:
                pass
        if entry.seq:
            self.received[entry.incarnation] = entry.seq


def _tell(attempts: list[AttemptHistory], entry: Entry) -> None:
    """Begin the history of an attempt, or go on with the last."""
    news = entry.news
    if isinstance(news, d.BeginAttempt):
        step, path = (news.resume.step, news.resume.path) if news.resume else (None, None)
        begun = AttemptHistory(news.attempt, news.why, entry.wall_s, step or 0, path, resumed_step=step)
        begun.passed, begun.resumed_save = news.passed, news.resume.save if news.resume else 0
        attempts.append(begun)
    elif attempts:
        _add(attempts[-1], entry)


def _add(attempt: AttemptHistory, entry: Entry) -> None:
    """Keep the verdict of an attempt, alerts and remarks, and how it ended."""
    match entry.news:
        case d.Judge(at=at, verdict=verdict):
            attempt.verdict, attempt.judged_at = verdict, at
        case d.Alert(verdict=verdict):
            attempt.notices.append(verdict.summary)
            text = verdict.culprit or verdict.summary
            attempt.told.append(Told("noticed", verdict.kind.value, text, entry.wall_s))
        case d.ResolveAlert(why=why):
            attempt.told.append(Told("withdrawn", "", why, entry.wall_s))
        case e.Started(how=how) if how and how not in attempt.starts:
            attempt.starts.append(how)
        case d.Notice(why=why, withdrawn=withdrawn):
            attempt.told.append(Told("withdrawn" if withdrawn else "noticed", "", why, entry.wall_s))
        case d.Remark(why=why):
            attempt.remarks.append(why)
        case d.Finish(why=why):
            attempt.ended_why = why
        case d.Requeue(at=at):
            attempt.requeued_at = at
        case e.AllocationBegan(at=at) if attempt.requeued_at is not None:
            attempt.queued_s = at - attempt.requeued_at
        case d.EndJob(end=end):
            attempt.job_end = end.value
        case _:
            return
