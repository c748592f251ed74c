"""Does a job live in an allocation of a real Slurm? Agents by srun, restarts inside, and what ends the allocation."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from orchestrator import queued
from tests.support.cluster.desk import FAKE_TORCH, STEPPER, TOGETHER, Desk, Job
from tests.support.cluster.slurm import SlurmBox

from .conftest import using

SAVES = (
    TOGETHER
    + """
import signal

ended = []
signal.signal(signal.SIGTERM, lambda signum, frame: ended.append(signum))
steps = int(sys.argv[1])
folder = Path(os.environ["ORCH_CHECKPOINT_DIR"])
resumed = os.environ["ORCH_RESUME_FROM"]
start = int(Path(resumed).name[5:-3]) if resumed else 0


def save(step):
    part = folder / f".step-{step}"
    part.write_bytes(b"PK\\x03\\x04" + b"PK\\x05\\x06" + bytes(18))
    part.rename(folder / f"step-{step}.pt")


def at_step(step):
    ends = together(bool(ended))
    if ends:
        if rank == 0:
            save(step - 1)
        os.write(1, f"saved step {step - 1}\\n".encode())
        sys.exit(0 if step > steps else 143)


meet()
run(steps, 0.05, at_step, start)
"""
)
"""Steps together; at TERM all save and leave."""

TELLS = """
import json, os, sys
names = ("SLURM_", "SLURMD_", "CUDA_", "PMI", "MASTER_", "RANK", "WORLD_SIZE", "ORCH_ENDING", "ORCH_CPUS", "MINE")
told = {name: value for name, value in os.environ.items() if name.startswith(names)}
print(json.dumps(told), flush=True)
"""


TRAINS = {
    "train.py": TOGETHER + "meet()\nrun(100000, 0.05, lambda step: together(True))",
    **FAKE_TORCH,
}
"""Ranks that step together until they are stopped."""


def told(job: Job, rank: int) -> dict[str, str]:
    """Return the environment that a rank has printed."""
    lines = [line for line in job.log(rank).splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1]))


def allocations(job: Job) -> list[str]:
    """Return the allocations that the job has had, in order."""
    lines = job.folder.journal.read_text().splitlines()
    news = [json.loads(line)["news"] for line in lines]
    return [one["allocation"] for one in news if one["kind"] == "AllocationBegan"]


def node_log(job: Job, node: str, attempt: int = 1) -> str:
    """Return what the agent of a node has noted of an attempt."""
    return job.folder.node_log(attempt, node).read_text()


def lose_batch_script(slurm: SlurmBox, job: Job) -> None:
    """Kill the batch script on the first node, with what Slurm has there for it, and the supervisor."""
    host, id = slurm.host("node1"), job.slurm_id()
    words = (f"slurmstepd: [{id}.batch]", f"job{int(id):05d}/slurm_script")
    host.kill([one.proc for one in host.processes() if any(word in one.command for word in words)])
    job.kill_supervisor()


def test_two_by_two_ranks_train_to_the_end(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit({"train.py": STEPPER + "run(20)", **FAKE_TORCH})
    assert job.wait()["state"] == "SUCCEEDED"
    assert [job.steps_logged(rank)[-1] for rank in range(4)] == [20] * 4
    assert slurm.queue.wait_for_state(job.slurm_id(), "COMPLETED", "FAILED")["JobState"] == "COMPLETED"


def test_the_variables_of_slurm_are_true_of_each_rank(desk: Desk) -> None:
    files = {"train.py": TELLS, **FAKE_TORCH}
    job = desk.submit(
        files, gpus_per_node=2, procs_per_node=None, env={"MINE": "1"}, slurm={"cpus_per_task": 2}
    )
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
        assert not {"SLURM_LAUNCH_NODE_IPADDR", "SLURM_LABELIO", "ORCH_ENDING", "ORCH_CPUS_PER_TASK"} & set(
            env
        )


def test_a_killed_rank_is_answered_inside_the_allocation(slurm: SlurmBox, desk: Desk) -> None:
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


def test_a_killed_agent_with_its_keeper_is_known_at_once_and_started_again(
    slurm: SlurmBox, desk: Desk
) -> None:
    job = desk.submit(TRAINS)
    job.wait_for_step(5)
    job.kill_supervisor()
    slurm.host("node2").signal(
        [one.proc for one in slurm.host("node2").processes() if " agent" in one.command and one.uid],
        signal.SIGKILL,
    )
    job.wait_for_step(5, attempt=2)
    assert job.placed() == ["node1", "node2"] and len(allocations(job)) == 1
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


def test_a_supervisor_that_dies_is_replaced_and_the_ranks_go_on(desk: Desk) -> None:
    job = desk.submit(TRAINS)
    step = job.wait_for_step(5)["step"]
    job.kill_supervisor()
    assert job.wait_for_step(step + 40)["attempt"] == 1
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


def test_a_preempted_job_saves_itself_and_goes_on_in_another_allocation(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit({"train.py": SAVES, **FAKE_TORCH}, entrypoint="train.py 300")
    job.wait_for_step(20)
    other = slurm.queue.preempt(4)
    job.wait_for_line("saved step")
    slurm.queue.scancel(other, user="root")
    seen = job.wait()
    assert seen["state"] == "SUCCEEDED" and job.kinds()[0] == "preempted"
    assert seen["restarts"] == 1 and len(allocations(job)) == 2
    steps = job.steps_logged(0, 1) + job.steps_logged(0, 2)
    assert steps == list(range(1, 301)), "no step is lost, and none is made twice"


def test_scancel_from_outside_ends_the_job(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit({"train.py": SAVES, **FAKE_TORCH}, entrypoint="train.py 100000")
    job.wait_for_step(5)
    slurm.queue.scancel(job.slurm_id())
    assert job.wait()["state"] == "CANCELLED"


def test_a_job_whose_folder_is_deleted_gives_its_nodes_back(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit(TRAINS)
    job.wait_for_step(5)
    slurm_id = job.slurm_id()
    shutil.rmtree(job.folder.root)
    slurm.queue.wait_for_state(slurm_id, "COMPLETED", "FAILED", "CANCELLED")
    assert not job.folder.root.exists()


def test_a_job_that_somebody_requeues_goes_on(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit({"train.py": SAVES, **FAKE_TORCH}, entrypoint="train.py 200")
    job.wait_for_step(20)
    slurm.queue.requeue(job.slurm_id())
    assert job.wait()["state"] == "SUCCEEDED" and len(allocations(job)) == 2
    assert job.steps_logged(0, 1) + job.steps_logged(0, 2) == list(range(1, 201))


def test_before_the_time_limit_ranks_save_and_the_job_goes_on_in_a_new_slot(
    slurm: SlurmBox, desk: Desk
) -> None:
    job = desk.submit(
        {"train.py": SAVES, **FAKE_TORCH},
        entrypoint="train.py 200",
        time_limit="10m",
        time_limit_action="requeue",
    )
    job.wait_for_step(20)
    slurm.queue.end_in(job.slurm_id(), 120)
    slurm.queue.warn(job.slurm_id())
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.kinds() == ["time_limit", None] and len(allocations(job)) == 2
    assert job.steps_logged(0, 1) + job.steps_logged(0, 2) == list(range(1, 201))


def test_a_warning_long_before_the_time_limit_is_not_heeded(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit(TRAINS, time_limit="10m")
    job.wait_for_step(5)
    slurm.queue.warn(job.slurm_id())
    job.wait_until(lambda: "none of Slurm's" in job.folder.supervisor_log.read_text(), "what came of it")
    assert job.wait_for_step(job.seen()["step"] + 40)["attempt"] == 1 and job.kinds() == [None]
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


def test_a_job_that_nobody_is_left_of_is_put_back_into_the_queue_by_a_look_at_it(
    slurm: SlurmBox, desk: Desk
) -> None:
    job = desk.submit(TRAINS)
    job.wait_for_step(5)
    id = job.slurm_id()
    slurm.power_off("node1")
    slurm.kill_all("node2", "trainer")

    def runs_on_for_nothing() -> bool:
        known = slurm.queue.job(id)
        return (known["JobState"], known["BatchHost"], known["NodeList"]) == ("RUNNING", "node1", "node2")

    job.wait_until(runs_on_for_nothing, "a job without its batch script")
    long_ago_s = time.time() - 2 * queued.ORPHANED_S
    os.utime(job.folder.state, (long_ago_s, long_ago_s))
    job.status()
    job.wait_until(lambda: job.status()["state"] == "QUEUED", "its place in the queue")
    job.wait_for_step(5, attempt=2)
    assert "node1" not in job.placed() and allocations(job) == [f"{id}.0", f"{id}.1"]
    slurm.power_on("node1")
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


def test_the_loss_of_the_first_node_takes_the_job_to_other_nodes(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit(TRAINS)
    job.wait_for_step(5)
    slurm.power_off("node1")
    job.wait_for_step(5, attempt=2)
    assert "node1" not in job.placed() and len(allocations(job)) == 2
    slurm.power_on("node1")
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


@pytest.mark.parametrize("is_supervised", [False, True])
def test_a_gang_that_trains_on_behind_its_cut_goes_before_the_next_attempt_begins(
    slurm: SlurmBox, desk: Desk, is_supervised: bool
) -> None:
    job = desk.submit(TRAINS)
    job.wait_for_step(5)
    assert job.placed() == ["node1", "node2"]
    for node in ("node1", "node2"):
        for other in ("login", "node3", "node4"):
            slurm.cut_between(node, other)
    if not is_supervised:
        lose_batch_script(slurm, job)
    cut_at_step = job.steps_logged(0)[-1]
    job.wait_until(
        lambda: job.steps_logged(0)[-1] > cut_at_step + 100, "steps of a gang that Slurm does not reach"
    )
    job.wait_for_step(5, attempt=2)
    assert set(job.placed()) == {"node3", "node4"} and len(allocations(job)) == 2
    began_s = datetime.fromisoformat(job.why()[1]["started_at"]).timestamp()
    for rank in range(4):
        assert job.folder.rank_log(1, rank).stat().st_mtime < began_s, "two attempts never run together"
        assert f"in allocation {allocations(job)[1]}: leaving" in node_log(job, f"node{rank // 2 + 1}")
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


def test_a_grace_before_preemption_is_used_to_the_end(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit(
        {"train.py": SAVES, **FAKE_TORCH}, entrypoint="train.py 200", slurm={"partition": "low"}
    )
    job.wait_for_step(20)
    other = slurm.queue.sbatch(
        "sleep 600", "--nodes=4", "--exclusive", "--no-requeue", "--output=/dev/null", user="root"
    )
    job.wait_for_line("saved step")
    slurm.queue.scancel(other, user="root")
    assert job.wait()["state"] == "SUCCEEDED" and job.kinds() == ["preempted", None]
    assert job.steps_logged(0, 1) + job.steps_logged(0, 2) == list(range(1, 201))


@pytest.fixture
def renamed_desk(renamed_slurm: SlurmBox) -> Iterator[Desk]:
    """Give a desk on a Slurm whose nodes are not called as their hosts are."""
    yield from using(renamed_slurm)


def test_nodes_go_by_the_names_that_slurm_gives_them(renamed_desk: Desk) -> None:
    job = renamed_desk.submit({"train.py": TELLS, **FAKE_TORCH})
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.placed() == ["gpu-01", "gpu-02"] == told(job, 3)["SLURM_JOB_NODELIST"].split(",")
