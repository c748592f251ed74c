"""A node whose GPU turns sick in the middle of a real training on a real Slurm is left, and only such a node. nvidia-smi is a fake."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.cluster import gpt, sick_gpu
from tests.support.cluster.desk import Desk
from tests.support.cluster.slurm import SlurmBox
from tests.support.cluster.slurm_jobs import allocations

OUT_S_MAX = 30.0
"""From the crash to the first step without the node."""

pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def _gpus(slurm: SlurmBox) -> Iterator[None]:
    with sick_gpu.nvidia_smi_on(slurm.nodes):
        yield


def test_node_with_gpu_that_turns_sick_is_replaced_by_spare(slurm: SlurmBox, desk: Desk) -> None:
    """The spare of the allocation takes over, and the next allocation does without the node."""
    calm = sick_gpu.train(desk, "")
    assert calm.wait()["state"] == "SUCCEEDED", calm.story()
    job = sick_gpu.train(desk, "sick", spares=1, gate=True)
    rank, step = sick_gpu.CRASHES[2]
    job.wait_for_line(f"made step {step}", rank, attempt=2)
    crashed_s = time.monotonic()
    assert job.placed() == ["node1", "node2"]
    job.wait_for_line("made step 31", rank, attempt=3)
    assert time.monotonic() - crashed_s < OUT_S_MAX, job.story()
    job.wait_for_line("made step 40", attempt=4)
    assert job.placed() == ["node1", "node3"] and len(allocations(job)) == 1
    sick_gpu.assert_host_was_left(job)
    listed = {one["host"]: one["why"] for one in json.loads(desk.orch("nodes", "--json").stdout) if one["why"]}
    assert listed.keys() == {"node2"} and "its GPU 1 wants a reset" in listed["node2"]

    other = slurm.queue.preempt(4)
    job.wait_for_state("QUEUED")
    slurm.queue.wait_for_state(other, "RUNNING")
    slurm.queue.scancel(other, user="root")
    gpt.open_gate(job)
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert len(allocations(job)) == 2 and "node2" not in job.placed()
    assert slurm.queue.job(job.slurm_id())["ExcNodeList"] == "node2"
    gpt.assert_resumed(job, 4, sick_gpu.STEPS)
    assert gpt.digest(job) == gpt.digest(calm)


def test_node_with_hot_gpu_is_kept_and_restart_counts(desk: Desk) -> None:
    job = sick_gpu.train(desk, "hot", spares=1)
    assert job.wait()["state"] == "FAILED"
    assert job.kinds() == ["crash", "crash", "crash"], "the last is one more than restart.max allows"
    assert "host" not in [one["kind"] for one in job.why()[1]["verdict"]["proof"]]
    assert "restart 1 of 1 without progress" in sick_gpu.begun_because(job)[1]
    assert job.placed() == ["node1", "node2"] and len(allocations(job)) == 1
    assert not [one["why"] for one in json.loads(desk.orch("nodes", "--json").stdout) if one["why"]]
    assert sick_gpu.gpu_news(job)[0] == ("", ("lower clocks: it is too hot",))
