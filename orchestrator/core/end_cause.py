"""Causes of the end of an allocation. A module of its own: commands need them without the brain's events."""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    """Why an allocation of a queue system ends before its job does."""

    CANCELLED = "cancelled"  # by a person, not through orch
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"  # by a person, not through orch
    NODE_LOST = "node_lost"
    FAILED = "failed"  # see `why`
