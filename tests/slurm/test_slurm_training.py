"""Does real training on a real Slurm end as if nothing had happened? With torch and gloo, whatever is taken away.

Weights are compared bit for bit with those of a run in which nothing happens: see `tests/support/cluster/gpt.py`. Whatever
happens, happens in the middle: a gate keeps the training from its end until the test has done what it does.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster import gpt, overwriting
from tests.support.cluster.desk import Desk, Job
from tests.support.cluster.slurm import SlurmBox
from tests.support.cluster.slurm_jobs import allocations

pytestmark = pytest.mark.soak

STEPS = 100
STRUCK_AT = 25
"""The step, behind two checkpoints, from which on something may happen."""

RANKS = 4

_DIGESTS: list[str] = []
"""The weights of the undisturbed run, once it was made."""


def undisturbed(desk: Desk) -> str:
    """Return the weights of a run of two by two ranks in which nothing happens; it is made once."""
    if not _DIGESTS:
        whole_run(desk)
    return _DIGESTS[0]


def whole_run(desk: Desk) -> Job:
    """Train with two by two ranks to the end, with every step logged once, and keep the weights."""
    job = gpt.train(desk, STEPS)
    assert_is_undisturbed(job)
    _DIGESTS.append(gpt.digest(job))
    return job


def assert_is_undisturbed(job: Job) -> None:
    """The job ends well in its first attempt, and each step was made once."""
    status = job.wait()
    assert (status["state"], status["world_size"], status["restarts"]) == ("SUCCEEDED", RANKS, 0)
    gpt.assert_logged_once(job, RANKS, STEPS)


def begun(desk: Desk, *, pace_s: float = 0.03, **spec: Any) -> Job:
    """Return a job of two by two ranks in mid-training, with checkpoints behind it and a gate before its end."""
    job = gpt.train(desk, STEPS, gate=True, pace_s=pace_s, **spec)
    job.wait_for_step(STRUCK_AT)
    job.until(lambda seen: seen["checkpoint"] is not None, "a checkpoint")
    return job


def assert_ends_the_same(job: Job, wanted: str, *kinds: str) -> None:
    """The job ends well after attempts that ended so, goes on from a checkpoint in the last, and with these weights."""
    gpt.open_gate(job)
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.kinds() == [*kinds, None]
    gpt.assert_resumed(job, RANKS, STEPS)
    assert gpt.digest(job) == wanted


def test_gpt_trains_on_two_nodes_with_two_ranks(desk: Desk) -> None:
    job = whole_run(desk)
    for rank in range(RANKS):
        assert f"rank {rank} of {RANKS} on node{rank // 2 + 1}, cpu" in job.log(rank)
    assert (job.folder.checkpoints / f"step-{STEPS:06d}.pt").exists()


def test_gpt_trains_on_four_nodes_with_two_ranks(desk: Desk) -> None:
    steps = 20
    job = gpt.train(desk, steps, nodes=4)
    status = job.wait()
    assert (status["state"], status["world_size"], status["restarts"]) == ("SUCCEEDED", 8, 0)
    gpt.assert_logged_once(job, 8, steps)
    for rank in range(8):
        assert f"rank {rank} of 8 on node{rank // 2 + 1}, cpu" in job.log(rank)


def test_time_limit_mid_run_changes_no_weight(slurm: SlurmBox, desk: Desk) -> None:
    wanted = undisturbed(desk)
    job = begun(
        desk,
        time_limit="10m",
        time_limit_action="requeue",
        checkpoint={"on_preempt": {"grace": 5}},
    )
    slurm.queue.end_in(job.slurm_id(), 60)
    job.wait_for_state("QUEUED")
    slurm.queue.allow(job.slurm_id(), minutes=10)  # a requeued job keeps a limit that was changed
    assert_ends_the_same(job, wanted, "time_limit")
    assert len(allocations(job)) == 2


def test_preemption_mid_run_changes_no_weight(slurm: SlurmBox, desk: Desk) -> None:
    wanted = undisturbed(desk)
    job = begun(desk)
    other = slurm.queue.preempt(4)
    job.wait_for_state("QUEUED")
    slurm.queue.wait_for_state(other, "RUNNING")
    slurm.queue.scancel(other, user="root")
    assert_ends_the_same(job, wanted, "preempted")
    assert len(allocations(job)) == 2


def test_slurmctld_restart_has_no_effect(slurm: SlurmBox, desk: Desk) -> None:
    wanted = undisturbed(desk)
    job = begun(desk, pace_s=0.3)
    slurm.stop_slurmctld()
    job.wait_for_step(job.seen()["step"] + 10)  # training goes on without it
    slurm.start_slurmctld()
    gpt.open_gate(job)
    assert_is_undisturbed(job)
    assert gpt.digest(job) == wanted
    slurm.queue.wait_for_state(job.slurm_id(), "COMPLETED")


def test_spare_node_reaches_the_same_weights(slurm: SlurmBox, desk: Desk) -> None:
    """A lost node is replaced by the spare, and the weights are the same."""
    wanted = undisturbed(desk)
    job = begun(desk, spares=1)
    assert job.placed() == ["node1", "node2"]
    slurm.kill_slurmd("node2", jobs=True)
    assert_ends_the_same(job, wanted, "node_lost")
    assert job.placed() == ["node1", "node3"] and len(allocations(job)) == 1


def test_lost_node_without_spare_requeues_with_same_weights(slurm: SlurmBox, desk: Desk) -> None:
    """Without a spare a lost node sends the job to other nodes, and the weights are the same."""
    wanted = undisturbed(desk)
    job = begun(desk)
    slurm.kill_slurmd("node2", jobs=True)
    assert_ends_the_same(job, wanted, "node_lost")
    assert "node2" not in job.placed() and len(allocations(job)) == 2
    assert slurm.queue.job(job.slurm_id())["ExcNodeList"] == "node2"


def test_losing_first_node_changes_no_weight(slurm: SlurmBox, desk: Desk) -> None:
    wanted = undisturbed(desk)
    job = begun(desk)
    slurm.power_off("node1")
    slurm.queue.down("node1", "no power")  # sooner than slurmctld finds out
    assert_ends_the_same(job, wanted, "node_lost")
    assert "node1" not in job.placed() and len(allocations(job)) == 2


def test_node_lost_during_overwrite_resumes_from_previous_checkpoint(slurm: SlurmBox, desk: Desk) -> None:
    """A node lost while it overwrites a checkpoint costs only the steps since the one before."""
    files = {"train.py": overwriting.SCRIPT}
    calm = desk.submit(files, env=overwriting.CALM, **overwriting.FIELDS)
    assert calm.wait()["state"] == "SUCCEEDED", calm.story()
    job = desk.submit(files, env=overwriting.TORN, spares=1, **overwriting.FIELDS)
    overwriting.wait_until_torn(job)
    kept = next((job.folder.checkpoints / ".kept").iterdir()) / "latest/__1_0.distcp"
    piece = job.folder.checkpoints / "latest/__1_0.distcp"
    assert kept.read_bytes() != piece.read_bytes(), "step 30 is written over step 20"
    slurm.kill_slurmd("node2", jobs=True)
    overwriting.assert_went_on_from_20(job, overwriting.digests(calm))
    assert (job.folder.checkpoints / ".latest.torn-attempt-1/__1_0.distcp").exists()
