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


def test_while_slurm_is_silent_its_last_word_stands_with_its_age(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = job(tmp_path, "7")
    slurm.queue(RUNNING)
    Job(folder).status()
    slurm.down()
    slurm_status.QUEUE.invalidate()
    told = Job(folder).status()["queue"]
    assert (told["state"], told["nodes"]) == ("RUNNING", "node[1-2]")
    assert told["silent"] and told["heard_s"] < 60.0


def test_a_command_that_slurm_has_never_answered_shows_what_the_supervisor_wrote(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    folder = job(tmp_path, "7")
    slurm.down()
    status = Job(folder).status()
    assert (status["state"], status["reason"]) == ("QUEUED", "Slurm has not reported job 7 yet")
    assert status["queue"]["state"] == "UNKNOWN" and status["queue"]["silent"]
    tell(folder, "RUNNING", step=12)
    assert Job(folder).status()["state"] == "RUNNING"


def test_the_post_mortem_of_a_queued_job_says_what_it_waits_for(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = job(tmp_path, "7")
    slurm.queue("7|PENDING|N/A|2||PartitionNodeLimit")
    why = Job(folder).why()
    assert (why["state"], why["queue"]["reason"]) == ("QUEUED", "PartitionNodeLimit")
    lines = cells.plain_text(post_mortem.post_mortem(why)).splitlines()
    assert lines[0] == f"{folder.id}  QUEUED"
    assert lines[1].startswith("Slurm job 7 cannot start as it is: PartitionNodeLimit")
    assert lines[2].startswith(f"  fix: orch cancel {folder.id}, then orch resume {folder.id} --set nodes=…")
    assert not [line for line in lines if "checkpoint" in line], "nothing was lost yet"


def test_a_supervisor_whose_node_is_lost_is_not_said_to_come_back(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(RUNNING)
    folder = job(tmp_path, "7")
    known = replace(Job(folder).source.settled_status(), written_s=70.0)
    for host, said in (
        ("node1", "its batch script restarts it"),
        ("node3", "that node is lost, and the job is being requeued"),
    ):
        assert said in status_view.outdated_text(replace(known, supervisor=LockHolder(8, host)))


def test_a_suspended_job_is_not_said_to_be_started_again(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(RUNNING.replace("RUNNING", "SUSPENDED"))
    status = Job(job(tmp_path, "7")).source.settled_status()
    known = replace(status, written_s=20.0, supervisor=LockHolder(8, "node1"))
    assert status_view.outdated_text(known).endswith("; Slurm has suspended it")
    assert cells.plain_text(status_view.queue(known)).splitlines() == [
        "queue       Slurm has suspended its job 7 on node[1-2]",
        "            fix: scontrol resume 7",
    ]


def test_a_held_job_that_is_cancelled_is_not_said_to_want_a_release(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue("7|PENDING|N/A|2||JobHeldUser")
    folder = job(tmp_path, "7")
    assert Job(folder).status()["reason"].endswith("; fix: scontrol release 7")
    requests.send(folder.requests, "cancel")
    status = Job(folder).status()
    assert (status["state"], status["reason"]) == ("STOPPING", "Slurm job 7 is held: JobHeldUser")
    assert status["queue"]["said"] == status["reason"]
