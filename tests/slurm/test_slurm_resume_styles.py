"""Scripts of all habits, with the real torch, in Slurm's queue: what orch says is what they did."""

from __future__ import annotations

import pytest

from tests.support.cluster import all_habits
from tests.support.cluster.desk import Desk
from tests.support.cluster.host import TRAINER
from tests.support.habits import BELOW_START, ELSEWHERE, NOTHING, script_of
from tests.support.torch_script import under_torchrun

pytestmark = pytest.mark.soak

AT_ONCE = 2
"""How many jobs run beside each other."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the weights with which every script ends if nothing disturbs it: the same for all, on all ranks."""
    return under_torchrun(tmp_path_factory.mktemp("torchrun"), script_of(NOTHING, ""), {"ORCH_ATTEMPT": "0"})[0]


@pytest.mark.parametrize("first", range(0, len(BELOW_START), AT_ONCE))
def test_attempt_resumes_where_the_script_reported(desk: Desk, first: int, weights: str) -> None:
    """An attempt starts at the step from which the script says that it did."""
    habits = BELOW_START[first:][:AT_ONCE]
    all_habits.play(desk, habits, [{"nodes": 2, "procs_per_node": 1}] * len(habits), weights)


@pytest.mark.parametrize("first", range(0, len(ELSEWHERE), AT_ONCE))
def test_checkpoints_outside_job_are_known_from_the_first(desk: Desk, first: int, weights: str) -> None:
    habits, scratch = ELSEWHERE[first:][:AT_ONCE], f"{TRAINER.home}/scratch"
    desk.box.login.run(["mkdir", "-p", *(f"{scratch}/{habit.name}" for habit in habits)], user="trainer")
    all_habits.play(desk, habits, [{"nodes": 2, "procs_per_node": 1}] * len(habits), weights, scratch)


def test_script_without_checkpoints_restarts_from_scratch(desk: Desk, weights: str) -> None:
    """A script that saves no checkpoint starts from scratch each time."""
    all_habits.play_nothing(desk, weights, nodes=2, procs_per_node=1)
