"""Restart policy: whether another attempt follows, after which pause and from which checkpoint, a requeue, or the end of the job."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import JobEnd, VerdictKind
from orchestrator.brain.model.facts import AttemptFacts, Facts, JobGoal
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.scheduling import allocation, fence
from orchestrator.brain.scheduling.checkpoint_trust import (
    IGNORED_CHECKPOINT,
    IGNORED_CHECKPOINT_HINT,
    no_attempt_reason,
)
from orchestrator.core.backoff import Backoff
from orchestrator.core.checkpoints.checkpoint import CheckpointState

RESTART_REQUESTED = "a restart requested by the user"
RESUME_REQUESTED = "resumed by the user"
"""Why an attempt ends, and the next begins."""

PASSED_SHOWN = 3
"""How many checkpoints that were passed over a reason names."""

FETCH_S_MAX = 600.0
"""How long a stopped attempt waits for a checkpoint that is being fetched."""

FETCH_CANCELLED_S_MAX = 30.0
"""The same when the user cancels the job; `orch collect` fetches what is left on the hosts."""


@dataclass(frozen=True, slots=True)
class RestartAttempt:
    """Start another attempt once the job clock passes `not_before_s`."""

    not_before_s: float
    why: str


@dataclass(frozen=True, slots=True)
class RequeueJob:
    """Go back to the queue, for other nodes than those to avoid."""

    avoid: dict[str, str]
    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the job."""

    end: JobEnd
    why: str


