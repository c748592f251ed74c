"""The supervisor's place in an allocation of a queue system: the nodes that it puts into the plan, the claim in the
job folder, and the exit codes that tell the batch script what to do next, see `templates/slurm.sh.j2`."""

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
"""The job has ended."""

BUSY = 73
"""Another supervisor is at work: the lock of a supervisor whose host was lost may outlive it for a while."""

REQUEUED = 75
"""The nodes were given back, and Slurm is about to take them (EX_TEMPFAIL of sysexits.h)."""


def placed(plan: Plan, allocation: Allocation | None) -> Plan:
    """Return the plan with the nodes of the allocation, if there is one."""
    if allocation is None:
        return plan
    nodes = tuple(PlannedNode(name, name, "", (), ()) for name in allocation.nodes)
    return dataclasses.replace(plan, nodes=nodes)


def claim(job: JobDir, name: str) -> None:
    """Write into the job folder that the job is in this allocation, before any order is given in it.

    Agents and a supervisor that live on in an earlier allocation read it and exit, see `agent/lost_supervisor.py`.
    Raises NotOursError when the job is in a later allocation by now.
    """
    if not name:
        return
    current = replaced(job, name)
    if _is_later(current, name):
        raise NotOursError(f"this is allocation {name}, and the job goes on in allocation {current}")
    full_disk.wait_for(lambda: replace_text(job.allocation, f"{name}\n"))


def announce_allocation(job: JobDir, name: str) -> int:
    """Claim the allocation for the job although another supervisor holds its lock, so that the other one exits;
    return the exit code of a supervisor that cannot act."""
    if codec.loads(Plan, job.plan.read_bytes()).slurm is None:
        return SUCCEEDED
    try:
        claim(job, name)
    except NotOursError as err:
        print(err, flush=True)
    return BUSY


def replaced(job: JobDir, name: str) -> str:
    """Return the other allocation that the job has moved to; empty when it is in this one, or none is written down."""
    if not name:
        return ""
    try:
        current = job.allocation.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return current if current != name else ""


def _is_later(one: str, other: str) -> bool:
    """Tell whether two allocations belong to the same Slurm job, and `one` is the later. Names: JOB_ID.RESTARTS."""
    (job_id, _, number), (other_id, _, other_number) = one.partition("."), other.partition(".")
    are_numbers = number.isdigit() and other_number.isdigit()
    return are_numbers and job_id == other_id and int(number) > int(other_number)


def leave(allocation: Allocation | None, requeue: d.Requeue | None, end: d.JobEnd | None) -> int:
    """Give the nodes back, if that was decided; return the exit code.

    An allocation in which the job has ended is not used again: a resume asks for new nodes.
    """
    if allocation is None:
        return SUCCEEDED
    if requeue is None:
        return SUCCEEDED if end is d.JobEnd.SUCCEEDED else OVER
    refusal = allocation.requeue(requeue.avoid)
    if refusal:
        print(f"the job cannot go back into the queue: {refusal}", flush=True)
    return REQUEUED
