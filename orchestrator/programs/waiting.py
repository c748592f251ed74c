"""Wait of `orch wait`: until a job has ended or needs a person, and what the person is needed for."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass

from orchestrator.client.job import Job
from orchestrator.core.jobdir import home, status_file
from orchestrator.core.jobdir.status_file import Status
from orchestrator.core.status_types import NextAction
from orchestrator.views.status import outdated_text

POLL_S = 0.5

HANG_S = 30.0
"""A hang needs a person after this long without progress: shorter ones often end by themselves."""

SOON_S = 60.0
"""A hang that orch ends within this time needs no person."""

SUPERVISOR_SILENT_S = 300.0
"""A supervisor needs a person after this long without an update. A wait restarts one that died on this machine; one on
another machine is restarted by any verb there."""


class NeedKind(enum.Enum):
    """Why a job needs a person."""

    HANG = "hang"  # a hang that orch will not end soon, or a desync that is only reported
    QUEUE = "queue"  # Slurm cannot start it as it is
    DISK = "disk"  # the disk of its folder is full
    SUPERVISOR = "supervisor"  # it died on another machine, and can only be restarted there


@dataclass(frozen=True, slots=True)
class Need:
    """What a person is needed for, and the fix, where it is known."""

    kind: NeedKind
    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class WaitResult:
    """The status with which a wait ended: the job has ended, needs a person, or neither within the time limit."""

    status: Status
    need: Need | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self.status.state in status_file.ENDED


def wait(job: Job, timeout_s: float | None = None) -> WaitResult:
    """Wait until a job has ended or needs a person, at most `timeout_s`. Raises UserError for a copy of a job's folder,
    and ClusterError when the job's supervisor cannot be started."""
    home.require_original(job.folder)
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        current = job.source.settled_status()
        result = WaitResult(current, find_need(current))
        if result.has_ended or result.need is not None:
            return result
        left_s = POLL_S if deadline_s is None else deadline_s - time.monotonic()
        if left_s <= 0:
            return result
        time.sleep(min(POLL_S, left_s))


def find_need(status: Status) -> Need | None:
    """Return what a running job needs a person for; None if it continues, or ends, by itself."""
    if status.state in status_file.ENDED:
        return None
    if status.full_disk:
        what = f"the disk is full, and the supervisor waits: {status.full_disk}"
        return Need(NeedKind.DISK, what, "free some space there: the job then continues by itself")
    if status.state == "QUEUED" and status.queue is not None:
        return Need(NeedKind.QUEUE, status.queue.said, status.queue.fix) if status.queue.is_stuck else None
    if status.backend != "slurm" and (status.written_s or 0.0) > SUPERVISOR_SILENT_S:
        return Need(NeedKind.SUPERVISOR, outdated_text(status))
    suspected = status.suspected
    if suspected is None or not suspected.ranks or suspected.for_s < HANG_S:
        return None
    needs_person = suspected.follows is NextAction.NOTHING or (
        suspected.follows is NextAction.ENDS and (suspected.in_s or 0.0) > SOON_S
    )
    return Need(NeedKind.HANG, suspected.what) if needs_person else None
