"""Slurm's job states: the stage and the reason for the end in each. The only table of them. Pure.

The names are those of Slurm 20 to 25 (`man squeue`, JOB STATE CODES; slurm.schedmd.com/job_state_codes.html). squeue
and scontrol show a flag in place of the state under it. Flags that do not say how far the job is (LAUNCH_FAILED,
RECONFIG_FAIL, REVOKED, UPDATE_DB) are unknown, like any word that is new here: a job in an unknown state counts neither
as running, nor as leaving, nor as over.
"""

from __future__ import annotations

import enum

from orchestrator.core.status_types import AllocationEndCause


class Stage(enum.Enum):
    """Stage of a job."""

    WAITING = "waiting"  # in the queue; it may come back into it
    RUNNING = "running"  # it has nodes
    LEAVING = "leaving"  # it is losing them: what comes next is not known yet
    OVER = "over"
    NOT_FOUND = "forgotten"  # Slurm answers, and knows no such job
    NO_ANSWER = "unheard"  # Slurm has never answered
    UNKNOWN = "unknown"  # Slurm's word does not say


_NAMES = {
    Stage.WAITING: "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD EXPEDITING",
    Stage.RUNNING: "RUNNING CONFIGURING POWER_UP_NODE SUSPENDED RESIZING SIGNALING STOPPED",
    Stage.LEAVING: "COMPLETING STAGE_OUT",
    Stage.OVER: "COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE OUT_OF_MEMORY",
}
_STAGES = {name: stage for stage, names in _NAMES.items() for name in names.split()}

_ENDS = {
    "CANCELLED": (AllocationEndCause.CANCELLED, "it was cancelled with scancel"),
    "TIMEOUT": (AllocationEndCause.TIME_LIMIT, "it reached its time limit"),
    "DEADLINE": (AllocationEndCause.TIME_LIMIT, "it reached its deadline"),
    "PREEMPTED": (AllocationEndCause.PREEMPTED, "a job of higher priority takes its nodes"),
    "REQUEUED": (AllocationEndCause.REQUEUED, "it was put back into the queue"),
    "NODE_FAIL": (AllocationEndCause.NODE_LOST, "a node failed"),
    "BOOT_FAIL": (AllocationEndCause.NODE_LOST, "a node did not boot"),
}
"""Why a job in a state loses its nodes, as a cause and as text; in any other state it has failed."""


def stage_of(state: str) -> Stage:
    """Return the stage of a job in this state."""
    return _STAGES.get(state, Stage.UNKNOWN)


def end_of(state: str) -> tuple[AllocationEndCause, str]:
    """Return why a job in this state loses its nodes, as a cause and as text."""
    return _ENDS.get(state, (AllocationEndCause.FAILED, f"it has ended: {state}"))
