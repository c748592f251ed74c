"""What counts as a step, and who trains alone, under real torch and the libraries that people train with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.agent.ranks.hook import layout
from orchestrator.core.observations import Framework
from tests.support.forked import Forge
from tests.support.hooked import Rank, free_port, gang, lay_out
from tests.support.torch_script import WITHOUT_DYNAMO

STEPS = 12

GAN = f"""{WITHOUT_DYNAMO}
generator, critic = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
for step in range({STEPS}):
    of_critic.zero_grad()
    (critic(torch.randn(4, 8)) - critic(generator(torch.randn(4, 8)).detach())).mean().backward()
    of_critic.step()
    of_generator.zero_grad()
    critic(generator(torch.randn(4, 8))).mean().backward()
    of_generator.step()
"""
SCALED = f"""{WITHOUT_DYNAMO}
weight = torch.nn.Parameter(torch.ones(1))
optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
for step in range({STEPS}):
    optimizer.zero_grad()
    scaler.scale(weight.sum() * (float("inf") if step % 4 == 0 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
"""
DCP = f"""
import sys, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
def state():
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.save(state(), checkpoint_id=sys.argv[1])
before = state()
dcp.load(before, checkpoint_id=sys.argv[1])
set_state_dict(model, optimizer, model_state_dict=before["model"], optim_state_dict=before["optimizer"])
for step in range({STEPS}):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 3:
        dcp.save(state(), checkpoint_id=sys.argv[1])
dist.destroy_process_group()
"""
SPAWN = f"""
import torch.multiprocessing
def work(rank, port):
    {WITHOUT_DYNAMO.replace(chr(10), chr(10) + "    ")}
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range({STEPS}):
        weight.sum().backward()
        dist.all_reduce(weight.grad)
        optimizer.step()
    dist.destroy_process_group()
if __name__ == "__main__":
    import sys
    torch.multiprocessing.spawn(work, args=(int(sys.argv[1]),), nprocs=2)
"""
LIGHTNING = f"""
import torch, lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(8, 1)
    def training_step(self, batch, number):
        return self.model(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(
    accelerator="cpu", max_steps={STEPS}, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(100, 8), batch_size=4))
"""
ACCELERATE = f"""
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range({STEPS}):
    accelerator.backward(model(torch.ones(4, 8)).sum())
    optimizer.step()
    optimizer.zero_grad()
print("of", accelerator.num_processes)
"""


def _train(forge: Forge, ranks: list[Rank], text: str, *words: str, **env: str) -> list[bytes]:
    """Run `text` as the script of all ranks at once; return their logs."""
    codes, logs = zip(*forge.run(ranks, text, *words, **env), strict=True)
    assert codes == (0,) * len(ranks), b"\n".join(logs).decode()
    assert not [note for rank in ranks for note in rank.dir.glob(layout.NOTES_FILE)]
    return list(logs)


def _steps(rank: Rank) -> tuple[int, int]:
    """Return the rank's steps, and those of all its optimizers together."""
    last = rank.last_step()
    return last.step, last.rows


def test_two_gan_optimizers_make_one_step_together(torch_forge: Forge, tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    _train(torch_forge, [rank], GAN)
    assert _steps(rank) == (STEPS, 2 * STEPS)


def test_step_skipped_by_grad_scaler_is_not_counted(torch_forge: Forge, tmp_path: Path) -> None:
    """A step that the gradient scaler skips is not counted."""
    rank = lay_out(tmp_path)
    _train(torch_forge, [rank], SCALED)
    assert _steps(rank) == (STEPS - 3, STEPS - 3)


def test_optimizer_init_for_sharded_checkpoint_counts_no_step(torch_forge: Forge, tmp_path: Path) -> None:
    ranks = gang(tmp_path)
    _train(torch_forge, ranks, DCP, str(tmp_path / "saved"))
    assert [_steps(rank) for rank in ranks] == [(STEPS, STEPS)] * 2
    assert [rank.reader().framework_without_group() for rank in ranks] == [None, None]


def test_steps_of_spawned_children_belong_to_their_rank(torch_forge: Forge, tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    _train(torch_forge, [rank], SPAWN, str(free_port()))
    assert _steps(rank) == (STEPS, STEPS)
    assert rank.reader().framework_without_group() is None
    assert not rank.reader().groups(), "the gangs of two ranks' children would be taken for one"


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        pytest.param(LIGHTNING, Framework.LIGHTNING, id="lightning", marks=pytest.mark.soak),
        pytest.param(ACCELERATE, Framework.ACCELERATE, id="accelerate"),
    ],
)
def test_ranks_without_process_group_train_alone(
    torch_forge: Forge, tmp_path: Path, text: str, framework: Framework
) -> None:
    """Ranks that no library has joined into a process group train alone."""
    ranks = gang(tmp_path)
    _train(torch_forge, ranks, text)
    assert [_steps(rank) for rank in ranks] == [(STEPS, STEPS)] * 2
    assert [rank.reader().framework_without_group() for rank in ranks] == [framework] * 2


def test_variable_of_the_notice_joins_accelerate_ranks(torch_forge: Forge, tmp_path: Path) -> None:
    ranks = gang(tmp_path)
    logs = _train(torch_forge, ranks, ACCELERATE, ACCELERATE_USE_CPU="true")
    assert all(b"of 2" in log for log in logs)
    assert [rank.reader().framework_without_group() for rank in ranks] == [None, None]
    assert "ACCELERATE_USE_CPU" not in os.environ
