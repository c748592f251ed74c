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
from orchestrator.brain.model.decisions import Decision, FailureCause, JobEnd, Verdict, VerdictKind
from orchestrator.brain.model.facts import AllocationLoss, AttemptFacts, Facts, JobGoal, Phase
from orchestrator.brain.model.node_facts import AgentState, NodeFacts, Orders
from orchestrator.core.errors import Fault
from orchestrator.core.status_types import AllocationEndCause
from orchestrator.core.text import what_and_fix

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

FRUITLESS_ALLOCATIONS_MAX = 3
"""How many allocations in a row may end at the time limit without any progress."""

_KINDS = {
    AllocationEndCause.CANCELLED: VerdictKind.PREEMPTED, AllocationEndCause.TIME_LIMIT: VerdictKind.TIME_LIMIT, AllocationEndCause.PREEMPTED: VerdictKind.PREEMPTED,
    AllocationEndCause.REQUEUED: VerdictKind.PREEMPTED, AllocationEndCause.NODE_LOST: VerdictKind.NODE_LOST, AllocationEndCause.FAILED: VerdictKind.NODE_LOST,
}  # fmt: skip
_CAUSE_TEXTS = {
    AllocationEndCause.CANCELLED: "was cancelled, not by orch", AllocationEndCause.TIME_LIMIT: "reaches its time limit",
    AllocationEndCause.PREEMPTED: "is preempted", AllocationEndCause.REQUEUED: "was requeued, not by orch",
    AllocationEndCause.NODE_LOST: "has lost a node", AllocationEndCause.FAILED: "has failed",
}  # fmt: skip

# Folds of events


def fold_allocation_began(facts: Facts, news: e.AllocationBegan) -> None:
    """Fold a new allocation, of other nodes or the same: agents must be launched there again."""
    if news.allocation == facts.allocation:
        return
    attempt, previous = facts.attempt, facts.allocation
    if attempt is not None and (attempt.phase is not Phase.PREPARE or attempt.placed_at is not None):
        attempt.allocation_lost_at = news.at
        if attempt.phase is not Phase.STOP:
            first = next(iter(facts.nodes), "")
            loss_text = f"its first node, {first}, was lost with the supervisor, or it was requeued without notice"
            assumed_loss = AllocationLoss(news.at, previous, AllocationEndCause.NODE_LOST, loss_text, first)
            attempt.allocation_loss = (
                _to_allocation_loss(facts.allocation_ending) if facts.allocation_ending is not None else assumed_loss
            )
    facts.allocations = (*facts.allocations, news.allocation)
    facts.allocation = news.allocation
    facts.allocation_ending = facts.requeued_at = facts.allocation_end = None
    facts.requeue_reason = ""
    for node in facts.every_node():
        node.agent_state, node.incarnation = AgentState.ABSENT, ""
        node.ordered = Orders()
        node.clear_faults()


def _to_allocation_loss(ending: e.AllocationEnding) -> AllocationLoss:
    return AllocationLoss(ending.at, ending.allocation, ending.cause, ending.why, "")


def fold_planned(facts: Facts, news: e.Planned) -> None:
    """Replace the nodes of the old allocation in the middle of a job, whose ranks are still to be judged. Old nodes
    are remembered for as long as something may run there, and at least until the next allocation."""
    assert facts.attempt is not None
    number, nodes_known = facts.attempt.number, {node.name: node for node in facts.every_node()}
    names_planned = {plan.name for plan in news.nodes}
    facts.leaving = {
        name: node
        for name, node in nodes_known.items()
        if name not in names_planned
        and (name in facts.nodes or node.agent_state is not AgentState.ABSENT or not node.is_clear(number))
    }
    facts.nodes = {plan.name: nodes_known.get(plan.name, NodeFacts(plan.name, ())) for plan in news.nodes}
    facts.last_hosts = tuple(name for name in facts.last_hosts if name in facts.nodes)


def fold_allocation_ending(facts: Facts, news: e.AllocationEnding) -> None:
    """Fold the announced end of the current allocation; of an old one only a cancel counts."""
    if facts.end is not None:
        return
    if news.cause is AllocationEndCause.CANCELLED:
        _note_cancelled(facts, news.why)
    if news.allocation == facts.allocation:
        facts.allocation_ending = news


