"""Allocations of a queue system: how news of them is folded, the verdict when nodes are taken away, and when to
requeue.

Nodes that the queue takes away cost no budget, and an intact gang may save a checkpoint first. A job goes back to the
queue only from an allocation that ends or has too few usable nodes, and then is idle until it has another one. Nothing is
launched on nodes of an old allocation: what may still run there must be clear, as on any lost node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision, FailureCause, JobEnd, Kind, Verdict
from orchestrator.brain.model.facts import AllocationLoss, AttemptFacts, Facts, JobGoal, Phase
from orchestrator.brain.model.node_facts import AgentState, NodeFacts, Orders
from orchestrator.core.errors import Fault
from orchestrator.core.shown import Cause
from orchestrator.core.text import with_remedy

TERM_S = 2.0
"""How long after the end of a rank or a node the queue system may turn out to be the cause: it signals all processes at
once, and the supervisor has to query the reason."""

REQUEUE_S = 2.0
"""How long before the end of its allocation the job must have asked for a requeue, unless others requeued it. A
preempted job asks, too: where PreemptMode is CANCEL it would be over."""

LEAVE_S_MAX = 10.0
"""How long after the grace agents may take to say that nothing is left, before the allocation is given back."""

RETURN_S = 5.0
"""How long a supervisor that has just started waits for agents to dial before it takes them for gone."""

FRUITLESS_STAYS_MAX = 3
"""How many allocations in a row may end at the time limit without any progress."""

_KINDS = {
    Cause.CANCELLED: Kind.PREEMPTED, Cause.TIME_LIMIT: Kind.TIME_LIMIT, Cause.PREEMPTED: Kind.PREEMPTED,
    Cause.REQUEUED: Kind.PREEMPTED, Cause.NODE_LOST: Kind.NODE_LOST, Cause.FAILED: Kind.NODE_LOST,
}  # fmt: skip
_WORDS = {
    Cause.CANCELLED: "was cancelled, not by orch", Cause.TIME_LIMIT: "reaches its time limit",
    Cause.PREEMPTED: "is preempted", Cause.REQUEUED: "was requeued, not by orch",
    Cause.NODE_LOST: "has lost a node", Cause.FAILED: "has failed",
}  # fmt: skip

# Folds of events


def began(facts: Facts, news: e.AllocationBegan) -> None:
    """Fold a new allocation, of other nodes or the same: agents must be launched there again."""
    if news.allocation == facts.allocation:
        return
    attempt, before = facts.attempt, facts.allocation
    if attempt is not None and (attempt.phase is not Phase.PREPARE or attempt.placed_at is not None):
        attempt.allocation_lost_at = news.at
        if attempt.phase is not Phase.STOP:
            first = next(iter(facts.nodes), "")
            lost = f"its first node, {first}, was lost with the supervisor, or it was requeued without notice"
            unsaid = AllocationLoss(news.at, before, Cause.NODE_LOST, lost, first)
            attempt.allocation_loss = _loss_of(facts.ending) if facts.ending is not None else unsaid
    facts.allocations = (*facts.allocations, news.allocation)
    facts.allocation = news.allocation
    facts.ending = facts.requeued_at = facts.over = None
    facts.requeued = ""
    for node in facts.every_node():
        node.agent_state, node.incarnation = AgentState.ABSENT, ""
        node.ordered = Orders()
        node.forgive()


def _loss_of(ending: e.AllocationEnding) -> AllocationLoss:
    return AllocationLoss(ending.at, ending.allocation, ending.cause, ending.why, "")


def planned(facts: Facts, news: e.Planned) -> None:
    """Replace the nodes of the old allocation in the middle of a job, whose ranks are still to be judged. Old nodes
    are remembered for as long as something may run there, and at least until the next allocation."""
    assert facts.attempt is not None
    number, known = facts.attempt.number, {node.name: node for node in facts.every_node()}
    there = {plan.name for plan in news.nodes}
    facts.leaving = {
        name: node
        for name, node in known.items()
        if name not in there
        and (name in facts.nodes or node.agent_state is not AgentState.ABSENT or not node.is_clear(number))
    }
    facts.nodes = {plan.name: known.get(plan.name, NodeFacts(plan.name, ())) for plan in news.nodes}
    facts.last_places = tuple(name for name in facts.last_places if name in facts.nodes)


def ending(facts: Facts, news: e.AllocationEnding) -> None:
    """Fold the announced end of the current allocation; of an old one only a cancel counts."""
    if facts.end is not None:
        return
    if news.cause is Cause.CANCELLED:
        _cancelled(facts, news.why)
    if news.allocation == facts.allocation:
        facts.ending = news


def ended(facts: Facts, news: e.AllocationEnded) -> None:
    """Fold the end of the job in the queue. A connected agent proves the news to be stale, and so does a later allocation."""
    facts.requests = max(facts.requests, news.request)
    is_past = news.allocation in facts.allocations[:-1]
    if (
        facts.end is not None
        or is_past
        or any(node.agent_state is AgentState.UP for node in facts.nodes.values())
    ):
        return
    facts.over = news
    if news.cause is Cause.CANCELLED:
        _cancelled(facts, news.why)


def _cancelled(facts: Facts, why: str) -> None:
    facts.goal = JobGoal.CANCEL
    facts.cancelled = facts.cancelled or f"cancelled, not by orch: {why}"


# Verdict


def verdict(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict on an attempt whose nodes were taken away, or will be."""
    taken = attempt.allocation_loss or (_loss_of(facts.ending) if facts.ending is not None else None)
    if facts.queue is None or taken is None:
        return None
    # A new allocation after the end of the time means that a user wants the job to continue.
    goes_on = facts.queue.requeues_at_time_limit or attempt.allocation_lost_at is not None
    return _verdict(facts, taken, retry=taken.cause is not Cause.TIME_LIMIT or goes_on)


