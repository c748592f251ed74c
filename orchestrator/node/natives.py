"""What do tools of the host say that /proc does not? Native frames by py-spy, the use of GPUs by nvidia-smi.

Both are asked where they are there, for a bounded time, in threads that nobody waits for long.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PY_SPY_S_MAX = 2.0
NVIDIA_SMI_S_MAX = 5.0
TEXT_CHARS_MAX = 1 << 20

_QUERY = "index,uuid,name,utilization.gpu,utilization.memory,memory.used,power.draw,pstate"


def native_frames(pid: int) -> str:
    """Return the stacks of a process with their native frames, or why there are none; it is halted for some 30 ms."""
    program = _py_spy(pid)
    if program is None:
        return "py-spy is not installed, so there are no native frames"
    return _said([program, "dump", "--native", "--pid", str(pid)], PY_SPY_S_MAX)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What nvidia-smi says: `page` in its own words, and `shares`, by process, how busy its GPU was, 0.0 to 1.0: the
    share of the last moments, up to a second, in which a kernel ran there."""

    page: str
    shares: Mapping[int, float]

    def share(self, pid: int) -> tuple[float | None, str]:
        """Return how busy the GPU of a process was; without that, why it is not known."""
        if not self.page:
            return None, "nvidia-smi is not there, so the use of GPUs is not known"
        if pid not in self.shares:
            return None, "nvidia-smi does not say which GPU the process uses"
        return self.shares[pid], ""


def gpu_use() -> GpuUse:
    """Return what every GPU of the host does and who uses it; an empty page where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return GpuUse("", {})
    use = _said([program, f"--query-gpu={_QUERY}", "--format=csv"], NVIDIA_SMI_S_MAX)
    users = _said(
        [program, "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv"], NVIDIA_SMI_S_MAX
    )
    return GpuUse(f"{use.rstrip()}\n\n{users.rstrip()}\n", gpu_shares(use, users))


def gpu_shares(use: str, users: str) -> dict[int, float]:
    """Return how busy the GPU of each process is, the busiest of several, from nvidia-smi's two tables (`--format=csv`)."""
    busy = {words[1]: words[3].removesuffix("%").strip() for words in _rows(use) if len(words) > 3}
    shares: dict[int, float] = {}
    for words in _rows(users):
        percent = busy.get(words[1], "") if len(words) > 1 else ""  # of a part of a GPU (MIG) it is not told
        if words[0].isdigit() and percent.isdigit():
            shares[int(words[0])] = max(int(percent) / 100, shares.get(int(words[0]), 0.0))
    return shares


def _rows(text: str) -> list[list[str]]:
    return [[word.strip() for word in line.split(",")] for line in text.splitlines()]


def _py_spy(pid: int) -> str | None:
    """Return py-spy as this host has it, or as it lies beside the Python that runs `pid`."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        argv = [b""]
    beside = os.path.dirname(os.fsdecode(argv[0]))  # noqa: PTH120 -- may be no path at all
    return shutil.which("py-spy") or (shutil.which("py-spy", path=beside) if beside else None)


def _said(argv: list[str], limit_s: float) -> str:
    """Run a program and return what it said, or how it failed.

    Its exit code is not asked for: the agent may have reaped it before this thread does.
    """
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False, close_fds=True
        )
    except subprocess.TimeoutExpired:
        return f"{argv[0]} took longer than {limit_s:g} s"
    except OSError as err:
        return f"{argv[0]}: {err.strerror}"
    return (done.stdout + done.stderr).decode(errors="replace")[:TEXT_CHARS_MAX]
