"""Is a job that has lost its batch script, and all who could ask for it, put back into the queue by whoever looks?"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from orchestrator.client import slurm_status
from orchestrator.client.job import Job
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import requests
from orchestrator.core.jobdir.layout import JobDir
from tests.support.fake_slurm import FakeSlurm, asked, job, tell

pytestmark = pytest.mark.slow

DENIED = "Access/permission denied for job 7\n"


ORPHANED = "JobId=7 JobState=RUNNING Restarts=1 BatchHost=node1 NodeList=node2 BatchFlag=1\n"
LONG_AGO_S = slurm_status.ORPHANED_S + 10.0


def orphaned(slurm: FakeSlurm, place: Path, shown: str = ORPHANED, silent_s: float = LONG_AGO_S) -> JobDir:
    """Return a job that Slurm shows as running, and whose supervisor has said nothing for so long."""
    slurm.queue("7|RUNNING|2026-11-21T06:21:01|1|node2|None")
    slurm.says("scontrol.job", shown)
    folder = job(place, "7")
    tell(folder, "RUNNING")
    at_s = time.time() - silent_s
    os.utime(folder.state, (at_s, at_s))
    return folder


def test_a_job_without_its_batch_script_is_requeued_once_and_shown_as_queued(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    folder = orphaned(slurm, tmp_path)
    Job(folder).look_after()
    assert slurm.calls("scontrol requeue") == ["scontrol requeue 7"]
    slurm.queue("7|PENDING|N/A|2||BeginTime")
    assert Job(folder).status()["state"] == "QUEUED"
    assert slurm.calls("scontrol requeue") == ["scontrol requeue 7"]
    assert asked(folder) == []


@pytest.mark.parametrize(
    ("shown", "silent_s"),
    [
        (ORPHANED, 1.0),
        (ORPHANED.replace("NodeList=node2", "NodeList=node[1-2]"), LONG_AGO_S),
        (ORPHANED.replace("RUNNING", "COMPLETING"), LONG_AGO_S),
        ("", LONG_AGO_S),
    ],
    ids=["its supervisor speaks", "its first node is there", "it is losing its nodes", "nothing is known"],
)
def test_a_job_that_may_be_supervised_is_not_requeued(
    slurm: FakeSlurm, tmp_path: Path, shown: str, silent_s: float
) -> None:
    Job(orphaned(slurm, tmp_path, shown, silent_s)).look_after()
    assert slurm.calls("scontrol requeue") == []


def test_a_cancelled_job_is_not_requeued(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = orphaned(slurm, tmp_path)
    requests.ask(folder.requests, "cancel")
    Job(folder).look_after()
    assert slurm.calls("scontrol requeue") == []


def test_a_requeue_that_slurm_refuses_is_told_with_what_to_do(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = orphaned(slurm, tmp_path)
    slurm.says("scontrol.7", "", DENIED, 1)
    with pytest.raises(ClusterError, match=r"node1 is lost.*Access/permission denied") as told:
        Job(folder).status()
    assert told.value.fix == f"scontrol requeue 7, or scancel 7 and orch resume {folder.id}"


def test_a_requeue_that_somebody_else_has_asked_for_is_none(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = orphaned(slurm, tmp_path)
    slurm.says("scontrol.7", "", "Job is pending execution for job 7\n", 1)
    Job(folder).look_after()
