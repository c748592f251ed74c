"""Is a part of a burn-in that cannot be tried no proof against the host, and a wrong result one? With real torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.host import burn_in, check_steps
from orchestrator.core.host_facts import AllReduced
from orchestrator.core.wire.bootstrap import AllReduce
from tests.support import packages

packages.need("torch")
pytestmark = pytest.mark.slow

PATCH = """
import torch
right = torch.{function}

def other(*args, **named):
    result = right(*args, **named)
{lines}
    return result

torch.{function} = other
"""
FAILS = (
    "    if result.dtype == torch.bfloat16:\n        raise RuntimeError('not implemented for BFloat16\\nfull story')"
)
WRONG = "    if result.dtype == torch.float32:\n        result[3, 5] += 1"


def burn(tmp_path: Path, function: str = "matmul", lines: str = "", seconds: float = 5.0) -> AllReduced:
    """Burn this machine in, with a torch of which one function is another."""
    if lines:
        (tmp_path / "sitecustomize.py").write_text(PATCH.format(function=function, lines=lines))
    steps = check_steps.CheckSteps({**os.environ, "PYTHONPATH": str(tmp_path)})
    folder = str(tmp_path / "not" / "there")
    answer = steps.run(AllReduce(0, 0, "", 0, sys.executable, {}, on_gpu=False, burn_s=seconds, folder=folder))
    assert isinstance(answer, AllReduced) and list(tmp_path.glob("not")) == []
    return answer


def test_two_burn_ins_of_a_host_agree(tmp_path: Path) -> None:
    first, second = burn(tmp_path), burn(tmp_path)
    assert (first.fault, first.wrong, first.notes) == ("", (), ())
    assert first.sums == second.sums and sorted(first.sums) == ["bfloat16", "float32"]
    assert first.devices == second.devices
    assert sorted(first.speeds) == ["bfloat16", "disk", "float32", "memory"]
    assert 0.0 <= first.busy <= 1.0


def test_type_that_torch_lacks_is_a_note_and_no_proof(tmp_path: Path) -> None:
    burned = burn(tmp_path, lines=FAILS)
    assert burned.notes == ("bfloat16 cannot be tried: RuntimeError: not implemented for BFloat16",)
    assert burned.wrong == () and list(burned.sums) == ["float32"]


def test_wrong_product_is_a_proof(tmp_path: Path) -> None:
    assert burn(tmp_path, lines=WRONG).wrong == ("a float32 product is not the exact one",)


def test_too_little_memory_is_a_note(tmp_path: Path) -> None:
    lines = "    if result.numel() > 1 << 22:\n        raise MemoryError('none left')"
    assert burn(tmp_path, "zeros", lines).notes == ("memory cannot be tried: MemoryError: none left",)


def test_missing_torch_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    assert burn(tmp_path).fault == "ImportError: libcudart.so.12: cannot open shared object file"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let torch call the CPU two GPUs, and return it; there is no GPU here."""
    torch = pytest.importorskip("torch")
    to, zeros = torch.Tensor.to, torch.zeros
    on_cpu = {"cuda:0": "cpu", "cuda:1": "cpu"}
    monkeypatch.setattr(torch.Tensor, "to", lambda self, where: to(self, on_cpu.get(where, where)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device="cpu": zeros(*size, dtype=dtype))
    cuda = {
        "device_count": lambda: 2, "get_device_name": lambda name: "H200", "synchronize": lambda name: None,
        "mem_get_info": lambda name: (burn_in.GPU_SPARE_BYTES + (8 << 20), 141 << 30),
    }  # fmt: skip
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    for name, value in {
        "GPU_SIZE": 256,
        "PART_S": 0.01,
        "DISK_BYTES": 1 << 20,
        "COPY_BYTES": 1 << 20,
        "CHUNK_WORDS": 1 << 18,
        "CPU_MEMORY_BYTES": 1 << 20,
    }.items():
        monkeypatch.setattr(burn_in, name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # those of two devices would wait for each other
    yield torch
    torch.set_num_threads(threads)


def test_parts_of_gpus_run_and_are_named(two_gpus: Any, tmp_path: Path) -> None:
    burned = burn_in.burn({"on_gpu": True, "seconds": 8.0, "folder": str(tmp_path)})
    assert burned["wrong"] == [] and burned["notes"] == [] and burned["busy"] == 0.0
    assert burned["devices"] == [f"H200, torch {two_gpus.__version__}"] * 2
    assert list(burned["speeds"]) == [
        "float32", "bfloat16", "float16", "memory", "host to device", "device to host", "disk",
    ]  # fmt: skip
    assert all(row[0] and (row[1] or part == "disk") for part, row in burned["speeds"].items())
    assert all(len(sums) == 1 for sums in burned["sums"].values()) and len(burned["sums"]) == 3


def test_gpu_whose_copies_or_types_fail_is_named(
    two_gpus: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lose(self: Any, source: Any) -> Any:
        return self

    def refuse(name: str) -> tuple[int, int]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(two_gpus.Tensor, "copy_", lose)
    monkeypatch.setattr(two_gpus.cuda, "mem_get_info", refuse)
    burned = burn_in.burn({"on_gpu": True, "seconds": 0.1, "folder": ""})
    assert burned["wrong"] == [f"GPU {at}: bytes copied to the GPU and back are not the same" for at in (0, 1)]
    assert burned["notes"] == [
        f"GPU {at}: memory cannot be tried: RuntimeError: CUDA error: an illegal memory access was encountered"
        for at in (0, 1)
    ]
    assert set(burned["speeds"]["float32"]) == {0.0}, "too short for a speed"
