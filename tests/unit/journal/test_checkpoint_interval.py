"""How often to save: the advice against a simulation, and what is said of few failures."""

from __future__ import annotations

import random

import pytest

from orchestrator.journal import checkpoint_interval
from orchestrator.journal.goodput import Goodput, Loss, Span, TimeKind

HOUR_S = 3600.0


def _simulated_share(interval_s: float, stall_s: float, between_s: float) -> float:
    """Return the share of the time that was no kept training, over many failures."""
    chance, kept_s, spent_s = random.Random(1), 0.0, 0.0
    for _ in range(20_000):
        until_s = chance.expovariate(1 / between_s)
        kept_s += until_s // (interval_s + stall_s) * interval_s
        spent_s += until_s
    return 1 - kept_s / spent_s


@pytest.mark.parametrize(("stall_s", "between_s"), [(1.5, HOUR_S), (60.0, 8 * HOUR_S), (120.0, HOUR_S)])
def test_advised_interval_costs_least_in_simulation(stall_s: float, between_s: float) -> None:
    best_s = checkpoint_interval.best_interval_s(stall_s, between_s)
    least = min(_simulated_share(best_s * factor, stall_s, between_s) for factor in (0.1, 0.2, 0.4, 0.7, 1.5, 3, 6))
    assert _simulated_share(best_s, stall_s, between_s) < least + 0.003
    for factor in (0.3, 1.0, 3.0):
        modelled = sum(checkpoint_interval.cost(best_s * factor, stall_s, between_s))
        assert modelled == pytest.approx(_simulated_share(best_s * factor, stall_s, between_s), abs=0.01)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (3, 0.619, 8.767), (10, 4.795, 18.39)]
)
def test_limits_are_those_of_poisson_tables(count: int, low: float, high: float) -> None:
    assert checkpoint_interval.failure_limits(count) == pytest.approx((low, high), abs=0.001)


def _job(stalls_s: tuple[float, ...], failures: int) -> Goodput:
    """40 h of 4 ranks with a step each second, and a checkpoint every 20."""
    spans = [
        Span(0, number + 1, TimeKind.PRODUCTIVE, number * HOUR_S, (number + 1) * HOUR_S, 4) for number in range(40)
    ]
    lost = [
        Span(0, number + 1, TimeKind.DETECTING, 50 * HOUR_S + number, 51 * HOUR_S, 4, Loss(number + 1, "crash"))
        for number in range(failures)
    ]
    return Goodput((*spans, *lost), stalls_s, 20, 1.0)


def test_advice_has_numbers_of_job_and_lab() -> None:
    advice = checkpoint_interval.advise(usage := _job((1.4, 1.5, 1.6), 2), [usage, _job((), 2)])
    assert advice is not None
    assert (advice["failures"], advice["rank_hours"], advice["ranks"]) == (4, 320.0, 4)
    assert advice["between_failures_s"][1] == pytest.approx(20 * HOUR_S)
    assert advice["best_steps"][1] == round((2 * 1.5 * 20 * HOUR_S) ** 0.5 - 1.5)
    assert advice["checkpoint_share"] == pytest.approx(1.5 / 21.5, abs=0.001)


def test_nothing_is_advised_of_too_little() -> None:
    few, free, whole = _job((1.5, 1.5), 2), _job((0.0, 0.0, 0.0), 2), _job((1.5, 1.5, 1.5), 0)
    assert checkpoint_interval.advise(few, [few]) is None
    assert checkpoint_interval.advise(free, [free]) is None
    unharmed = checkpoint_interval.advise(whole, [whole])
    assert unharmed is not None
    assert unharmed["best_steps"][1:] == [None, None]
    assert unharmed["between_failures_s"][0] == pytest.approx(40 * HOUR_S / 3.689, rel=0.001)


@pytest.mark.parametrize(("in_memory_s", "share"), [(None, 0.0), (0.5, 1.0 / 21.5), (1.5, 0.0), (9.0, 0.0)])
def test_checkpoints_in_memory_save_the_rest_of_their_stall(in_memory_s: float | None, share: float) -> None:
    usage = _job((1.4, 1.5, 1.6), 2)
    advice = checkpoint_interval.advise(usage, [usage], in_memory_s)
    assert advice is not None and advice["memory_share"] == pytest.approx(share, abs=0.0001)
