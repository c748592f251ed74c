"""Frameworks that save where they like and resume by themselves, under random kills: they end as undisturbed ones do, and what orch
says of them is what they did."""

from __future__ import annotations

import fnmatch
import random
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orchestrator.client import job_checkpoints
from orchestrator.supervisor.status import ENDED
from tests.support.framework_scripts import EVERY, FRAMEWORKS, STEPS, Framework
from tests.support.local import Desk, Sight, kill, wait_until
from tests.support.packages import need
from tests.support.torch_script import under_torchrun

pytestmark = pytest.mark.soak

RUN_S_MAX = 120.0


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_framework_killed_cancelled_and_resumed_matches_undisturbed_run(desk: Desk, framework: Framework) -> None:
    """A framework that is killed, cancelled and resumed ends like an undisturbed run."""
    need(framework.package)
    seed = random.randrange(10**6)
    print("seed", seed)
    dice = random.Random(seed)
    scratch = desk.folder / "tmp"
    scratch.mkdir()
    job = desk.submit(
        {"train.py": framework.text}, entrypoint="train.py", env={"TMPDIR": str(scratch)}, restart={"max": 1}
    )
    _kill_at(job, 1, dice.randrange(2 * EVERY + 1, 3 * EVERY - 1), dice.randrange(2))
    _kill_in_the_midst_of_a_save(job, framework, scratch, dice.uniform(0, 0.02))
    _wait_for_step(job, 3, dice.randrange(4 * EVERY + 2, STEPS - 1))
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"
    job.job.resume()
    status = job.wait(RUN_S_MAX)
    assert status["state"] == "SUCCEEDED", (status["reason"], job.log(0, status["attempt"]))
    _assert_told(job, framework, status)
    calm = desk.folder / "calm"
    calm.mkdir()
    weights = [_said(job, rank, 4, "weights") for rank in (0, 1)]
    assert weights == under_torchrun(calm, framework.text, {"PACE_S": "0"})


def _kill_at(job: Sight, attempt: int, step: int, rank: int) -> None:
    _wait_for_step(job, attempt, step)
    kill(job.rank_procs()[rank])
    print("killed rank", rank, "at step", step)


def _wait_for_step(job: Sight, attempt: int, step: int) -> None:
    line = f"made {step}\n"
    wait_until(
        lambda: line in job.log(0, attempt) or job.seen()["state"] in ENDED,
        f"step {step} of attempt {attempt}",
        RUN_S_MAX,
    )
    assert line in job.log(0, attempt), (job.seen()["reason"], job.log(0, attempt))


def _kill_in_the_midst_of_a_save(job: Sight, framework: Framework, scratch: Path, later_s: float) -> None:
    """Kill rank 0 of attempt 2 as soon as a name of its save, or a temporary one, is there, and a moment more is over."""
    wait_until(lambda: "made " in job.log(0, 2), "the first step of attempt 2", RUN_S_MAX)
    before = _names(job, framework, scratch)
    victim = job.rank_procs()[0]
    deadline_s = time.monotonic() + RUN_S_MAX
    while not (new := _names(job, framework, scratch) - before):
        assert time.monotonic() < deadline_s, "attempt 2 does not save"
    time.sleep(later_s)
    kill(victim)
    print("killed rank 0", later_s, "s after it began to write", new)


def _names(job: Sight, framework: Framework, scratch: Path) -> set[Path]:
    return {*(job.root / "code").glob(framework.place), *scratch.iterdir()}


def _assert_told(job: Sight, framework: Framework, status: dict[str, Any]) -> None:
    """Steps, beginnings, restarts and saves that orch tells are those of the script."""
    attempts = job.job.why()["attempts"]
    assert [one["attempt"] for one in attempts] == [1, 2, 3, 4]
    for before, attempt in pairwise(attempts):
        number, began = attempt["attempt"], attempt["began_from"]
        said, first = _said(job, 0, number, "begins from"), int(_said(job, 0, number, "made"))
        if framework.resumes:
            assert (began["step"], began["chosen_by"]) == (first - 1, "script"), (number, began)
            assert Path(began["path"]).resolve() == (job.root / "code" / said).resolve(), (number, began)
        else:
            assert (began["path"], said, first) == (None, "None", 1), (number, began)
        logs = job.log(0, number - 1) + job.log(1, number - 1)
        made = max(map(int, re.findall("^made (.+)$", logs, re.MULTILINE)))
        assert attempt["first_step"] == first
        assert before["last_step"] in (made, made + 1), (number, before)  # killed before it could tell
        assert before["repeated_steps"] == before["last_step"] - first + 1, (number, before)
    assert (status["step"], status["restarts"], status["checkpoint"]["step"]) == (STEPS, 2, STEPS)
    newest = next(
        one for one in job_checkpoints.list_checkpoints(job.job.folder, job.job.plan(), verify=False) if one["resume"]
    )
    assert (newest["state"], newest["step"], newest["exists"]) == ("whole", STEPS, True), newest
    assert fnmatch.fnmatchcase(newest["path"], f"{job.root}/code/{framework.place}"), newest


def _said(job: Sight, rank: int, attempt: int, words: str) -> str:
    """Return what follows these words where they first begin a line of a rank's log."""
    found = re.search(f"^{words} (.+)$", job.log(rank, attempt), re.MULTILINE)
    assert found is not None, (words, job.log(rank, attempt))
    return found[1]
