"""Scripts of all habits, with the real torch, on hosts that share no disk, and for those that save outside of the job's folder also
on hosts that share one: every host begins from the same checkpoint, the one that orch names."""

from __future__ import annotations

import pytest

from tests.support.cluster import all_habits
from tests.support.cluster.box import Box
from tests.support.cluster.desk import Desk
from tests.support.habits import BELOW_START, ELSEWHERE, NOTHING, script_of
from tests.support.torch_script import under_torchrun

pytestmark = pytest.mark.soak

AT_ONCE = 4
"""How many jobs run beside each other, each on two hosts of its own."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the weights with which every script ends if nothing disturbs it: the same for all, on all ranks."""
    return under_torchrun(tmp_path_factory.mktemp("torchrun"), script_of(NOTHING, ""), {"ORCH_ATTEMPT": "0"})[0]


@pytest.mark.parametrize("first", range(0, len(BELOW_START), AT_ONCE))
def test_every_host_resumes_where_the_script_reported(desk: Desk, first: int, weights: str) -> None:
    """Every host starts at the step from which the script says that it did."""
    habits = BELOW_START[first:][:AT_ONCE]
    hosts = [f"node[{2 * place + 1}-{2 * place + 2}]" for place in range(len(habits))]
    fields = [{"nodes": 2, "procs_per_node": 1, "ssh": {"hosts": one}} for one in hosts]
    all_habits.play(desk, habits, fields, weights)


def test_shared_disk_checkpoints_are_known_from_the_first(desk: Desk, box: Box, weights: str) -> None:
    """Checkpoints on a disk that hosts share are known from the first one."""
    scratch = box.state / "scratch"
    for habit in ELSEWHERE:
        (scratch / habit.name).mkdir(parents=True)
        (scratch / habit.name).chmod(0o777)
    hosts = [f"node[{2 * place + 1}-{2 * place + 2}]" for place in range(len(ELSEWHERE))]
    fields = [{"nodes": 2, "procs_per_node": 1, "ssh": {"hosts": one}} for one in hosts]
    all_habits.play(desk, ELSEWHERE, fields, weights, str(scratch))


def test_one_hosts_checkpoints_are_known_without_submit_machine(desk: Desk, box: Box, weights: str) -> None:
    """Checkpoints on one host's disk are known although the submit machine does not see that disk."""
    scratch = "/tmp/own"
    for host in box.nodes:
        host.run(["mkdir", "-p", *(f"{scratch}/{habit.name}" for habit in ELSEWHERE)], user="trainer")
    fields = [
        {"nodes": 1, "procs_per_node": 2, "ssh": {"hosts": f"node{place + 1}"}} for place in range(len(ELSEWHERE))
    ]
    all_habits.play(desk, ELSEWHERE, fields, weights, scratch)


def test_script_without_checkpoints_restarts_from_scratch(desk: Desk, weights: str) -> None:
    """A script that saves no checkpoint starts from scratch each time."""
    all_habits.play_nothing(desk, weights, nodes=2, procs_per_node=1, ssh={"hosts": "node[1-2]"})
