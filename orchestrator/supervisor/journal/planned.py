"""The plan as the first event of a journal, and the identity of this machine that journals carry."""

from __future__ import annotations

import zlib

from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.core.host import procfs
from orchestrator.core.jobdir.plan import Plan


def machine() -> str:
    """Return the name of this boot of this machine."""
    return procfs.boot_id()


def planned(plan: Plan, at: float) -> e.Planned:
    """Return the plan as the brain needs it."""
    nodes = tuple(e.NodePlan(node.name, node.ranks) for node in plan.nodes)
    return e.Planned(at, nodes, plan.limits, _pool(plan))


def is_news(planned: e.Planned, facts: Facts) -> bool:
    """Tell whether a plan differs from the one that the brain knows."""
    has_pool = facts.pool is not None
    nodes = tuple(e.NodePlan(node.name, () if has_pool else node.ranks) for node in facts.nodes.values())
    return (facts.limits, facts.pool, nodes) != (planned.limits, planned.pool, planned.nodes)


def _pool(plan: Plan) -> e.Pool | None:
    pool = plan.pool
    if pool is None:
        return None
    slurm = plan.slurm
    queue = e.QueueTerms(slurm.requeues_at_time_limit, slurm.grace_s) if slurm is not None else None
    # Setup lines could change files that ranks use, where nodes share a disk, or fail for a while and use up all hosts.
    readies_spares = not plan.setup
    seed = zlib.crc32(plan.id.encode())
    return e.Pool(pool.nodes, pool.ranks_each, pool.spares, seed, queue, readies_spares)
