"""Does real training on hosts over SSH end as if nothing had happened? With torch and gloo, whatever breaks between.

Weights are compared bit for bit, and lines that are lost or doubled on their way home are seen: see `gpt.py`.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from orchestrator.core.jobdir import status_file
from tests.support.cluster import gpt, overwriting
from tests.support.cluster.box import Box
from tests.support.cluster.desk import Desk, Job
from tests.support.cluster.gpt import digest
from tests.support.cluster.verbs import REPOSITORY
from tests.support.sharded import SHARDED
from tests.support.torch_script import WITHOUT_DYNAMO

STEPS = 120

LOST_S_MAX = 45.0
"""From the loss of a host to the first step on another: 25 s, and some more on a busy machine."""

_DIGESTS: dict[int, str] = {}
"""The weights of undisturbed runs, by the number of hosts."""


def train(desk: Desk, nodes: int, hosts: str, **spec: Any) -> Job:
    """Submit the training with two ranks on each of so many hosts."""
    return gpt.train(desk, STEPS, nodes=nodes, ssh={"hosts": hosts}, **spec)


def assert_logged_once(job: Job, ranks: int) -> None:
    """Every rank's log at home has every step of the only attempt once, in order."""
    gpt.assert_logged_once(job, ranks, STEPS)


def undisturbed(desk: Desk, nodes: int) -> str:
    """Return the weights of a run on so many hosts in which nothing happens; it is made once."""
    if nodes not in _DIGESTS:
        job = train(desk, nodes, f"node[1-{nodes}]")
        assert job.wait()["state"] == "SUCCEEDED", job.story()
        assert_logged_once(job, nodes * 2)
        _DIGESTS[nodes] = digest(job)
    return _DIGESTS[nodes]


@pytest.mark.soak
def test_gpt_trains_on_four_hosts_with_two_ranks(desk: Desk) -> None:
    job = train(desk, 4, "node[1-4]")
    status = job.wait()
    assert (status["state"], status["world_size"], status["restarts"]) == ("SUCCEEDED", 8, 0)
    assert [(one["name"], one["host"], one["ranks"]) for one in status["nodes"]] == [
        (f"node{number}", f"node{number}", [2 * number - 2, 2 * number - 1]) for number in range(1, 5)
    ]
    for rank in range(8):
        assert f"rank {rank} of 8 on node{rank // 2 + 1}, cpu" in job.log(rank)
    assert_logged_once(job, 8)
    _DIGESTS[4] = digest(job)
    checkpoints = sorted(path.name for path in job.folder.checkpoints.glob("step-*.pt"))
    assert checkpoints == [f"step-{step:06d}.pt" for step in (STEPS - 20, STEPS - 10, STEPS)]


@pytest.mark.soak
def test_ssh_cut_changes_neither_weights_nor_logs(desk: Desk, box: Box) -> None:
    """An SSH connection that is cut and healed changes neither the weights nor a log line."""
    wanted = undisturbed(desk, 4)
    job = train(desk, 4, "node[1-4]", pace_s=0.1)
    job.wait_for_step(5)
    box.cut_between("login", "node2")  # silent, both ways; the ranks go on
    box.break_ssh("node3")  # closed, and at once possible again
    box.stall_ssh("node4")  # there, and dead
    job.wait_for_step(40)
    box.heal()
    job.wait_for_step(60)
    for name in ("node1", "node2", "node3", "node4"):
        box.break_ssh(name)
    status = job.wait()
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 0)
    assert_logged_once(job, 8)
    assert digest(job) == wanted


@pytest.mark.soak
def test_spare_host_reaches_the_same_weights(desk: Desk, box: Box) -> None:
    """A host lost for good is replaced by the spare, and the weights are the same."""
    wanted = undisturbed(desk, 2)
    job = train(desk, 2, "node[1-3]", spares=1, pace_s=0.1)
    job.wait_for_step(25)
    job.until(lambda seen: seen["checkpoint"] is not None, "a checkpoint at home")
    assert job.placed() == ["node1", "node2"]
    box.cut("node2")
    status = job.wait()
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 1)
    lost, last = job.why()
    assert (lost["verdict"]["kind"], lost["verdict"]["node"], last["verdict"]) == ("node_lost", "node2", None)
    assert last["resumed_from"] is not None
    assert job.placed() == ["node1", "node3"]
    template = job.on_host("node3").node("node3") / "template"
    assert template.stat().st_mtime < status_file.parse_iso(last["started_at"])
    assert all(how.startswith("forks of") for how in last["starts"])
    assert digest(job) == wanted
    box.heal()
    desk.orch("clean", "--yes")  # the agent there, which nobody could dismiss, would wait for an hour


