"""Every state of a job that Slurm has a name for, and what follows from it.

Base states and flags, as https://slurm.schedmd.com/job_state_codes.html lists them for Slurm 20 to 25.
"""

from __future__ import annotations

from orchestrator.core.shown import Cause
from orchestrator.core.slurm.job_states import Stage

STATES: dict[str, tuple[Stage, Cause | None]] = {
    "BOOT_FAIL": (Stage.OVER, Cause.NODE_LOST),
    "CANCELLED": (Stage.OVER, Cause.CANCELLED),
    "COMPLETED": (Stage.OVER, Cause.FAILED),
    "COMPLETING": (Stage.LEAVING, None),
    "CONFIGURING": (Stage.RUNNING, None),
    "DEADLINE": (Stage.OVER, Cause.TIME_LIMIT),
    "EXPEDITING": (Stage.WAITING, None),
    "FAILED": (Stage.OVER, Cause.FAILED),
    "LAUNCH_FAILED": (Stage.UNKNOWN, None),
    "NODE_FAIL": (Stage.OVER, Cause.NODE_LOST),
    "OUT_OF_MEMORY": (Stage.OVER, Cause.FAILED),
    "PENDING": (Stage.WAITING, None),
    "POWER_UP_NODE": (Stage.RUNNING, None),
    "PREEMPTED": (Stage.OVER, Cause.PREEMPTED),
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
    "TIMEOUT": (Stage.OVER, Cause.TIME_LIMIT),
    "UPDATE_DB": (Stage.UNKNOWN, None),
}
