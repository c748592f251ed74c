"""Locks of a job: of its one supervisor, and of the one command that resumes it."""

from __future__ import annotations

from contextlib import AbstractContextManager

from orchestrator.wire import locks
from orchestrator.wire.paths import JobDir

LOCK_S_MAX = 1.0
"""How long to wait for the lock: a process that only looks at it holds it for an instant."""

RESUME_S_MAX = 60.0
"""How long to wait for another command that resumes the job: sbatch may be slow to answer it."""


def locked(job: JobDir) -> AbstractContextManager[bool]:
    """Hold the job's lock, or learn within `LOCK_S_MAX` that another supervisor does."""
    return locks.held(job.lock, LOCK_S_MAX)


def resuming(job: JobDir, limit_s: float = RESUME_S_MAX) -> AbstractContextManager[bool]:
    """Hold the right to resume the job, or learn within `limit_s` that another command has it."""
    return locks.held(job.resume_lock, limit_s)
