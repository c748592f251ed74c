"""Do the example jobs run as the README says, and do people's frameworks go on after a rank was killed?"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

import orchestrator
from orchestrator.client.job import Job

JOBS = Path(__file__).parents[2] / "jobs"
RUN_S_MAX = 600.0
POLL_S = 0.1
DEMO_LOSS_MAX = 2.1


def submit(name: str, home: Path, *overrides: str) -> Job:
    return orchestrator.submit(
        JOBS / name, overrides=overrides, environ={**os.environ, "ORCH_HOME": str(home)}
    )


def log(job: Job, attempt: int, rank: int) -> str:
    return job.folder.rank_log(attempt, rank).read_text(errors="replace")


def kill_a_rank_after_a_checkpoint(job: Job, rank: int) -> None:
    """Kill `rank` of the first attempt with -9 once a checkpoint is there to go on from."""
    deadline_s = time.monotonic() + RUN_S_MAX
    while time.monotonic() < deadline_s:
        status = job.status()
        pid = status["ranks"][rank]["pid"]
        if status["checkpoint"] is not None and status["attempt"] == 1 and pid is not None:
            os.kill(pid, signal.SIGKILL)
            return
        assert status["state"] in ("STARTING", "RUNNING"), status["reason"]
        time.sleep(POLL_S)
    pytest.fail("no checkpoint was written")


@pytest.mark.soak
def test_the_demo_learns_the_standard_library(tmp_path: Path) -> None:
    job = submit("tiny_gpt.yaml", tmp_path)
    status = job.wait(RUN_S_MAX)
    assert (status["state"], status["step"], status["restarts"]) == ("SUCCEEDED", 700, 0), status["reason"]
    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", log(job, 1, 0))]
    assert losses[-1] < DEMO_LOSS_MAX < losses[0]
    assert status["checkpoint"] is not None and status["checkpoint"]["step"] == 700
    assert len(list(job.folder.checkpoints.glob("step-*.pt"))) <= 4, (
        "checkpoint.keep is 3, and one may be new"
    )


@pytest.mark.parametrize("name", ["accelerate.yaml", pytest.param("lightning.yaml", marks=pytest.mark.soak)])
def test_a_framework_s_job_goes_on_from_its_checkpoint_when_a_rank_is_killed(
    name: str, tmp_path: Path
) -> None:
    job = submit(name, tmp_path)
    kill_a_rank_after_a_checkpoint(job, 2)
    status = job.wait(RUN_S_MAX)
    assert (status["state"], status["step"], status["attempt"]) == ("SUCCEEDED", 120, 2), status["reason"]
    first, second = job.why()["attempts"]
    assert (first["verdict"]["kind"], first["verdict"]["ranks"], first["verdict"]["node"]) == (
        "crash",
        [2],
        "node-1",
    )
    assert second["resumed_from"] is not None
    assert second["first_step"] > 1, "it went on, it did not begin again"
    assert second["first_step"] <= first["last_step"] + 1, "no step was left out"
    assert "final weights sha256" in log(job, 2, 0)
