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
    nodes = tuple(e.NodePlan(node.name, node.ranks) for node in plan.nodes)
    return e.Planned(at, nodes, plan.limits, _pool(plan))


def _pool(plan: Plan) -> e.Pool | None:
    pool = plan.pool
    if pool is None:
        return None
    slurm = plan.slurm
    queue = e.QueueTerms(slurm.requeues_at_time_limit, slurm.grace_s) if slurm is not None else None
    return e.Pool(pool.nodes, pool.ranks_each, pool.spares, zlib.crc32(plan.id.encode()), queue)
