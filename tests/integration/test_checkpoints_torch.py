"""Is what real torch writes told apart, whole from cut off, and gone on from? With torch.distributed.checkpoint."""

from __future__ import annotations

import re

import pytest

from orchestrator import collect

from .conftest import Desk

pytestmark = pytest.mark.integration

TRAIN = """
import hashlib, os, signal, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

rank, attempt = int(os.environ["RANK"]), int(os.environ["ORCH_ATTEMPT"])
folder, resume = Path(os.environ["ORCH_CHECKPOINT_DIR"]), os.environ["ORCH_RESUME_FROM"]
dist.init_process_group("gloo")
in_background = dist.new_group()  # its collectives must not mix with those of the training
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(number):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.03)


def state(number):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": number}


def digest():
    parts = [part.detach().to_local().numpy().tobytes() for part in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


first = 0
if resume:
    found = state(0)
    dcp.load(found, checkpoint_id=resume)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    first = found["step"]
print(f"attempt {attempt} rank {rank} begins at {first} with {digest()}", flush=True)
for number in range(first + 1, 41):
    step(number)
    if number == 10:
        dcp.save(state(number), checkpoint_id=folder / "step-10")
    if number == 20:
        saving = dcp.async_save(
            state(number), checkpoint_id=folder / "step-20", process_group=in_background
        )
        print(f"rank {rank} saved 20 with {digest()}", flush=True)
    if number == 25 and not resume:
        saving.result()
    if number == 30 and attempt == 1:  # what a kill in the middle of a save leaves
        dcp.save(state(number), checkpoint_id=folder / "step-30")
        dist.barrier()
        (folder / "step-30" / ".metadata").unlink(missing_ok=True)
    if number == 35 and attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    dcp.save({"step": number}, checkpoint_id=folder / "step-40", no_dist=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_job_goes_on_from_the_newest_whole_folder_of_torch_distributed_checkpoint(desk: Desk) -> None:
    job = desk.submit({"train.py": TRAIN}, entrypoint="train.py")
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert job.attempts()[1]["resumed_from"].endswith("/step-20")
    for rank in (0, 1):
        (saved,) = re.findall(r"saved 20 with (\w+)", job.log(rank))
        assert f"begins at 20 with {saved}" in job.log(rank, 2)
    known = {
        one["path"].rpartition("/")[2]: (one["step"], one["complete"], one["whole"], one["resume"])
        for one in collect.checkpoints(job.job, verify=True)
    }
    assert known == {
        "step-10": (10, True, True, False), "step-20": (20, True, True, False),
        "step-30": (None, False, False, False), "step-40": (40, True, True, True),
    }  # fmt: skip
