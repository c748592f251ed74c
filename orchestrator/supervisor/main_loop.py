"""Main function of the supervisor process: supervises one job from a start or a resume to its end, and after each resume again."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from orchestrator.backends.api import Backend
from orchestrator.core import codec
from orchestrator.core.errors import OwnershipLostError
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.journal import journal_integrity
from orchestrator.supervisor import allocation_claim, translation
from orchestrator.supervisor.request_inbox import RequestInbox
from orchestrator.supervisor.supervisor import Supervisor


def supervise(root: Path, backend_of: Callable[[JobDir, Plan], Backend], allocation: str = "") -> int:
    """Supervise the job at `root`; return the exit code (0 also when another supervisor is running).

    In the named allocation the code is for the batch script, see `allocation_claim`. Raises JournalError.
    """
    job = JobDir(root)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that submitted the job may close
    with locks.hold(job.lock) as is_held:
        if not is_held:
            print(f"another supervisor is running{locks.holder_text(job.lock)}", file=sys.stderr)
            return allocation_claim.announce_allocation(job, allocation)
        while True:  # each round takes at least one request
            plan = codec.loads(Plan, job.plan.read_bytes())
            try:
                backend = backend_of(job, plan)
                allocation_claim.claim(job, backend.allocation.id if backend.allocation is not None else "")
            except OwnershipLostError as err:
                print(err, file=sys.stderr)
                return allocation_claim.OVER
            journal_integrity.require_journal(job)
            plan_placed = allocation_claim.plan_in_allocation(plan, backend.allocation)
            supervisor = Supervisor(job, plan_placed, translation.read_secrets(job), backend)
            try:
                last_request = asyncio.run(supervisor.run())
            except OwnershipLostError as err:
                print(f"{err}: this supervisor exits", file=sys.stderr)
                return allocation_claim.OVER if allocation else 0
            if plan.slurm is not None:
                return allocation_claim.leave_allocation(
                    backend.allocation, supervisor.allocation_session.requeue, supervisor.end
                )
            # `ended` exists by now, so a resume that comes after this check starts a supervisor itself.
            if not RequestInbox(job.requests).read_after(last_request, 0.0):
                return 0
