"""Prometheus metrics of all jobs of a job home, read from their folders; no process is started and no host asked.

Rules: base units; a job is `job_id`, since `job` is Prometheus' own label; shown are running jobs and those that
ended within a day, and the ranks of no more than `RANKS_MAX`. What an ended job's journal comes to is kept between scrapes.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.client import job_checkpoints
from orchestrator.client.job import Job
from orchestrator.core.errors import OrchError
from orchestrator.core.host import file_age, host_health, procfs
from orchestrator.core.host.host_health import HostHealth
from orchestrator.core.jobdir import home, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.status_file import Status
from orchestrator.journal import facts_file, goodput, journal_integrity
from orchestrator.report.overview import Holding, JobReader
from orchestrator.views.cells import STYLES

ENDED_S_MAX = 86_400.0
"""A job that ended longer ago is left out."""

RANKS_MAX = 1_024
"""The ranks of larger jobs are left out: each would be a separate time series."""


@dataclass(frozen=True, slots=True)
class _History:
    """Figures of a job from its journal and ledger."""

    restarts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None
    checkpoint_bytes: int | None = None
    checkpoint_wall_s: float | None = None
    checkpoint_stall_s: float | None = None


class JobMetrics(Collector):
    """The metrics of all jobs of a job home, read again at each scrape. A folder that cannot be read is counted in
    `orch_unreadable_jobs`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = JobReader(self._status)
        self._boot = ""
        # By the journal's time and size
        self._kept: dict[str, tuple[tuple[int, int], _History]] = {}

    def describe(self) -> list[Metric]:
        """Return nothing, so that no job is read before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Raises ClusterError when the home cannot be read."""
        wall_s, unreadable, files_now_s = time.time(), 0, file_age.now_s(self._folder)
        self._boot = procfs.boot_id()
        families = _MetricFamilies()
        shown = set()
        for job in home.list_jobs(self._folder):
            try:
                if _is_old(job, files_now_s):
                    continue
                status = self._reader.status(job)
                shown.add(job.id)
                families.add(status, self._history(job, status), self._reader.holdings(job, status), wall_s)
            except FileNotFoundError:
                continue  # submitted a moment ago
            except (OrchError, OSError):
                unreadable += 1
        self._kept = {job_id: kept for job_id, kept in self._kept.items() if job_id in shown}
        self._reader.keep_only(shown)
        yield from families.all(host_health.read_all(self._folder).values())
        yield GaugeMetricFamily("orch_unreadable_jobs", "Jobs whose folder could not be read.", unreadable)

    def _status(self, job: JobDir) -> Status:
        try:
            return status_file.read(job, time.time(), self._boot)
        except FileNotFoundError:
            if not job.slurm.exists():
                raise
            return status_file.status_from_plan(Job(job).plan(), "QUEUED", "", time.time())

    def _history(self, job: JobDir, status: Status) -> _History:
        try:
            at = job.journal.stat()
        except FileNotFoundError:
            journal_integrity.require_journal(job)
            return _History()
        version = (at.st_mtime_ns, at.st_size)
        cached = self._kept.get(job.id)
        if cached is not None and cached[0] == version:
            return cached[1]
        history = _read_history(job, status_file.parse_iso(status.created_at))
        self._kept[job.id] = (version, history)
        return history


def _is_old(job: JobDir, now_s: float) -> bool:
    """Return whether a job ended long ago, at a stat or two."""
    with contextlib.suppress(OSError):
        return now_s - job.ended.stat().st_mtime > ENDED_S_MAX
    return False


def _read_history(job: JobDir, created_s: float) -> _History:
    record = facts_file.read(job)
    spent = goodput.from_record(record, created_s)
    causes = Counter(
        attempt.judged.verdict.kind.value if attempt.judged else "none" for attempt in record.attempts[:-1]
    )
    newest, size_bytes, written_s, stall_s = record.facts.checkpoint, None, None, None
    if newest is not None:
        with contextlib.suppress(OrchError):
            checkpoint = job_checkpoints.load_checkpoints(job).get(newest.save)
            if checkpoint is not None:
                size_bytes, written_s = checkpoint.size_bytes, checkpoint.written_ns / 1e9
                stall_s = checkpoint.stall_s
    seconds = {kind.value: rank_s for kind, rank_s in spent.rank_seconds().items()}
    return _History(dict(causes), seconds, spent.ratio, size_bytes, written_s, stall_s)


