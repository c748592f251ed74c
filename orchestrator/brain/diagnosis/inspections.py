"""Inspections of all ranks: when they are due, and what the last one has shown.

The first one follows at suspicion, the second soon after it, then with growing pauses while no rank moves; a sign of life
voids earlier results. An inspection that the user requests goes to every node that can answer. No inspection follows
before the last one was answered, or was waited for long enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from orchestrator.brain.diagnosis import suspicion
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.model.rank_facts import RankFacts
from orchestrator.core.observations import Activity, RankInspection
from orchestrator.core.wire.orders import Inspect

ANSWER_S_MAX = 6.0
"""How long the nodes' answers to an inspection are waited for."""

PAUSES_S = (2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses between inspections while no rank moves; the last one repeats."""

LONG_SILENCE_INSPECTIONS = 40
LONG_PAUSE_S = 120.0
"""The pause after this many inspections in one silence: answers of a large gang fill a disk."""

STOPPED_AFTER_S = (1.0, 3.0)
"""When all are inspected after a rank was first seen in state T (stopped)."""

RENDEZVOUS_AFTER_S = (0.0, 2.0, 6.0, 8.0, 14.0, 16.0, 30.0, 32.0, 60.0, 62.0, 120.0, 122.0)
"""When all are inspected after the limit of the rendezvous, in pairs 2 s apart, since one inspection shows no standstill.
The pauses grow: a rank that still imports may come late, and then wait for the others."""

STILL_S = 1.5
"""How long a rank must not have moved, by the clock of the rank's host, for a rank to count as still."""

EndsAtIfBefore: TypeAlias = "Callable[[float], float]"
"""Returns when (job clock) the attempt is ended if no rank moves, infinite where that is not before a time."""

INSPECTIONS_MIN = 2
"""The number of inspections in a row that a verdict needs."""


def living_ranks(facts: Facts) -> list[RankFacts]:
    """Return the ranks whose processes are alive."""
    return facts.living()


def are_all_connected(facts: Facts) -> bool:
    """Return whether the agents of all living ranks are connected, which says nothing about a node that is silent."""
    names = dict.fromkeys([rank.node for rank in living_ranks(facts)])
    return all(facts.nodes[name].agent_state is AgentState.UP for name in names)


def is_answered(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> bool:
    """Return whether the last inspection is over: every node with living ranks has answered, or was waited for long enough."""
    if attempt.inspected_at is None:
        return True
    names = {rank.node for rank in living_ranks(facts)}
    late = [
        n
        for n in facts.gang
        if n.name in names and n.agent_state is AgentState.UP and n.inspection_answered < attempt.inspection
    ]
    return not late or deadlines.passed(attempt.inspected_at + ANSWER_S_MAX)


def inspect_orders(facts: Facts, attempt: AttemptFacts, why: str, deadlines: Deadlines) -> list[Decision]:
    """Return the orders for one inspection of all ranks, to every node with a connected agent."""
    number = attempt.inspection + 1
    nodes = [node for node in facts.gang if node.agent_state is AgentState.UP]
    return [d.To(deadlines.now_s, why, node.name, Inspect(attempt.number, number)) for node in nodes]


def last_inspection(attempt: AttemptFacts, rank: RankFacts) -> RankInspection | None:
    """Return what the last inspection has found of a rank, None if there is no answer."""
    if rank.inspection is None or attempt.inspected_at is None or rank.inspected_at < attempt.inspected_at:
        return None
    return rank.inspection


def last_inspections(facts: Facts, attempt: AttemptFacts) -> dict[int, RankInspection]:
    """Return what the last inspection has found of the living ranks, by rank."""
    return {
        rank.rank: inspection
        for rank in living_ranks(facts)
        if (inspection := last_inspection(attempt, rank)) is not None
    }


def is_moving(attempt: AttemptFacts, rank: RankFacts) -> bool:
    """Return whether the last inspection has found that the rank makes progress."""
    inspection = last_inspection(attempt, rank)
    return inspection is not None and (
        inspection.activity is Activity.PROGRESSING or rank.collective_at >= rank.inspected_at
    )


def still_s(facts: Facts, attempt: AttemptFacts, rank: RankFacts) -> float | None:
    """Return for how long a rank has been stalled by its inspections, None where that is unknown."""
    inspection = last_inspection(attempt, rank)
    if inspection is None or inspection.activity is Activity.UNKNOWN:
        return None
    return min(
        inspection.still_s,
        rank.inspected_at - max(rank.collective_at, suspicion.gang_progress_at(facts, attempt)),
    )


def count_in_silence(facts: Facts, attempt: AttemptFacts) -> int:
    """Return how many inspections were ordered in the present silence."""
    is_present = attempt.inspected_at is not None and attempt.inspected_at >= suspicion.quiet_since(facts, attempt)
    return attempt.inspections_in_silence if is_present else 0


def inspection_reason(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines, ends_before: EndsAtIfBefore) -> str:
    """Return why every rank is to be inspected now; empty if not."""
    if attempt.phase is not Phase.RUN or not living_ranks(facts):
        return ""
    if facts.inspect_requested > facts.inspect_answered:
        return "the user requested an inspection"
    if attempt.running_at is None or not are_all_connected(facts) or not is_answered(facts, attempt, deadlines):
        return ""
    assert facts.limits is not None
    limit_at = suspicion.start_limit_at(facts, attempt, facts.limits.rendezvous_timeout_s)
    for due_s in () if limit_at is None else (limit_at + after_s for after_s in RENDEZVOUS_AFTER_S):
        if deadlines.passed(due_s) and (attempt.inspected_at or 0.0) < due_s:
            return f"no step {due_s - attempt.running_at:.0f} s after the start of all ranks"
    return _stopped_reason(facts, attempt, deadlines) or _silence_reason(facts, attempt, deadlines, ends_before)


def _stopped_reason(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> str:
    """Return why to inspect for a stopped rank: its verdict follows soon and from its state alone, and two inspections before
    that show what the others wait in."""
    for rank in living_ranks(facts):
        for after_s in STOPPED_AFTER_S if rank.state == "T" else ():
            due_s = rank.state_at + after_s
            if deadlines.passed(due_s) and (attempt.inspected_at or 0.0) < due_s:
                return f"rank {rank.rank} is stopped (state T)"
    return ""


def _silence_reason(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines, ends_before: EndsAtIfBefore) -> str:
    silence_s = suspicion.suspicious_silence_s(facts)
    if silence_s is None:
        return ""
    since_s = suspicion.quiet_since(facts, attempt)
    if not deadlines.passed(since_s + silence_s):
        return ""
    number, last_at = count_in_silence(facts, attempt), attempt.inspected_at or 0.0
    pause_s = _pause_s(facts, attempt, number) if number else 0.0
    if number and last_at < (ends_at := ends_before(last_at + pause_s)) < last_at + pause_s:
        pause_s = max(PAUSES_S[0], ends_at - last_at)
    if number and not deadlines.passed(last_at + pause_s):
        return ""
    return f"no sign of progress for {deadlines.now_s - since_s:.0f} s" + (
        f", inspection {number + 1}" if number else ""
    )


def _pause_s(facts: Facts, attempt: AttemptFacts, number: int) -> float:
    """Return how long after the last inspection the next one follows: soon after a rank has come to a stop."""
    if number >= LONG_SILENCE_INSPECTIONS:
        return LONG_PAUSE_S
    pause_s = PAUSES_S[min(number, len(PAUSES_S)) - 1]
    if any(is_moving(attempt, rank) for rank in living_ranks(facts)):
        return pause_s
    stills = [still for rank in living_ranks(facts) if (still := still_s(facts, attempt, rank)) is not None]
    return PAUSES_S[0] if stills and min(stills) < STILL_S else pause_s


def is_waiting(attempt: AttemptFacts, rank: RankFacts) -> bool:
    """Return whether the last inspection has found the rank waiting for others."""
    return is_doing(attempt, rank, Activity.WAITING_FOR_RANKS)


def is_doing(attempt: AttemptFacts, rank: RankFacts, *activities: Activity) -> bool:
    """Return whether the last inspection has found the rank in one of these activities."""
    inspection = last_inspection(attempt, rank)
    return inspection is not None and inspection.activity in activities
