"""Restart policy: whether another attempt follows, after which pause and from which checkpoint, a requeue, or the end of the job."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import JobEnd, Kind
from orchestrator.brain.model.facts import AttemptFacts, Facts, JobGoal
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.scheduling import allocation, fence
from orchestrator.brain.scheduling.checkpoints import QUESTION, SUSPICION, why_none
from orchestrator.core.backoff import Backoff

RESTART_ASKED = "a restart requested by the user"
RESUME_ASKED = "resumed by the user"
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
    coming = [save for save in facts.saves.values() if save.is_coming and save.attempt == attempt.number]
    sending = [
        save for save in coming if all(_may_send(facts, place.host, deadlines) for place in save.places)
    ]
    return bool(sending) and not deadlines.passed(since_s + limit_s)


def _may_send(facts: Facts, name: str, deadlines: Deadlines) -> bool:
    """Return whether the node can still send; a checkpoint on a lost node is not waited for."""
    assert facts.limits is not None
    node = facts.node(name)
    if node is None or fence.is_seen_over(facts, node, deadlines):
        return False
    return node.agent_state is AgentState.UP or not deadlines.passed(
        node.contact_at + facts.limits.node_timeout_s
    )


def after(facts: Facts) -> RestartAttempt | RequeueJob | GiveUp:
    """Return what follows the current attempt, whose ranks have all ended, or will with their allocation."""
    attempt = facts.attempt
    assert attempt is not None
    follows = _anywhere(facts, attempt)
    if isinstance(follows, RestartAttempt) and (why := why_none(facts)):
        return GiveUp(JobEnd.FAILED, why)
    leave = allocation.why_leave(facts, attempt)
    if not leave and allocation.is_short(facts, attempt):
        leave = f"too few nodes of allocation {facts.allocation} are left"
    if isinstance(follows, GiveUp) or not leave:
        return follows
    if allocation.is_out_of_time(facts):
        return GiveUp(JobEnd.FAILED, f"{_verdict_text(attempt)}; {leave}, and time_limit_action is fail")
    return RequeueJob(allocation.avoid(facts), f"{leave}; {follows.why}")


def _anywhere(facts: Facts, attempt: AttemptFacts) -> RestartAttempt | GiveUp:
    """Return what follows, wherever the next attempt may run."""
    assert facts.limits is not None
    verdict = attempt.verdict
    if attempt.number <= facts.resumed_after and facts.goal is JobGoal.RUN:
        return RestartAttempt(attempt.watched_at, f"{RESUME_ASKED}, from {_source(facts)}")
    if verdict is None and facts.done:
        return GiveUp(JobEnd.SUCCEEDED, "every rank exited with code 0")
    if facts.goal is JobGoal.CANCEL:
        return GiveUp(JobEnd.CANCELLED, facts.cancelled)
    if verdict is None and attempt.restart_asked:
        return RestartAttempt(attempt.watched_at, f"{RESTART_ASKED}, from {_source(facts)}")
    assert verdict is not None, "an attempt is stopped when it is done, cancelled, restarted, or judged"
    if not verdict.retry:
        return GiveUp(JobEnd.FAILED, f"{verdict.kind.value}: {verdict.summary}{_suspicion(attempt)}")
    if attempt.is_free:
        if allocation.is_fruitless(facts, attempt):
            stays = f"{allocation.FRUITLESS_STAYS_MAX} allocations in a row ended at the time limit without progress"
            return GiveUp(JobEnd.FAILED, f"{verdict.kind.value}: {verdict.summary}; {stays}")
        return RestartAttempt(attempt.judged_at, _why(facts, attempt, verdict.kind, facts.spent))
    if facts.limits.restarts_max == 0:
        return GiveUp(JobEnd.FAILED, f"{verdict.kind.value}: {verdict.summary}; restart.max is 0")
    spent = facts.spent + (0 if facts.progressed() else 1)
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
    if facts.progressed():
        return 0.0
    in_a_row = 1
    for past in reversed(facts.past):
        if past.progressed or past.number <= facts.resumed_after:
            break
        in_a_row += 0 if past.attempt.is_free else 1
    return Backoff(facts.limits.backoff_s, 2.0, facts.limits.backoff_max_s).pause_s(in_a_row - 1)


def _why(facts: Facts, attempt: AttemptFacts, kind: Kind, spent: int) -> str:
    assert facts.limits is not None
    is_free = facts.progressed() or attempt.is_free
    cost = (
        "not counted in restart.max"
        if is_free
        else f"restart {spent} of {facts.limits.restarts_max} without progress"
    )
    return (
        f"attempt {attempt.number} ended: {kind.value} ({cost}); from {_source(facts)}{_suspicion(attempt)}"
    )


def _source(facts: Facts) -> str:
    choice = facts.choice
    if choice.save is None:
        source = "the beginning, since there is no complete checkpoint" if facts.saves else "the beginning"
    else:
        step = "" if choice.save.step is None else f" (step {choice.save.step:,})"
        source = f"{choice.save.path}{step}"
    passed = [f"{loser.main} ({loser.why})" for loser in choice.passed[:PASSED_SHOWN]]
    return f"{source}; passed over: {', '.join(passed)}" if passed else source


def _verdict_text(attempt: AttemptFacts) -> str:
    verdict = attempt.verdict
    return f"{verdict.kind.value}: {verdict.summary}" if verdict is not None else "stopped"


def _suspicion(attempt: AttemptFacts) -> str:
    """Say that the script seems to ignore its checkpoint, where that was seen."""
    return f"; {SUSPICION} ({QUESTION})" if attempt.began is not None and not attempt.began.step else ""
