"""What a user is told at a submit and a resume: warnings, and another effective batch size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import group, lifecycle
from orchestrator.client.job import Job
from orchestrator.core import codec
from tests.support import folders, jobs

BATCH = {"per_device": 16, "accumulation": 4}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"batch": BATCH}, {"batch": BATCH, "nodes": 1}, "effective batch 256 → 128: 128 = 16 per device × 4 accumulated × 2 ranks\n         to keep 256, let the script accumulate 8 times, and --set batch.accumulation=8\n"),
        ({"batch": BATCH}, {"batch": BATCH, "nodes": 3}, "effective batch 256 → 384: 384 = 16 per device × 4 accumulated × 6 ranks\n"),
        ({"batch": BATCH}, {"batch": {**BATCH, "accumulation": 8}, "nodes": 1}, ""),
        ({"batch": BATCH}, {"batch": BATCH}, ""),
        ({}, {"nodes": 1}, ""),
        ({}, {"batch": BATCH}, ""),
    ],
)  # fmt: skip
def test_changed_effective_batch_is_shown_with_both_values(
    before: dict[str, Any], after: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A different effective batch size is reported with both numbers."""
    lifecycle._warn_about_batch(jobs.plan(**before), jobs.plan(**after))
    err = capsys.readouterr().err
    assert said in err and bool(said) == bool(err)


@pytest.mark.parametrize(
    ("total", "step", "said"), [(700, 2000, True), (700, 699, False), (None, 9, False), (9, None, False)]
)
def test_resume_beyond_total_steps_warns(
    total: int | None, step: int | None, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume beyond its total number of steps gives a warning."""
    lifecycle._warn_about_total(total, step)
    warning = "warning: total_steps is 700, and the job resumes at step 2,000\n"
    assert capsys.readouterr().err == (warning if said else "")


def test_submit_warns_with_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(folders.failed(tmp_path))
    assert lifecycle.report_submitted(job, follow=False, as_json=False) == 0
    assert capsys.readouterr().err == ""
    keeps = jobs.plan(checkpoint={"keep": 3}, entrypoint="train.py --save_top_k 2")
    job.folder.plan.write_text(codec.dumps(dataclasses.replace(keeps, id=job.id)))
    assert lifecycle.report_submitted(job, follow=False, as_json=True) == 0
    said = capsys.readouterr()
    assert said.err.startswith("warning: checkpoint.keep deletes") and "\n  fix: leave checkpoint.keep out" in said.err
    assert json.loads(said.out)["id"] == job.id


def test_follow_without_past_shows_no_old_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resume is followed from here on: lines of earlier attempts are not repeated."""
    job = Job(folders.failed(tmp_path))
    log = job.folder.rank_log(1, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("an old line\n")
    group.follow_job(job)
    assert "an old line" in capsys.readouterr().out
    group.follow_job(job, tail=0)
    assert "an old line" not in capsys.readouterr().out
