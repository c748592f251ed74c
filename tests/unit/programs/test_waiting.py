"""What ends a wait, and who is to blame then?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.client.job import Job
from orchestrator.programs import outcome, waiting
from orchestrator.programs.waiting import NeedKind, WaitResult
from orchestrator.report import page
from orchestrator.views import cells
from tests.support import folders, jobs

RUNNING = jobs.status([*jobs.submitted(), *jobs.running(1, 1.0, 7)])


@pytest.mark.parametrize(
    ("backend", "silent_s", "kind"),
    [("local", 200.0, None), ("local", 400.0, NeedKind.SUPERVISOR), ("ssh", 400.0, NeedKind.SUPERVISOR), ("slurm", 400.0, None)],
)  # fmt: skip
def test_silent_remote_supervisor_needs_a_person(backend: str, silent_s: float, kind: NeedKind | None) -> None:
    """Slurm starts one again by itself, and one of this machine is started by the wait."""
    need = waiting.find_need(replace(RUNNING, backend=backend, written_s=silent_s))
    assert (need.kind if need else None) == kind


def test_contradiction_of_job_end_is_reported(tmp_path: Path) -> None:
    said = "every rank exited with code 0, and no step was made"
    news = [*jobs.submitted(), *jobs.running(1, 1.0, 0), d.Notice(2.0, said, 1, d.NoticeTopic.END)]
    news += [d.Finish(2.0, "done", 1), jobs.end(1, 3.0, d.JobEnd.SUCCEEDED, "every rank exited with code 0")]
    shown = outcome.outcome(WaitResult(jobs.status(news)), Job(folders.make(tmp_path, news)).why(), "gpt")
    assert (shown["state"], shown["notices"]) == ("SUCCEEDED", [said])
    assert said in cells.plain_text(outcome.lines(shown))


@pytest.mark.parametrize("how", [d.JobEnd.CANCELLED, d.JobEnd.FAILED])
def test_survived_crash_is_not_blamed_for_end(tmp_path: Path, how: d.JobEnd) -> None:
    """A crash that the job survived is not to blame for its end."""
    news = [
        *jobs.crashed_once(),
        *jobs.running(2, 10.0, 1),
        jobs.end(2, 11.0, how, "Slurm ended it: NODE_FAIL"),
    ]
    why = Job(folders.make(tmp_path, news)).why()
    shown = outcome.outcome(WaitResult(jobs.status(news)), why, "gpt")
    assert (shown["verdict"], shown["culprits"]) == (None, []) and "NODE_FAIL" in shown["reason"]
    if how is d.JobEnd.FAILED:
        assert page.summarize_failure(why) == "Slurm ended it: NODE_FAIL"
