"""Torch's window in a rank of NCCL: is the collective seen that waits behind a GPU which never comes to it?"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.agent.ranks.flight_recorder import WorkerServerClient
from tests.integration.test_flight_torch import READY_S_MAX, until
from tests.support.hooked import gang, gang_envs

STUCK = """
import torch
import torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
torch.cuda.synchronize()
for _ in range(100):
    torch.cuda._sleep(2**40)  # minutes of nothing, in the way of what follows
dist.all_reduce(torch.ones(1000, device="cuda"))
print("waits", flush=True)
torch.cuda.synchronize()
"""


def has_gpu() -> bool:
    """Tell whether torch finds a GPU, without making a CUDA context in this process."""
    if not any(Path("/dev").glob("nvidia*")):
        return False
    asked = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(asked, check=False, timeout=READY_S_MAX).returncode == 0


def test_collective_not_reached_by_gpu_is_not_done(tmp_path: Path) -> None:
    """A collective that its GPU never reaches is seen as not done."""
    if not has_gpu():
        pytest.skip("needs a CUDA device")
    (rank,) = gang(tmp_path, 1)
    env = {**rank.env, **gang_envs(1)[0]}
    process = subprocess.Popen([sys.executable, rank.script(STUCK)], env=env, stdout=subprocess.PIPE)
    client = WorkerServerClient(rank.dir)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        found = until(lambda: client.query(), "torch's answer")
        last = found.collectives(rank.reader().groups(), 1, time.time_ns())[-1]
        assert (last.what, last.shape, last.ranks, last.done) == ("all_reduce", "float32[1000]", (0,), False)
    finally:
        process.kill()
        process.wait(READY_S_MAX)
        client.close()
