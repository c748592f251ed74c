"""The plan as the first event of a journal, and the identity of this machine that journals carry."""

from __future__ import annotations

import zlib

from orchestrator.brain.model import events as e
from orchestrator.core.host import procfs
from orchestrator.core.jobdir.plan import Plan


def machine() -> str:
    """Return the name of this boot of this machine."""
    return procfs.boot_id()


def planned(plan: Plan, at: float) -> e.Planned:
    """Return the plan as the brain needs it."""
    limits = plan.limits
    return e.Planned(
        at,
        tuple(e.NodePlan(node.name, node.ranks) for node in plan.nodes),
        e.Limits(
            queue_s_max=limits.queue_s,
            start_s_max=limits.start_s,
            rendezvous_s_max=limits.rendezvous_s,
            first_step_s_max=limits.first_step_s,
            hang_s_max=limits.hang_s,
            hang_s_floor=limits.hang_floor_s,
            hang_s_ceiling=limits.hang_ceiling_s,
            patience_s=limits.patience_s,
            node_silent_s_max=limits.node_silent_s,
            fence_s=limits.fence_s,
            stop_grace_s=limits.stop_grace_s,
            break_grace_s=limits.break_grace_s,
            restarts_max=limits.restarts,
            backoff_s=limits.backoff_s,
            backoff_s_max=limits.backoff_s_max,
            never_on_exit_codes=limits.never_on_exit_codes,
            time_s_max=limits.time_s,
            on_hang=limits.on_hang,
            on_desync=limits.on_desync,
        ),
        _pool(plan),
    )


def _pool(plan: Plan) -> e.Pool | None:
    pool = plan.pool
    if pool is None:
        return None
    slurm = plan.slurm
    queue = e.QueueTerms(slurm.requeues_at_time_limit, slurm.grace_s) if slurm is not None else None
    return e.Pool(pool.nodes, pool.ranks_each, pool.spares, zlib.crc32(plan.id.encode()), queue)
