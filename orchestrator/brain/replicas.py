"""Replicas: ranks that have held the same parameters and no longer do, by the sums of `monitor.compare_replicas`.

Which ranks are replicas is learned, not assumed: those whose sums were equal at two earlier steps, while the parameters
moved. So ranks that differ by design (shards, experts, stages of a pipeline, local SGD) are never named. Only sums of the
same step of the same optimizer are compared. Of three or more replicas the ones that differ from most are named, of two
it is only said. Sums are not journaled: a new supervisor begins its comparison from scratch.
"""

from __future__ import annotations

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.collective_counts import Tally
from orchestrator.brain.model.decisions import NoticeTopic
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.rank_facts import RankFacts
from orchestrator.core.text import ranks_label

AGREED_MIN = 2
"""At how many steps, with different sums, ranks must have agreed to count as replicas."""

STEPS_MAX = 16
"""The number of steps of an optimizer that are remembered. A heartbeat brings up to 3, and those of some hosts come later."""

NONE_KEY = "none"
"""Of the notice that no two ranks hold the same."""


def record_sums(facts: Facts, rank: RankFacts, sums: tuple[tuple[int, ...], ...]) -> None:
    """Remember the sums of a rank's parameters after some of its steps."""
    for optimizer, own_step, step, total in sums:
        tallies = facts.sums_at_steps.setdefault(optimizer, {})
        if any(rank.rank in tally.counts for known, tally in tallies.items() if known >= own_step):
            tallies.clear()  # its script has begun another training
        tally = tallies.setdefault(own_step, Tally(step))
        tally.add(rank.rank, total, step)
        if len(tally.counts) == max(map(len, (one.counts for one in tallies.values()))):
            facts.complete_sums.append((optimizer, own_step))
        while len(tallies) > STEPS_MAX:
            del tallies[min(tallies)]


def notice(facts: Facts, attempt: AttemptFacts, now_s: float) -> d.Notice | None:
    """Return the notice on ranks that have drifted, or that there are none to compare; each is given once."""
    if attempt.last_notice(NoticeTopic.REPLICAS):
        facts.complete_sums.clear()
    are_all_compared = False
    for optimizer, own_step in dict.fromkeys(facts.complete_sums):
        tallies = facts.sums_at_steps.get(optimizer, {})
        tally = tallies.get(own_step, Tally(own_step))
        complete = len(tally.counts)
        earlier = [tallies[at] for at in sorted(tallies) if at < own_step and len(tallies[at].counts) >= complete]
        if len(earlier) < AGREED_MIN:
            continue
        for ranks, agreed_step in _replicas(earlier):
            texts = _differences(facts, tally, ranks)
            if texts:
                base = attempt.call_step
                why = f"{texts} at step {base + tally.step:,}; all of {ranks_label(ranks)} held the same at step {base + agreed_step:,}"
                fix = f"resume from a checkpoint of step {base + agreed_step:,} or before, and test the memory of that host"
                return d.Notice(now_s, why, attempt.number, NoticeTopic.REPLICAS, fix=fix)
        are_all_compared = are_all_compared or complete >= len(facts.ranks)
    found = _none_notice(facts, attempt, now_s) if are_all_compared else None
    if found is None:
        facts.complete_sums.clear()  # derived: these need no second look
    return found


def _replicas(earlier: list[Tally]) -> list[tuple[list[int], int]]:
    """Return the ranks that were equal at the last steps, at two at least and with different sums; and the last of them."""
    sums_by_rank: dict[int, tuple[int | None, ...]] = {}
    for rank in earlier[-1].counts:
        sums_by_rank[rank] = tuple(tally.counts.get(rank) for tally in earlier)
    ranks_by_sums: dict[tuple[int | None, ...], list[int]] = {}
    for rank, sums in sums_by_rank.items():
        if len(set(sums) - {None}) >= AGREED_MIN:
            ranks_by_sums.setdefault(sums, []).append(rank)
    return [(sorted(ranks), earlier[-1].step) for ranks in ranks_by_sums.values() if len(ranks) > 1]


def _differences(facts: Facts, tally: Tally, ranks: list[int]) -> str:
    """Say which of the replicas differ; empty where none does, or each from each other: they are no longer trained together."""
    ranks_by_sum: dict[int, list[int]] = {}
    for rank in ranks:
        if rank in tally.counts:
            ranks_by_sum.setdefault(tally.counts[rank], []).append(rank)
    parts = sorted(ranks_by_sum.values(), key=len)
    most, known = parts[-1] if parts else [], sum(map(len, parts))
    if len(parts) > 1 and 2 * len(most) > known:
        odd = sorted(rank for part in parts[:-1] for rank in part)
        hosts = ", ".join(dict.fromkeys(facts.ranks[rank].node for rank in odd))
        return f"the parameters of {ranks_label(odd)} on {hosts} differ from those of {ranks_label(most)}"
    if len(parts) == 2:
        one, other = ((ranks_label(part), facts.ranks[part[0]].node) for part in parts)
        return f"the parameters of {one[0]} on {one[1]} and of {other[0]} on {other[1]} differ"
    return ""


def _none_notice(facts: Facts, attempt: AttemptFacts, now_s: float) -> d.Notice | None:
    """Say once in a job that no two ranks hold the same, unless it has one rank."""
    attempts = (*(past.attempt for past in facts.past_attempts), attempt)
    if len(facts.ranks) < 2 or any(one.last_notice(NoticeTopic.REPLICAS, NONE_KEY) for one in attempts):
        return None
    tallies = [tally for by_step in facts.sums_at_steps.values() for tally in by_step.values()]
    if any(len(tally.ranks_per_count) < len(tally.counts) for tally in tallies):
        return None
    why = "compare_replicas: ranks do not hold the same parameters; nothing is compared"
    return d.Notice(now_s, why, attempt.number, NoticeTopic.REPLICAS, NONE_KEY)
