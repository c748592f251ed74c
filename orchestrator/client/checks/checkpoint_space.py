"""Size of the last checkpoint of an earlier job of the same name."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.core.checkpoints import ledger
from orchestrator.core.host_facts import UNKNOWN
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.plan import Plan

JOBS_READ_MAX = 5
"""How many earlier jobs of the same name are searched for a checkpoint."""


def last_bytes(plan: Plan, environ: Mapping[str, str]) -> int:
    """Return the size of the newest checkpoint that an earlier job of this name has saved, UNKNOWN without one."""
    named = [job for job in home.list_jobs(home.job_home(environ)) if home.name_of(job.id) == plan.name]
    for job in reversed(named[-JOBS_READ_MAX:]):
        try:
            checkpoints, _ = ledger.read(job.root, job.ledger)
        except OSError:
            continue
        sized = [checkpoint for checkpoint in checkpoints.values() if checkpoint.size_bytes]
        if sized:
            return max(sized, key=lambda checkpoint: checkpoint.number).size_bytes
    return UNKNOWN
