"""Limits of a job, as its job file sets them; what is left to orch is filled in here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.plan_types import Limits
from orchestrator.spec.sections import BEATS_PER_NODE_TIMEOUT

if TYPE_CHECKING:
    from orchestrator.spec.load import JobSpec

FENCE_SHARE = 0.8
"""The part of `monitor.node_timeout` after which an agent without contact and progress stops its ranks; the
supervisor waits the whole of it, so that a new attempt never meets the old one."""

NODE_TIMEOUT_S = 60.0
NODE_TIMEOUT_SEEN_S = 20.0
"""`monitor.node_timeout: auto`: in general, and if another node shows that the gang does not move. The second is short, but
longer than a network needs to recover after 10 s: TCP retries at 6 and 13 s."""

BREAK_GRACE_S_MAX = 1.0
"""TERM to KILL for ranks of a broken gang, which has nothing left to save: Lightning, for example, answers TERM by waiting
for the end of a step that never comes."""


def limits_of(spec: JobSpec) -> Limits:
    """Return the limits that the job file sets."""
    monitor, restart = spec.monitor, spec.restart
    least_s = BEATS_PER_NODE_TIMEOUT * monitor.heartbeat_s
    if monitor.node_timeout == "auto":
        timeout_s = max(NODE_TIMEOUT_S, least_s)
        seen_s = max(NODE_TIMEOUT_SEEN_S, least_s) if spec.nodes > 1 else timeout_s
    else:
        timeout_s = seen_s = monitor.node_timeout
    return Limits(
        queue_timeout_s=monitor.queue_timeout,
        start_timeout_s=monitor.start_timeout,
        rendezvous_timeout_s=monitor.rendezvous_timeout,
        first_step_timeout_s=monitor.first_step_timeout,
        hang_timeout_s=0.0 if monitor.hang_timeout == "auto" else monitor.hang_timeout,
        node_timeout_s=timeout_s,
        fence_s=None if spec.backend == "local" else seen_s * FENCE_SHARE,
        disconnected_timeout_s=timeout_s * FENCE_SHARE,
        stop_grace_s=monitor.stop_grace,
        break_grace_s=min(monitor.stop_grace, BREAK_GRACE_S_MAX),
        restarts_max=restart.max,
        backoff_s=restart.backoff,
        backoff_max_s=restart.backoff_max,
        never_on_exit_codes=tuple(restart.never_on_exit_codes),
        time_limit_s=None if spec.backend == "slurm" else spec.time_limit,  # Slurm keeps this limit itself
        on_hang=monitor.on_hang,
        on_desync=monitor.on_desync,
        on_nan=monitor.on_nan,
        compare_steps=monitor.compare_replicas or 0,
        saves_async=spec.checkpoint.async_ == "dcp",
        launches=spec.launch is not None,
    )
