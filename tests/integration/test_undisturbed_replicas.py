"""A hundred healthy trainings of several kinds with `monitor.compare_replicas`: none of them is said to have drifted.

Each of its runs draws another model, optimizer and data. That their sums were made is read from the ranks' step files, and that they
were compared is shown by one more run of each kind, in which a bit flips.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from orchestrator.agent.ranks.hook.layout import STEP_FILE
from orchestrator.agent.ranks.step_counter import StepCounter
from orchestrator.brain.model.decisions import NoticeTopic
from tests.support.local import Desk, Sight
from tests.support.packages import need

pytestmark = pytest.mark.soak

RUNS = 25
STEPS, FLIPS_AT = 60, 45
SUMS_MIN = STEPS - 1
"""Of a rank, with a sum at each step: the last may not be read any more."""

RUN_S_MAX = 120.0

COMMON = f"""
import os, sys, time, torch
import torch.distributed as dist

number, flips, steps = int(sys.argv[1]), "flip" in sys.argv, {STEPS}
torch.set_num_threads(1)
torch.manual_seed(number)
width = 16 + 8 * (number % 3)
middle = (torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.LayerNorm(width), torch.nn.GELU(), torch.nn.PReLU())[number % 5]
model = torch.nn.Sequential(torch.nn.Linear(16, width), middle, torch.nn.Linear(width, 1, bias=number % 2 == 0))


def optimizer_of(model):
    torch.manual_seed(1000 * number + int(os.environ["RANK"]))  # from here on each rank has its own data
    make = (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop)[number % 4]
    return make(model.parameters(), lr=0.001 * (1 + number % 7))


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True)).pow(2).mean()


def made(model, step):
    time.sleep(0.02)
    if flips and (step, os.environ["RANK"]) == ({FLIPS_AT}, "1"):
        parameter = next(model.parameters()).detach()
        with torch.no_grad():
            getattr(parameter, "_local_tensor", parameter).view(torch.int32)[0, 0] ^= 1 << 12
"""
LOOP = """
optimizer = optimizer_of(model)
every = 1 + number % 2
for step in range(1, steps + 1):
    for _ in range(every):
        loss_of(model, torch.randn(4, 16)).div(every).backward()
    optimizer.step()
    optimizer.zero_grad()
    made(model, step)
dist.barrier()
dist.destroy_process_group()
"""
DDP = f"""{COMMON}
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model, static_graph=number % 3 == 1)
{LOOP}"""
SHARDED = f"""{COMMON}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
sizes = (2, dist.get_world_size() // 2)
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")) if "hybrid" in sys.argv else init_device_mesh("cpu", (2,))
for layer in (model[0], model):
    fully_shard(layer, mesh=mesh)
{LOOP}"""
ACCELERATE = f"""{COMMON}
from accelerate import Accelerator

every = 1 + number % 2
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
data = torch.utils.data.DataLoader(torch.randn(2 * 4 * steps * every, 16), batch_size=4, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer_of(model), data)
for index, x in enumerate(data, 1):
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, x))
        if accelerator.sync_gradients and number % 3:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if index % every == 0:
        made(model, index // every)
accelerator.end_training()
"""
LIGHTNING = f"""{COMMON}
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model

    def training_step(self, batch, index):
        return loss_of(self.net, batch)

    def on_train_batch_end(self, outputs, batch, index):
        if (index + 1) % every == 0:
            made(self.net, self.global_step)

    def configure_optimizers(self):
        return optimizer_of(self)


every = 1 + number % 2
trainer = lightning.Trainer(
    strategy="ddp", devices=2, accelerator="cpu", max_steps=steps, accumulate_grad_batches=every, logger=False,
    gradient_clip_val=1.0 if number % 3 else None, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(2 * 4 * steps * every, 16), batch_size=4, shuffle=True))
"""


@dataclass(frozen=True)
class Kind:
    """A way to train. `alike`: the groups of ranks that hold the same; none where every rank holds another part."""

    name: str
    script: str
    word: str = ""
    package: str = "torch"
    alike: tuple[tuple[int, ...], ...] = ((0, 1),)
    ranks: int = 2
    nodes: int = 1
    runs: int = RUNS


KINDS = (
    Kind("ddp", DDP, runs=20),
    Kind("ddp on two nodes", DDP, nodes=2, runs=5),
    Kind("fsdp", SHARDED, alike=(), runs=10),
    Kind("hsdp", SHARDED, "hybrid", runs=10),
    Kind("hsdp of four", SHARDED, "hybrid", alike=((0, 2), (1, 3)), ranks=4, runs=5),
    Kind("accelerate", ACCELERATE, package="accelerate"),
    Kind("lightning", LIGHTNING, package="lightning"),
)


def run(desk: Desk, kind: Kind, number: int, *words: str) -> tuple[Sight, int]:
    """Train to the end; return the job, and how many sums each rank made, where those that hold the same made the same."""
    job = desk.submit(
        {"train.py": kind.script}, entrypoint=" ".join(["train.py", str(number), kind.word, *words]), nodes=kind.nodes,
        procs_per_node=kind.ranks // kind.nodes, monitor={"compare_replicas": 1, "heartbeat_s": 0.1},
    )  # fmt: skip
    assert job.wait(RUN_S_MAX)["state"] == "SUCCEEDED", f"run {number}: {job.log()}"
    counters = {int(path.parent.name.rpartition("-")[2]): StepCounter(path) for path in job.root.rglob(STEP_FILE)}
    sums = {rank: counter.parameter_sums(0) for rank, counter in counters.items()}
    assert sums.keys() == set(range(kind.ranks)), sorted(job.root.rglob(STEP_FILE))
    if not words:
        for ranks in kind.alike:
            assert len({sums[rank] for rank in ranks}) == 1, f"run {number}: {sums}"
        assert len({sums[rank] for rank in sums}) == (len(kind.alike) or kind.ranks)
    return job, min(made for made, _ in sums.values())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_undisturbed_replicas_raise_no_alarm(desk: Desk, kind: Kind) -> None:
    need(kind.package)
    began_s, compared = time.monotonic(), 0
    for number in range(kind.runs):
        job, made = run(desk, kind, number)
        assert made >= SUMS_MIN, f"run {number}: {made} sums"
        compared += made * kind.ranks
        keys = [one.key for one in job.notices(NoticeTopic.REPLICAS)]
        assert keys == ([] if kind.alike else ["none"]), f"run {number}: {job.attempts()[0]['told']}"
    print(f"{kind.name}: {kind.runs} runs, {compared} sums, no alarm, {time.monotonic() - began_s:.0f} s")
    if kind.alike:
        job, _ = run(desk, kind, kind.runs, "flip")
        (notice,) = job.notices(NoticeTopic.REPLICAS)
        assert f"rank 1 on node-{kind.nodes - 1}" in notice.why and "held the same" in notice.why, notice
        print(notice.why)
