"""Every mutation of the brain is killed by the night that is stated for it."""

from __future__ import annotations

import pytest

from tests.support.sim.mutations import KILLERS, MUTATIONS, Mutation, kills, mutated

MUTATIONS_MIN = 25


def test_mutations_are_enough_and_each_has_a_night() -> None:
    assert len(MUTATIONS) >= MUTATIONS_MIN
    assert [mutation.name for mutation in MUTATIONS] == list(KILLERS)


def test_each_mutation_fits_the_code() -> None:
    for mutation in MUTATIONS:
        with mutated(mutation):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_brain_mutation_is_killed(mutation: Mutation) -> None:
    nights = KILLERS[mutation.name].split(", ")
    assert any(kills(night, mutation) for night in nights), (
        f"{nights} no longer notice {mutation.name!r}; look for others: python -m tests.support.sim.mutations {mutation.name!r}"
    )
