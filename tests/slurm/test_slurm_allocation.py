"""Does a job live in an allocation of a real Slurm? Agents by srun, restarts inside, and what ends the allocation."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from tests.cluster.desk import FAKE_TORCH, STEPPER, TOGETHER, Desk, Job
from tests.cluster.slurm import SlurmBox

from .conftest import using

pytestmark = [pytest.mark.integration, pytest.mark.cluster, pytest.mark.slurm]

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
names = ("SLURM_", "SLURMD_", "CUDA_", "PMI", "MASTER_", "RANK", "WORLD_SIZE", "ORCH_ENDING", "MINE")
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


def test_two_by_two_ranks_train_to_the_end(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit({"train.py": STEPPER + "run(20)", **FAKE_TORCH})
    assert job.wait()["state"] == "SUCCEEDED"
    assert [job.steps_logged(rank)[-1] for rank in range(4)] == [20] * 4
    assert slurm.queue.wait_for_state(job.slurm_id(), "COMPLETED", "FAILED")["JobState"] == "COMPLETED"


def test_the_variables_of_slurm_are_true_of_each_rank(desk: Desk) -> None:
    files = {"train.py": TELLS, **FAKE_TORCH}
    job = desk.submit(files, gpus_per_node=2, procs_per_node=None, env={"MINE": "1"})
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
        assert "SLURM_LAUNCH_NODE_IPADDR" not in env and "ORCH_ENDING" not in env


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
    slurm.queue.warn(job.slurm_id())
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.kinds() == ["time_limit", None] and len(allocations(job)) == 2
    assert job.steps_logged(0, 1) + job.steps_logged(0, 2) == list(range(1, 201))


def test_the_loss_of_the_first_node_takes_the_job_to_other_nodes(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit(TRAINS)
    job.wait_for_step(5)
    slurm.power_off("node1")
    job.wait_for_step(5, attempt=2)
    assert "node1" not in job.placed() and len(allocations(job)) == 2
    slurm.power_on("node1")
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
