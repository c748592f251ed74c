"""Does `orch` tell the queue's truth, end what Slurm has ended, and cancel in every state? On a real Slurm."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.support.cluster.desk import ENDED, FAKE_TORCH, STEPPER, Desk, Job
from tests.support.cluster.host import wait_for
from tests.support.cluster.slurm import SlurmBox

from .conftest import using

FILES = {"train.py": STEPPER, **FAKE_TORCH}
LONG = {"train.py": STEPPER + "\nrun(100_000)\n", **FAKE_TORCH}
BLOCKER = "#!/bin/bash\nexec sleep 600\n"
SOON_S_MAX = 60.0
OVER = ("CANCELLED", "COMPLETED", "FAILED")


@contextmanager
def _nodes_taken(slurm: SlurmBox, nodes: int) -> Iterator[None]:
    """Take nodes, so that the next job has the others."""
    blocker = str(slurm.queue.sbatch(BLOCKER, f"--nodes={nodes}", "--exclusive", "--time=30"))
    slurm.queue.wait_for_state(blocker, "RUNNING")
    yield
    slurm.queue.scancel(blocker)
    slurm.queue.wait_for_state(blocker, "CANCELLED")


def _all_nodes_taken(slurm: SlurmBox) -> AbstractContextManager[None]:
    """Take all nodes, so that the next job waits."""
    return _nodes_taken(slurm, len(slurm.queue.nodes()))


@pytest.fixture
def crowd(slurm: SlurmBox, desk: Desk) -> Iterator[None]:
    """Let all nodes be taken by somebody else."""
    with _all_nodes_taken(slurm):
        yield


def _said(job: Job) -> str:
    return job.desk.orch("status", job.id).stdout


def _wait(job: Job, text: str) -> None:
    """Wait until `orch status` says this."""
    wait_for(lambda: text in _said(job), f"{text!r} in the status", SOON_S_MAX)


def test_pending_job_is_shown_held_released_and_cancelled(slurm: SlurmBox, desk: Desk, crowd: None) -> None:
    job = desk.submit(FILES)
    _wait(job, "waits in the queue: Resources")
    assert job.status()["state"] == "QUEUED"
    slurm.login.run(["scontrol", "hold", job.slurm_id()], user="trainer")
    _wait(job, f"fix: scontrol release {job.slurm_id()}")
    slurm.queue.hold(job.slurm_id())
    _wait(job, "is held by an administrator")
    slurm.queue.release(job.slurm_id())
    _wait(job, "waits in the queue")
    said = desk.orch("cancel", job.id).stdout
    assert said.strip() == f"{job.id} CANCELLED"
    assert (job.status()["state"], job.folder.ended.exists()) == ("CANCELLED", True)
    assert slurm.queue.state(job.slurm_id()) == "CANCELLED"


@pytest.mark.soak
def test_many_pending_jobs_are_shown_and_cancelled(slurm: SlurmBox, desk: Desk, crowd: None) -> None:
    jobs = [desk.submit(FILES, name=f"j{number}") for number in range(3)]
    told = json.loads(desk.orch("status", "--all", "--json").stdout)
    assert [(one["state"], one["queue"]["id"]) for one in told] == [("QUEUED", job.slurm_id()) for job in jobs]
    for job in jobs:
        assert desk.orch("cancel", job.id).stdout.strip() == f"{job.id} CANCELLED"


def test_pending_job_outlives_slurmctld_outage(slurm: SlurmBox, desk: Desk, crowd: None) -> None:
    job = desk.submit(FILES)
    slurm.stop_slurmctld()
    status = job.status()
    assert status["state"] == "QUEUED"
    assert status["queue"]["silent"]
    slurm.start_slurmctld()
    _wait(job, "waits in the queue")
    assert desk.orch("cancel", job.id).stdout.strip() == f"{job.id} CANCELLED"


def test_job_forgotten_by_slurm_is_judged_from_folder(slurm: SlurmBox, desk: Desk, crowd: None) -> None:
    """A job that Slurm forgot is ended from what its folder says."""
    job = desk.submit(FILES)
    slurm.queue.scancel(job.slurm_id())
    job.folder.slurm.write_text(json.dumps(["999999"]))
    status = job.status()
    assert (status["state"], "no longer knows job 999999" in str(status["reason"])) == ("FAILED", True)


def test_reused_id_of_lost_job_is_left_alone(slurm: SlurmBox, desk: Desk) -> None:
    """A slurmctld that loses what it knew, here all of it since before the submit, gives the next job the same id."""
    knows, knew = slurm.logs / "ctld", slurm.state / "knew"
    slurm.stop_slurmctld()
    subprocess.run(["cp", "-a", knows, knew], check=True)
    slurm.start_slurmctld()
    job = desk.submit(FILES, slurm={"extra": ["--hold"]})
    slurm.stop_slurmctld(kill=True)
    shutil.rmtree(knows)
    knew.rename(knows)
    slurm.start_slurmctld()
    others = slurm.queue.sbatch("sleep 600", "--hold")
    assert others == job.slurm_id()
    status = job.status()
    lost = f"Slurm lost job {others}: its id now belongs to a job in /home/trainer"
    assert (status["state"], lost in str(status["reason"])) == ("FAILED", True), status["reason"]
    desk.orch("resume", job.id)
    assert job.slurm_id() != others
    assert desk.orch("cancel", job.id).stdout.strip() == f"{job.id} CANCELLED"
    assert slurm.queue.state(others) == "PENDING"
    slurm.queue.scancel(others)


def test_running_job_is_cancelled_and_resumed(slurm: SlurmBox, desk: Desk) -> None:
    """A running job is shown and cancelled, and resumes in the queue with a new ID."""
    job = desk.submit(LONG)
    job.wait_for_step(5)
    told = job.status()["queue"]
    assert (told["state"], told["nodes"]) == ("RUNNING", "node[1-2]")
    assert desk.orch("cancel", job.id).stdout.strip() == f"{job.id} CANCELLED"
    assert job.status()["reason"] == "cancelled by the user"
    first = job.slurm_id()
    desk.orch("resume", job.id)
    assert job.slurm_id() != first
    assert job.status()["state"] not in ENDED
    job.wait_for_step(5, attempt=2)
    assert job.status()["queue"]["id"] == job.slurm_id()
    assert desk.orch("cancel", job.id).stdout.strip() == f"{job.id} CANCELLED"


@pytest.mark.soak
def test_resume_is_shown_while_last_supervisor_still_exits(slurm: SlurmBox, desk: Desk) -> None:
    """A resume is shown although the supervisor of the last end is still there."""
    with _nodes_taken(slurm, 2):
        job = desk.submit(LONG, notify={"command": "sleep 20", "on": ["cancelled"]})
        job.wait_for_step(5)
        desk.orch("cancel", job.id)
        first = job.slurm_id()
        assert not job.folder.ended.exists()  # it waits for the command
        desk.orch("resume", job.id, "--set", "nodes=4")
        slurm.queue.wait_for_state(first, *OVER)
        assert (job.status()["state"], job.folder.ended.exists()) == ("QUEUED", False)
    job.wait_for_step(5, attempt=2)
    assert desk.orch("cancel", job.id).stdout.strip() == f"{job.id} CANCELLED"


@pytest.fixture
def accounted(accounting_slurm: SlurmBox) -> Iterator[Desk]:
    """Give a desk on a Slurm that keeps accounts."""
    for one in using(accounting_slurm):
        with _all_nodes_taken(accounting_slurm):
            yield one


def test_accounting_shows_who_cancelled_a_job(accounting_slurm: SlurmBox, accounted: Desk) -> None:
    job = accounted.submit(FILES)
    accounting_slurm.queue.scancel(job.slurm_id())
    # accounts are some seconds behind the queue
    _ = wait_for(
        lambda: "CANCELLED by" in accounting_slurm.login.run(["sacct", "-n", "-X", "-P", "-j", job.slurm_id()]).stdout,
        "the account of the cancel",
        SOON_S_MAX,
    )
    assert " was cancelled by trainer" in str(job.status()["reason"])
