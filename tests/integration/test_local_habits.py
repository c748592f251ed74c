"""Scripts that save where they like and resume by themselves, told nothing of orch: is what orch says of them what they did?"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.client import saves
from tests.support.habits import COMMON, DEATHS, EVERY, HABITS, STEPS, Habit
from tests.support.local import Desk, Sight, desk_at
from tests.support.packages import need
from tests.support.torch_script import WITHOUT_DYNAMO, under_torchrun

need("torch")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Sight, Path]]]:
    """Give the job of each habit, all of them beside each other, and the folder outside of it in which it may save."""
    folder = tmp_path_factory.mktemp("habits")
    with desk_at(folder) as desk:
        yield {habit.name: _submit(desk, habit, folder / "scratch" / habit.name) for habit in HABITS}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the weights of both ranks of a script that torchrun runs and no rank of which dies: all train the same."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return under_torchrun(folder, WITHOUT_DYNAMO + COMMON + HABITS[0].script, {"ORCH_ATTEMPT": "0"})


def _submit(desk: Desk, habit: Habit, scratch: Path) -> tuple[Sight, Path]:
    scratch.mkdir(parents=True)
    work = desk.folder / f"work-{len(desk.jobs)}"
    work.mkdir()
    if habit.name == "link":
        (work / "results").symlink_to(scratch)
        (scratch / "net_0001.pth.old").write_bytes(b"was here before the job")
    env = {name: str(scratch / "mine") for name in habit.env}
    script = WITHOUT_DYNAMO + COMMON + f"SCRATCH = {str(scratch)!r}\n" + habit.script
    return desk.submit({"train.py": script}, entrypoint="train.py", env=env, restart={"max": 1}), scratch


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.name)
def test_what_a_script_does_by_itself_is_what_orch_says_of_it(
    played: dict[str, tuple[Sight, Path]], undisturbed: list[str], habit: Habit
) -> None:
    job, scratch = played[habit.name]
    status = job.wait()
    why = job.job.why()
    if habit.name == "nothing":  # dies at each step anew, and gets no further
        assert status["state"] in ("SUCCEEDED", "FAILED")
        assert [one["began_from"] for one in why["attempts"]] == [None] * len(why["attempts"])
        return
    assert status["state"] == "SUCCEEDED", (status["reason"], job.log(0, status["attempt"]))
    assert [one["attempt"] for one in why["attempts"]] == [1, 2, 3, 4]
    weights = [job.log(rank, 4).split("weights ")[1].split()[0] for rank in (0, 1)]
    assert weights == undisturbed
    for number in (2, 3, 4):
        _assert_begun(job, why["attempts"][number - 1], habit, number, scratch)
    listed = saves.listed(job.job.folder, job.job.plan(), verify=False)
    newest = next(one for one in listed if one["resume"])
    assert (newest["step"], newest["exists"]) == (STEPS, True), newest
    assert status["step"] == STEPS
    repeated = [one["repeated_steps"] for one in why["attempts"][:3]]
    least = [DEATHS[1][0] - 1 - 20, DEATHS[2][0] - 20, DEATHS[3][0] - 1 - 40]  # rank 1 goes on for a moment
    assert all(few <= made < few + 2 * EVERY for few, made in zip(least, repeated, strict=True)), repeated
    if habit.name == "link":
        assert (scratch / "net_0001.pth.old").exists()


def _assert_begun(job: Sight, attempt: dict[str, object], habit: Habit, number: int, scratch: Path) -> None:
    """The attempt began from what its script says, the newest whole checkpoint that there was."""
    log = job.log(0, number)
    said = log.split("begins from ")[1].split("\n")[0]
    began = attempt["began_from"]
    assert isinstance(began, dict), (number, log)
    died, _ = DEATHS[number - 1]
    step = (died - 1) // EVERY * EVERY
    assert (began["step"], began["chosen_by"]) == (step, "script"), (number, began)
    assert (
        Path(said).is_relative_to(Path(began["path"]).resolve())
        or Path(said).resolve() == Path(began["path"]).resolve()
    ), (said, began)
    assert attempt["first_step"] == step + 1
    place = habit.place.replace("SCRATCH", str(scratch))
    name = str(Path(began["path"])).removeprefix(f"{job.root}/code/")
    assert fnmatch.fnmatchcase(name, place), (name, place)
