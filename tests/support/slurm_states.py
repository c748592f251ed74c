"""Every state of a job that Slurm has a name for, and what follows from it.

Base states and flags, as https://slurm.schedmd.com/job_state_codes.html lists them for Slurm 20 to 25.
"""

from __future__ import annotations

from orchestrator.core.slurm.job_states import Stage
from orchestrator.core.status_types import AllocationEndCause

STATES: dict[str, tuple[Stage, AllocationEndCause | None]] = {
    "BOOT_FAIL": (Stage.OVER, AllocationEndCause.NODE_LOST),
    "CANCELLED": (Stage.OVER, AllocationEndCause.CANCELLED),
    "COMPLETED": (Stage.OVER, AllocationEndCause.FAILED),
    "COMPLETING": (Stage.LEAVING, None),
    "CONFIGURING": (Stage.RUNNING, None),
    "DEADLINE": (Stage.OVER, AllocationEndCause.TIME_LIMIT),
    "EXPEDITING": (Stage.WAITING, None),
    "FAILED": (Stage.OVER, AllocationEndCause.FAILED),
    "LAUNCH_FAILED": (Stage.UNKNOWN, None),
    "NODE_FAIL": (Stage.OVER, AllocationEndCause.NODE_LOST),
    "OUT_OF_MEMORY": (Stage.OVER, AllocationEndCause.FAILED),
    "PENDING": (Stage.WAITING, None),
    "POWER_UP_NODE": (Stage.RUNNING, None),
    "PREEMPTED": (Stage.OVER, AllocationEndCause.PREEMPTED),
    "RECONFIG_FAIL": (Stage.UNKNOWN, None),
    "REQUEUED": (Stage.WAITING, None),
    "REQUEUE_FED": (Stage.WAITING, None),
    "REQUEUE_HOLD": (Stage.WAITING, None),
    "RESIZING": (Stage.RUNNING, None),
    "RESV_DEL_HOLD": (Stage.WAITING, None),
    "REVOKED": (Stage.UNKNOWN, None),
    "RUNNING": (Stage.RUNNING, None),
    "SIGNALING": (Stage.RUNNING, None),
    "SPECIAL_EXIT": (Stage.WAITING, None),
    "STAGE_OUT": (Stage.LEAVING, None),
    "STOPPED": (Stage.RUNNING, None),
    "SUSPENDED": (Stage.RUNNING, None),
    "TIMEOUT": (Stage.OVER, AllocationEndCause.TIME_LIMIT),
    "UPDATE_DB": (Stage.UNKNOWN, None),
}