def fold_allocation_ended(facts: Facts, news: e.AllocationEnded) -> None:
    """Fold the end of the job in the queue. A connected agent proves the news to be stale, and so does a later allocation."""
    facts.last_request = max(facts.last_request, news.request)
    is_past = news.allocation in facts.allocations[:-1]
    if facts.end is not None or is_past or any(node.agent_state is AgentState.UP for node in facts.nodes.values()):
        return
    facts.allocation_end = news
    if news.cause is AllocationEndCause.CANCELLED:
        _note_cancelled(facts, news.why)


def _note_cancelled(facts: Facts, why: str) -> None:
    facts.goal = JobGoal.CANCEL
    facts.cancel_reason = facts.cancel_reason or f"cancelled, not by orch: {why}"


# Verdict


def verdict(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict on an attempt whose nodes were taken away, or will be."""
    loss = attempt.allocation_loss or (
        _to_allocation_loss(facts.allocation_ending) if facts.allocation_ending is not None else None
    )
    if facts.queue is None or loss is None:
        return None
    # A new allocation after the end of the time means that a user wants the job to continue.
    may_continue = facts.queue.requeues_at_time_limit or attempt.allocation_lost_at is not None
    return _verdict(facts, loss, retry=loss.cause is not AllocationEndCause.TIME_LIMIT or may_continue)


def _verdict(facts: Facts, loss: AllocationLoss, *, retry: bool) -> Verdict:
    kind = _KINDS[loss.cause]
    head = f"{_allocation_text(loss.allocation)} {_CAUSE_TEXTS[loss.cause]}"
    return facts.verdict_on(
        kind, head, cause=FailureCause.ALLOCATION, node=loss.node, proof=(d.Evidence(loss.why),), end=f": {loss.why}",
        since_s=loss.at, retry=retry,
    )  # fmt: skip


def _allocation_text(allocation: str) -> str:
    return f"allocation {allocation}" if allocation else "the allocation"


def may_be_queue_action(facts: Facts, at_s: float, deadlines: Deadlines) -> bool:
    """Return whether the queue system may turn out to be the cause of an end at this time."""
    return facts.queue is not None and not deadlines.passed(at_s + TERM_S)


def may_save_first(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether the gang is intact and may save a checkpoint before its nodes are taken away."""
    return facts.queue is not None and attempt.is_preempted and attempt.allocation_lost_at is None


def grace_s(facts: Facts, attempt: AttemptFacts, plain_s: float) -> float:
    """Return how long ranks may take to leave: `plain_s`, or as the user wants it in a queue; less if time is short."""
    assert facts.limits is not None
    grace_s_min = facts.limits.break_grace_s
    if facts.queue is None:
        return plain_s
    if attempt.allocation_lost_at is not None:
        return grace_s_min
    user_grace_s = facts.queue.grace_s if attempt.is_preempted else plain_s
    by_s = _leave_by_s(facts)
    return user_grace_s if by_s is None else min(user_grace_s, max(grace_s_min, by_s - (attempt.stop_at or 0.0)))


def _leave_by_s(facts: Facts) -> float | None:
    if facts.allocation_ending is None or facts.allocation_ending.ends_at is None:
        return None
    return facts.allocation_ending.ends_at - (
        0.0 if facts.allocation_ending.cause is AllocationEndCause.REQUEUED else REQUEUE_S
    )


# Actions


def leave_reason(facts: Facts, attempt: AttemptFacts) -> str:
    """Return why the job cannot continue in this allocation, which may be later than that of the attempt; empty if it can."""
    if facts.queue is None:
        return ""
    if facts.allocation_ending is not None:
        return f"{_allocation_text(facts.allocation)} {_CAUSE_TEXTS[facts.allocation_ending.cause]}"
    if attempt.allocation_lost_at is not None:
        return ""
    if attempt.verdict is not None and attempt.verdict.signature.cause is FailureCause.PLACEMENT:
        return f"too few nodes of {_allocation_text(facts.allocation)} can be used"
    return ""


def is_short(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether a node was lost, has not come back while its ranks had to be waited for, and leaves too few."""
    verdict, pool = attempt.verdict, facts.pool
    if facts.queue is None or pool is None or attempt.allocation_lost_at is not None or verdict is None:
        return False
    if verdict.kind is not VerdictKind.NODE_LOST:
        return False
    usable = [node for node in facts.nodes.values() if not node.excluded and not _is_lost(node, attempt)]
    return len(usable) < pool.nodes


def _is_lost(node: NodeFacts, attempt: AttemptFacts) -> bool:
    """Return whether a node is gone. One without ranks was not waited for: its agent may just have to be launched again."""
    lost = node.may_run_attempt == attempt.number and node.loss_reason(attempt.verdict)
    return node.agent_state is not AgentState.UP and bool(lost or node.lost_earlier)


def is_out_of_time(facts: Facts) -> bool:
    """Return whether the allocation's time limit is that of the job."""
    if facts.queue is None or facts.allocation_ending is None or facts.queue.requeues_at_time_limit:
        return False
    return facts.allocation_ending.cause is AllocationEndCause.TIME_LIMIT


def is_fruitless(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether too many allocations in a row ended at their time limit and brought nothing."""
    results = [(past.attempt, past.has_progressed) for past in facts.past_attempts if past.number > facts.resumed_after]
    if not results or results[-1][0] is not attempt:
        results.append((attempt, facts.has_progressed()))
    last = results[-FRUITLESS_ALLOCATIONS_MAX:]
    return len(last) == FRUITLESS_ALLOCATIONS_MAX and all(
        stay.verdict is not None and stay.verdict.kind is VerdictKind.TIME_LIMIT and not progressed
        for stay, progressed in last
    )


def may_leave_unclear(
    facts: Facts, attempt: AttemptFacts, unclear: Iterable[NodeFacts], grace_s: float, deadlines: Deadlines
) -> bool:
    """Return whether to stop waiting for nodes that are not clear, since the queue will clear them."""
    if not leave_reason(facts, attempt):
        return False
    if not any(
        node.agent_state is AgentState.UP or not deadlines.passed(node.contact_at + RETURN_S) for node in unclear
    ):
        return True
    by_s = (attempt.stop_at or 0.0) + grace_s + LEAVE_S_MAX
    latest_s = _leave_by_s(facts)
    return deadlines.passed(by_s if latest_s is None else min(by_s, latest_s))


def nodes_to_avoid(facts: Facts) -> dict[str, str]:
    """Return the nodes that the next allocation should avoid, each with its reason."""
    verdict = facts.attempt.verdict if facts.attempt is not None else None
    too_few = verdict is not None and verdict.signature.cause is FailureCause.PLACEMENT
    reasons = {}
    for node in facts.nodes.values():
        lost = "" if node.agent_state is AgentState.UP else node.loss_reason(verdict) or node.lost_earlier
        launch = node.launch_fault if too_few and node.agent_state is not AgentState.UP else None
        gone = Fault(node.name, lost) if lost else launch
        if reason := node.excluded or gone:
            reasons[node.name] = what_and_fix(reason)
    return reasons


def decide_allocation_ended(facts: Facts, news: e.AllocationEnded, deadlines: Deadlines) -> list[Decision]:
    """Return the end of a job that is no longer in any queue: its ranks have ended with their nodes."""
    attempt, cancelled = facts.attempt, facts.goal is JobGoal.CANCEL
    why = (
        facts.cancel_reason
        if cancelled
        else f"{_allocation_text(news.allocation)} {_CAUSE_TEXTS[news.cause]}: {news.why}"
    )
    if attempt is None:
        return [d.EndJob(deadlines.now_s, why, 0, JobEnd.CANCELLED if cancelled else JobEnd.FAILED)]
    if attempt.phase is Phase.STOP:
        done = attempt.verdict is None and facts.is_done
        end = JobEnd.SUCCEEDED if done else JobEnd.CANCELLED if cancelled else JobEnd.FAILED
        return [d.EndJob(deadlines.now_s, "every rank exited with code 0" if done else why, attempt.number, end)]
    if cancelled or facts.is_done:
        if facts.is_done:
            return [d.Finish(deadlines.now_s, "every rank exited with code 0", attempt.number)]
        return [d.Finish(deadlines.now_s, why, attempt.number, d.AttemptEnd.CANCELLED)]
    loss = AllocationLoss(news.at, news.allocation, news.cause, news.why, "")
    final_verdict = _verdict(facts, loss, retry=False)
    return [d.Judge(deadlines.now_s, final_verdict.summary, attempt.number, final_verdict)]


FOLDS: dict[type[Any], Any] = {
    e.AllocationBegan: fold_allocation_began,
    e.AllocationEnding: fold_allocation_ending,
    e.AllocationEnded: fold_allocation_ended,
}
