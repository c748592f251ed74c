"""How does a supervisor live in an allocation of a queue system? With its nodes in the plan, and with exit codes that
tell the batch script, see `templates/slurm.sh.j2`, what to do when it leaves."""

from __future__ import annotations

import dataclasses

from orchestrator.backends.api import Allocation, NotOursError
from orchestrator.brain.model import decisions as d
from orchestrator.core import codec
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan, PlannedNode

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


def claim(job: JobDir, name: str) -> None:
    """Write in the job folder that the job is in this allocation, before anything is ordered in it. Agents of an earlier
    one that were lost with their nodes, and whose ranks train on, read it and go, see `node/orphan.py`; so does a
    supervisor that lives on there and holds the lock. Raises NotOursError when the job is in a later one by now."""
    if not name:
        return
    there = replaced(job, name)
    if _is_later(there, name):
        raise NotOursError(f"this is allocation {name}, and the job goes on in allocation {there}")
    full_disk.wait_for(lambda: replace_text(job.allocation, f"{name}\n"))


def announce_allocation(job: JobDir, name: str) -> int:
    """Let the supervisor that has the lock know that the job is in this allocation by now, if it is; return the exit
    code for one that cannot act."""
    if codec.loads(Plan, job.plan.read_bytes()).slurm is None:
        return SUCCEEDED
    try:
        claim(job, name)
    except NotOursError as err:
        print(err, flush=True)
    return BUSY


def replaced(job: JobDir, name: str) -> str:
    """Return the other allocation that the job is in by now; empty when it is in this one, or nobody says."""
    if not name:
        return ""
    try:
        there = job.allocation.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return there if there != name else ""


def _is_later(one: str, other: str) -> bool:
    """Tell whether two allocations are stays of the same job of Slurm, and `one` is the later of them."""
    (job_id, _, stay), (other_id, _, other_stay) = one.partition("."), other.partition(".")
    counts = stay.isdigit() and other_stay.isdigit()
    return counts and job_id == other_id and int(stay) > int(other_stay)


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
