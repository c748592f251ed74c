"""Overview of a job home: its jobs, who holds which hosts and GPUs, and what waits for what."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.client.job import Job
from orchestrator.core.errors import OrchError
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.status_file import ENDED, Status
from orchestrator.core.text import named, ranks_text

JOBS_MAX = 200
"""How many jobs are shown, the newest first; of those that have not ended, all."""

KEPT_S = 2.0
"""How long a look counts as new: however many look, files are read once in that time."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a job holds of a host: GPUs, or ranks on processors."""

    host: str
    job_id: str
    what: str
    state: str
    note: str


@dataclass(frozen=True, slots=True)
class Overview:
    """All jobs, the newest first, and what those that have not ended hold. `faults`: why a folder cannot be read."""

    jobs: tuple[Status, ...]
    holdings: tuple[Holding, ...]
    faults: tuple[str, ...]


class Overlook:
    """Reader of a job home for many looks: what has ended is read once."""

    def __init__(self, place: Path) -> None:
        """`place`: the job home."""
        self._place = place
        self._ended: dict[str, Status] = {}
        self._plans: dict[str, Plan] = {}
        self._last: Overview | None = None
        self._last_s = 0.0

    def now(self) -> Overview:
        """Return how all jobs are. Raises ClusterError when the home cannot be read."""
        if self._last is None or time.monotonic() > self._last_s + KEPT_S:
            self._last, self._last_s = self._read(), time.monotonic()
        return self._last

    def _read(self) -> Overview:
        folders = home.jobs(self._place)[::-1]
        going = {folder.id for folder in home.unended(self._place)}
        statuses, holdings, faults = [], [], []
        for number, folder in enumerate(folders):
            if number >= JOBS_MAX and folder.id not in going:
                continue
            try:
                status = self._status(folder)
                statuses.append(status)
                if status.state not in ENDED:
                    holdings += self._holdings(folder, status)
            except OrchError as err:
                faults.append(str(err))
        return Overview(tuple(statuses), tuple(sorted(holdings, key=_place)), tuple(faults))

    def _status(self, folder: JobDir) -> Status:
        if not folder.ended.exists():  # a resume has taken it away
            self._ended.pop(folder.id, None)
            return Job(folder).source.status()
        if folder.id not in self._ended:
            self._ended[folder.id] = Job(folder).source.status()
        return self._ended[folder.id]

    def _holdings(self, folder: JobDir, status: Status) -> list[Holding]:
        if folder.id not in self._plans:
            self._plans[folder.id] = Job(folder).plan()
        gpus = {node.name: node.gpus for node in self._plans[folder.id].nodes}
        held = []
        for node in status.nodes:
            if node.ranks or node.role == "spare":
                on = f", GPUs {ranks_text(gpus[node.name])}" if gpus.get(node.name) else ""
                what = f"{named(node.ranks)}{on}" if node.ranks else "spare"
                held.append(Holding(node.host, folder.id, what, node.state, node.note))
        return held


def _place(one: Holding) -> tuple[str, str, str]:
    return one.host, one.job_id, one.what
