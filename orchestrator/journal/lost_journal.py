"""Refusal to go on without a journal: a supervisor never begins from nothing where something was done before, since it
would append to old logs and save beside old checkpoints."""

from __future__ import annotations

import contextlib
import os

from orchestrator.core.jobdir import locks, ownership
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.journal import facts_file
from orchestrator.journal.job_record import Record
from orchestrator.journal.journal_file import JournalError


def lack(job: JobDir) -> str:
    """Return what the journal of a job lacks; empty if it is whole, or if nothing was done yet. A torn last line, which a
    crash leaves, is not a lack."""
    recorded_bytes = facts_file.place(job)  # read first, since a journal that is written grows
    try:
        with os.fdopen(ownership.open_regular(job.journal), "rb") as file:
            how = "" if file.readline().endswith(b"\n") else "the journal is empty"
            size_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        how, size_bytes = "the journal is gone", 0
    if size_bytes < recorded_bytes:
        return (
            how
            or f"the journal was cut: it has {size_bytes} bytes, and {job.facts.name} knows of {recorded_bytes}"
        )
    is_fresh = not (facts_file.attempt_shown(job) or job.ended.exists() or job.ledger.exists())
    return "" if is_fresh else how


def require_journal(job: JobDir) -> None:
    """Raise JournalError where `lack` finds anything."""
    if how := lack(job):
        what = f"{how}; to begin from nothing would write over what the folder holds"
        raise JournalError(job.journal, what, first=_end_of_agents(job))


def record(job: JobDir) -> Record:
    """Return all that a job's journal comes to. Raises JournalError when it is lost or damaged."""
    require_journal(job)
    return facts_file.read(job)


def _end_of_agents(job: JobDir) -> str:
    """Return how the agents of this job on this machine are ended, and their ranks with them; empty without any."""
    with contextlib.suppress(OSError):
        held = filter(locks.is_held, sorted(job.root.glob("nodes/*/agent.lock")))
        agents = [f"kill {who.pid} on {who.host}" for who in map(locks.holder, held) if who]
        return f"end what still runs by {', '.join(agents)}; then " if agents else ""
    return ""
