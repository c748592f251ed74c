"""Does a job live in an allocation of a real Slurm? Agents by srun, and restarts inside."""

from __future__ import annotations

import json
import shutil
import signal

import pytest

from tests.support.cluster.desk import FAKE_TORCH, STEPPER, Desk, Job
from tests.support.cluster.slurm import SlurmBox
from tests.support.cluster.slurm_jobs import TRAINS, allocations

TELLS = """
import json, os, sys
names = ("SLURM_", "SLURMD_", "CUDA_", "PMI", "MASTER_", "RANK", "WORLD_SIZE", "ORCH_ENDING", "ORCH_CPUS", "MINE")
told = {name: value for name, value in os.environ.items() if name.startswith(names)}
print(json.dumps(told), flush=True)
"""


def told(job: Job, rank: int) -> dict[str, str]:
    """Return the environment that a rank has printed."""
    lines = [line for line in job.log(rank).splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1]))


@pytest.mark.soak
def test_two_by_two_ranks_train_to_the_end(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit({"train.py": STEPPER + "run(20)", **FAKE_TORCH})
    assert job.wait()["state"] == "SUCCEEDED"
    assert [job.steps_logged(rank)[-1] for rank in range(4)] == [20] * 4
    assert slurm.queue.wait_for_state(job.slurm_id(), "COMPLETED", "FAILED")["JobState"] == "COMPLETED"


def test_slurm_variables_are_correct_for_each_rank(desk: Desk) -> None:
    files = {"train.py": TELLS, **FAKE_TORCH}
    job = desk.submit(files, gpus_per_node=2, procs_per_node=None, env={"MINE": "1"}, slurm={"cpus_per_task": 2})
    assert job.wait()["state"] == "SUCCEEDED"
    for rank in range(4):
        env = told(job, rank)
        assert (env["SLURM_PROCID"], env["SLURM_LOCALID"], env["SLURM_NODEID"]) == (
            str(rank),
            str(rank % 2),
            str(rank // 2),
        )
        assert (env["SLURM_NTASKS"], env["SLURM_NNODES"], env["SLURM_TASKS_PER_NODE"]) == ("4", "2", "2(x2)")
        assert env["SLURM_JOB_NODELIST"] == "node1,node2" and env["SLURM_JOB_ID"] == job.slurm_id()
        assert env["SLURMD_NODENAME"] == f"node{rank // 2 + 1}"
        assert env["CUDA_VISIBLE_DEVICES"] == "0,1" and env["MINE"] == "1"
        assert env["SLURM_CPUS_PER_TASK"] == "2"
        assert not {"SLURM_LAUNCH_NODE_IPADDR", "SLURM_LABELIO", "ORCH_ENDING", "ORCH_CPUS_PER_TASK"} & set(env)


@pytest.mark.soak
def test_killed_rank_is_restarted_inside_the_allocation(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit(TRAINS)
    seen = job.wait_for_step(5)
    pid = next(one["pid"] for one in seen["ranks"] if one["rank"] == 3)
    slurm.host("node2").run(["kill", "-9", str(pid)])
    job.wait_for_step(5, attempt=2)
    assert job.kinds()[0] == "crash" and len(allocations(job)) == 1
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


def test_a_lost_node_is_replaced_by_the_spare(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit(TRAINS, spares=1)
    job.wait_for_step(5)
    assert job.placed() == ["node1", "node2"]
    slurm.kill_slurmd("node2", jobs=True)
    job.wait_for_step(5, attempt=2)
    assert job.placed() == ["node1", "node3"] and len(allocations(job)) == 1
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


def test_dead_supervisor_and_agent_monitor_are_restarted(slurm: SlurmBox, desk: Desk) -> None:
    """A dead supervisor is replaced; an agent killed with its monitor is noticed at once and restarted."""
    job = desk.submit(TRAINS)
    step = job.wait_for_step(5)["step"]
    job.kill_supervisor()
    assert job.wait_for_step(step + 40)["attempt"] == 1, "the ranks go on"
    job.kill_supervisor()
    slurm.host("node2").signal(
        [one.proc for one in slurm.host("node2").processes() if " agent" in one.command and one.uid],
        signal.SIGKILL,
    )
    job.wait_for_step(5, attempt=2)
    assert job.placed() == ["node1", "node2"] and len(allocations(job)) == 1
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


def test_deleted_job_folder_releases_the_nodes(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit(TRAINS)
    job.wait_for_step(5)
    slurm_id = job.slurm_id()
    while job.folder.root.exists():  # the job still writes into it
        shutil.rmtree(job.folder.root, ignore_errors=True)
    slurm.queue.wait_for_state(slurm_id, "COMPLETED", "FAILED", "CANCELLED")
    assert not job.folder.root.exists()
