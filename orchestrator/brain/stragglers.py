"""Stragglers: ranks whose local compute time is longer than that of their peers, and so delay all.

Only time without waiting for other ranks counts, since the ranks of a gang step together. One slow report may be
chance, so a rank is named only after several in a row.
"""

from __future__ import annotations

import statistics

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.rank_facts import RankFacts, RankState, Straggler

SLOW_FACTOR_MIN = 1.3
"""A rank is slow from this multiple of its peers' median on."""

SLOWER_S_MIN = 0.005
"""Least difference to that median: quick steps differ by chance."""

REPORTS_MIN = 3
"""The number of reports in a row, each of many steps, after which a rank is named."""

SLOW_S_MIN = 20.0
"""How long a rank must have been slow, in addition."""

PEERS_MAX = 128
"""The largest number of ranks whose work is compared: those of a larger job are taken at equal distances, so that each
comparison costs the same."""


def compare_work(facts: Facts, rank: RankFacts, at: float) -> None:
    """Compare a rank's new local compute time with those of its peers."""
    numbers = range(0, len(facts.ranks), 1 + (len(facts.ranks) - 1) // PEERS_MAX)
    peers = [
        other.beat.own_work_s
        for other in (facts.ranks[number] for number in numbers)
        if other is not rank and other.beat.own_work_s is not None and other.rank_state is RankState.ALIVE
    ]
    work_s = rank.beat.own_work_s
    if work_s is None or not peers:
        return
    peers_s = max(statistics.median(peers), 1e-6)
    if work_s < max(SLOW_FACTOR_MIN * peers_s, peers_s + SLOWER_S_MIN):
        rank.straggler = None
        return
    previous = rank.straggler
    step, since_s, times = (previous.step, previous.since_s, previous.reports + 1) if previous else (rank.steps, at, 1)
    rank.straggler = Straggler(work_s, peers_s, step, since_s, times)


def slow_ranks(facts: Facts) -> list[RankFacts]:
    """Return the ranks that are certainly slow, the slowest first."""
    slow = [
        rank
        for rank in facts.ranks.values()
        if rank.rank_state is RankState.ALIVE
        and rank.straggler is not None
        and _is_certain(rank.straggler, rank.beat_at)
    ]
    return sorted(slow, key=lambda rank: (-rank.straggler.factor if rank.straggler else 0.0, rank.rank))


def decide(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Report each slow rank once."""
    return [
        d.Notice(
            deadlines.now_s,
            f"slow: {describe(facts, rank)}",
            attempt.number,
            d.NoticeTopic.SLOW,
            str(rank.rank),
        )
        for rank in slow_ranks(facts)
        if attempt.last_notice(d.NoticeTopic.SLOW, str(rank.rank)) is None
    ]


def describe(facts: Facts, rank: RankFacts) -> str:
    """Say in one line how slow a rank is, and since when."""
    assert rank.straggler is not None and facts.attempt is not None
    slow = rank.straggler
    step = facts.attempt.call_step + slow.step
    times = f"{slow.factor:.1f} x its peers"
    work = f"{times} ({slow.own_work_s * 1000:.0f} ms a step) since step {step:,}"
    remarks = gpu_remarks(facts, rank)
    return f"rank {rank.rank} on {rank.node}, {work}{f'; {remarks}' if remarks else ''}"


def gpu_remarks(facts: Facts, rank: RankFacts) -> str:
    """Return what nvidia-smi says of the GPUs of a rank's node; empty for nothing."""
    node = facts.nodes.get(rank.node)
    told = [(gpu.gpu, one) for gpu in node.gpus for one in (gpu.fault, *gpu.remarks) if one] if node is not None else []
    return "; ".join(f"GPU {gpu}: {one}" for gpu, one in told)


def _is_certain(slow: Straggler, now_s: float) -> bool:
    return slow.reports >= REPORTS_MIN and now_s >= slow.since_s + SLOW_S_MIN
