"""Training progress as the scripts report it: loss, share of the work, time left. Pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from orchestrator.brain.model.facts import Facts
from orchestrator.brain.model.rank_facts import REPORTING_RANKS_MAX
from orchestrator.core.status_types import NOT_REPORTED, Training

LAG_SHARE, LAG_S = 0.05, 10.0
"""Largest difference between a reported and a counted step if the script counts steps, too: reports are seconds old."""


def reported_training(facts: Facts) -> Training:
    """Return the training progress of the job: each number from the lowest rank that reports it."""
    reported = NOT_REPORTED
    for rank in islice((rank for rank in facts.ranks.values() if rank.training is not None), REPORTING_RANKS_MAX):
        reported = reported.fill_from(rank.training or NOT_REPORTED)
    return reported


def rate_per_s(facts: Facts) -> float:
    """Return the greatest rate that any rank reported last, ended ranks included."""
    return max((rank.beat.rate_per_s or 0.0 for rank in facts.ranks.values()), default=0.0)


def total_steps(step: int | None, rate_per_s: float | None, reported: Training) -> int | None:
    """Return the total of steps that a script reports, if it counts optimizer steps: a bar may count batches or epochs."""
    if reported.total_steps is None or step is None or reported.percent is None:
        return reported.total_steps
    difference = abs(reported.percent / 100 * reported.total_steps - step)
    is_near = difference <= max(2.0, LAG_SHARE * step, LAG_S * (rate_per_s or 0.0))
    return reported.total_steps if is_near and step <= reported.total_steps else None


def estimate_progress(reported: Training, step: int | None, total: int | None, rate_per_s: float | None) -> Training:
    """Return the training progress: from steps and rate where these are known, else as the script reports it. At a rate of 0
    the time left is unknown."""
    percent = None if reported.percent is None else round(reported.percent, 1)
    eta_s = None if rate_per_s == 0 else reported.eta_s
    if step is not None and total:
        percent = round(min(100.0, 100.0 * step / total), 1)
        eta_s = round(max(0.0, (total - step) / rate_per_s), 1) if rate_per_s else eta_s
    return replace(reported, percent=percent, eta_s=eta_s, total_steps=total)
