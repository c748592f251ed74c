"""Sums of parameters that the hook makes, under real torch and its ways to train on several ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.agent.ranks.hook import layout
from tests.integration.test_hook_torch import ACCELERATE, DDP, FSDP2, LIGHTNING, LOOP, MODEL
from tests.support.forked import Forge
from tests.support.hooked import RUN_S_MAX, gang

STEPS = 8
EVERY = 2

SUMS = """
import torch
from types import SimpleNamespace
from orchestrator.agent.ranks.hook.tensors import sum_bits, sum_parameters

def total(*tensors):
    place, totals = sum_parameters(SimpleNamespace(param_groups=[{"params": list(tensors)}]))
    return (place + sum(int(one) for _, one in totals)) % 2**64

for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int8, torch.float8_e4m3fn):
    for size in (1, 3, 4, 8, 13):
        real = torch.arange(size + 1).to(torch.float32)
        tensor = real.to(dtype)
        assert total(tensor) == total(tensor.clone())
        part = tensor[1:]  # it begins where eight bytes do not
        assert total(part) == total(part.clone()), (dtype, size)
        raw = tensor.clone().view(torch.uint8) if dtype is not torch.complex128 else torch.view_as_real(tensor.clone()).view(torch.uint8)
        for at in (0, raw.numel() - 1):
            for bit in (0, 7):
                flipped = tensor.clone()
                bytes_of = (torch.view_as_real(flipped) if flipped.is_complex() else flipped).view(-1).view(torch.uint8)
                bytes_of[at] ^= 1 << bit
                assert int(sum_bits(flipped, torch)) != int(sum_bits(tensor, torch)), (dtype, size, at, bit)
one, other = torch.rand(8, 8), torch.rand(8, 8)
assert total(one, other) != total(other, one)
assert total(one.t()) == total(one.t().clone(memory_format=torch.preserve_format))
assert total(torch.nn.Parameter(one)) == total(one)
assert int(sum_bits(torch.empty(0), torch)) == 0
assert total(torch.empty(0), one) != total(one, torch.empty(0))
channels = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
assert total(channels) == total(channels.clone())
print("well")
"""
SEEDED = f"import torch\ntorch.manual_seed(1)\n{MODEL}"
HSDP = f"""{SEEDED}
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
{LOOP}dist.destroy_process_group()
"""
ZERO = f"""{SEEDED}
from torch.distributed.optim import ZeroRedundancyOptimizer
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
for _ in range(steps):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
TENSOR_PARALLEL = f"""{MODEL}
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
half = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
for _ in range(steps):
    out = half(torch.ones(4, 8))
    dist.all_reduce(out.detach())
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def run_sums(forge: Forge, folder: Path, text: str, ranks: int = 2) -> list[dict[int, dict[int, int]]]:
    """Run a script on ranks; return of each rank and optimizer the sum after each step that has one."""
    there = gang(folder, ranks)
    for code, log in forge.run(there, text, str(STEPS), **{layout.COMPARE_ENV: str(EVERY)}):
        assert code == 0, log.decode()
    found = []
    for rank in there:
        assert not (rank.dir / layout.NOTES_FILE).exists(), (rank.dir / layout.NOTES_FILE).read_text()
        by_optimizer: dict[int, dict[int, int]] = {}
        made, sums = rank.reader().parameter_sums(0)
        assert made >= len(sums) > 0
        for optimizer, _, step, total in sums:
            by_optimizer.setdefault(optimizer, {})[step] = total
        found.append(by_optimizer)
    return found


def test_sum_shows_each_bit_of_each_type() -> None:
    done = subprocess.run([sys.executable, "-c", SUMS], capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    assert done.stdout == "well\n", done.stderr


@pytest.mark.parametrize(
    "text",
    [DDP, *(pytest.param(text, marks=pytest.mark.soak) for text in (LIGHTNING, ACCELERATE))],
    ids=["ddp", "lightning", "accelerate"],
)
def test_replicas_have_equal_sums(torch_forge: Forge, tmp_path: Path, text: str) -> None:
    one, other = run_sums(torch_forge, tmp_path, text)
    assert one == other
    assert len(set(one[0].values())) == len(one[0]) >= 1


@pytest.mark.parametrize(
    "text", ["import torch\ntorch.manual_seed(1)\n" + FSDP2, TENSOR_PARALLEL], ids=["fsdp2", "tensor parallel"]
)
def test_shards_have_different_sums(torch_forge: Forge, tmp_path: Path, text: str) -> None:
    one, other = run_sums(torch_forge, tmp_path, text)
    assert one[0].keys() == other[0].keys()
    assert not set(one[0].values()) & set(other[0].values())


def test_shards_of_hybrid_mesh_equal_those_of_their_replicas(torch_forge: Forge, tmp_path: Path) -> None:
    sums = [one[0] for one in run_sums(torch_forge, tmp_path, HSDP, 4)]
    assert sums[0] == sums[2] != sums[1] == sums[3]


def test_zero_redundancy_optimizer_holds_equal_parameters(torch_forge: Forge, tmp_path: Path) -> None:
    """One of its two optimizers has a part of the parameters, the other all of them."""
    one, other = run_sums(torch_forge, tmp_path, ZERO)
    assert [number for number in one if one[number] == other[number]]