SAVES_IN_PARTS = (
    SHARDED
    + """
saving = None
for number in range(first + 1, 61):
    step()
    time.sleep(0.3 if attempt == 1 else 0)
    if number % 10 == 0:
        if saving is not None:
            saving.result()
        print(f"rank {rank} saved {number} with {digest()}", flush=True)
        saving = dcp.async_save(
            state(number), checkpoint_id=folder / f"step-{number}", process_group=in_background
        )
saving.result()
dist.barrier()
dist.destroy_process_group()
"""
)


def test_sharded_checkpoint_resumes_complete_on_other_hosts(desk: Desk, box: Box) -> None:
    """A checkpoint that several hosts saved in parts is resumed complete on other hosts."""
    job = desk.submit(
        {"train.py": SAVES_IN_PARTS}, entrypoint="train.py", nodes=2, procs_per_node=1, spares=1,
        ssh={"hosts": "node[1-3]"}, monitor={"heartbeat_s": 1, "node_timeout": "auto"},
    )  # fmt: skip
    job.until(lambda seen: (seen["checkpoint"] or {"step": 0})["step"] >= 20, "the second checkpoint at home")
    box.cut("node2")
    cut_s = time.monotonic()
    job.until(lambda seen: seen["attempt"] == 2 and (seen["ranks"][0]["step"] or 0) > 20, "a step without node2")
    assert time.monotonic() - cut_s < LOST_S_MAX, job.story()
    status = job.wait()
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 1), job.story()
    path = job.why()[-1]["resumed_from"]
    at = int(path.rpartition("-")[2])
    assert {one.name for one in job.folder.checkpoints.joinpath(f"step-{at}").iterdir()} == {
        ".metadata", "__0_0.distcp", "__1_0.distcp",
    }  # fmt: skip
    for rank in (0, 1):
        (saved,) = re.findall(rf"saved {at} with (\w+)", job.log(rank))
        assert f"begins at {at} with {saved}" in job.log(rank, 2)
    box.heal()
    desk.orch("clean", "--yes")


@pytest.mark.soak
def test_host_reset_during_overwrite_resumes_from_previous_checkpoint(desk: Desk, box: Box) -> None:
    """A host that is reset while it overwrites a checkpoint costs the steps since the one before."""
    files, fields = {"train.py": overwriting.SCRIPT}, {**overwriting.FIELDS, "ssh": {"hosts": "node[1-2]"}}
    calm = desk.submit(files, env=overwriting.CALM, **fields)
    assert calm.wait()["state"] == "SUCCEEDED", calm.story()
    job = desk.submit(files, env=overwriting.TORN, **fields)
    overwriting.wait_until_torn(job)
    there = [job.on_host(f"node{rank + 1}").checkpoints / f"latest/__{rank}_0.distcp" for rank in (0, 1)]
    home = job.folder.checkpoints / "latest"
    assert [path.read_bytes() == (home / path.name).read_bytes() for path in there] == [True, False]
    box.kill_all("node2", "trainer")
    overwriting.assert_went_on_from_20(job, overwriting.digests(calm))
    assert job.placed() == ["node1", "node2"]
    assert job.why()[1]["resumed_from"].endswith("/latest")


SUMS = f"""{WITHOUT_DYNAMO}
import torch.distributed as dist

dist.init_process_group("gloo")
found = torch.ones(1)
dist.all_reduce(found)
print("sum", int(found), flush=True)
dist.destroy_process_group()
"""


def test_ranks_rendezvous_on_network_shared_by_hosts(desk: Desk, box: Box) -> None:
    box.second_network(only=True)
    box.docker_bridges()
    for name in ("node1", "node2"):
        box.name_is_loopback(name)
    job = desk.submit({"train.py": SUMS}, procs_per_node=1, start="fresh")
    assert job.wait()["state"] == "SUCCEEDED"
    assert [job.log(rank) for rank in (0, 1)] == ["sum 2\n"] * 2


def test_example_job_runs_on_hosts_unchanged(desk: Desk) -> None:
    files = {"hello.py": (REPOSITORY / "jobs/hello.py").read_text()}
    job = desk.submit(
        files,
        nodes=3,
        procs_per_node=1,
        entrypoint="hello.py --seconds 1",
        ssh={"hosts": ["node[1-2]", "node4"]},
    )
    assert job.wait()["state"] == "SUCCEEDED"
    assert all("node" in job.log(rank) for rank in range(3))
