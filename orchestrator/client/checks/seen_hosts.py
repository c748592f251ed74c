"""Hosts that jobs and checks of a job home have used, with their last failures, for `orch nodes`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.errors import OrchError
from orchestrator.core.host import host_health
from orchestrator.core.host.host_health import HostHealth
from orchestrator.core.jobdir import home, status_file
from orchestrator.core.jobdir.layout import JobDir

JOBS_MAX = 50
"""How many jobs are read, the latest first."""


@dataclass(frozen=True, slots=True)
class SeenHost:
    """A host as a job or a check has last seen it; `failure`: the last one that still counts."""

    name: str
    seen_at: float
    state: str
    job: str
    failure: HostHealth | None

    def as_json(self) -> codec.Json:
        """Return the host as `orch nodes --json` prints it."""
        failure = self.failure
        return {
            "host": self.name,
            "state": self.state,
            "seen_at": status_file.iso(self.seen_at),
            "job": self.job or None,
            "failed_at": status_file.iso(failure.at) if failure else None,
            "failed_job": (failure.job or None) if failure else None,
            "why": failure.fault if failure else None,
        }


def list_hosts(folder: Path, wall_s: float) -> list[SeenHost]:
    """Return the hosts of a job home, by name. Raises ClusterError when it cannot be read."""
    failures = host_health.recent_failures(folder, wall_s)
    seen = [(note.host, note.at, _state(note), note.job) for note in host_health.read_all(folder).values()]
    for job in home.list_jobs(folder)[-JOBS_MAX:]:
        with contextlib.suppress(OSError, ValueError, OrchError):
            seen += _hosts_of_job(job, wall_s)
    latest = {name: (at, state, job) for name, at, state, job in sorted(seen, key=lambda one: one[1])}
    return [SeenHost(name, *details, failures.get(name)) for name, details in sorted(latest.items())]


def _state(note: HostHealth) -> str:
    if note.job:
        return "was lost"
    return "failed its check" if note.fault else "passed its check"


def _hosts_of_job(job: JobDir, wall_s: float) -> Iterator[tuple[str, float, str, str]]:
    """Yield the hosts of a job's last status, with time and state. Raises OSError, ValueError, OrchError."""
    if not home.is_own_job(job):
        return
    status = status_file.read(job, wall_s)
    if status.backend == "local":
        return
    at = status_file.parse_iso(status.written_at)
    for node in status.nodes:
        yield node.host or node.name, at, node.state, job.id
