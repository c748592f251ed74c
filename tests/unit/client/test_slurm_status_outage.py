"""What is told of a job in Slurm's queue while Slurm is silent, or its supervisor is not there?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.client import slurm_status
from orchestrator.client.job import Job
from orchestrator.core.jobdir import requests
from orchestrator.core.jobdir.locks import LockHolder
from orchestrator.views import cells, post_mortem
from orchestrator.views import status as status_view
from tests.support.fake_slurm import RUNNING, FakeSlurm, job, tell

pytestmark = pytest.mark.slow


def test_last_slurm_answer_stays_with_age_during_outage(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = job(tmp_path, "7")
    slurm.queue(RUNNING)
    Job(folder).status()
    slurm.down()
    slurm_status.QUEUE.invalidate()
    told = Job(folder).status()["queue"]
    assert (told["state"], told["nodes"]) == ("RUNNING", "node[1-2]")
    assert told["silent"] and told["heard_s"] < 60.0


def test_never_answered_command_shows_supervisor_status(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A command that Slurm has never answered shows what the supervisor wrote."""
    folder = job(tmp_path, "7")
    slurm.down()
    status = Job(folder).status()
    assert (status["state"], status["reason"]) == ("QUEUED", "Slurm has not reported job 7 yet")
    assert status["queue"]["state"] == "UNKNOWN" and status["queue"]["silent"]
    tell(folder, "RUNNING", step=12)
    assert Job(folder).status()["state"] == "RUNNING"


def test_queued_jobs_post_mortem_shows_wait_reason(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = job(tmp_path, "7")
    slurm.queue("7|PENDING|N/A|2||PartitionNodeLimit")
    why = Job(folder).why()
    assert (why["state"], why["queue"]["reason"]) == ("QUEUED", "PartitionNodeLimit")
    lines = cells.plain_text(post_mortem.post_mortem(why)).splitlines()
    assert lines[0] == f"{folder.id}  QUEUED"
    assert lines[1].startswith("Slurm job 7 cannot start as it is: PartitionNodeLimit")
    assert lines[2].startswith(f"  fix: orch cancel {folder.id}, then orch resume {folder.id} --set nodes=…")
    assert not [line for line in lines if "checkpoint" in line], "nothing was lost yet"


def test_supervisor_on_lost_node_is_not_expected_back(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A supervisor whose node is lost is not said to come back."""
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    known = replace(Job(folder).source.settled_status(), written_s=70.0)
    for host, said in (
        ("node1", "its batch script restarts it"),
        ("node3", "that node is lost, and the job is being requeued"),
    ):
        assert said in status_view.outdated_text(replace(known, supervisor=LockHolder(8, host)))


def test_suspended_job_is_not_announced_as_restarting(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A suspended job is not said to be started again."""
    slurm.queue(RUNNING.replace("RUNNING", "SUSPENDED"))
    status = Job(job(tmp_path, "7")).source.settled_status()
    known = replace(status, written_s=20.0, supervisor=LockHolder(8, "node1"))
    assert status_view.outdated_text(known).endswith("; Slurm has suspended it")
    assert cells.plain_text(status_view.queue(known)).splitlines() == [
        "queue       Slurm has suspended its job 7 on node[1-2]",
        "            fix: scontrol resume 7",
    ]


def test_cancelled_held_job_needs_no_release(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue("7|PENDING|N/A|2||JobHeldUser")
    folder = job(tmp_path, "7")
    assert Job(folder).status()["reason"].endswith("; fix: scontrol release 7")
    requests.send(folder.requests, "cancel")
    status = Job(folder).status()
    assert (status["state"], status["reason"]) == ("STOPPING", "Slurm job 7 is held: JobHeldUser")
    assert status["queue"]["said"] == status["reason"]
