"""Is a part of a burn-in that cannot be tried no proof against the host, and a wrong result one? With real torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from orchestrator.agent.host import check_steps
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
