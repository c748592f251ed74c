"""Do the example jobs run as their files say, and does each framework's job go on after a rank was killed?

Each example is submitted as it is, two nodes with two ranks each on this machine's CPUs, and rank 2 gets a -9 once there
is a checkpoint, or of a script that saves nothing once the rank is at work.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import orchestrator
from orchestrator.client import job_checkpoints
from orchestrator.client.job import Job
from tests.support.packages import need

pytestmark = pytest.mark.soak

JOBS = Path(__file__).parents[2] / "jobs"
RUN_S_MAX = 600.0
POLL_S = 0.05
DEMO_LOSS_MAX = 2.1
STEPS = 120
KILLED = 2


@dataclass(frozen=True, slots=True)
class Training:
    """An example that trains STEPS steps: the pattern of its checkpoints' names, and what its last attempt says."""

    file: str
    checkpoints: str
    says: str
    needs: str = "torch"
    overrides: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.file.removesuffix(".yaml") + ("-changed" if self.overrides else "")


TRAININGS = (
    Training("fsdp2.yaml", r"step-\d{6}", r"resumed from \S+ at step \d+"),
    Training("accelerate.yaml", r"step_\d+", r"final weights sha256", "accelerate"),
    Training("fsdp2.yaml", r"step-\d{6}", r"resumed from", overrides=("entrypoint=fsdp2.py --async-save",)),
    Training("nanogpt.yaml", r"ckpt\.pt", r"resuming from \S+ at iter \d+"),
    Training("accelerate_fsdp.yaml", r"step_\d+", r"Mixed precision type: bf16", "accelerate"),
    Training("lightning.yaml", r"step-\d{6}\.ckpt", r"final weights sha256", "lightning"),
    Training("fabric.yaml", r"step-\d{6}\.ckpt", r"resumed from \S+ at step \d+", "lightning"),
    Training("trainer.yaml", r"checkpoint-\d+", r"eval metrics", "transformers"),
    Training("deepspeed.yaml", r"global_step\d+", r"resumed from \S+ at step \d+", "deepspeed"),
)


def submit(name: str, home: Path, *overrides: str, **environ: str) -> Job:
    return orchestrator.submit(
        JOBS / name, overrides=overrides, environ={**os.environ, "ORCH_HOME": str(home), **environ}
    )


def log(job: Job, attempt: int, rank: int) -> str:
    path = job.folder.rank_log(attempt, rank)
    return path.read_text(errors="replace") if path.exists() else ""


def kill_a_rank(job: Job, at_work: str = "") -> None:
    """Kill KILLED of the first attempt with -9: once a checkpoint is there, or once its log matches `at_work`."""
    deadline_s = time.monotonic() + RUN_S_MAX
    while time.monotonic() < deadline_s:
        status = job.status()
        pid = status["ranks"][KILLED]["pid"]
        is_due = re.search(at_work, log(job, 1, KILLED)) if at_work else status["checkpoint"]
        if is_due and status["attempt"] == 1 and pid is not None:
            os.kill(pid, signal.SIGKILL)
            return
        assert status["state"] in ("STARTING", "RUNNING"), status["reason"]
        time.sleep(POLL_S)
    pytest.fail("the moment to kill a rank never came")


def assert_killed_once(job: Job) -> None:
    """The job has succeeded in its second attempt, the first ended by the kill, and `why` says so."""
    status = job.wait(RUN_S_MAX)
    assert (status["state"], status["attempt"], status["restarts"]) == ("SUCCEEDED", 2, 1), status["reason"]
    assert status["world_size"] == 4 and [rank["exit"] for rank in status["ranks"]] == [0, 0, 0, 0]
    verdict = job.why()["attempts"][0]["verdict"]
    assert (verdict["kind"], verdict["ranks"], verdict["node"]) == ("crash", [KILLED], "node-1")


def test_the_demo_learns_the_standard_library(tmp_path: Path) -> None:
    job = submit("tiny_gpt.yaml", tmp_path)
    status = job.wait(RUN_S_MAX)
    assert (status["state"], status["step"], status["restarts"]) == ("SUCCEEDED", 700, 0), status["reason"]
    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", log(job, 1, 0))]
    assert losses[-1] < DEMO_LOSS_MAX < losses[0]
    assert status["checkpoint"] is not None and status["checkpoint"]["step"] == 700
    assert len(list(job.folder.checkpoints.glob("step-*.pt"))) <= 4, "checkpoint.keep is 3, and one may be new"


@pytest.mark.parametrize("example", TRAININGS, ids=lambda one: one.title)
def test_training_resumes_from_checkpoint_after_rank_is_killed(example: Training, tmp_path: Path) -> None:
    need(example.needs)
    job = submit(example.file, tmp_path, *example.overrides)
    kill_a_rank(job)
    assert_killed_once(job)
    first, second = job.why()["attempts"]
    assert re.fullmatch(example.checkpoints, Path(second["resumed_from"]).name)
    assert 1 < second["first_step"] <= first["last_step"] + 1, "it went on, and left no step out"
    assert job.status()["step"] == second["last_step"] == STEPS
    assert re.search(example.says, log(job, 2, 0))
    found = [one for one in job_checkpoints.list_checkpoints(job.folder, job.plan(), verify=True) if one["complete"]]
    assert found and found[-1]["step"] == STEPS
    for one in found:
        assert re.fullmatch(example.checkpoints, Path(one["path"]).name)
        assert one["whole"], one


def test_trackers_of_accelerate_write_in_both_attempts(tmp_path: Path) -> None:
    for package in ("accelerate", "tensorboard", "wandb"):
        need(package)
    entry = "entrypoint=accelerate_snippets.py --report_to all"
    job = submit("accelerate.yaml", tmp_path, entry, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    kill_a_rank(job)
    assert_killed_once(job)
    assert len(list((job.folder.checkpoints / "snippets").glob("events.out.tfevents.*"))) == 2
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


INFERENCES = (
    ("accelerate_generate.yaml", "transformers", "has answered", "35 of 35 prompts were answered"),
    ("accelerate_offload.yaml", "accelerate", "has layers on cpu, disk", "mean loss of 201 batches"),
)


@pytest.mark.parametrize(("file", "package", "at_work", "says"), INFERENCES)
def test_inference_starts_over_after_rank_is_killed(
    file: str, package: str, at_work: str, says: str, tmp_path: Path
) -> None:
    need(package)
    job = submit(file, tmp_path)
    kill_a_rank(job, at_work)
    assert_killed_once(job)
    assert says in log(job, 2, 0)
    assert job.status()["step"] is None and job.why()["attempts"][1]["resumed_from"] is None
