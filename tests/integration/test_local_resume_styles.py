"""Scripts that save where they like and resume by themselves, told nothing of orch: is what orch says of them what they did?"""

from __future__ import annotations

import fnmatch
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.client import job_checkpoints
from orchestrator.core.text import format_count
from orchestrator.report import page
from orchestrator.views import cells
from tests.support.habits import DEATHS, EVERY, HABITS, STEPS, Habit, env_of, script_of
from tests.support.local import Desk, Sight, desk_at
from tests.support.packages import need
from tests.support.torch_script import under_torchrun

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
    return under_torchrun(folder, script_of(HABITS[0], ""), {"ORCH_ATTEMPT": "0"})


def _submit(desk: Desk, habit: Habit, scratch: Path) -> tuple[Sight, Path]:
    scratch.mkdir(parents=True)
    work = desk.folder / f"work-{len(desk.jobs)}"
    work.mkdir()
    if habit.name == "link":
        (work / "results").symlink_to(scratch)
        (scratch / "net_0001.pth.old").write_bytes(b"was here before the job")
    script, env = script_of(habit, str(scratch)), env_of(habit, str(scratch))
    return desk.submit({"train.py": script}, entrypoint="train.py", env=env, restart={"max": 1}), scratch


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.name)
def test_reported_resume_matches_what_the_script_does(
    played: dict[str, tuple[Sight, Path]], undisturbed: list[str], habit: Habit
) -> None:
    """The resume that orch reports is the one that the script made by itself."""
    job, scratch = played[habit.name]
    status = job.wait()
    why = job.job.why()
    if habit.name == "nothing":  # dies at each step anew, and gets no further
        assert status["state"] in ("SUCCEEDED", "FAILED")
        assert [one["began_from"] for one in why["attempts"]] == [None] * len(why["attempts"])
        _assert_page(job, status, why)
        return
    assert status["state"] == "SUCCEEDED", (status["reason"], job.log(0, status["attempt"]))
    assert [one["attempt"] for one in why["attempts"]] == [1, 2, 3, 4]
    weights = [job.log(rank, 4).split("weights ")[1].split()[0] for rank in (0, 1)]
    assert weights == undisturbed
    for number in (2, 3, 4):
        _assert_begun(job, why["attempts"][number - 1], habit, number, scratch)
    listed = job_checkpoints.list_checkpoints(job.job.folder, job.job.plan(), verify=False)
    newest = next(one for one in listed if one["resume"])
    assert (newest["step"], newest["exists"]) == (STEPS, True), newest
    assert status["step"] == STEPS
    repeated = [one["repeated_steps"] for one in why["attempts"][:3]]
    least = [DEATHS[1][0] - 1 - 20, DEATHS[2][0] - 20, DEATHS[3][0] - 1 - 40]  # rank 1 goes on for a moment
    assert all(few <= made < few + 2 * EVERY for few, made in zip(least, repeated, strict=True)), repeated
    if habit.name == "link":
        assert (scratch / "net_0001.pth.old").exists()
    _assert_page(job, status, why)


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


def _assert_page(job: Sight, status: dict[str, Any], why: dict[str, Any]) -> None:
    """The page of the job has the figures of the JSON outputs."""
    text = page.page(job.job)
    table = re.search('aria-label="Attempts".*?</table>', text, re.DOTALL)
    assert table is not None
    rows = [_cells(row) for row in re.findall("<tr>(.*?)</tr>", table[0], re.DOTALL)[1:]]
    assert len(rows) == len(why["attempts"]) == status["restarts"] + 1
    for row, attempt in zip(rows, why["attempts"], strict=True):
        again = f", {attempt['repeated_steps']} repeated" if attempt["repeated_steps"] else ""
        assert row[0] == str(attempt["attempt"])
        assert row[3] == f"{attempt['first_step']} to {attempt['last_step']}{again}"
        began = attempt["began_from"]
        path = cells.shorten_paths(began["path"], str(job.root)) if began else "the beginning"
        assert row[4] == (f"{path} (the script's choice), step {began['step']}" if began else path)
    whole = _cells(text)[0]
    if (newest := status["checkpoint"]) is not None:
        assert (
            f"newest checkpoint: {cells.shorten_paths(newest['path'], str(job.root))}, step {newest['step']} " in whole
        )
    assert f"{status['state']} attempt {status['attempt']} step {status['step']} " in whole
    assert f"{format_count(status['restarts'], 'restart')} " in whole
    spent = why["goodput"]["rank_seconds"]
    assert why["goodput"]["ratio"] == pytest.approx(spent["productive"] / sum(spent.values()), abs=0.01)
    percent = round(100 * spent["productive"] / sum(spent.values()), 2)
    assert f"productive {percent:.1f} %" in whole


def _cells(markup: str) -> list[str]:
    """Return the texts of a row of a table, one for each cell; all of the text for what is none."""
    found = re.findall("<t[dh][^>]*>(.*?)</t[dh]>", markup, re.DOTALL) if "<html" not in markup else [markup]
    return [" ".join(html.unescape(re.sub("<[^>]+>", " ", one)).split()) for one in found]
