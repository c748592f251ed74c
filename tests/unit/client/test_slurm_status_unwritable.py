"""What if the folder of a job in Slurm's queue takes nothing more?"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.client import slurm_status
from orchestrator.client.job import Job
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir.layout import JobDir
from tests.support.fake_slurm import RUNNING, FakeSlurm, job

pytestmark = pytest.mark.slow

CANCELLED = "7|CANCELLED|2026-11-21T06:21:01|2||None"


def refusing(tmp_path: Path) -> JobDir:
    """Return the folder of Slurm's job 7, into which no request can be written."""
    folder = job(tmp_path, "7")
    folder.requests.rmdir()
    folder.requests.touch()
    return folder


def test_job_with_unwritable_folder_is_ended_by_slurm(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A job whose folder accepts no request is ended by Slurm."""
    slurm.queue(RUNNING)
    folder = refusing(tmp_path)
    with pytest.raises(ClusterError, match="so the job was cancelled through Slurm: scancel 7") as told:
        Job(folder).cancel()
    assert told.value.fix == f"free some space in {folder.root}, then run orch status {folder.id}"
    assert slurm.calls("scancel") == ["scancel 7"]


@pytest.mark.parametrize("said", ["lost", "down"])
def test_unidentified_slurm_job_is_not_ended(slurm: FakeSlurm, tmp_path: Path, said: str) -> None:
    if said == "lost":
        slurm.queue(f"{RUNNING}|/home/ada/other")
    else:
        slurm.down()
    words = "Slurm lost job 7" if said == "lost" else "Unable to contact slurm controller"
    with pytest.raises(ClusterError, match=words):
        slurm_status.SlurmSource(refusing(tmp_path)).cancel()
    assert not slurm.calls("scancel")


def test_job_that_cannot_be_closed_says_so(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A job that cannot be closed because of its folder says so."""
    slurm.queue(CANCELLED)
    folder = refusing(tmp_path)
    with pytest.raises(ClusterError, match="cannot be written: File exists") as told:
        Job(folder).status()
    assert told.value.fix
