"""Metrics of the ranks of a node, measured beside the heartbeats: resource use, and the progress that scripts report.

Rules: they are sent once in `REPORT_S` and not with each heartbeat, so that heartbeats stay cheap. Nothing here
waits: nvidia-smi and the trainers' reports have threads of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.numbers.gpu_use import GpuPoller
from orchestrator.agent.numbers.printed_metrics import PrintedMetrics
from orchestrator.agent.numbers.trainer_reports import TrainerReports
from orchestrator.core.host import procfs
from orchestrator.core.status_types import Training, Usage

REPORT_S = 5.0


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


def find_device(env: Mapping[str, str], local_rank: int) -> str:
    """Return the GPU of a rank as its environment names it; empty where it does not."""
    devices = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return devices[local_rank] if local_rank < len(devices) else ""
