"""Training of a model in shards by FSDP2 under gloo, saved by torch.distributed.checkpoint, whose weights can be compared."""

from __future__ import annotations

SHARDED = """
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


def begin():
    global model, optimizer
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step():
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(float(os.environ.get("PACE_S", "0.03")))


def state(number):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": number}


def digest():
    parts = [part.detach().to_local().numpy().tobytes() for part in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


begin()
first = 0
if resume:
    found = state(0)
    dcp.load(found, checkpoint_id=resume)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    first = found["step"]
print(f"attempt {attempt} rank {rank} begins at {first} with {digest()}", flush=True)
"""
"""A script up to its loop: `step()`, `state(number)` to save, `digest()` of this rank's weights, and `first`, the step that
it goes on from. `in_background` is a process group for saves that go on while steps are made."""
