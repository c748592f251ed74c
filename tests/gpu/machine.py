"""The device that these tests use, by `ORCH_GPU_TESTS`, and what of it is there."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from orchestrator.core.errors import HostError
from orchestrator.core.host import gpus

VARIABLE = "ORCH_GPU_TESTS"
DEVICE = "cpu" if os.environ.get(VARIABLE) == "cpu" else "cuda"

ASK_S_MAX = 120.0
"""For the import of torch on a disk that has not read it yet."""

ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="on CPUs: needs a GPU")

ONE_RANK: dict[str, Any] = {"procs_per_node": 1, **({} if DEVICE == "cpu" else {"gpus_per_node": 1})}
TWO_RANKS: dict[str, Any] = {"procs_per_node": 2}
"""Two ranks share one GPU: to orch they are ranks of CPUs, which sees to no GPU and hides none."""

BEGIN = f"""
import os, sys, time
import torch
import torch.distributed as dist

rank, attempt, device = int(os.environ["RANK"]), int(os.environ.get("ORCH_ATTEMPT", "1")), torch.device("{DEVICE}")
torch.set_num_threads(1)
"""
"""The first lines of a script; `device` is the one that all ranks share."""

_ASK = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available(), torch.cuda.nccl.version() if torch.cuda.is_available() else '')"


def missing() -> str:
    """Return why nothing can be tried here; empty if something can. Makes no CUDA context in this process."""
    if DEVICE == "cpu":
        return ""
    tool = gpus.find_nvidia_smi()
    if tool is None:
        return "there is no nvidia-smi"
    try:
        if not gpus.list_gpus():
            return f"{tool} lists no GPU"
    except HostError as err:
        return str(err)
    words = _torch()
    return "" if "True" in words else f"torch finds no GPU ({' '.join(words)})"


def found() -> str:
    """Return what is there, in one line."""
    devices = "CPUs only" if DEVICE == "cpu" else ", ".join(gpu.model for gpu in gpus.list_gpus())
    return f"{devices}; torch, its CUDA, whether it finds a GPU, NCCL: {' '.join(_torch())}; {os.cpu_count()} CPUs"


def _torch() -> list[str]:
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=False, timeout=ASK_S_MAX)
    return done.stdout.split(maxsplit=3) or [done.stderr.strip()[-200:]]
