"""Scripts that save below the folder where they start, with the real torch, on hosts that share no disk: what orch says is what they
did, and every host begins from the same checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster.desk import Desk, Job
from tests.support.habits import BELOW_START, COMMON, DEATHS, EVERY, STEPS, Habit
from tests.support.torch_script import WITHOUT_DYNAMO

pytestmark = pytest.mark.soak

AT_ONCE = 4
"""How many jobs run beside each other, each on two hosts of its own."""


@pytest.mark.parametrize("part", range(-(-len(BELOW_START) // AT_ONCE)))
def test_every_host_begins_where_the_script_says_it_did(desk: Desk, part: int) -> None:
    habits = BELOW_START[part * AT_ONCE :][:AT_ONCE]
    jobs = [_submit(desk, habit, place) for place, habit in enumerate(habits)]
    for habit, job in zip(habits, jobs, strict=True):
        status = job.wait()
        assert status["state"] == "SUCCEEDED", (habit.name, job.story())
        attempts = job.why()
        assert [one["attempt"] for one in attempts] == [1, 2, 3, 4], habit.name
        weights = {job.log(rank, 4).split("weights ")[1].split()[0] for rank in (0, 1)}
        assert len(weights) == 1, habit.name
        for attempt in attempts[1:]:
            _assert_begun(job, attempt, habit)


def _submit(desk: Desk, habit: Habit, place: int) -> Job:
    script = WITHOUT_DYNAMO + COMMON + habit.script
    hosts = f"node[{2 * place + 1}-{2 * place + 2}]"
    return desk.submit(
        {"train.py": script}, nodes=2, procs_per_node=1, entrypoint="train.py", ssh={"hosts": hosts}, restart={"max": 1}
    )  # fmt: skip


def _assert_begun(job: Job, attempt: dict[str, Any], habit: Habit) -> None:
    """Both ranks began from the newest whole checkpoint that was at home, and orch says so."""
    number, began = attempt["attempt"], attempt["began_from"]
    said = [job.log(rank, number).split("begins from ")[1].split("\n")[0] for rank in (0, 1)]
    assert said[0].partition("/code/")[2] == said[1].partition("/code/")[2], (habit.name, said)
    died, _ = DEATHS[number - 1]
    newest = (died - 1) // EVERY * EVERY
    assert began is not None and began["step"] in (newest, newest - EVERY), (habit.name, number, began)
    assert attempt["first_step"] == began["step"] + 1 <= STEPS
