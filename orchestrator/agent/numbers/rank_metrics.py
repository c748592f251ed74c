"""Metrics of the ranks of a node, measured beside the heartbeats: resource use, and the progress that scripts report.

Rules: they are sent once in `REPORT_S` and not with each heartbeat, so that heartbeats stay cheap. Nothing here
waits: nvidia-smi and the trainers' reports have threads of their own.
"""

from __future__ import annotations

import contextlib
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.numbers.gpu_use import GpuPoller
from orchestrator.agent.numbers.printed_metrics import PrintedMetrics
from orchestrator.agent.numbers.trainer_reports import TrainerReports
from orchestrator.core.host import process_tags, procfs
from orchestrator.core.status_types import Training, Usage

REPORT_S = 5.0

_FULL_GPU = re.compile(r"CUDA out of memory\..*?\bGPU (\d{1,4}) has a total", re.DOTALL)
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""As Linux names it everywhere. In any other one nvidia-smi's process ids are not those of /proc."""


@dataclass(slots=True)
class NodeMetrics:
    """What the ranks of a node share."""

    gpus: GpuPoller = field(default_factory=GpuPoller)
    reports: TrainerReports = field(default_factory=TrainerReports)


class RankMetrics:
    """The numbers of one rank; `device`: its GPU as CUDA_VISIBLE_DEVICES names it, empty where that is not known."""

    def __init__(self, node: NodeMetrics, rank: int, log: Path, device: str) -> None:
        self.printed = PrintedMetrics(log)
        self._node = node
        self._rank = rank
        self._device = device
        node.gpus.states.devices.update({device} - {""})
        self._due_s = 0.0
        # Processor seconds of each process, when they were read
        self._cpu_s: dict[int, float] = {}
        self._read_s = 0.0

    def measure_if_due(self, pids: list[int], now_s: float) -> tuple[Usage | None, Training | None]:
        """Return the use of a rank's processes `pids`, and its training progress; None while they are not due."""
        if now_s < self._due_s:
            return None, None
        self._due_s = now_s + REPORT_S
        return self._measure_usage(pids, now_s), self.training()

    def training(self) -> Training | None:
        """Return the training progress: what the script reports, else what it prints; None for nothing."""
        reported = self._node.reports.latest(self._rank).fill_from(self.printed.training())
        return reported if reported != Training() else None

    def nonfinite_losses(self) -> int:
        """Return how many losses in a row, up to the last, are not finite: of those that it reports, else of those that it
        prints."""
        reports = self._node.reports
        is_reported = reports.latest(self._rank).loss is not None
        return reports.nonfinite_losses(self._rank) if is_reported else self.printed.nonfinite_losses

    def describe_gpu_users(self, message: str, local_rank: int, pids: list[int], now_s: float) -> tuple[str, ...]:
        """Return who else held memory of the GPU that a rank's error calls full, when nvidia-smi was last asked, and is still
        there; nothing where that GPU is not certainly the one that the rank was given. `pids`: the rank's own."""
        full = _FULL_GPU.search(message)
        if full is None or int(full[1]) != local_rank or not _is_in_first_pid_namespace():
            return ()
        use = self._node.gpus.latest(now_s)
        users = use.users.get(self._device, [])
        if any(pid in use.processes for pid in pids) and not any(pid in pids for pid, _ in users):
            return ()  # the script has chosen another one
        lines = (_describe_gpu_user(*user) for user in users if user[0] not in pids)
        return tuple(f"GPU {self._device} was used by {line}" for line in lines if line)

    def _measure_usage(self, pids: list[int], now_s: float) -> Usage:
        stats = {pid: stat for pid in pids if (stat := procfs.stat(pid)) is not None}
        grown_s = sum(max(0.0, stat.cpu_s - self._cpu_s[pid]) for pid, stat in stats.items() if pid in self._cpu_s)
        is_first, passed_s = not self._cpu_s, now_s - self._read_s
        self._cpu_s, self._read_s = {pid: stat.cpu_s for pid, stat in stats.items()}, now_s
        share, gpu_bytes = self._node.gpus.latest(now_s).rank_use(pids, self._device)
        return Usage(
            cpu_share=None if is_first or passed_s <= 0 else round(grown_s / passed_s, 2),
            memory_bytes=sum(stat.rss_bytes for stat in stats.values()) or None,
            gpu_share=share,
            gpu_memory_bytes=gpu_bytes,
        )


def _is_in_first_pid_namespace() -> bool:
    with contextlib.suppress(OSError):  # not known
        return str(Path("/proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    return False


def _describe_gpu_user(pid: int, size_bytes: int | None) -> str:
    """Return a process, its user and its job, if it is one of orch's that may be read; empty where it has ended."""
    folder = Path("/proc", str(pid))
    try:
        uid, name = folder.stat().st_uid, (folder / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""
    user = f"uid {uid}"
    with contextlib.suppress(KeyError):
        user = f"user {pwd.getpwuid(uid).pw_name}"
    job = procfs.environment(pid, process_tags.NAME).partition("/")[0]  # empty where it cannot be read
    parts = [name, user, job and f"job {job}", "" if size_bytes is None else f"{size_bytes >> 20:,} MiB"]
    return f"pid {pid} ({', '.join(part for part in parts if part)})"


def find_device(env: Mapping[str, str], local_rank: int) -> str:
    """Return the GPU of a rank as its environment names it; empty where it does not."""
    devices = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return devices[local_rank] if local_rank < len(devices) else ""
