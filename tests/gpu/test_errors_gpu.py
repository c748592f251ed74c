"""Are errors of CUDA and NCCL told in words that say what to do? On CPUs the same messages are raised by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.gpu.machine import BEGIN, DEVICE, ONE_RANK, TWO_RANKS
from tests.support import fake_nvidia_smi
from tests.support.local import Desk, Sight, wait_until

pytestmark = pytest.mark.gpu

BY_LOCAL_RANK = "set the device by LOCAL_RANK"
NO_RESTART = {"max": 0}
HOLDER_BYTES = 1 << 30
ASKED_S = 10.0
"""How long the rank that runs out of memory waits before: nvidia-smi is asked when ranks begin, and takes seconds."""

DUPLICATE = f"""{BEGIN}
if device.type == "cpu":
    raise RuntimeError("NCCL error in: NCCLUtils.cpp:94, invalid usage\\nncclInvalidUsage: This usually reflects invalid usage.\\n"
                       "Last error:\\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 60")
torch.cuda.set_device(0)
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(4, device="cuda"))
torch.cuda.synchronize()
"""

ORDINAL = f"""{BEGIN}
if device.type == "cpu":
    raise RuntimeError("CUDA error: invalid device ordinal")
torch.cuda.set_device(97)
"""

FULL = f"""{BEGIN}
if device.type == "cuda":
    torch.ones(4, device=device)
time.sleep({ASKED_S})
if device.type == "cpu":
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 TiB. GPU 0 has a total capacity of 79.1 GiB")
torch.empty(1 << 46, dtype=torch.uint8, device=device)
"""

HOLDER = f"""
import sys, time, torch
if "{DEVICE}" == "cuda":
    held = torch.ones({HOLDER_BYTES}, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
open(sys.argv[1], "w").close()
time.sleep(3600)
"""


def told(job: Sight) -> str:
    """Return all that is said of the first attempt's end."""
    assert job.wait()["state"] == "FAILED"
    verdict = job.verdict()
    return "\n".join([verdict["kind"], verdict["summary"], *verdict["evidence"], job.seen()["reason"] or ""])


def test_two_ranks_of_nccl_on_one_gpu(desk: Desk, say: Callable[[str], None]) -> None:
    """The reason cites NCCL's last error, and how to set the device."""
    job = desk.submit({"train.py": DUPLICATE}, entrypoint="train.py", restart=NO_RESTART, **TWO_RANKS)
    text = told(job)
    say(f"two ranks of NCCL on one GPU: {job.verdict()['summary']}")
    assert text.startswith("crash") and BY_LOCAL_RANK in text
    assert "Duplicate GPU detected" in job.verdict()["summary"]


def test_gpu_that_a_rank_does_not_have(desk: Desk, say: Callable[[str], None]) -> None:
    job = desk.submit({"train.py": ORDINAL}, entrypoint="train.py", restart=NO_RESTART, **ONE_RANK)
    text = told(job)
    say(f"no such GPU: {job.verdict()['summary']}")
    assert "invalid device ordinal" in text and BY_LOCAL_RANK in text and "LOCAL_RANK=0" in text
    if DEVICE == "cuda":
        assert "GPU 97 was asked for, this rank sees 1 GPUs" in text


@contextmanager
def holder(folder: Path) -> Iterator[int]:
    """Run a process that holds memory of the GPU, and give its pid."""
    held = folder / "held"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(held)]) as process:
        try:
            wait_until(held.exists, "memory that is held")
            yield process.pid
        finally:
            process.kill()


def test_full_gpu_names_who_else_is_on_it(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None]
) -> None:
    with holder(tmp_path) as pid:
        spec = dict(ONE_RANK)
        if DEVICE == "cpu":
            host = fake_nvidia_smi.Host(users=((pid, 0, HOLDER_BYTES >> 20),))
            fake_nvidia_smi.install(tmp_path / "tools", host)
            monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
            desk.environ["PATH"] = os.environ["PATH"]
            spec["env"] = {"CUDA_VISIBLE_DEVICES": "0"}
        job = desk.submit({"train.py": FULL}, entrypoint="train.py", restart=NO_RESTART, **spec)
        text = told(job)
    assert text.startswith("oom"), text
    lines = [line for line in job.verdict()["evidence"] if "was used by" in line]
    own = Path("/proc/self/ns/pid").readlink()
    if not lines and str(own) != "pid:[4026531836]":
        say("full GPU: others on it cannot be named here: nvidia-smi's process ids are not those of this container")
        return
    say(f"full GPU: {'; '.join(lines)}")
    assert any(f"was used by pid {pid} " in line for line in lines), text
