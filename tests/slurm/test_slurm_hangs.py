"""Is a hang on a real Slurm found, explained and told of as elsewhere? The supervisor lives inside the allocation."""

from __future__ import annotations

import json

from tests.support.cluster import hanging
from tests.support.cluster.desk import Desk
from tests.support.cluster.host import TRAINER

from .test_slurm_allocation import allocations

ALWAYS_SLEEPS = """
import time

import torch

parameter = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(80):
    parameter.grad = torch.ones(2)
    optimizer.step()
    time.sleep(0.03)
    if step == 60:
        time.sleep(3600)
"""


def test_a_hang_is_explained_told_of_from_the_allocation_and_answered_in_it(desk: Desk) -> None:
    told = f"{TRAINER.home}/desk/told.jsonl"  # on all hosts
    command = f"(hostname; cat; echo) >> {told}"
    job = hanging.reading_a_fifo(desk, notify={"command": command, "on": ["hang", "restart"]})
    hanging.assert_stacks_tell_and_change_nothing(job)
    hanging.assert_judged_and_mended(job)
    assert len(allocations(job)) == 1
    lines = desk.box.login.path(told).read_text().splitlines()
    assert lines[::2] == ["node1", "node1"], "the supervisor is on the first node"
    notes = [json.loads(line) for line in lines[1::2]]
    assert [(note["event"], note["attempt"]) for note in notes] == [("hang", 1), ("restart", 2)]
    assert notes[0]["verdict"]["ranks"] == [2] and hanging.LINE in notes[0]["text"], notes


def test_a_hang_that_returns_at_the_same_place_is_no_progress(desk: Desk) -> None:
    monitor = {"heartbeat_s": 1.0, "hang_timeout": "auto"}
    job = desk.submit({"train.py": ALWAYS_SLEEPS}, monitor=monitor)
    assert job.wait()["state"] == "FAILED", job.story()
    assert job.kinds() == ["hang", "no_progress"]
    verdict = job.why()[1]["verdict"]
    assert "the same failure again at step" in verdict["summary"] and "train.py" in verdict["summary"], (
        verdict
    )
    assert len(allocations(job)) == 1
