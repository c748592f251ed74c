"""Desync: ranks of a group that run different numbers of collectives, from their counts at equal steps.

A rank that skips or adds a collective of the same shape stops nothing: the gang trains on, one collective out of phase,
with wrong gradients. Only the counts show it. A group is judged only among its own members, and only if their counts
have agreed before: those of a pipeline differ by design. Each optimizer's steps are compared by themselves: an
optimizer that one rank uses alone, as for a probe, says nothing; neither does a group with point-to-point operations,
where they are counted with the collectives. A difference that goes away does not count: a thread that saves a
checkpoint runs its collectives concurrently with the steps, and while no step is made nothing can pass. Counts are not
journaled: a new supervisor begins its comparison from scratch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from orchestrator.brain.diagnosis import inspections, suspicion
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.collective_counts import CountKey, Tally
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision, FailureCause, Verdict, VerdictKind
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.core import observations
from orchestrator.core.text import ranks_text

AGREED_MIN = 3
"""The number of steps at which the counts of all members must have been equal, and then unequal."""

DIFFERENCE_S_MIN = 1.5
"""How long a difference must last in a group that runs a collective in every step."""

AUXILIARY_DIFFERENCE_S_MIN = 60.0
"""The same in an auxiliary group that does not, such as that of a thread that saves checkpoints: as many steps as usually
take this long, since pauses do not count. And all members must have run more since then: one that is only late has not."""

STEPS_MAX = 32
"""The number of steps of a group that are remembered."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Members of a group ran unequal numbers of collectives after the optimizer's step `agreed`, seen first after
    `differs`; `agreed_step` is the former among the attempt's own steps.

    `counts`: each member's at the last step that all have reported; `outliers`: the members that differ from most.
    """

    series: CountKey
    agreed: int
    differs: int
    agreed_step: int
    counts: dict[int, int]
    outliers: tuple[int, ...]
    since_s: float


def decide(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Return what follows a difference: an inspection of all ranks, then the verdict or a notice; once all ranks are
    done, which leaves none to inspect, the verdict at once."""
    assert facts.limits is not None
    difference = (
        find_difference(facts, deadlines) if facts.counts_differ_since and attempt.running_at is not None else None
    )
    if difference is None or attempt.last_notice(d.NoticeTopic.DESYNC):
        return []
    inspected_at = attempt.inspected_at or 0.0
    if not facts.is_done and inspected_at < difference.since_s:
        why = f"ranks {ranks_text(difference.outliers)} run other collectives than their peers"
        return inspections.inspect_orders(facts, attempt, why, deadlines)
    if not _is_explained(facts, difference) and not deadlines.passed(inspected_at + inspections.ANSWER_S_MAX):
        return []
    judged = _verdict(facts, difference)
    if facts.limits.on_desync == "notify":
        return [d.Notice(deadlines.now_s, judged.summary, attempt.number, d.NoticeTopic.DESYNC, verdict=judged)]
    return [d.Judge(deadlines.now_s, judged.summary, attempt.number, judged)]


def record_counts(
    facts: Facts,
    rank: RankFacts,
    groups: tuple[str, ...],
    samples: tuple[observations.CollectiveCounts, ...],
    at: float,
) -> None:
    """Remember how many collectives of each group a rank had run at some of its steps."""
    for mark in samples:
        for key, count in zip(groups, mark.counts, strict=False):
            series = CountKey(key, mark.optimizer)
            tallies = facts.counts_at_steps.setdefault(series, {})
            if mark.optimizer_step not in tallies:
                tallies[mark.optimizer_step] = Tally(mark.step)
            tally = tallies[mark.optimizer_step]
            if not tally.add(rank.rank, count, mark.step):
                facts.counts_differ_since.setdefault(series, at)
            elif series in facts.counts_differ_since and tally.counts.keys() >= _members(facts, key):
                del facts.counts_differ_since[series]  # any earlier difference has gone away
            while len(tallies) > STEPS_MAX:
                del tallies[min(tallies)]


def forget_counts(facts: Facts) -> None:
    """Forget all counts: another attempt or another supervisor begins."""
    facts.counts_at_steps.clear()
    facts.counts_differ_since.clear()
    facts.uncountable_groups.clear()
    facts.group_members.clear()
    facts.sums_at_steps.clear()
    facts.complete_sums.clear()


def find_difference(facts: Facts, deadlines: Deadlines) -> Difference | None:
    """Return a difference that lasts, or None; when to check again is left in `deadlines`."""
    usual_s = suspicion.usual_step_s(facts) or 0.0
    for series, since_s in facts.counts_differ_since.items():
        if series.key in facts.uncountable_groups:
            continue
        members = sorted(_members(facts, series.key))
        counts_by_step = {
            turn: {rank: tally.counts[rank] for rank in members}
            for turn, tally in sorted(facts.counts_at_steps[series].items())
            if all(rank in tally.counts for rank in members)
        }
        keys = list(counts_by_step)
        equal = [len(set(counts.values())) == 1 for counts in counts_by_step.values()]
        agreed = equal.index(False) if False in equal else len(equal)
        if len(members) < 2 or agreed < AGREED_MIN or len(equal) - agreed < AGREED_MIN or any(equal[agreed:]):
            continue
        first, last = keys[agreed], keys[-1]
        # No member is only late
        all_advanced = all(counts_by_step[last][rank] > counts_by_step[first][rank] for rank in members)
        lasts = all_advanced and (last - first) * usual_s >= AUXILIARY_DIFFERENCE_S_MIN
        if _is_auxiliary(counts_by_step, keys[:agreed]) and not lasts:
            continue
        if not deadlines.passed(since_s + DIFFERENCE_S_MIN):
            continue
        agreed_step = facts.counts_at_steps[series][keys[agreed - 1]].step
        counts = counts_by_step[last]
        return Difference(series, keys[agreed - 1], first, agreed_step, counts, _find_outliers(counts), since_s)
    return None


