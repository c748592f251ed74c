"""Is a hang seen over SSH, explained by pages that were written on other hosts, and is a host at fault left out?"""

from __future__ import annotations

from tests.hangs.script import training
from tests.support.cluster import hanging
from tests.support.cluster.box import Box
from tests.support.cluster.desk import Desk

LONG_TRAINING = training("""
def misbehave():
    train(3000)
""")

SLEEPS_ON_NODE2 = """
import os, socket, time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(80):
    parameter.grad = torch.ones(2)
    dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(0.03)
    if step == 60 and socket.gethostname() == "node2":
        time.sleep(3600)
dist.destroy_process_group()
"""

FOUND_S_MAX = 45.0
"""5 s of silence and 5 s of proof on a quiet machine, and what a busy one adds."""


def test_hosts_that_lose_each_other_while_both_are_heard_are_a_hang_of_the_network(
    desk: Desk, box: Box
) -> None:
    monitor = {"heartbeat_s": 1.0, "node_timeout": 60, "hang_timeout": "auto"}
    job = desk.submit({"train.py": LONG_TRAINING}, monitor=monitor)
    job.wait_for_step(100)
    box.cut_between("node1", "node2")
    job.until(lambda seen: seen["attempt"] == 2 or seen["state"] == "RESTARTING", "the verdict")
    box.heal()
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert job.kinds() == ["hang", None]
    verdict = job.why()[0]["verdict"]
    assert "nobody is missing" in verdict["summary"], verdict
    assert verdict["detected_s"] < FOUND_S_MAX


def test_a_rank_that_reads_a_fifo_is_named_with_its_line_and_all_pages_come_home(desk: Desk) -> None:
    job = hanging.reading_a_fifo(desk)
    hanging.assert_stacks_tell_and_change_nothing(job)
    hanging.assert_judged_and_mended(job)


def test_a_host_on_which_ranks_hung_twice_is_set_aside_for_a_spare(desk: Desk) -> None:
    job = desk.submit(
        {"train.py": SLEEPS_ON_NODE2},
        procs_per_node=1,
        spares=1,
        ssh={"hosts": "node[1-3]"},
        monitor={"heartbeat_s": 1.0, "hang_timeout": "auto"},
    )
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert job.kinds() == ["hang", "hang", None]
    assert [one["verdict"]["node"] for one in job.why()[:2]] == ["node2", "node2"]
    assert job.placed() == ["node1", "node3"]
    assert "ranks hung on it in attempts 1 and 2" in job.note("node2")
