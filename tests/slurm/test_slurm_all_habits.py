"""Scripts that save below the folder where they start, with the real torch, in Slurm's queue: what orch says is what they did."""

from __future__ import annotations

import pytest

from tests.support.cluster import all_habits
from tests.support.cluster.desk import Desk
from tests.support.habits import BELOW_START

pytestmark = pytest.mark.soak

AT_ONCE = 2
"""How many jobs run beside each other."""


@pytest.mark.parametrize("first", range(0, len(BELOW_START), AT_ONCE))
def test_an_attempt_begins_where_the_script_says_it_did(desk: Desk, first: int) -> None:
    habits = BELOW_START[first:][:AT_ONCE]
    all_habits.play(desk, habits, [{"nodes": 2, "procs_per_node": 1}] * len(habits))
