"""Random nights, most of them on pools of hosts or in a queue, and clean ones whose verdicts are known. `ORCH_SEED=n` replays
one, `ORCH_NIGHTS=n` runs more than 150, from the seed `ORCH_FIRST` on; the named ones are played in `test_transcripts`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.support.sim import accounts
from tests.support.sim.clean import check_clean, clean_night
from tests.support.sim.clean_desync import CASES as DESYNC_CASES
from tests.support.sim.clean_desync import check_desync, desync_night
from tests.support.sim.clean_hang import CASES, hang_night
from tests.support.sim.clean_pool import check_pool, pool_night
from tests.support.sim.clean_queue import check_queue, queue_night
from tests.support.sim.night import Night, random_night
from tests.support.sim.tale import LINES_MAX, tale
from tests.support.sim.world import World

pytestmark = pytest.mark.slow

X = TypeVar("X")

NIGHTS = int(os.environ.get("ORCH_NIGHTS", "150"))
FIRST = int(os.environ.get("ORCH_FIRST", "0"))
SEEDS = [int(os.environ["ORCH_SEED"])] if "ORCH_SEED" in os.environ else list(range(FIRST, FIRST + NIGHTS))
CLEAN_SEEDS = SEEDS if "ORCH_SEED" in os.environ else SEEDS[: max(25 * 6, NIGHTS // 4)]
QUEUE_SEEDS = SEEDS if "ORCH_SEED" in os.environ else SEEDS[: max(38 * 2, NIGHTS // 8)]
HANG_SEEDS = SEEDS if "ORCH_SEED" in os.environ else SEEDS[: max(CASES, NIGHTS // 8)]
DESYNC_SEEDS = SEEDS if "ORCH_SEED" in os.environ else SEEDS[: max(DESYNC_CASES * 3, NIGHTS // 8)]
POOL_SEEDS = SEEDS if "ORCH_SEED" in os.environ else SEEDS[: max(42 * 2 + 11, NIGHTS // 8)]


def _live(world: World, seed: int, test: str, check: Callable[[], None] = lambda: None) -> None:
    try:
        world.play()
        accounts.check(world)
        check()
    except Exception as err:  # whatever breaks, the night is shown
        lines = "\n".join(tale(world)[-LINES_MAX:])
        replay = f"ORCH_SEED={seed} python -m pytest tests/sim/test_nights.py -k {test}"
        pytest.fail(f"night {seed}: {type(err).__name__}: {err}\n  replay: {replay}\n{lines}", pytrace=False)


def _live_each(
    seeds: list[int], test: str, draw: Callable[[int], tuple[Night, X]], check: Callable[[World, X], None]
) -> None:
    """Play the night that each seed draws, and check what comes of it against what is expected."""
    for seed in seeds:
        night, expected = draw(seed)
        world = World(night)
        _live(world, seed, test, functools.partial(check, world, expected))


def test_random_nights_break_no_oracle() -> None:
    for seed in SEEDS:
        _live(World(random_night(seed)), seed, "test_random_nights")


@pytest.mark.soak  # the longest night of all
def test_night_without_steps_with_logging_rank_may_continue() -> None:
    """One rank computes in one place, another is blocked beside a thread that logs: no state proves that they hang."""
    _live(World(random_night(700607)), 700607, "test_random_nights")


def test_single_fault_is_classified_and_harmless_one_ignored() -> None:
    _live_each(CLEAN_SEEDS, "test_single_fault", clean_night, check_clean)


def test_stuck_rank_is_named_but_paused_is_not() -> None:
    _live_each(HANG_SEEDS, "test_stuck_rank", hang_night, check_clean)


def test_desynced_rank_is_named_and_checkpoints_distrusted() -> None:
    """A rank out of step is named in time, and nothing starts from checkpoints after it."""
    _live_each(DESYNC_SEEDS, "test_desynced_rank", desync_night, check_desync)


def test_single_host_fault_is_named_and_avoided() -> None:
    _live_each(POOL_SEEDS, "test_single_host_fault", pool_night, check_pool)


def test_single_queue_event_is_distinguished_from_all_others() -> None:
    """One event that befalls a queued job is distinguished from all others."""
    _live_each(QUEUE_SEEDS, "test_single_queue_event", queue_night, check_queue)
