"""Overview of a job home: its jobs, and which job uses which hosts and GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from orchestrator.client.job import Job
from orchestrator.core.errors import OrchError
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.status_file import ENDED, Status
from orchestrator.core.text import format_count, ranks_label, ranks_text

JOBS_MAX = 200
"""How many jobs are shown, the newest first; of those that have not ended, all."""

CACHE_S = 2.0
"""How long an overview is cached: files are read once in that time, for any number of readers."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a job uses of a host: GPUs, or ranks on CPUs."""

    host: str
    job_id: str
    gpus: int
    what: str
    state: str
    note: str


class JobReader:
    """Cached reader of jobs: the status of an ended job is read once, and so is a plan."""

    def __init__(self, read: Callable[[JobDir], Status]) -> None:
        """`read` returns a job's status, and raises OrchError or OSError."""
        self._read = read
        self._ended: dict[str, Status] = {}
        self._plans: dict[str, Plan] = {}

    def status(self, folder: JobDir) -> Status:
        """Return the status of a job. Raises OrchError and OSError."""
        if not folder.ended.exists():  # a resume has removed it
            self._ended.pop(folder.id, None)
            return self._read(folder)
        self._plans.pop(folder.id, None)
        if folder.id not in self._ended:
            self._ended[folder.id] = self._read(folder)
        return self._ended[folder.id]

    def keep_only(self, shown: Container[str]) -> None:
        """Drop the ended jobs that are not among these ids from the cache."""
        self._ended = {job_id: status for job_id, status in self._ended.items() if job_id in shown}

    def holdings(self, folder: JobDir, status: Status) -> list[Holding]:
        """Return what a job uses of its hosts; nothing once it has ended. Raises OrchError."""
        if status.state in ENDED:
            return []
        if folder.id not in self._plans:
            self._plans[folder.id] = Job(folder).plan()
        plan = self._plans[folder.id]
        gpus_by_node = {node.name: node.gpus for node in plan.nodes}
        holdings = []
        for node in status.nodes:
            if not node.ranks and node.role != "spare":
                continue
            gpus, on = gpus_by_node.get(node.name, ()), ""
            count = len(gpus) if plan.pool is None else plan.pool.gpus_each
            if count:
                on = f", GPUs {ranks_text(gpus)}" if gpus else f", {format_count(count, 'GPU')}"
            what = f"{ranks_label(node.ranks)}{on}" if node.ranks else f"spare{on}"
            holdings.append(Holding(node.host or node.name, folder.id, count, what, node.state, node.note))
        return holdings


@dataclass(frozen=True, slots=True)
class Overview:
    """All jobs, the newest first, and the hosts in use. `faults`: why a folder cannot be read."""

    jobs: tuple[Status, ...]
    holdings: tuple[Holding, ...]
    faults: tuple[str, ...]


class OverviewReader:
    """Cached reader of a job home: requests within `CACHE_S` share one read."""

    def __init__(self, place: Path) -> None:
        """`place`: the job home."""
        self._place = place
        self._reader = JobReader(lambda folder: Job(folder).source.status())
        self._last: Overview | None = None
        self._last_s = 0.0

    def current(self) -> Overview:
        """Return the overview. Raises ClusterError when the home cannot be read."""
        if self._last is None or time.monotonic() > self._last_s + CACHE_S:
            self._last, self._last_s = self._read(), time.monotonic()
        return self._last

    def _read(self) -> Overview:
        folders = home.list_jobs(self._place)[::-1]
        going = {folder.id for folder in home.unfinished_jobs(self._place)}
        statuses, holdings, faults = [], [], []
        for number, folder in enumerate(folders):
            if number >= JOBS_MAX and folder.id not in going:
                continue
            try:
                status = self._reader.status(folder)
                statuses.append(status)
                holdings += self._reader.holdings(folder, status)
            except (OrchError, OSError) as err:
                faults.append(str(err))
        return Overview(
            tuple(statuses), tuple(sorted(holdings, key=attrgetter("host", "job_id", "what"))), tuple(faults)
        )
