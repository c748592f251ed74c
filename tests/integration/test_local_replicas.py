"""A training of three ranks in which one bit of one rank's parameters flips, with `monitor.compare_replicas`."""

from __future__ import annotations

import re

import pytest

from tests.support.local import Desk

EVERY = 10
FLIPPED_AT = 45

SCRIPT = """
import os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(1, 101):
    if "flip" in sys.argv and (step, dist.get_rank()) == (45, 1):
        with torch.no_grad():
            model.module.weight.view(torch.int32)[3, 2] ^= 1 << 12
    model(torch.rand(4, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
print("done")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("word", ["flip", "calm"])
def test_flipped_bit_is_named_within_so_many_steps(desk: Desk, word: str) -> None:
    job = desk.submit(
        {"train.py": SCRIPT}, entrypoint=f"train.py {word}", nodes=1, procs_per_node=3,
        monitor={"compare_replicas": EVERY},
    )  # fmt: skip
    assert job.wait(240.0)["state"] == "SUCCEEDED"
    (attempt,) = job.job.why()["attempts"]
    told = attempt["told"]
    if word == "calm":
        assert not told
        return
    (notice,) = told
    found = re.match(r"the parameters of rank 1 on \S+ differ from those of ranks 0,2 at step (\d+); ", notice["text"])
    assert found, notice
    assert FLIPPED_AT <= int(found[1]) <= FLIPPED_AT + EVERY
