"""End of a job that only Slurm knows to have ended: a request states it, and a supervisor without nodes ends the job.

Rules: one command at a time does it, and the others wait. Only the supervisor, started on this machine, writes to the
job beyond the request.
"""

from __future__ import annotations

import time

from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import home, locks, requests
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.status_types import AllocationEndCause
from orchestrator.submission import supervisor_process

CLOSE_S_MAX = 30.0
"""Limit on closing an ended job."""

POLL_S = 0.02


def close_job(job: JobDir, allocation: str, cause: AllocationEndCause, why: str) -> None:
    """Let a supervisor end a job that Slurm has ended.

    Raises ClusterError when it has not ended it in time, or the disk refuses, and UserError for a job that is not this
    user's alone.
    """
    home.require_own_job(job)
    try:
        with locks.hold(job.queue.with_suffix(".lock"), CLOSE_S_MAX) as is_mine:
            if is_mine and not _has_ended(job):
                last = requests.read_latest(job.requests)
                if last is None or (last.action, last.allocation) != ("allocation_ended", allocation):
                    requests.send(job.requests, "allocation_ended", allocation=allocation, cause=cause.value, why=why)
                supervisor_process.start_supervisor(job)
                deadline_s = time.monotonic() + CLOSE_S_MAX
                while not _has_ended(job) and time.monotonic() < deadline_s:
                    time.sleep(POLL_S)
    except OSError as err:
        raise requests.make_write_error(err, job.root) from err
    if not _has_ended(job):
        what = f"{why}, and the job could not be closed within {CLOSE_S_MAX:g} s"
        raise ClusterError(what, job.id, f"see {job.supervisor_log}")


def _has_ended(job: JobDir) -> bool:
    """Tell whether the job has ended, from the folder's list: NFS caches for a minute that a file is missing."""
    try:
        return any(path.name == job.ended.name for path in job.root.iterdir())
    except OSError:
        return False
