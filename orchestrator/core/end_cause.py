"""Why does an allocation end? In a module of its own: commands know the causes without all of the brain's events."""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    """Why an allocation of a queue system ends before its job does."""

    CANCELLED = "cancelled"  # by somebody, not through us
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"  # by somebody, not through us
    NODE_LOST = "node_lost"
    FAILED = "failed"  # for a reason that `why` tells
