"""Scripts that save below the folder where they start, with the real torch, on hosts that share no disk: every host begins from the
same checkpoint, the one that orch names."""

from __future__ import annotations

import pytest

from tests.support.cluster import all_habits
from tests.support.cluster.desk import Desk
from tests.support.habits import BELOW_START

pytestmark = pytest.mark.soak

AT_ONCE = 4
"""How many jobs run beside each other, each on two hosts of its own."""


@pytest.mark.parametrize("first", range(0, len(BELOW_START), AT_ONCE))
def test_every_host_begins_where_the_script_says_it_did(desk: Desk, first: int) -> None:
    habits = BELOW_START[first:][:AT_ONCE]
    hosts = [f"node[{2 * place + 1}-{2 * place + 2}]" for place in range(len(habits))]
    fields = [{"nodes": 2, "procs_per_node": 1, "ssh": {"hosts": one}} for one in hosts]
    all_habits.play(desk, habits, fields)
