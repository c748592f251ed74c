"""Do checkpoints in memory outlive an allocation of a real Slurm? Each node's own memory, and a disk that all share."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from orchestrator.core.checkpoints import ledger, memory
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState, FileLocation
from tests.cluster.test_ssh_memory import EVERY, STATES, assert_weights, memory_left, resumed_step, safe_step
from tests.support.cluster.desk import FAKE_TORCH, Desk, Job
from tests.support.cluster.host import wait_for
from tests.support.cluster.slurm import SlurmBox
from tests.support.cluster.slurm_jobs import SAVES, TRAINS, allocations

MEMORY_S_MAX = 60.0
"""How long what is in memory may stay after the end of a job."""


def submit(desk: Desk, steps: int, script: str = STATES, **spec: Any) -> Job:
    fields: dict[str, Any] = {
        "checkpoint": {"memory": "512M", "keep": 3},
        "env": {"STEPS": str(steps), "BLOCKS": str(1 << 16)},
        **spec,
    }
    return desk.submit({**FAKE_TORCH, "train.py": script}, **fields)


def whole(job: Job) -> list[Checkpoint]:
    saves, _ = ledger.read(job.folder.root, job.folder.ledger)
    return [one for one in saves.values() if one.state is CheckpointState.WHOLE]


def on_disk_step(job: Job) -> int:
    return max(
        (one.step or 0 for one in whole(job) if not memory.find_missing(one, [p for p in one.locations if not p.host])),
        default=0,
    )


def wait_empty(box: SlurmBox, lost: str = "") -> None:
    """Wait until nothing is left in the memory of nodes but `lost`; say what is."""

    def is_empty() -> bool:
        return all(line.partition(":")[0] == lost for line in memory_left(box))

    try:
        wait_for(is_empty, "memory without anything of the job", MEMORY_S_MAX)
    except TimeoutError as err:
        found = [host.run(["find", "/dev/shm", "-path", "*orch-*", "-ls"]).stdout for host in box.nodes if host.is_up]
        raise AssertionError("\n".join([str(err), *found])) from None


def places(job: Job) -> set[tuple[str, str]]:
    """Return where the complete checkpoints are: a host, and the kind of folder."""
    found = set()
    for one in (place for checkpoint in whole(job) for place in checkpoint.locations):
        kind = memory.NEIGHBOURS if f"/{memory.NEIGHBOURS}/" in one.root else memory.CHECKPOINTS
        found.add((one.host, kind if one.is_memory else "disk"))
    return found


def assert_ended_well(job: Job, box: SlurmBox, steps: int, lost: str = "") -> None:
    """`lost`: a node whose processes were killed, where the next job deletes what is in memory."""
    assert job.wait()["state"] == "SUCCEEDED"
    assert_weights(job, steps, 4)
    wait_empty(box, lost)
    home = str(job.folder.checkpoints)
    kept = range(steps - 1 - (steps - 1) % EVERY, 0, -EVERY)[:3]
    for step in kept:
        for rank in range(4):
            path = job.folder.checkpoints / f"step-{step}/rank{rank}.pt"
            assert path.is_file() and not path.is_symlink(), f"{path} in {home}"
    assert all(not one.is_memory for checkpoint in whole(job) for one in checkpoint.locations)


def test_killed_rank_resumes_from_memory(slurm: SlurmBox, desk: Desk) -> None:
    """Each checkpoint is in the memory of both nodes, and in the job folder that they share."""
    job = submit(desk, 400)
    wanted = {("", "disk"), *((node, kind) for node in ("node1", "node2") for kind in ("checkpoints", "neighbours"))}
    job.wait_until(lambda: places(job) >= wanted, "copies in the memory of both nodes, and on the disk")
    seen, step = job.seen(), max(one.step or 0 for one in whole(job))
    pid = next(one["pid"] for one in seen["ranks"] if one["rank"] == 3)
    slurm.host("node2").run(["kill", "-9", str(pid)])
    assert_ended_well(job, slurm, 400)
    assert resumed_step(job, 2) >= step > 0 and len(allocations(job)) == 1


@pytest.mark.soak
@pytest.mark.parametrize("how", ["slurmd", "down", "first"])
def test_lost_node_costs_nothing_that_is_safe(slurm: SlurmBox, desk: Desk, how: str) -> None:
    """The other node does not suffice: the job is requeued, and goes on from what the lost one had written. With the first node the
    supervisor is lost: then what is on the disk counts."""
    job = submit(desk, 600)
    job.wait_until(lambda: on_disk_step(job), "a checkpoint that is on the disk")
    step = on_disk_step(job) if how == "first" else safe_step(job)
    if how == "first":
        slurm.kill_slurmd("node1", jobs=True)
    elif how == "slurmd":
        slurm.kill_slurmd("node2", jobs=True)
    else:
        slurm.queue.down("node2")
    job.until(lambda seen: seen["attempt"] == 2 and seen["state"] == "RUNNING", "the second attempt")
    assert_ended_well(job, slurm, 600, "node1" if how == "first" else "node2")
    assert resumed_step(job, 2) >= step > 0 and len(allocations(job)) == 2


def assert_saved_at_end(job: Job, slurm: SlurmBox, attempt: int) -> None:
    """What the ranks of an attempt saved at its end is on the disk, and its nodes have nothing more in memory."""
    job.wait_for_line("saved step", attempt=attempt)
    wait_empty(slurm)
    (saved,) = (line for line in job.log(0, attempt).splitlines() if line.startswith("saved step"))
    (newest,) = [one for one in whole(job) if one.attempt == attempt]
    assert newest.main == f"step-{saved.rpartition(' ')[2]}.pt"
    assert newest.locations == (FileLocation("", str(job.folder.checkpoints)),)


@pytest.mark.soak
def test_what_is_saved_at_a_preemption_is_on_disk_and_nothing_in_memory(slurm: SlurmBox, desk: Desk) -> None:
    job = submit(desk, 0, SAVES, entrypoint="train.py 300 1", slurm={"partition": "low"})
    job.wait_for_step(20)
    other = slurm.queue.sbatch(
        "sleep 600", "--nodes=4", "--exclusive", "--no-requeue", "--output=/dev/null", user="root"
    )
    assert_saved_at_end(job, slurm, 1)
    slurm.queue.scancel(other, user="root")
    assert job.wait()["state"] == "SUCCEEDED" and job.kinds() == ["preempted", None]
    assert job.steps_logged(0, 1) + job.steps_logged(0, 2) == list(range(1, 301))


@pytest.mark.soak
def test_requeue_and_time_limit_leave_nothing_in_memory(slurm: SlurmBox, desk: Desk) -> None:
    """Somebody requeues the job, whose ranks have KillWait (5 s) then; later its time limit comes near."""
    job = submit(desk, 0, SAVES, entrypoint="train.py 400 2", time_limit="10m", time_limit_action="requeue")
    job.wait_for_step(20)
    slurm.queue.requeue(job.slurm_id())
    assert_saved_at_end(job, slurm, 1)
    job.wait_until(lambda: len(job.steps_logged(0, 2)) > 20, "steps of the second attempt")
    slurm.queue.end_in(job.slurm_id(), 120)
    slurm.queue.warn(job.slurm_id())
    assert_saved_at_end(job, slurm, 2)
    assert job.wait()["state"] == "SUCCEEDED" and job.kinds() == ["preempted", "time_limit", None]
    assert [step for attempt in (1, 2, 3) for step in job.steps_logged(0, attempt)] == list(range(1, 401))


@pytest.mark.soak
def test_scancel_leaves_nothing_in_memory(slurm: SlurmBox, desk: Desk) -> None:
    job = submit(desk, 100_000)
    job.wait_until(lambda: safe_step(job), "a checkpoint that is safe")
    assert {line.partition(":")[0] for line in memory_left(slurm)} == {"node1", "node2"}
    slurm.queue.scancel(job.slurm_id())
    wait_empty(slurm)
    assert job.wait()["state"] == "CANCELLED"
    assert all(not one.is_memory for checkpoint in whole(job) for one in checkpoint.locations)


@pytest.mark.soak
def test_killed_slurmstepd_leaves_nothing_in_memory(slurm: SlurmBox, desk: Desk) -> None:
    """The gang lives on, as Slurm has lost track of it; the end of the job is as of any other."""
    job = submit(desk, 100_000)
    job.wait_until(lambda: safe_step(job), "a checkpoint that is safe")
    kill(slurm, f"slurmstepd: [{job.slurm_id()}.")
    step = job.seen()["step"]
    job.wait_for_step(step + 2 * EVERY)
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"
    wait_empty(slurm)
    host = slurm.host("node1")  # srun waits for processes that Slurm has lost
    host.kill([one.proc for one in host.processes() if one.command.startswith("srun ")])
    slurm.queue.scancel(job.slurm_id())  # without a slurmstepd of its batch script it runs on


@pytest.mark.soak
def test_next_job_deletes_what_one_that_was_killed_has_left(slurm: SlurmBox, desk: Desk) -> None:
    """All processes of a job are killed at once; the next one of the user deletes its memory, also if it uses none itself."""
    job = submit(desk, 100_000)
    job.wait_until(lambda: safe_step(job), "a checkpoint that is safe")
    kill(slurm, f"slurmstepd: [{job.slurm_id()}.", "supervise", "orch.pyz", "orch-", "train.py", "srun ")
    slurm.queue.scancel(job.slurm_id())
    left = memory_left(slurm)
    assert {line.partition(":")[0] for line in left} == {"node1", "node2"}
    following = desk.submit(TRAINS)
    following.wait_for_step(5)
    assert following.placed() == ["node1", "node2"] and memory_left(slurm) == []
    desk.orch("cancel", following.id)
    assert following.wait()["state"] == "CANCELLED"


def kill(slurm: SlurmBox, *words: str) -> None:
    """Kill processes of the job on its nodes, by their command lines."""
    for node in ("node1", "node2"):
        host = slurm.host(node)
        procs = [one.proc for one in host.processes() if any(word in one.command for word in words)]
        assert procs
        host.signal(procs, signal.SIGKILL)


@pytest.mark.soak
def test_job_resumed_in_another_allocation_begins_from_the_disk(slurm: SlurmBox, desk: Desk) -> None:
    job = submit(desk, 400)
    job.wait_until(lambda: safe_step(job), "a checkpoint that is safe")
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"
    wait_empty(slurm)
    assert places(job) == {("", "disk")}
    step, nodes = max(one.step or 0 for one in whole(job)), job.placed()
    for node in nodes:
        slurm.queue.drain(node)
    desk.orch("resume", job.id)
    job.until(lambda seen: seen["attempt"] == 2 and seen["state"] == "RUNNING", "the second attempt")
    assert set(job.placed()) == {"node3", "node4"}
    assert_ended_well(job, slurm, 400)
    assert resumed_step(job, 2) == step > 0
