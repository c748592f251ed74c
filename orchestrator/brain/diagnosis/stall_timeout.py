"""Stall timeout: how long a gang may be stalled when no state proves that it never continues.

| `monitor.hang_timeout` | a rank is seen to wait for others             | no rank is                                  |
|------------------------|-----------------------------------------------|---------------------------------------------|
| `auto`                 | as long as the process group lets it wait     | `IDLE_S_MAX`; never if all compute or sleep |
| a time                 | that time                                     | that time                                   |
"""

from __future__ import annotations

import math

from orchestrator.brain.diagnosis import collectives, inspections, suspicion
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.rank_facts import RankFacts
from orchestrator.core.observations import Activity

IDLE_S_MAX = 1800.0
"""How long nothing may move in any process of a gang in which no rank waits for another."""


def timeout_s(facts: Facts, attempt: AttemptFacts) -> float:
    """Return how many seconds the gang may be stalled; infinite where there is no limit."""
    assert facts.limits is not None
    if facts.limits.hang_timeout_s:
        return facts.limits.hang_timeout_s
    seen = list(inspections.last_inspections(facts, attempt).values())
    waiting = [one for one in seen if one.activity is Activity.WAITING_FOR_RANKS]
    if waiting:
        return collectives.torch_limit_s(waiting)
    are_at_work = all(one.activity in (Activity.SPINNING, Activity.SLEEPING) or one.gpu_use for one in seen)
    return math.inf if are_at_work else IDLE_S_MAX


def expires_at(facts: Facts, attempt: AttemptFacts, ranks: list[RankFacts]) -> float:
    """Return when (job clock) the timeout passes if the ranks that are waited for stay where they are."""
    is_waited_for = any(inspections.is_waiting(attempt, rank) for rank in inspections.living_ranks(facts))
    since_s = suspicion.stalled_since(facts, attempt, is_waited_for)
    # Inspections cannot show what was stalled before the first one: the silence that led to it counts, too.
    silence_s = suspicion.suspicious_silence_s(facts) or 0.0
    for rank in ranks:
        still_s = inspections.still_s(facts, attempt, rank)
        if still_s is not None:
            since_s = max(since_s, rank.inspected_at - still_s - silence_s)
    return since_s + timeout_s(facts, attempt)


def has_expired(facts: Facts, attempt: AttemptFacts, ranks: list[RankFacts]) -> bool:
    """Return whether the timeout had passed at the last inspection."""
    heard_s = max(rank.inspected_at for rank in facts.ranks.values())
    return heard_s >= expires_at(facts, attempt, ranks)
