"""Scripts of all habits on hosts, with the real torch: they die by themselves, and what orch says of them is what they did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.cluster.desk import Desk, Job
from tests.support.habits import COMMON, DEATHS, EVERY, STEPS, Habit
from tests.support.torch_script import WITHOUT_DYNAMO


def play(desk: Desk, habits: Sequence[Habit], fields: Sequence[dict[str, Any]]) -> None:
    """Run the scripts beside each other, each with these fields of its job file, and hold them against what orch says."""
    jobs = [
        desk.submit(
            {"train.py": WITHOUT_DYNAMO + COMMON + habit.script}, entrypoint="train.py", restart={"max": 1}, **own
        )
        for habit, own in zip(habits, fields, strict=True)
    ]  # fmt: skip
    for habit, job in zip(habits, jobs, strict=True):
        status = job.wait()
        assert status["state"] == "SUCCEEDED", (habit.name, job.story())
        attempts = job.why()
        assert [one["attempt"] for one in attempts] == [1, 2, 3, 4], habit.name
        weights = {job.log(rank, 4).split("weights ")[1].split()[0] for rank in (0, 1)}
        assert len(weights) == 1, habit.name
        for attempt in attempts[1:]:
            _assert_begun(job, attempt, habit)


def _assert_begun(job: Job, attempt: dict[str, Any], habit: Habit) -> None:
    """Both ranks began from the newest whole checkpoint that was at home, and orch says so."""
    number, began = attempt["attempt"], attempt["began_from"]
    said = [job.log(rank, number).split("begins from ")[1].split("\n")[0] for rank in (0, 1)]
    assert said[0].partition("/code/")[2] == said[1].partition("/code/")[2], (habit.name, said)
    died, _ = DEATHS[number - 1]
    newest = (died - 1) // EVERY * EVERY
    assert began is not None and began["step"] in (newest, newest - EVERY), (habit.name, number, began)
    assert attempt["first_step"] == began["step"] + 1 <= STEPS
