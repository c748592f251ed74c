"""Is a loop that updates its weights by hand judged by its backward passes?"""

from __future__ import annotations

import time

from orchestrator.brain.model import decisions as d
from tests.support.local import Desk, wait_until

BY_HAND = """
import os, sys, time
import torch
import torch.distributed as dist

def wait_for_nothing():
    time.sleep(3600)

dist.init_process_group("gloo")
rank = dist.get_rank()
weights = torch.zeros(8, requires_grad=True)
for step in range(1, int(sys.argv[1]) + 1):
    if rank == 1 and step == int(sys.argv[2]):
        print(f"frozen at {time.time()}", flush=True)
        wait_for_nothing()
    (weights - torch.ones(8)).square().sum().backward()
    dist.all_reduce(weights.grad)
    weights.data -= 0.01 * weights.grad
    weights.grad = None
    time.sleep(0.05)
dist.destroy_process_group()
"""
NAMED_S_MAX = 10.0
BUSY_S = 5.0  # on a busy machine


def test_frozen_loop_without_optimizer_is_named_soon(desk: Desk) -> None:
    job = desk.submit({"train.py": BY_HAND}, nodes=2, procs_per_node=1, entrypoint="train.py 10000 40")
    (notice,) = wait_until(lambda: job.notices(d.NoticeTopic.SUSPECT), "the suspect")
    frozen_s = float(job.log(1).partition("frozen at ")[2].split()[0])
    assert time.time() - frozen_s < NAMED_S_MAX + BUSY_S
    assert notice.why.startswith("no backward pass for ")
    assert "rank 1 on node-1: in sleep(), train.py:7 wait_for_nothing" in notice.why
    assert job.seen()["progress"] == "40 backward passes"
    job.job.cancel()


def test_healthy_loop_without_optimizer_is_shown_and_left_alone(desk: Desk) -> None:
    job = desk.submit({"train.py": BY_HAND}, nodes=2, procs_per_node=1, entrypoint="train.py 400 0")
    wait_until(lambda: "backward passes" in (job.seen()["progress"] or ""), "the progress")
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.seen()["step"] is None and not job.notices(*d.NoticeTopic) and not job.news(d.Judge)
