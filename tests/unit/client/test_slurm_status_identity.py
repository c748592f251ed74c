"""Is what Slurm tells of the job that is meant? Its id may be that of another cluster's job, or have been given again."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.client import slurm_status
from orchestrator.client.job import Job
from orchestrator.core.jobdir import status_file
from orchestrator.core.slurm.queue import SlurmQueue
from tests.support.fake_slurm import CONFIG, FAILED, PENDING, RUNNING, SHOWN, FakeSlurm, asked, job

pytestmark = pytest.mark.slow


def test_job_of_other_cluster_is_not_mistaken(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.queue(FAILED)
    folder = job(tmp_path, "7")
    slurm_status.record_cluster(folder)
    slurm.says("scontrol.config", CONFIG.format("other"))
    slurm_status.QUEUE = SlurmQueue()
    status = Job(folder).status()
    assert status["queue"]["silent"] == "it is in the queue of cluster box, but this machine's Slurm is cluster other"
    assert asked(folder) == []


def test_reused_id_is_not_taken_for_the_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A Slurm that has lost its memory gives ids again: what has ours now must not be told of, nor cancelled."""
    folder = job(tmp_path, "7")
    slurm.queue(f"{RUNNING}|/nfs/home/jobs/{folder.id}")
    assert Job(folder).status()["queue"]["state"] == "RUNNING"  # the same folder, by another path
    for anothers in (RUNNING, FAILED, PENDING):
        slurm.queue(f"{anothers}|/home/ada/other")
        slurm.says("scontrol.job", f"{SHOWN.strip()} WorkDir=/home/ada/other StdErr=/dev/null\n")
        slurm_status.QUEUE.invalidate()
        told = status_file.to_json(Job(folder).source.status())["queue"]
        assert (told["state"], told["nodes"]) == ("FORGOTTEN", "")
    slurm.says("sacct.out", "7|FAILED|1:0|node[1-2]\n")  # that, too, is another's
    slurm_status.SlurmSource(folder).cancel()
    assert not slurm.calls("scancel")
    lost = "Slurm lost job 7: its id now belongs to a job in /home/ada/other; fix: orch resume "
    assert [one.get("why") for one in asked(folder)] == [None, f"{lost}{folder.id}"]
    assert folder.ended.exists()
