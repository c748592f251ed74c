"""A training whose loss becomes nan by one batch, with `monitor.on_nan`: where it resumes, and when it fails."""

from __future__ import annotations

import re

from orchestrator.brain.model import decisions as d
from orchestrator.client import job_checkpoints
from tests.support.local import Desk
from tests.support.torch_saves import STAND_IN

BAD_BATCH = 60

SCRIPT = """
import array, math, os, re, sys, time
import torch
from torch.optim.optimizer import Optimizer
import colorsys  # any import after torch lets the hook see that it is there

attempt, folder = int(os.environ["ORCH_ATTEMPT"]), os.environ["ORCH_CHECKPOINT_DIR"]
optimizer, weights, step = Optimizer(), array.array("d", [1.0]), 0
if path := os.environ.get("ORCH_RESUME_FROM"):
    weights, step = torch.load(path)["model"]["weight"], int(re.search(r"(\\d+)\\.pt", path)[1])
print("begins at", step, flush=True)
skips = "--skip" in sys.argv and attempt > 1
while step < 200:
    step += 1
    if step == 60 and not skips:
        weights[0] = math.nan
    elif step != 60:
        weights[0] *= 0.99
    time.sleep(0.2 if attempt == 1 or not skips else 0.02)
    optimizer.step()
    print("step", step, "loss", weights[0], flush=True)
    if step % 10 == 0:
        torch.save({"model": {"weight": weights}, "step": step}, os.path.join(folder, f"step_{step}.pt"))
print("weights", weights[0].hex(), flush=True)
"""


SILENT = """
import os, time, torch
torch.manual_seed(1)
model, first = torch.nn.Linear(8, 1), 1
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
if path := os.environ.get("ORCH_RESUME_FROM"):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    first = saved["step"] + 1
print("begins at", first, flush=True)
for step in range(first, 101):
    optimizer.zero_grad()
    is_bad = step == 40 and os.environ["ORCH_ATTEMPT"] == "1"
    loss = model(torch.rand(4, 8)).square().sum() * (float("nan") if is_bad else 1.0)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    time.sleep(0.05)
    if step % 13 == 0:  # 39 is that of the last finite norm
        torch.save({"model": model.state_dict(), "step": step}, f"{os.environ['ORCH_CHECKPOINT_DIR']}/step_{step}.pt")
print("weights", model.weight.isfinite().all().item())
"""


def test_norm_that_is_not_finite_is_noticed_without_a_loss(desk: Desk) -> None:
    job = desk.submit({"train.py": SILENT}, entrypoint="train.py", nodes=1, procs_per_node=1)
    assert job.wait(180.0)["state"] == "SUCCEEDED"
    (notice,) = job.notices(d.NoticeTopic.LOSS)
    assert re.fullmatch(r"gradient norm is nan at step 40 \(last finite \d\S* at step 39\)", notice.why), notice


def test_rollback_begins_before_last_finite_norm(desk: Desk) -> None:
    job = desk.submit(
        {"train.py": SILENT}, entrypoint="train.py", nodes=1, procs_per_node=1,
        checkpoint={"path": "step_*.pt", "keep": 20}, monitor={"on_nan": "rollback"},
    )  # fmt: skip
    assert job.wait(180.0)["state"] == "SUCCEEDED"
    assert job.kinds()[0] == "diverged"
    assert job.log(attempt=2).splitlines() == ["begins at 27", "weights True"]


def test_rollback_matches_run_without_bad_batch(desk: Desk) -> None:
    """A rollback ends with the weights of a run without the bad batch."""
    job = desk.submit(
        {**STAND_IN, "train.py": SCRIPT}, entrypoint="train.py --skip", nodes=1, procs_per_node=1,
        checkpoint={"path": "step_*.pt", "keep": 20}, monitor={"on_nan": "rollback"},
    )  # fmt: skip
    assert job.wait(180.0)["state"] == "SUCCEEDED"
    verdict = job.verdict(1)
    assert (verdict["kind"], verdict["ranks"]) == ("diverged", [0])
    assert verdict["step"] >= BAD_BATCH
    began = int(job.log(attempt=2).split()[2])
    assert 0 < began < BAD_BATCH
    weight = 1.0
    for _ in range(199):
        weight *= 0.99
    assert f"weights {weight.hex()}" in job.log(attempt=2)


def test_rollback_fails_where_the_loss_is_nan_again(desk: Desk) -> None:
    job = desk.submit(
        {**STAND_IN, "train.py": SCRIPT}, entrypoint="train.py", nodes=1, procs_per_node=1,
        checkpoint={"path": "step_*.pt", "keep": 20}, monitor={"on_nan": "rollback"},
    )  # fmt: skip
    assert job.wait(180.0)["state"] == "FAILED"
    assert job.kinds() == ["diverged", "diverged"]
    distrusted = [
        one
        for one in job_checkpoints.list_checkpoints(job.job.folder, job.job.plan(), verify=False)
        if one["state"] == "distrusted"
    ]
    assert distrusted
    assert all(one["step"] >= BAD_BATCH - 40 for one in distrusted)
