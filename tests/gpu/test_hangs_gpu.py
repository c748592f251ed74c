"""Is the rank named that keeps others waiting: behind a kernel that never ends, or behind a worker of its DataLoader?"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from orchestrator.brain.model import decisions as d
from tests.gpu.machine import BEGIN, ON_GPU, ONE_RANK, TWO_RANKS
from tests.support.local import Desk, wait_until

pytestmark = pytest.mark.gpu

NAMED_S_MAX = 40.0
"""At least 5 s without a step, two looks, and a machine that is busy."""
CANCEL = {"stop_grace": 1}

TRAIN = f"""{BEGIN}
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train(steps):
    for step in range(steps):
        model(torch.ones(4, 64, device=device)).sum().backward()
        flat = torch.cat([one.grad.flatten() for one in model.parameters()]).cpu()
        dist.all_reduce(flat)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
"""

KERNEL = f"""{TRAIN}
train(40)
if rank == 1:
    if device.type == "cuda":
        for _ in range(100):
            torch.cuda._sleep(2**40)  # minutes of nothing, each
        print("stuck at", time.time(), flush=True)
        torch.cuda.synchronize()  # here
    else:
        print("stuck at", time.time(), flush=True)
        time.sleep(3600)  # here
train(10)
"""

LOADER = f"""{TRAIN}
class Shards(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 7:
            time.sleep(3600)
        return torch.ones(64)


def load():
    for batch in torch.utils.data.DataLoader(Shards(), num_workers=1, pin_memory=device.type == "cuda"):  # here
        model(batch.to(device))


train(40)
if rank == 1:
    print("stuck at", time.time(), flush=True)
    load()
train(10)
"""


def line_at_fault(script: str) -> list[str]:
    """Return the lines that bear the mark, of which the one that this device comes to is the culprit's."""
    return [f"train.py:{at}" for at, line in enumerate(script.splitlines(), start=1) if line.endswith("# here")]


@pytest.mark.parametrize("name", ["kernel", "loader"])
def test_rank_that_others_wait_for_is_named_with_its_line(desk: Desk, say: Callable[[str], None], name: str) -> None:
    """A kernel that never ends, awaited by one of two ranks; and a worker of a DataLoader that sleeps."""
    script = {"kernel": KERNEL, "loader": LOADER}[name]
    job = desk.submit({"train.py": script}, entrypoint="train.py", monitor=CANCEL, **TWO_RANKS)
    job.wait_for_line("stuck at", rank=1)
    (notice,) = wait_until(lambda: job.notices(d.NoticeTopic.SUSPECT), f"the suspect, {job.seen()}", NAMED_S_MAX)
    after_s = time.time() - float(job.log(1).partition("stuck at ")[2].split()[0])
    say(f"{name}: named {after_s:.1f} s after it began: {notice.why}")
    assert "rank 1 on node-0" in notice.why and "rank 0" in notice.why.partition("rank 1 on node-0")[2]
    assert any(line in notice.why for line in line_at_fault(script)), notice.why
    job.job.cancel()
    job.wait()


GRAPH = f"""{BEGIN}
model = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.ones(4, 64, device=device)


def step():
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(stream)
graph, forward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
with torch.cuda.graph(forward):
    model(batch)
for _ in range(200):
    graph.replay()
    forward.replay()
    time.sleep(0.01)
torch.cuda.synchronize()
print("done", flush=True)
"""


@ON_GPU
def test_replays_of_a_graph_with_an_optimizer_are_steps(desk: Desk, say: Callable[[str], None]) -> None:
    """Not the capture, nor replays of a graph that only computes."""
    job = desk.submit({"train.py": GRAPH}, entrypoint="train.py", **ONE_RANK)
    status = job.wait()
    assert status["state"] == "SUCCEEDED", job.job.why()
    say(f"CUDA graph: {status['step']} steps, of 3 before the capture and 200 replays")
    assert status["step"] == 203
