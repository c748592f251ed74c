"""Integrity of a job's journal, checked without reading it: whether it is missing, empty, or cut.

Rules: a supervisor never starts from scratch in a folder with earlier work, since it would append to old logs and write
beside old checkpoints. The facts file, which outlives the journal, has the journal's length.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import home, locks, ownership
from orchestrator.core.jobdir.layout import JobDir, attempt_of

HEAD_BYTES_MAX = 1000


class JournalError(ClusterError):
    """The journal is damaged in a way that a crash cannot explain."""

    def __init__(self, path: Path, what: str, line: int | None = None, first_step: str = "", fix: str = "") -> None:
        """`first_step`: a step before the usual fix. `fix`: replaces the usual fix."""
        where = f"{path}:{line}" if line is not None else str(path)
        fix = fix or f"restore the file from a backup; or {first_step}{home.resubmit_hint(path.parent)}"
        super().__init__(what, where, fix)


@dataclass(frozen=True, slots=True)
class FactsHead:
    """The first line of the facts file; sums are CRC-32."""

    version: str
    offset: int  # the place in the journal, in bytes
    journal_sum: int  # of the journal's bytes before `offset`
    body_sum: int  # of the second line


def last_attempt_on_disk(job: JobDir) -> int:
    """Return the last attempt that has left a folder; 0 without one."""
    folders = (path for pattern in ("logs/attempt-*", "evidence/attempt-*") for path in job.root.glob(pattern))
    return max((number for path in folders if (number := attempt_of(path)) is not None), default=0)


def read_recorded_bytes(job: JobDir) -> int:
    """Return how long the journal was, in bytes, when the facts were written; 0 if unknown."""
    try:
        with os.fdopen(ownership.open_regular(job.facts), "rb") as file:
            return codec.loads(FactsHead, file.readline(HEAD_BYTES_MAX)).offset
    except (OSError, codec.CodecError):
        return 0


def find_loss(job: JobDir) -> str:
    """Return why a job's journal is incomplete; empty if it is complete, or if nothing was done yet. A torn last line, which
    a crash leaves, is not a fault."""
    recorded_bytes = read_recorded_bytes(job)  # read first, since a journal that is written grows
    try:
        with os.fdopen(ownership.open_regular(job.journal), "rb") as file:
            how = "" if file.readline().endswith(b"\n") else "the journal is empty"
            size_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        how, size_bytes = "the journal is gone", 0
    if size_bytes < recorded_bytes:
        return (
            how or f"the journal was cut: it has {size_bytes} bytes, and {job.facts.name} has recorded {recorded_bytes}"
        )
    is_fresh = not (last_attempt_on_disk(job) or job.ended.exists() or job.ledger.exists())
    return "" if is_fresh else how


def require_journal(job: JobDir) -> None:
    """Raise JournalError if the journal is incomplete, see `find_loss`."""
    if how := find_loss(job):
        what = f"{how}; starting from scratch would overwrite what the folder holds"
        raise JournalError(job.journal, what, first_step=_kill_agents_hint(job))


def _kill_agents_hint(job: JobDir) -> str:
    """Return how to stop the agents of this job on this machine, and their ranks with them; empty without any."""
    with contextlib.suppress(OSError):
        held = filter(locks.is_held, sorted(job.root.glob("nodes/*/agent.lock")))
        agents = [f"kill {who.pid} on {who.host}" for who in map(locks.read_holder, held) if who]
        return f"stop what still runs: {', '.join(agents)}; then " if agents else ""
    return ""
