"""Whatever happens to hosts, lines, agents and supervisors, and in whatever order: is nothing resumed from that is not whole, and
nothing lost that was called safe? Real files, real agents' memories, one real tracker; see `tests.support.copy_story`."""

from __future__ import annotations

import pytest

from tests.support.copy_mutations import KILLERS, MODULES, MUTATIONS, SURVIVORS, kills
from tests.support.copy_play import play
from tests.support.sim.mutations import Mutation, mutated

BLOCK, SOAK_BLOCK = 5, 100
FOUND = (32, 138, 201, 280, 308, 639, 675, 938)
"""Seeds whose stories once went wrong, by an earlier form of the story."""


@pytest.mark.parametrize("block", range(20))
def test_nothing_is_resumed_that_is_not_whole_and_nothing_safe_is_lost(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        play(seed)


def test_stories_that_once_went_wrong() -> None:
    for seed in FOUND:
        play(seed)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_many_orders(block: int) -> None:
    for seed in range(1000 + block * SOAK_BLOCK, 1000 + (block + 1) * SOAK_BLOCK):
        try:
            play(seed)
        except AssertionError as err:
            raise AssertionError(f"seed {seed}: {err}") from err


def test_each_mutation_fits_the_code() -> None:
    assert {mutation.name for mutation in MUTATIONS} == {*KILLERS, *SURVIVORS}
    for mutation in MUTATIONS:
        with mutated(mutation, MODULES):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [one for one in MUTATIONS if one.name in KILLERS], ids=lambda one: one.name)
def test_mutation_is_noticed(mutation: Mutation) -> None:
    seed = KILLERS[mutation.name]
    assert kills(seed, mutation), f"{seed} no longer notices {mutation.name!r}: python -m tests.support.copy_mutations"
