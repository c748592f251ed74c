"""What must hold of a job in a queue? The books and oracles of nights in which a queue system lends the nodes.

Written from the contract: they know the journal and the physical world, and nothing of the facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core.status_types import AllocationEndCause
from orchestrator.core.wire import orders
from orchestrator.journal.journal_file import unwrap_message

if TYPE_CHECKING:
    from .ledger import Ledger
    from .world import World

KINDS = {
    AllocationEndCause.PREEMPTED: d.VerdictKind.PREEMPTED, AllocationEndCause.REQUEUED: d.VerdictKind.PREEMPTED, AllocationEndCause.TIME_LIMIT: d.VerdictKind.TIME_LIMIT,
    AllocationEndCause.NODE_LOST: d.VerdictKind.NODE_LOST, AllocationEndCause.FAILED: d.VerdictKind.NODE_LOST,
}  # fmt: skip

SHORT_S = 8.0
"""So near the end of an allocation nobody has to wait for ranks any more."""

JUDGED_S_MAX = 15.0
"""How long after the allocation's end is told a verdict on a running attempt may take."""

ROUNDING_S = 1e-3


class QueueBook:
    """Books and oracles of one night in a queue."""

    def __init__(self, ledger: Ledger, world: World) -> None:
        self.ledger = ledger
        self.world = world
        self.allocation = ""
        self.past: set[str] = set()
        self.ending: e.AllocationEnding | None = None
        self.is_over = False
        self.resting = self.judged = self.placed = False
        self.entered = False  # another allocation than the one that the attempt had its nodes of
        self.stopping_s = 0.0
        self.up: set[str] = set()
        self.heard: set[AllocationEndCause] = set()  # of what allocations were said to end
        self.clear: dict[str, int] = {}

    @property
    def is_ending(self) -> bool:
        return self.ending is not None or self.is_over

    def _must(self, holds: bool, what: str) -> None:
        self.ledger.must(holds, what)

    def written(self, news: News) -> None:
        """Judge a line of the journal as far as the queue goes, and enter it."""
        match news:
            case e.AllocationBegan():
                self._must(news.allocation != self.allocation, f"it is known: {news}")
                self.past.add(self.allocation)
                self.allocation, self.ending, self.is_over = news.allocation, None, False
                self.resting, self.entered = False, self.placed or self.judged
            case e.AllocationEnding():
                self.ending = news
                self.heard.add(news.cause)
                self._cancelled(news.cause)
            case e.AllocationEnded():
                if not self.up and self.ledger.end is None and news.allocation not in self.past:
                    self.is_over = True
                    self.heard.add(news.cause)
                    self._cancelled(news.cause)
            case e.SupervisorStarted():
                self.up.clear()
            case e.AgentUp():
                self.up.add(news.node)
            case e.AgentDisconnected() | e.AgentDied():
                self.up.discard(news.node)
            case e.ResumeRequested() if self.ledger.end is not None:
                self.is_over = False
            case _:
                self._decided(news)

    def _cancelled(self, cause: AllocationEndCause) -> None:
        if cause is AllocationEndCause.CANCELLED and self.ledger.end is None:
            self.ledger.cancelled = True

    def _decided(self, news: News) -> None:
        if not isinstance(news, d.Decision):
            return
        self._must(
            not self.resting or isinstance(unwrap_message(news), orders.Dismiss | d.EndJob),
            f"it waits in the queue: {news}",
        )
        match news:
            case d.BeginAttempt():
                self.judged = self.entered = self.placed = False
            case d.Place():
                self.placed = True
            case d.Launch() | d.To(order=orders.Prepare() | orders.Start()):
                lent = [plan.name for plan in self.world.plan()]
                self._must(news.node in lent, f"it is not ours: {news}")
            case d.To(order=orders.Stop() as stop):
                self._stops(news.at, stop)
            case d.Finish():
                self.judged, self.stopping_s = True, news.at
            case d.Judge():
                self.judged, self.stopping_s = True, news.at
                self._judges(news.verdict)
            case d.Requeue():
                self._requeues(news)
            case d.EndJob():
                self.resting = False
                by_word = news.why.startswith("allocation ")
                self._must(self.is_over or not by_word, f"nobody has said so of {self.allocation}: {news}")
            case _:
                pass

    def _judges(self, verdict: d.Verdict) -> None:
        """What is put down to the queue is what was heard of it, or a supervisor that was lost."""
        if verdict.signature.cause is not d.FailureCause.ALLOCATION:
            self._must(verdict.kind is not d.VerdictKind.PREEMPTED, f"nobody preempted it: {verdict}")
            return
        late = verdict.kind is d.VerdictKind.TIME_LIMIT and not self.entered
        lease = self.world.night.lease
        assert lease is not None
        self._must(not late or verdict.retry == (lease.requeues and not self.is_over), f"goes on: {verdict}")
        known = {KINDS[cause] for cause in self.heard if cause in KINDS}
        lost = verdict.kind is d.VerdictKind.NODE_LOST and self.entered
        self._must(verdict.kind in known or lost, f"not heard, only {known}: {verdict}")

    def _stops(self, at: float, stop: orders.Stop) -> None:
        """A whole gang has its grace, as far as there is time; and is told why."""
        attempt, lease = self.ledger.tries[-1], self.world.night.lease
        assert lease is not None
        verdict = attempt.verdict
        free = verdict is not None and verdict.kind in (d.VerdictKind.PREEMPTED, d.VerdictKind.TIME_LIMIT)
        here = free and not self.entered
        self._must(stop.may_save == here, f"whole {here}: {stop}")
        ends_at = self.ending.ends_at if self.ending is not None else None
        if here and ends_at is None:
            self._must(stop.grace_s == lease.grace_s, f"the grace is {lease.grace_s}: {stop}")
        if ends_at is not None and not self.entered:
            least_s = self.world.night.limits.break_grace_s
            since_s = min(at, self.stopping_s)  # an order that is given again ends nothing later
            most_s = min(lease.grace_s, max(least_s, ends_at - since_s))
            by_itself = self.ending is not None and self.ending.cause is AllocationEndCause.REQUEUED
            whole_s = not here or not by_itself or abs(stop.grace_s - most_s) < ROUNDING_S
            self._must(whole_s, f"{most_s:.1f} s, since the queue puts it back by itself: {stop}")
            self._must(stop.grace_s <= max(least_s, ends_at - since_s), f"until {ends_at:.1f}: {stop}")

    def _requeues(self, decision: d.Requeue) -> None:
        """Only from an allocation that ends or has too few nodes, and only by a job that is to go on."""
        attempt, clock = self.ledger.tries[-1], self.world.clock
        cause = attempt.verdict.signature.cause if attempt.verdict is not None else None
        placement = cause is d.FailureCause.PLACEMENT
        lost = attempt.verdict is not None and attempt.verdict.kind is d.VerdictKind.NODE_LOST
        out = self.ledger.pool.barred if self.ledger.pool is not None else {}
        few = len(self.up - set(out)) < self.world.nodes
        could_leave = (placement or (lost and few)) and not self.entered
        self._must(self.ending is not None or could_leave, f"it could stay: {decision}")
        self._must(not self.ledger.cancelled, f"it was cancelled: {decision}")
        asked = attempt.number == self.ledger.restarted  # by the user
        judged = attempt.verdict is not None or asked or self.ledger.forgiven == len(self.ledger.tries)
        self._must(judged, f"for no reason: {decision}")
        lease = self.world.night.lease
        assert lease is not None
        late = self.ending is not None and self.ending.cause is AllocationEndCause.TIME_LIMIT and not lease.requeues
        self._must(not late, f"its time is over: {decision}")
        ends_at = self.ending.ends_at if self.ending is not None else None
        waited_s = clock - self.stopping_s + ROUNDING_S
        near = ends_at is not None and clock >= ends_at - SHORT_S
        for host in self.world.hosts:
            mortal = [rank for rank in host.living() if not rank.immortal_until_s]
            saving = bool(mortal) and host.name in self.up and host.reaches_boss()
            self._must(not saving or near or waited_s >= lease.grace_s, f"{host.name} still saves itself: {decision}")
        bad = [name for name in decision.avoid if name in self.up]
        for name in bad:
            barred = self.ledger.pool is not None and name in self.ledger.pool.barred
            self._must(barred, f"{name} is good: {decision}")
        self.resting = True

    def looked(self) -> None:
        """Nothing is to be done now: the end of the allocation was not overheard."""
        runs = bool(self.ledger.tries) and not self.judged and self.ledger.end is None
        self._must(not (runs and self.ending is not None), f"it goes on in what ends: {self.ending}")
