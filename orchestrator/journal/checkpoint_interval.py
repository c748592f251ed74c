"""Interval between checkpoints that costs least: from how long a checkpoint stops the ranks, and how often the lab's jobs fail.

For failures at random with a mean time M between them, training of length t between two checkpoints of length s takes
M (exp((t + s) / M) - 1) on average, without the restarts, which cost the same at any interval. It is least near
t = sqrt(2 s M) - s.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (1974).
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22 (2006).

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from orchestrator.core.codec import Json
from orchestrator.journal.goodput import Goodput

STALLS_MIN = 3
"""How many checkpoints of a job must have a known stall before anything is advised."""

CHANCE = 0.025
"""That the true rate of failures is above, and that it is below, what is said."""

EXPONENT_MAX = 500.0
BISECTIONS = 60


def best_interval_s(stall_s: float, between_s: float) -> float:
    """Return how long to train between two checkpoints. `between_s`: the mean time between failures."""
    return math.sqrt(2 * stall_s * between_s) - stall_s if stall_s < between_s / 2 else between_s


def cost(interval_s: float, stall_s: float, between_s: float) -> tuple[float, float]:
    """Return the share of the time that checkpoints take, and the share of what is lost by failures."""
    whole_s = between_s * math.expm1(min(EXPONENT_MAX, (interval_s + stall_s) / between_s))
    return stall_s / whole_s, 1 - (interval_s + stall_s) / whole_s


def failure_limits(count: int) -> tuple[float, float]:
    """Return the least and the largest mean number of failures of which `count` are plausible: the exact limits of Poisson's
    distribution at 95 %."""
    high = _solve(count, CHANCE)
    return (_solve(count - 1, 1 - CHANCE) if count else 0.0), high


def _solve(count: int, chance: float) -> float:
    """Return the mean with which at most `count` failures happen with this chance."""
    low, high = 0.0, count + 10 * math.sqrt(count + 1) + 10
    for _ in range(BISECTIONS):
        mean = (low + high) / 2
        below = sum(math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(count + 1))
        low, high = (mean, high) if below > chance else (low, mean)
    return low


def advise(usage: Goodput, lab: Iterable[Goodput], memory_stall_s: float | None = None) -> Json | None:
    """Return what the job's checkpoints cost at their interval, and at the best one; None where too little is known. `lab`: all
    jobs, whose failures count by rank-hour; `memory_stall_s`: what a checkpoint would cost in memory, if it could be there. Shares and steps are None where no job has failed."""
    stalls_s, step_s, ranks = usage.stalls_s, usage.step_s, usage.ranks
    stall_s = sum(stalls_s) / max(1, len(stalls_s))
    if len(stalls_s) < STALLS_MIN or not (stall_s and step_s and ranks and usage.interval_steps):
        return None
    counts = [(one.failures, one.work_rank_s) for one in lab]
    failures, work_s = sum(count for count, _ in counts), sum(rank_s for _, rank_s in counts)
    low, high = failure_limits(failures)
    between_s = [work_s / ranks / count if count else None for count in (high, failures, low)]
    steps = [None if one is None else max(1, round(best_interval_s(stall_s, one) / step_s)) for one in between_s]
    now = best = None
    in_memory_s = stall_s if memory_stall_s is None else memory_stall_s
    if between_s[1] is not None and steps[1] is not None:
        now = cost(usage.interval_steps * step_s, stall_s, between_s[1])
        best = sum(cost(steps[1] * step_s, stall_s, between_s[1]))
    return {
        "checkpoints": len(stalls_s),
        "stall_s": round(stall_s, 3),
        "interval_steps": usage.interval_steps,
        "failures": failures,
        "rank_hours": round(work_s / 3600, 3),
        "ranks": ranks,
        "between_failures_s": between_s,
        "best_steps": steps,
        "checkpoint_share": now and round(now[0], 4),
        "failure_share": now and round(now[1], 4),
        "best_share": best and round(best, 4),
        "memory_share": round(max(0.0, stall_s - in_memory_s) / (usage.interval_steps * step_s + stall_s), 4),
    }
