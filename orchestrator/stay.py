"""How does a supervisor live in an allocation of a queue system? With its nodes in the plan, and with exit codes that
tell the batch script, see `templates/slurm.sh.j2`, what to do when it leaves."""

from __future__ import annotations

import dataclasses

from orchestrator.backends import Allocation
from orchestrator.brain import decisions as d
from orchestrator.plan import Plan, PlannedNode

SUCCEEDED, OVER = 0, 1
"""The job is over, well or otherwise."""

BUSY = 73
"""Another supervisor is at work: the lock of one whose host was lost may outlive it for a while."""

REQUEUED = 75
"""The nodes were given back, and Slurm is about to take them (EX_TEMPFAIL of sysexits.h)."""


def placed(plan: Plan, allocation: Allocation | None) -> Plan:
    """Return the plan with the nodes that the job was given, if it is a queue system that gives them."""
    if allocation is None:
        return plan
    nodes = tuple(PlannedNode(name, name, "", (), ()) for name in allocation.nodes)
    return dataclasses.replace(plan, nodes=nodes)


def leave(allocation: Allocation | None, requeue: d.Requeue | None, end: d.JobEnd | None) -> int:
    """Give the nodes back, if that was decided; return the exit code.

    Nobody goes on in an allocation in which the job has ended: whoever resumes it asks for nodes anew.
    """
    if allocation is None:
        return SUCCEEDED
    if requeue is None:
        return SUCCEEDED if end is d.JobEnd.SUCCEEDED else OVER
    refusal = allocation.requeue(requeue.avoid)
    if refusal:
        print(f"the job cannot go back into the queue: {refusal}", flush=True)
    return REQUEUED
