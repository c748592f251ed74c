"""Use of the host's GPUs as nvidia-smi tells it: asked where it is there, for a bounded time."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

NVIDIA_SMI_S_MAX = 5.0
TEXT_CHARS_MAX = 1 << 20

_QUERY = "index,uuid,name,utilization.gpu,utilization.memory,memory.used,power.draw,pstate"


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