def _verdict(facts: Facts, taken: AllocationLoss, *, retry: bool) -> Verdict:
    kind = _KINDS[taken.cause]
    head = f"{_name(taken.allocation)} {_WORDS[taken.cause]}"
    return facts.verdict_on(
        kind, head, cause=FailureCause.ALLOCATION, node=taken.node, proof=(d.Evidence(taken.why),), end=f": {taken.why}",
        since_s=taken.at, retry=retry,
    )  # fmt: skip


def _name(allocation: str) -> str:
    return f"allocation {allocation}" if allocation else "the allocation"


def may_be_taken(facts: Facts, at_s: float, deadlines: Deadlines) -> bool:
    """Return whether the queue system may turn out to be the cause of an end at this time."""
    return facts.queue is not None and not deadlines.passed(at_s + TERM_S)


def saves(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether the gang is intact and may save a checkpoint before its nodes are taken away."""
    return facts.queue is not None and attempt.lost_its_nodes and attempt.allocation_lost_at is None


def grace_s(facts: Facts, attempt: AttemptFacts, plain_s: float) -> float:
    """Return how long ranks may take to leave: `plain_s`, or as the user wants it in a queue; less if time is short."""
    assert facts.limits is not None
    least_s = facts.limits.break_grace_s
    if facts.queue is None:
        return plain_s
    if attempt.allocation_lost_at is not None:
        return least_s
    wanted_s = facts.queue.grace_s if attempt.lost_its_nodes else plain_s
    by_s = _leave_by_s(facts)
    return wanted_s if by_s is None else min(wanted_s, max(least_s, by_s - (attempt.stop_at or 0.0)))


def _leave_by_s(facts: Facts) -> float | None:
    if facts.ending is None or facts.ending.ends_at is None:
        return None
    return facts.ending.ends_at - (0.0 if facts.ending.cause is Cause.REQUEUED else REQUEUE_S)


# Actions


def why_leave(facts: Facts, attempt: AttemptFacts) -> str:
    """Return why the job cannot continue in this allocation, which may be later than that of the attempt; empty if it can."""
    if facts.queue is None:
        return ""
    if facts.ending is not None:
        return f"{_name(facts.allocation)} {_WORDS[facts.ending.cause]}"
    if attempt.allocation_lost_at is not None:
        return ""
    if attempt.verdict is not None and attempt.verdict.signature.cause is FailureCause.PLACEMENT:
        return f"too few nodes of {_name(facts.allocation)} can be used"
    return ""


def is_short(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether a node was lost, has not come back while its ranks had to be waited for, and leaves too few."""
    verdict, pool = attempt.verdict, facts.pool
    if facts.queue is None or pool is None or attempt.allocation_lost_at is not None or verdict is None:
        return False
    if verdict.kind is not Kind.NODE_LOST:
        return False
    there = [node for node in facts.nodes.values() if not node.excluded and not _is_lost(node, attempt)]
    return len(there) < pool.nodes


def _is_lost(node: NodeFacts, attempt: AttemptFacts) -> bool:
    """Return whether a node is gone. One without ranks was not waited for: its agent may just have to be launched again."""
    lost = node.ever_started == attempt.number and node.lost_how(attempt.verdict)
    return node.agent_state is not AgentState.UP and bool(lost or node.missing)


def is_out_of_time(facts: Facts) -> bool:
    """Return whether the allocation's time limit is that of the job."""
    if facts.queue is None or facts.ending is None or facts.queue.requeues_at_time_limit:
        return False
    return facts.ending.cause is Cause.TIME_LIMIT


def is_fruitless(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether too many allocations in a row ended at their time limit and brought nothing."""
    stays = [(past.attempt, past.progressed) for past in facts.past if past.number > facts.resumed_after]
    if not stays or stays[-1][0] is not attempt:
        stays.append((attempt, facts.progressed()))
    last = stays[-FRUITLESS_STAYS_MAX:]
    return len(last) == FRUITLESS_STAYS_MAX and all(
        stay.verdict is not None and stay.verdict.kind is Kind.TIME_LIMIT and not progressed
        for stay, progressed in last
    )


def leaves(
    facts: Facts, attempt: AttemptFacts, left: Iterable[NodeFacts], grace_s: float, deadlines: Deadlines
) -> bool:
    """Return whether to stop waiting for nodes that are not clear, since the queue will clear them."""
    if not why_leave(facts, attempt):
        return False
    if not any(
        node.agent_state is AgentState.UP or not deadlines.passed(node.contact_at + RETURN_S) for node in left
    ):
        return True
    by_s = (attempt.stop_at or 0.0) + grace_s + LEAVE_S_MAX
    latest_s = _leave_by_s(facts)
    return deadlines.passed(by_s if latest_s is None else min(by_s, latest_s))


def avoid(facts: Facts) -> dict[str, str]:
    """Return the nodes that the next allocation should avoid, each with its reason."""
    verdict = facts.attempt.verdict if facts.attempt is not None else None
    too_few = verdict is not None and verdict.signature.cause is FailureCause.PLACEMENT
    reasons = {}
    for node in facts.nodes.values():
        lost = "" if node.agent_state is AgentState.UP else node.lost_how(verdict) or node.missing
        launch = node.launch_fault if too_few and node.agent_state is not AgentState.UP else None
        gone = Fault(node.name, lost) if lost else launch
        if reason := node.excluded or gone:
            reasons[node.name] = with_remedy(reason)
    return reasons


def over(facts: Facts, news: e.AllocationEnded, deadlines: Deadlines) -> list[Decision]:
    """Return the end of a job that is no longer in any queue: its ranks have ended with their nodes."""
    attempt, cancelled = facts.attempt, facts.goal is JobGoal.CANCEL
    why = facts.cancelled if cancelled else f"{_name(news.allocation)} {_WORDS[news.cause]}: {news.why}"
    if attempt is None:
        return [d.EndJob(deadlines.now_s, why, 0, JobEnd.CANCELLED if cancelled else JobEnd.FAILED)]
    if attempt.phase is Phase.STOP:
        done = attempt.verdict is None and facts.done
        end = JobEnd.SUCCEEDED if done else JobEnd.CANCELLED if cancelled else JobEnd.FAILED
        return [
            d.EndJob(deadlines.now_s, "every rank exited with code 0" if done else why, attempt.number, end)
        ]
    if cancelled or facts.done:
        if facts.done:
            return [d.Finish(deadlines.now_s, "every rank exited with code 0", attempt.number)]
        return [d.Finish(deadlines.now_s, why, attempt.number, d.Ending.CANCELLED)]
    taken = AllocationLoss(news.at, news.allocation, news.cause, news.why, "")
    judged = _verdict(facts, taken, retry=False)
    return [d.Judge(deadlines.now_s, judged.summary, attempt.number, judged)]


FOLDS: dict[type[Any], Any] = {
    e.AllocationBegan: began,
    e.AllocationEnding: ending,
    e.AllocationEnded: ended,
}
