"""Is a loop that updates its weights by hand judged by its backward passes?"""

from __future__ import annotations

import time
from pathlib import Path

from orchestrator.agent.ranks.step_counter import NO_STEP, PASSES_MIN
from orchestrator.brain.model import decisions as d
from tests.support.forked import Forge
from tests.support.hooked import lay_out
from tests.support.local import Desk, wait_until
from tests.support.torch_script import WITHOUT_DYNAMO

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


PASSES = f"""{WITHOUT_DYNAMO}
import sys
passes, steps, fails = map(int, sys.argv[1:])
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(passes):
    torch.autograd.grad(weight.sum(), weight) if _ % 2 else weight.sum().backward()
for _ in range(steps):
    weight.sum().backward()
    optimizer.step()
class Fails(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.sum())
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no gradient")
if fails:
    Fails.apply(weight).backward()
"""


def test_backward_passes_count_until_an_optimizer_steps(torch_forge: Forge, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("few", "many", "stepping")]
    for folder in folders:
        folder.mkdir()
    few, many, stepping = map(lay_out, folders)
    for rank, passes, steps in ((few, PASSES_MIN - 1, 0), (many, 40, 0), (stepping, 40, 5)):
        assert torch_forge.run([rank], PASSES, str(passes), str(steps), "0") == [(0, b"")]
    assert few.reader().backward_passes() == (0, None) and few.last_step() == NO_STEP
    count, median_s = many.reader().backward_passes()
    assert count == 40 and median_s is not None and 0 < median_s < 1 and many.last_step() == NO_STEP
    assert stepping.reader().backward_passes() == (0, None) and stepping.last_step().step == 5
    assert [rank.files() for rank in (few, many)] == [["files.txt", "steps"]] * 2, "nothing is claimed"


def test_error_in_a_backward_pass_shows_no_frame_of_the_hook(torch_forge: Forge, tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    ((code, log),) = torch_forge.run([rank], PASSES, "3", "0", "1")
    assert code == 1 and b"ValueError: no gradient" in log and b"_orch_hook" not in log
