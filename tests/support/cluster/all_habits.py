"""Scripts of all habits on hosts, with the real torch: they die by themselves, and what orch says of them is what they did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from tests.support.cluster.desk import Desk, Job
from tests.support.habits import DEATHS, EVERY, HELD, NOTHING, STEPS, Habit, env_of, script_of


def play(
    desk: Desk, habits: Sequence[Habit], fields: Sequence[dict[str, Any]], weights: str, scratch: str = ""
) -> None:
    """Run the scripts beside each other, each with these fields of its job file, and hold them against what orch says.

    In their fourth attempt they are cancelled and resumed. `weights`: what they end with if nothing disturbs them; `scratch`: a
    folder that all hosts see, in which those save that save outside of the job's.
    """
    jobs = [
        submit(desk, habit, f"{scratch}/{habit.name}", HELD, restart={"max": 1}, **own)
        for habit, own in zip(habits, fields, strict=True)
    ]
    for job in jobs:
        _cancel_and_resume(job, 4, int(HELD["HABIT_STEP"]) - 1)
    for habit, job in zip(habits, jobs, strict=True):
        _assert_told(job, habit, weights)


def submit(desk: Desk, habit: Habit, scratch: str, env: dict[str, str], **own: Any) -> Job:
    """Submit a habit's script; where it saves behind a link, that lies in its workdir."""
    files = {"train.py": script_of(habit, scratch)}
    path = desk.write(files, entrypoint="train.py", env=env_of(habit, scratch) | env, **own)
    if habit.name == "link":
        desk.box.login.run(["ln", "-s", scratch, f"{PurePosixPath(path).parent}/results"], user="trainer")
    told = json.loads(desk.orch("submit", path, "--json").stdout)
    desk.jobs.append(Job(desk, told["id"], told["dir"]))
    return desk.jobs[-1]


def play_nothing(desk: Desk, weights: str, **own: Any) -> None:
    """Run a script that saves nothing: each attempt begins anew, and orch says so."""
    job = submit(desk, NOTHING, "", {"HABIT_ATTEMPT": "2", "HABIT_STEP": "30"}, restart={"max": 1}, **own)
    _cancel_and_resume(job, 2, 29)
    status, attempts = job.wait(), job.why()
    assert status["state"] == "SUCCEEDED", job.story()
    assert (status["step"], status["checkpoint"]) == (STEPS, None)
    begun = [(one["attempt"], one["began_from"], one["first_step"]) for one in attempts]
    assert begun == [(number, None, 1) for number in (1, 2, 3, 4)]
    assert attempts[-1]["last_step"] == STEPS
    assert json.loads(desk.orch("checkpoints", job.id, "--json").stdout) == []
    assert [job.log(rank, 4).split("weights ")[1].split()[0] for rank in (0, 1)] == [weights] * 2


def _cancel_and_resume(job: Job, attempt: int, step: int) -> None:
    """Cancel a job that waits after a step, and resume it."""
    job.until(
        lambda seen: (seen["attempt"], seen["step"]) == (attempt, step) or seen["state"] == "FAILED",
        f"step {step} of attempt {attempt}",
    )
    job.desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED", job.story()
    job.desk.orch("resume", job.id)


def _assert_told(job: Job, habit: Habit, weights: str) -> None:
    status, attempts = job.wait(), job.why()
    assert status["state"] == "SUCCEEDED", (habit.name, job.story())
    assert [one["attempt"] for one in attempts] == [1, 2, 3, 4, 5], habit.name
    assert [job.log(rank, 5).split("weights ")[1].split()[0] for rank in (0, 1)] == [weights] * 2, habit.name
    for attempt in attempts[1:]:
        _assert_begun(job, attempt, habit)
    listed = json.loads(job.desk.orch("checkpoints", job.id, "--json").stdout)
    newest = next(one for one in listed if one["resume"])
    assert newest["exists"] or newest["places"][-1]["host"], (habit.name, newest)
    assert (newest["step"], status["step"], status["restarts"]) == (STEPS, STEPS, 3), (habit.name, newest)
    assert status["checkpoint"] == {"path": newest["path"], "step": STEPS}, (habit.name, status["checkpoint"])


def _assert_begun(job: Job, attempt: dict[str, Any], habit: Habit) -> None:
    """Both ranks began from the newest whole checkpoint that was at home, and orch says so."""
    number, began = attempt["attempt"], attempt["began_from"]
    said = [job.log(rank, number).split("begins from ")[1].split("\n")[0] for rank in (0, 1)]
    own = [one.rpartition("/code/")[2] for one in said]
    assert own[0] == own[1], (habit.name, said)
    died = int(HELD["HABIT_STEP"]) if number == 5 else DEATHS[number - 1][0]
    newest = (died - 1) // EVERY * EVERY
    assert began is not None and began["step"] in (newest, newest - EVERY), (habit.name, number, began)
    assert attempt["first_step"] == began["step"] + 1 <= STEPS
    place = PurePosixPath(began["path"].rpartition("/code/")[2])
    assert PurePosixPath(own[0]).is_relative_to(place) or place.name == PurePosixPath(own[0]).name, (
        said,
        began,
    )
