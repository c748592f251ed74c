"""A host whose GPU turns sick in the middle of a real training over SSH is left, and only such a host. nvidia-smi is a fake."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.cluster import gpt, sick_gpu
from tests.support.cluster.box import Box
from tests.support.cluster.desk import Desk

OUT_S_MAX = 30.0
"""From the crash to the first step without the host."""

THREE = {"hosts": "node[1-3]"}

pytestmark = pytest.mark.soak


@pytest.fixture
def gpus(box: Box) -> Iterator[None]:
    with sick_gpu.nvidia_smi_on(box.nodes[:3]):
        yield


def failures(desk: Desk) -> dict[str, str]:
    """Return why hosts count as failed, by `orch nodes`."""
    listed = json.loads(desk.orch("nodes", "--json").stdout)
    return {one["host"]: one["why"] for one in listed if one["why"]}


@pytest.mark.usefixtures("gpus")
def test_host_with_gpu_that_turns_sick_is_replaced_by_spare(desk: Desk) -> None:
    calm = sick_gpu.train(desk, "", ssh=THREE)
    assert calm.wait()["state"] == "SUCCEEDED", calm.story()
    job = sick_gpu.train(desk, "sick", spares=1, ssh=THREE)
    rank, step = sick_gpu.CRASHES[2]
    job.wait_for_line(f"made step {step}", rank, attempt=2)
    crashed_s = time.monotonic()
    job.wait_for_line("made step 31", rank, attempt=3)
    assert time.monotonic() - crashed_s < OUT_S_MAX, job.story()
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    sick_gpu.assert_host_was_left(job)
    assert job.placed() == ["node1", "node3"]
    gpt.assert_resumed(job, 4, sick_gpu.STEPS)
    assert gpt.digest(job) == gpt.digest(calm)
    ((host, why),) = failures(desk).items()
    assert host == "node2" and why.startswith("crash: ") and "its GPU 1 wants a reset" in why
    later = sick_gpu.train(desk, "", ssh=THREE)
    assert later.wait()["state"] == "SUCCEEDED" and later.placed() == ["node1", "node3"]


@pytest.mark.usefixtures("gpus")
def test_host_with_hot_gpu_is_kept_and_restart_counts(desk: Desk) -> None:
    job = sick_gpu.train(desk, "hot", spares=1, ssh=THREE)
    assert job.wait()["state"] == "FAILED"
    assert job.kinds() == ["crash", "crash", "crash"], "the last is one more than restart.max allows"
    assert "host" not in [one["kind"] for one in job.why()[1]["verdict"]["proof"]]
    assert "restart 1 of 1 without progress" in sick_gpu.begun_because(job)[1]
    assert job.placed() == ["node1", "node2"] and not failures(desk)
    assert sick_gpu.gpu_news(job)[0] == ("", ("lower clocks: it is too hot",))


def test_slow_nvidia_smi_costs_another_crash_at_most(desk: Desk, box: Box) -> None:
    """The next attempt begins before it answers: the host is left at the crash after that."""
    with sick_gpu.nvidia_smi_on(box.nodes[:3], slow_s=1.5):
        job = sick_gpu.train(desk, "sick", restarts_max=3, spares=1, ssh=THREE)
        assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert job.placed() == ["node1", "node3"] and failures(desk).keys() == {"node2"}
    assert any(
        "node2 is not used again: its GPU 1 wants a reset since" in why for why in sick_gpu.begun_because(job)[1:3]
    )
