"""A script that saves in `out/` and resumes by itself, in Slurm's queue: a requeue and a lost node cost it the steps since its last save."""

from __future__ import annotations

from tests.support.cluster import saves_in_out
from tests.support.cluster.desk import Desk
from tests.support.cluster.slurm import SlurmBox


def test_requeued_script_resumes_from_newest_file_in_out(desk: Desk, slurm: SlurmBox) -> None:
    job = desk.submit(saves_in_out.FILES, time_limit_action="requeue")
    job.until(lambda seen: (seen.get("checkpoint") or {"step": 0})["step"] >= 40, "step 40 saved")
    slurm.queue.requeue(job.slurm_id())
    status = job.wait()
    assert (status["state"], status["step"]) == ("SUCCEEDED", 200)
    saves_in_out.assert_began_by_its_own_choice(job, job.why()[1])