def _members(facts: Facts, key: str) -> set[int]:
    if key not in facts.group_members:
        facts.group_members[key] = {rank.rank for rank in facts.ranks.values() if key in rank.group_keys}
    return facts.group_members[key]


def _is_auxiliary(turns: dict[int, dict[int, int]], agreed: list[int]) -> bool:
    """Return whether there are steps without a collective of the group."""
    increments = [
        min(turns[after].values()) - min(turns[before].values()) for before, after in itertools.pairwise(agreed)
    ]
    return not all(increments)


def _find_outliers(counts: dict[int, int]) -> tuple[int, ...]:
    """Return the ranks that differ from most; of two equal halves, those that ran fewer."""
    tally = Counter(counts.values())
    most = max(tally, key=lambda count: (tally[count], count))
    return tuple(rank for rank in sorted(counts) if counts[rank] != most)


def _is_explained(facts: Facts, difference: Difference) -> bool:
    """Return whether all living members were inspected since, so that the verdict can say where it began."""
    return all(
        facts.ranks[rank].inspection is not None and facts.ranks[rank].inspected_at >= difference.since_s
        for rank in difference.counts
        if facts.ranks[rank].rank_state is RankState.ALIVE
    )


def _verdict(facts: Facts, difference: Difference) -> Verdict:
    assert facts.limits is not None and facts.attempt is not None
    base = facts.attempt.call_step
    majority_count = max(count for rank, count in difference.counts.items() if rank not in difference.outliers)
    first_step = base + _first_differing_step(facts, difference)
    outliers = [facts.ranks[rank] for rank in difference.outliers]
    outlier_texts = [_describe_outlier(rank, difference.counts[rank.rank] - majority_count) for rank in outliers]
    others = [rank for rank in difference.counts if rank not in difference.outliers]
    name = _group_name(facts, difference)
    culprit = f"{'; '.join(outlier_texts)} than ranks {ranks_text(others)} in {name}, from step {first_step:,} on"
    counts = ", ".join(f"rank {rank}: {count:,}" for rank, count in sorted(difference.counts.items()))
    counts_text = f"collectives of {name} by now: {counts}; equal up to step {base + difference.agreed_step:,}"
    proof = [
        d.Evidence(counts_text),
        *(piece for rank in sorted(difference.counts) for piece in _context_evidence(facts, facts.ranks[rank])),
    ]
    summary = (
        f"{outlier_texts[0]} than its peers from step {first_step:,} on, so their gradients come from different batches"
    )
    return facts.verdict_on(
        VerdictKind.DESYNC, summary, ranks=difference.outliers, node=outliers[0].node, culprit=culprit, proof=tuple(proof),
        cause=FailureCause.COUNTS, place=(ranks_text(difference.outliers),), step=first_step, since_s=difference.since_s, retry=False,
    )  # fmt: skip


def _describe_outlier(rank: RankFacts, by: int) -> str:
    more = "more" if by > 0 else "fewer"
    noun = "collective" if abs(by) == 1 else "collectives"
    return f"rank {rank.rank} on {rank.node} entered {abs(by)} {noun} {more}"


def _first_differing_step(facts: Facts, difference: Difference) -> int:
    """Return the first step, of the attempt's own, in which an odd rank's counts grew differently from its peers'."""
    changes = {rank: _changes(facts.ranks[rank], difference) for rank in difference.counts}
    common_changes = set.intersection(
        *(set(changes[rank]) for rank in difference.counts if rank not in difference.outliers)
    )
    differing_steps = sorted(turn for rank in difference.outliers for turn in changes[rank].keys() ^ common_changes)
    steps = [turns[differing_steps[0]] for turns in changes.values() if differing_steps and differing_steps[0] in turns]
    return min(steps, default=difference.agreed_step + 1)


def _changes(rank: RankFacts, difference: Difference) -> dict[int, int]:
    """Return the optimizer's steps after the last agreement up to the first difference in which a count grew by a
    different number, and for each the attempt's own step."""
    if rank.inspection is None:
        return {}
    marks = [mark for mark in rank.inspection.collective_counts if mark.optimizer == difference.series.optimizer]
    return {
        mark.optimizer_step: mark.step
        for mark in marks
        if difference.agreed < mark.optimizer_step <= difference.differs
    }


def _group_name(facts: Facts, difference: Difference) -> str:
    """Return the group's name, from the last collectives that a member was seen in."""
    for rank in difference.counts:
        inspection = facts.ranks[rank].inspection
        for one in inspection.collectives if inspection is not None else ():
            if set(one.ranks) == set(difference.counts):
                return one.label or f"group {one.group}"
    return f"the group of ranks {ranks_text(difference.counts)}"


def _context_evidence(facts: Facts, rank: RankFacts) -> list[d.Evidence]:
    if rank.inspection is None:
        return []
    last = ", ".join(
        f"{collective.what} #{collective.number:,} {collective.shape}" for collective in rank.inspection.collectives
    )
    where = rank.inspection.where or "no frame of its own"
    text = f"rank {rank.rank}: last in {last or 'no known collective'}; {where}"
    return [d.Evidence(text, d.EvidenceKind.RANKS)]
