"""A thousand random nights, most of them on pools of hosts or in a queue, and clean ones whose verdicts are known. `ORCH_SEED=n`
replays one, `ORCH_NIGHTS=n` runs more."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import pytest

from .clean import check_clean, clean_night
from .clean_pool import check_pool, pool_night
from .clean_queue import check_queue, queue_night
from .named import NAMED
from .night import random_night
from .tale import LINES_MAX, tale
from .world import World

NIGHTS = int(os.environ.get("ORCH_NIGHTS", "1000"))
SEEDS = [int(os.environ["ORCH_SEED"])] if "ORCH_SEED" in os.environ else list(range(NIGHTS))
CLEAN_SEEDS = SEEDS if "ORCH_SEED" in os.environ else SEEDS[: max(24 * 10, NIGHTS // 4)]
QUEUE_SEEDS = SEEDS if "ORCH_SEED" in os.environ else SEEDS[: max(35 * 3, NIGHTS // 8)]
POOL_SEEDS = SEEDS if "ORCH_SEED" in os.environ else SEEDS[: max(42 * 3, NIGHTS // 8)]


def _live(world: World, seed: int, test: str, check: Callable[[], None] = lambda: None) -> None:
    try:
        world.play()
        check()
    except Exception as err:  # whatever breaks, the night is shown
        lines = "\n".join(tale(world)[-LINES_MAX:])
        replay = f"ORCH_SEED={seed} python -m pytest tests/sim/test_nights.py -k {test}"
        pytest.fail(f"night {seed}: {type(err).__name__}: {err}\n  replay: {replay}\n{lines}", pytrace=False)


def test_random_nights_break_no_oracle() -> None:
    for seed in SEEDS:
        _live(World(random_night(seed)), seed, "test_random_nights")


def test_one_fault_is_judged_as_what_it_was_and_a_harmless_one_not_at_all() -> None:
    for seed in CLEAN_SEEDS:
        night, expected = clean_night(seed)
        world = World(night)
        _live(world, seed, "test_one_fault", functools.partial(check_clean, world, expected))


def test_one_thing_wrong_with_hosts_is_named_and_got_around_where_others_are() -> None:
    for seed in POOL_SEEDS:
        night, expected = pool_night(seed)
        world = World(night)
        _live(world, seed, "test_one_thing_wrong", functools.partial(check_pool, world, expected))


def test_one_thing_that_befalls_a_job_in_a_queue_is_told_apart_from_all_others() -> None:
    for seed in QUEUE_SEEDS:
        night, expected = queue_night(seed)
        world = World(night)
        _live(world, seed, "test_one_thing_that_befalls", functools.partial(check_queue, world, expected))


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_named_night_breaks_no_oracle(name: str) -> None:
    _live(World(NAMED[name]), NAMED[name].seed, name)