def waits_for_checkpoint(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> bool:
    """Return whether what follows may depend on a checkpoint that is still being fetched."""
    limit_s = FETCH_CANCELLED_S_MAX if facts.goal is JobGoal.CANCEL else FETCH_S_MAX
    since_s = max(attempt.stop_at or 0.0, attempt.watched_at)
    coming = [
        checkpoint
        for checkpoint in facts.checkpoints.values()
        if checkpoint.is_in_transit
        and checkpoint.state is CheckpointState.OPEN  # a complete one in memory is used from there
        and checkpoint.attempt == attempt.number
    ]
    sending = [
        checkpoint
        for checkpoint in coming
        if all(_may_send(facts, place.host, deadlines) for place in checkpoint.locations)
    ]
    return bool(sending) and not deadlines.passed(since_s + limit_s)


def _may_send(facts: Facts, name: str, deadlines: Deadlines) -> bool:
    """Return whether the node can still send; a checkpoint on a lost node is not waited for."""
    assert facts.limits is not None
    node = facts.node(name)
    if node is None or fence.is_proven_over(facts, node, deadlines):
        return False
    return node.agent_state is AgentState.UP or not deadlines.passed(node.contact_at + facts.limits.node_timeout_s)


def decide_next(facts: Facts) -> RestartAttempt | RequeueJob | GiveUp:
    """Return what follows the current attempt, whose ranks have all ended, or will with their allocation."""
    attempt = facts.attempt
    assert attempt is not None
    outcome = _decide_restart(facts, attempt)
    if isinstance(outcome, RestartAttempt) and (why := no_attempt_reason(facts)):
        return GiveUp(JobEnd.FAILED, why)
    leave = allocation.leave_reason(facts, attempt)
    if not leave and allocation.is_short(facts, attempt):
        leave = f"too few nodes of allocation {facts.allocation} are left"
    if isinstance(outcome, GiveUp) or not leave:
        return outcome
    if allocation.is_out_of_time(facts):
        return GiveUp(JobEnd.FAILED, f"{_verdict_text(attempt)}; {leave}, and time_limit_action is fail")
    return RequeueJob(allocation.nodes_to_avoid(facts), f"{leave}; {outcome.why}")


def _decide_restart(facts: Facts, attempt: AttemptFacts) -> RestartAttempt | GiveUp:
    """Return what follows, wherever the next attempt may run."""
    assert facts.limits is not None
    verdict = attempt.verdict
    if attempt.number <= facts.resumed_after and facts.goal is JobGoal.RUN:
        return RestartAttempt(attempt.watched_at, f"{RESUME_REQUESTED}, from {_source_text(facts)}")
    if verdict is None and facts.is_done:
        return GiveUp(JobEnd.SUCCEEDED, "every rank exited with code 0")
    if facts.goal is JobGoal.CANCEL:
        return GiveUp(JobEnd.CANCELLED, facts.cancel_reason)
    if verdict is None and attempt.restart_requested:
        return RestartAttempt(attempt.watched_at, f"{RESTART_REQUESTED}, from {_source_text(facts)}")
    assert verdict is not None, "an attempt is stopped when it is done, cancelled, restarted, or judged"
    if not verdict.retry:
        return GiveUp(JobEnd.FAILED, f"{verdict.kind.value}: {verdict.summary}{_suspicion(attempt)}")
    if attempt.costs_no_restart:
        if allocation.is_fruitless(facts, attempt):
            fruitless = (
                f"{allocation.FRUITLESS_ALLOCATIONS_MAX} allocations in a row ended at the time limit without progress"
            )
            return GiveUp(JobEnd.FAILED, f"{verdict.kind.value}: {verdict.summary}; {fruitless}")
        return RestartAttempt(attempt.judged_at, _why(facts, attempt, verdict.kind, facts.restarts_spent))
    if facts.limits.restarts_max == 0:
        return GiveUp(JobEnd.FAILED, f"{verdict.kind.value}: {verdict.summary}; restart.max is 0")
    spent = facts.restarts_spent + (0 if facts.has_progressed() else 1)
    if spent > facts.limits.restarts_max:
        used = f"{facts.limits.restarts_max} of {facts.limits.restarts_max} without progress"
        return GiveUp(
            JobEnd.FAILED,
            f"{verdict.kind.value}: {verdict.summary}; the restart budget is spent: {used}{_suspicion(attempt)}",
        )
    wait_s = backoff_s(facts)
    return RestartAttempt(attempt.judged_at + wait_s, _why(facts, attempt, verdict.kind, spent))


def backoff_s(facts: Facts) -> float:
    """Return how long to wait before the next attempt: nothing after progress, else doubling with each attempt
    in a row that got nowhere, from the second on."""
    assert facts.limits is not None
    if facts.has_progressed():
        return 0.0
    in_a_row = 1
    for past in reversed(facts.past_attempts):
        if past.has_progressed or past.number <= facts.resumed_after:
            break
        in_a_row += 0 if past.attempt.costs_no_restart else 1
    return Backoff(facts.limits.backoff_s, 2.0, facts.limits.backoff_max_s).pause_s(in_a_row - 1)


def _why(facts: Facts, attempt: AttemptFacts, kind: VerdictKind, spent: int) -> str:
    assert facts.limits is not None
    is_free = facts.has_progressed() or attempt.costs_no_restart
    cost = (
        "not counted in restart.max" if is_free else f"restart {spent} of {facts.limits.restarts_max} without progress"
    )
    if attempt.leaves_host and attempt.verdict is not None:
        cost += f"; {attempt.verdict.node} is not used again: {attempt.verdict.host_fault}"
    return f"attempt {attempt.number} ended: {kind.value} ({cost}); from {_source_text(facts)}{_suspicion(attempt)}"


def _source_text(facts: Facts) -> str:
    choice = facts.checkpoint_choice
    if choice.checkpoint is None:
        source = "the beginning, since there is no complete checkpoint" if facts.checkpoints else "the beginning"
    else:
        step = "" if choice.checkpoint.step is None else f" (step {choice.checkpoint.step:,})"
        source = f"{choice.checkpoint.path}{step}"
    passed = [f"{loser.main} ({loser.why})" for loser in choice.skipped[:PASSED_SHOWN]]
    return f"{source}; passed over: {', '.join(passed)}" if passed else source


def _verdict_text(attempt: AttemptFacts) -> str:
    verdict = attempt.verdict
    return f"{verdict.kind.value}: {verdict.summary}" if verdict is not None else "stopped"


def _suspicion(attempt: AttemptFacts) -> str:
    """Say that the script seems to ignore its checkpoint, where that was seen."""
    return (
        f"; {IGNORED_CHECKPOINT} ({IGNORED_CHECKPOINT_HINT})"
        if attempt.actual_resume is not None and not attempt.actual_resume.step
        else ""
    )
