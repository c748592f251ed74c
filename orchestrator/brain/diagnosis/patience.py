"""Patience: how long a rank may stand in one place when no state proves that it never goes on."""

from __future__ import annotations

import math

from orchestrator.brain.diagnosis import collectives, inspections, suspicion
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.rank_facts import RankFacts
from orchestrator.core.observations import Activity, RankInspection

PATIENCE_S = 300.0
PATIENCE_LONGER = 2.0
PATIENCE_STEPS = 20.0
PATIENCE_PAUSES = 3.0
"""How long a rank may stand in one place when no state proves that it never goes on: 5 min where it is blocked, and twice
that where it computes, spins, sleeps, polls, saves, evaluates or exits, or where no rank is seen to wait for others. Not
less than 20 usual steps, or three times the longest pause between two steps that the job has shown."""

LONG_PHASES = ("evaluate", "save", "exit")
"""What a rank is in by its stack when it may take longer."""


def is_over(facts: Facts, attempt: AttemptFacts, ranks: list[RankFacts]) -> bool:
    """Tell whether patience with ranks that stay where they are is over by what was last heard."""
    return _heard_at(facts) >= over_at(facts, attempt, ranks)


def _heard_at(facts: Facts) -> float:
    return max(rank.inspected_at for rank in facts.ranks.values())


def over_at(facts: Facts, attempt: AttemptFacts, ranks: list[RankFacts]) -> float:
    """Return when (job clock) patience with ranks is over if they stay where they are; infinite where it never is."""
    assert facts.limits is not None
    is_waited_for = any(inspections.waits(attempt, rank) for rank in inspections.living(facts))
    heard_s, since_s = _heard_at(facts), suspicion.silent_since(facts, attempt, is_waited_for)
    latest_at = -math.inf
    if _is_free(facts, attempt, ranks):
        return math.inf
    for rank in ranks:
        inspection, still_s = inspections.result(attempt, rank), inspections.still_s(facts, attempt, rank)
        patience_s = of_rank_s(facts, attempt, rank)
        if still_s is None:
            blind_s = 0.0 if suspicion.is_fixed(facts) else max(facts.limits.hang_ceiling_s, patience_s)
            patience_s, still_s = blind_s, heard_s - since_s
        elif inspection is not None:  # on a busy machine everything takes longer, but not without end
            still_s -= min(inspection.starved_s, still_s / 2)
        # Inspections cannot show what stood still before the first one: the silence that led to it counts instead.
        stood_s = still_s + (suspicion.suspect_s(facts) or 0.0)
        latest_at = max(latest_at, since_s + patience_s, heard_s + patience_s - stood_s)
    return latest_at


def of_rank_s(facts: Facts, attempt: AttemptFacts, rank: RankFacts) -> float:
    """Return for how long a rank may stand where it does: the longest that fits what it was seen in since it last moved."""
    still_s = inspections.still_s(facts, attempt, rank)
    torch_s = torch_limit_s(facts, attempt)
    took_longer = still_s is not None and rank.longer_at >= rank.inspected_at - still_s
    is_whole = inspections.waits(attempt, rank)  # then all wait for each other, and the network may come back
    longer = took_longer or is_whole or not torch_s
    return of_gang_s(facts, attempt, longer, limit_s=torch_s)


def torch_limit_s(facts: Facts, attempt: AttemptFacts) -> float:
    """Return for how long torch lets the ranks wait that are seen to wait for others; 0 where none is."""
    waiting = [rank for rank in inspections.living(facts) if inspections.waits(attempt, rank)]
    return collectives.limit_s([rank.inspection for rank in waiting if rank.inspection is not None])


def _is_free(facts: Facts, attempt: AttemptFacts, ranks: list[RankFacts]) -> bool:
    """Tell whether ranks may go on like this for as long as they like: no rank is seen to wait for another, and they
    compute or sleep. No launcher would end that; a user who wants that sets `monitor.hang_patience`."""
    assert facts.limits is not None
    if suspicion.is_fixed(facts) or (facts.limits.hang_patience_s and suspicion.has_stepped(facts)):
        return False
    if any(inspections.waits(attempt, rank) for rank in inspections.living(facts)):
        return False
    return all(inspections.does(attempt, rank, Activity.SPINNING, Activity.SLEEPING) for rank in ranks)


def of_gang_s(facts: Facts, attempt: AttemptFacts, longer: bool = False, limit_s: float = 0.0) -> float:
    """Return how long a rank may stand in one place before that alone is a hang; infinite where the user wants no such
    verdict.

    Never above the ceiling, unless one usual pause or 20 usual steps of the job are longer than that. `limit_s`: for how
    long torch lets the others wait; unless the user has chosen patience, orch is not less patient than that. An attempt
    after hangs that only patience saw has a multiple of all that.
    """
    assert facts.limits is not None
    limits, usual_steps_s = facts.limits, PATIENCE_STEPS * (suspicion.usual_s(facts) or 0.0)
    if suspicion.is_fixed(facts):
        return 0.0
    if limits.hang_patience_s is None:
        return math.inf
    ceiling_s = max(limits.hang_ceiling_s, usual_steps_s, facts.pause_s)
    wanted_s = (limits.hang_patience_s or PATIENCE_S) * (PATIENCE_LONGER if longer else 1.0)
    wanted_s = min(max(wanted_s, usual_steps_s, PATIENCE_PAUSES * facts.pause_s), ceiling_s)
    wanted_s = wanted_s if suspicion.has_stepped(facts) or limits.hang_patience_s else ceiling_s
    return max(wanted_s, 0.0 if limits.hang_patience_s else limit_s) * attempt.patience_times


def takes_longer(inspection: RankInspection) -> bool:
    """Tell whether what a rank stands in may well take long: it computes, sleeps, polls, saves, evaluates or exits."""
    own = (
        inspection.activity in (Activity.SPINNING, Activity.SLEEPING, Activity.EXITING)
        or inspection.phase in LONG_PHASES
    )
    return own or (inspection.activity is Activity.BLOCKED and inspection.has_limit)
