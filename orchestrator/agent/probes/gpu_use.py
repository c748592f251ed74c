"""Use of the host's GPUs, from nvidia-smi where it is installed, within a bounded time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.host import gpus

NVIDIA_SMI_S_MAX = 5.0
TEXT_CHARS_MAX = 1 << 20

_QUERY = "index,uuid,name,utilization.gpu,utilization.memory,memory.used,power.draw,pstate"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The output of nvidia-smi, and what it says of each process."""

    text: str
    # By process, how busy its GPU was, 0.0 to 1.0: the share of the last second at most in which a kernel ran there.
    shares: Mapping[int, float]

    def share(self, pid: int) -> tuple[float | None, str]:
        """Return how busy the GPU of a process was, or None and the reason why that is not known."""
        if not self.text:
            return None, "nvidia-smi is not there, so the use of GPUs is not known"
        if pid not in self.shares:
            return None, "nvidia-smi does not say which GPU the process uses"
        return self.shares[pid], ""


def gpu_use() -> GpuUse:
    """Return the use of every GPU of the host and its processes; an empty text where nvidia-smi is missing."""
    tool = gpus.program()
    if tool is None:
        return GpuUse("", {})
    use = _output(tool, f"--query-gpu={_QUERY}")
    users = _output(tool, "--query-compute-apps=pid,gpu_uuid,used_memory")
    return GpuUse(f"{use.rstrip()}\n\n{users.rstrip()}\n", gpu_shares(use, users))


def gpu_shares(use: str, users: str) -> dict[int, float]:
    """Return how busy each process's GPU is, the busiest of several, from nvidia-smi's two tables (`--format=csv`)."""
    busy = {words[1]: words[3].removesuffix("%").strip() for words in gpus.rows(use) if len(words) > 3}
    shares: dict[int, float] = {}
    for words in gpus.rows(users):
        percent = busy.get(words[1], "") if len(words) > 1 else ""  # not known for a part of a GPU (MIG)
        if words[0].isdigit() and percent.isdigit():
            shares[int(words[0])] = max(int(percent) / 100, shares.get(int(words[0]), 0.0))
    return shares


def _output(tool: str, *options: str) -> str:
    """Run nvidia-smi and return its output, or how it failed.

    The exit code is not checked: the agent may have reaped the program before this thread does.
    """
    try:
        done = gpus.run(tool, *options, "--format=csv", limit_s=NVIDIA_SMI_S_MAX)
    except gpus.GpuError as err:
        return str(err)
    return (done.stdout + done.stderr)[:TEXT_CHARS_MAX]
