"""Do checkpoints in memory outlive an allocation of a real Slurm? Each node's own memory, and a disk that all share."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from orchestrator.core.checkpoints import ledger, memory
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState
from tests.cluster.test_ssh_memory import EVERY, STATES, assert_weights, memory_left, resumed_step, safe_step
from tests.support.cluster.desk import FAKE_TORCH, Desk, Job
from tests.support.cluster.slurm import SlurmBox
from tests.support.cluster.slurm_jobs import allocations

SAVE = """
def save(step):
    folder = checkpoints / f"step-{step}"
    folder.mkdir(exist_ok=True)
    data = state + b"%032d" % step + state * int(os.environ["BLOCKS"])
    part = folder / f".rank{rank}.pt.part"
    part.write_bytes(data)
    part.rename(folder / f"rank{rank}.pt")


import signal
ended = []
signal.signal(signal.SIGTERM, lambda signum, frame: ended.append(signum))


def at_step(step):
    global state
    if together(bool(ended)):
        save(step - 1)
        os.write(1, f"saved step {step - 1}\\n".encode())
        sys.exit(143)
"""
"""At TERM all ranks save together and leave."""

SAVES_AT_TERM = STATES.replace("\ndef at_step(step):\n    global state\n", SAVE).replace("    together(True)\n", "")


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


def places(job: Job) -> set[tuple[str, str]]:
    """Return where the complete checkpoints are: a host, and the kind of folder."""
    found = set()
    for one in (place for checkpoint in whole(job) for place in checkpoint.locations):
        kind = memory.NEIGHBOURS if f"/{memory.NEIGHBOURS}/" in one.root else memory.CHECKPOINTS
        found.add((one.host, kind if one.is_memory else "disk"))
    return found


def assert_ended_well(job: Job, box: SlurmBox, steps: int) -> None:
    assert job.wait()["state"] == "SUCCEEDED"
    assert_weights(job, steps, 4)
    job.wait_until(lambda: not memory_left(box), "memory without anything of the job")
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
@pytest.mark.parametrize("how", ["slurmd", "down"])
def test_lost_node_costs_nothing_that_is_safe(slurm: SlurmBox, desk: Desk, how: str) -> None:
    """The other node does not suffice: the job is requeued, and goes on from what the lost one had written."""
    job = submit(desk, 600)
    job.wait_until(lambda: safe_step(job), "a checkpoint that is safe")
    step = safe_step(job)
    if how == "slurmd":
        slurm.kill_slurmd("node2", jobs=True)
    else:
        slurm.queue.down("node2")
    job.until(lambda seen: seen["attempt"] == 2 and seen["state"] == "RUNNING", "the second attempt")
    assert_ended_well(job, slurm, 600)
    assert resumed_step(job, 2) >= step > 0 and len(allocations(job)) == 2


@pytest.mark.soak
def test_what_is_saved_at_a_preemption_is_on_disk_and_nothing_in_memory(slurm: SlurmBox, desk: Desk) -> None:
    job = submit(desk, 400, SAVES_AT_TERM, slurm={"partition": "low"})
    job.wait_for_step(EVERY + 5)
    other = slurm.queue.sbatch(
        "sleep 600", "--nodes=4", "--exclusive", "--no-requeue", "--output=/dev/null", user="root"
    )
    job.wait_for_line("saved step")
    slurm.queue.wait_for_state(other, "RUNNING")
    assert memory_left(slurm) == []
    step = max(one.step or 0 for one in whole(job))
    assert f"saved step {step}\n" in job.log(3)
    assert all(not one.is_memory for checkpoint in whole(job) for one in checkpoint.locations)
    slurm.queue.scancel(other, user="root")
    assert job.wait()["state"] == "SUCCEEDED" and job.kinds() == ["preempted", None]
    assert resumed_step(job, 2) == step
    assert_weights(job, 400, 4)


@pytest.mark.soak
def test_time_limit_and_requeue_leave_nothing_in_memory(slurm: SlurmBox, desk: Desk) -> None:
    """Somebody requeues the job, whose ranks have KillWait (5 s) then; later its time limit comes near."""
    job = submit(desk, 800, SAVES_AT_TERM, time_limit="10m", time_limit_action="requeue")
    for attempt, name in ((1, "requeue"), (2, "limit")):
        job.until(
            lambda seen, attempt=attempt: seen["attempt"] == attempt and (seen["step"] or 0) > 60 * attempt, "steps"
        )
        if name == "requeue":
            slurm.queue.requeue(job.slurm_id())
        else:
            slurm.queue.end_in(job.slurm_id(), 120)
            slurm.queue.warn(job.slurm_id())
        job.wait_for_line("saved step", attempt=attempt)
        job.wait_until(lambda: not memory_left(slurm), "memory without anything of the job")
    assert job.wait()["state"] == "SUCCEEDED" and job.kinds() == ["preempted", "time_limit", None]
    for attempt in (1, 2):
        assert f"saved step {resumed_step(job, attempt + 1)}\n" in job.log(0, attempt)
    assert_weights(job, 800, 4)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["scancel", "slurmstepd"])
def test_nothing_is_left_in_memory(slurm: SlurmBox, desk: Desk, how: str) -> None:
    job = submit(desk, 100_000)
    job.wait_until(lambda: safe_step(job), "a checkpoint that is safe")
    assert {line.partition(":")[0] for line in memory_left(slurm)} == {"node1", "node2"}
    if how == "scancel":
        slurm.queue.scancel(job.slurm_id())
    else:
        for node in ("node1", "node2"):
            host = slurm.host(node)
            procs = [one.proc for one in host.processes() if f"slurmstepd: [{job.slurm_id()}." in one.command]
            assert procs
            host.signal(procs, signal.SIGKILL)
    if how == "scancel":
        job.wait_until(lambda: not memory_left(slurm), "memory without anything of the job")
        assert job.wait()["state"] == "CANCELLED"
    else:
        print("right after", memory_left(slurm))
        slurm.queue.scancel(job.slurm_id())
        job.wait_until(lambda: not memory_left(slurm), "memory without anything of the job")


@pytest.mark.soak
def test_job_resumed_in_another_allocation_begins_from_the_disk(slurm: SlurmBox, desk: Desk) -> None:
    job = submit(desk, 400)
    job.wait_until(lambda: safe_step(job), "a checkpoint that is safe")
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"
    job.wait_until(lambda: not memory_left(slurm), "memory without anything of the job")
    assert places(job) == {("", "disk")}
    step, nodes = max(one.step or 0 for one in whole(job)), job.placed()
    for node in nodes:
        slurm.queue.drain(node)
    desk.orch("resume", job.id)
    job.until(lambda seen: seen["attempt"] == 2 and seen["state"] == "RUNNING", "the second attempt")
    assert set(job.placed()) == {"node3", "node4"}
    assert_ended_well(job, slurm, 400)
    assert resumed_step(job, 2) == step > 0