class _MetricFamilies:
    """The samples of all jobs, by metric."""

    def __init__(self) -> None:
        self._made: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        self._gpus: Counter[str] = Counter()

    def add(self, status: Status, history: _History, held: Iterable[Holding], wall_s: float) -> None:
        """Add the metrics of a job."""
        self._add_job(status)
        self._add_history(status.id, history)
        if status.checkpoint is not None:
            age_s = None if history.checkpoint_wall_s is None else max(0.0, wall_s - history.checkpoint_wall_s)
            gauges = (
                ("last_step", "Step of the checkpoint that a restart resumes from.", status.checkpoint.step),
                ("bytes", "Its size.", history.checkpoint_bytes),
                ("age_seconds", "Its age.", age_s),
                ("stall_seconds", "How long ranks made no steps because of it.", history.checkpoint_stall_s),
                ("safe", "1 if it outlives the loss of any one host.", float(status.checkpoint.safe)),
            )
            for name, what, value in gauges:
                self._gauge(f"orch_checkpoint_{name}", what, value, job_id=status.id)
        if status.state in status_file.ENDED:
            return
        what = "Time since the rank's last step."
        for rank in status.ranks if len(status.ranks) <= RANKS_MAX else ():
            labels = {"job_id": status.id, "rank": str(rank.rank)}
            self._gauge("orch_rank_last_step_age_seconds", what, rank.step_age_s, **labels)
        for one in held:
            self._gpus[one.host] += one.gpus

    def _add_job(self, status: Status) -> None:
        job = status.id
        info_labels = {"job_id": job, "name": status.name, "backend": status.backend}
        self._gauge("orch_job_info", "A job, with its name and backend.", 1, **info_labels)
        for state in STYLES:
            is_in = int(state == status.state)
            self._gauge("orch_job_state", "1 for the state that a job is in.", is_in, job_id=job, state=state)
        self._gauge("orch_job_step", "The job's step.", status.step, job_id=job)
        self._gauge("orch_job_steps_per_second", "Pace of the slowest rank.", status.steps_per_s, job_id=job)

    def _add_history(self, job: str, history: _History) -> None:
        what = "Share of all ranks' time that advanced the training."
        self._gauge("orch_job_goodput_ratio", what, history.ratio, job_id=job)
        for cause, times in history.restarts.items():
            self._counter("orch_job_restarts", "Restarts by the verdict before.", times, job_id=job, cause=cause)
        what = "Time of all ranks by kind; a restart moves some of it."
        for phase, rank_s in history.seconds.items():
            self._counter("orch_job_time_seconds", what, rank_s, job_id=job, phase=phase)

    def all(self, notes: Iterable[HostHealth]) -> Iterator[Metric]:
        """Yield the metrics, with the free GPUs of hosts that passed their last check."""
        what = "GPUs of a host that these jobs use, and that are free."
        good = [note for note in notes if note.gpus and not note.fault]
        free = {note.host: max(0, (note.gpus or 0) - self._gpus[note.host]) for note in good}
        for state, hosts in (("held", +self._gpus), ("free", free)):
            for host, gpus in hosts.items():
                self._gauge("orch_host_gpus", what, gpus, host=host, state=state)
        yield from self._made.values()

    def _gauge(self, name: str, what: str, value: float | None, /, **labels: str) -> None:
        if value is not None:
            family = self._made.setdefault(name, GaugeMetricFamily(name, what, labels=list(labels)))
            family.add_metric(list(labels.values()), float(value))

    def _counter(self, name: str, what: str, value: float, /, **labels: str) -> None:
        family = self._made.setdefault(name, CounterMetricFamily(name, what, labels=list(labels)))
        family.add_metric(list(labels.values()), value)


def make_registry(folder: Path) -> CollectorRegistry:
    """Return a registry with only the metrics of a job home."""
    made = CollectorRegistry()
    made.register(JobMetrics(folder))
    return made
