"""Supervisor in an allocation of a queue system: the nodes that it puts into the plan, the claim in the job
folder, why it leaves, and its exit codes for the batch script, see `templates/slurm.sh.j2`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from orchestrator.backends.api import Allocation
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts, JobGoal
from orchestrator.core import codec
from orchestrator.core.errors import OwnershipLostError
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.plan_types import PlannedNode

SUCCEEDED, OVER = 0, 1
"""The job has ended."""

LOCK_HELD = 73
"""Another supervisor is running: the lock of a supervisor whose host was lost may outlive it for a while."""

REQUEUED = 75
"""The nodes were given back, and Slurm is about to take them (EX_TEMPFAIL of sysexits.h)."""


def plan_in_allocation(plan: Plan, allocation: Allocation | None) -> Plan:
    """Return the plan with the nodes of the allocation, if there is one."""
    if allocation is None:
        return plan
    nodes = tuple(PlannedNode(name, name, "", (), ()) for name in allocation.nodes)
    return dataclasses.replace(plan, nodes=nodes)


def claim(job: JobDir, name: str) -> None:
    """Write into the job folder that the job is in this allocation, before any order is given in it.

    Agents and a supervisor that live on in an earlier allocation read it and exit, see `agent/process/lost_supervisor.py`.
    Raises NotOursError when the job is in a later allocation by now.
    """
    if not name:
        return
    current = newer_allocation(job, name)
    if _is_later(current, name):
        raise OwnershipLostError(f"this is allocation {name}, and the job continues in allocation {current}")
    full_disk.retry_while_full(lambda: replace_text(job.allocation, f"{name}\n"))


def announce_allocation(job: JobDir, name: str) -> int:
    """Claim the allocation for the job although another supervisor holds its lock, so that the other one exits;
    return the exit code of a supervisor that cannot act."""
    if codec.loads(Plan, job.plan.read_bytes()).slurm is None:
        return SUCCEEDED
    try:
        claim(job, name)
    except OwnershipLostError as err:
        print(err, flush=True)
    return LOCK_HELD


def newer_allocation(job: JobDir, name: str) -> str:
    """Return the other allocation that the job has moved to; empty when it is in this one, or none is written down."""
    if not name:
        return ""
    try:
        current = job.allocation.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return current if current != name else ""


def _is_later(one: str, other: str) -> bool:
    """Return whether two allocations belong to the same Slurm job, and `one` is the later. Names: JOB_ID.RESTARTS."""
    (job_id, _, number), (other_id, _, other_number) = one.partition("."), other.partition(".")
    are_numbers = number.isdigit() and other_number.isdigit()
    return are_numbers and job_id == other_id and int(number) > int(other_number)


def leave_allocation(allocation: Allocation | None, requeue: d.Requeue | None, end: d.JobEnd | None) -> int:
    """Give the nodes back, if that was decided; return the exit code.

    An allocation in which the job has ended is not used again: a resume asks for new nodes.
    """
    if allocation is None:
        return SUCCEEDED
    if requeue is None:
        return SUCCEEDED if end is d.JobEnd.SUCCEEDED else OVER
    refusal = allocation.requeue(requeue.avoid)
    if refusal:
        print(f"the job cannot be requeued: {refusal}", flush=True)
    return REQUEUED


def _differs(plan: Plan, facts: Facts) -> bool:
    nodes = [(node.name, () if facts.pool is not None else node.ranks) for node in facts.nodes.values()]
    current = (facts.limits, facts.pool, nodes)
    return current != (plan.limits, plan.pool, [(node.name, node.ranks) for node in plan.nodes])


class AllocationSession:
    """The allocation that a supervisor is in, if it is in one. `requeue`: decided, the nodes are to be given back."""

    def __init__(self, job: JobDir, plan: Plan, allocation: Allocation | None) -> None:
        self._job = job
        self._plan = plan
        self._allocation = allocation
        self.requeue: d.Requeue | None = None
        self._is_replaced = False

    @property
    def addresses(self) -> list[str]:
        """Where the nodes reach this machine; empty outside of an allocation."""
        return self._allocation.addresses() if self._allocation is not None else []

    def begin(self, facts: Facts, requeue: d.Requeue | None, now_s: float) -> Iterator[e.Event]:
        """Yield a new allocation, and the plan where it is news, for the brain to learn. In the old allocation a `requeue`
        that was decided but not done is taken up."""
        if self._allocation is not None and self._allocation.id != facts.allocation:
            yield e.AllocationBegan(now_s, self._allocation.id)
        elif self._allocation is not None and facts.end is None:
            self.requeue = requeue
        if self._plan.slurm is not None and self._allocation is None and facts.limits is not None:
            return  # the nodes are those of the last allocation
        if _differs(self._plan, facts):
            yield e.Planned(now_s, self._plan.nodes, self._plan.limits, self._plan.pool)

    def is_idle(self, facts: Facts) -> bool:
        """Return whether the job only waits in the queue: it has no nodes to act on, and is not to be ended."""
        if self._plan.slurm is None or self._allocation is not None or facts.end is not None:
            return False
        return facts.allocation_end is None and not (facts.goal is JobGoal.CANCEL and facts.attempt is None)

    def check_replaced(self) -> None:
        """Check whether the job has moved to another allocation."""
        if self._allocation is not None:
            self._is_replaced = bool(newer_allocation(self._job, self._allocation.id))

    def check_ending(self) -> None:
        """Handle the report of a node that Slurm has signalled it."""
        if self._allocation is not None:
            self._allocation.check()

    def must_leave(self, empty_memory: Callable[[int, float], bool], now_s: float) -> bool:
        """Return whether the supervisor is to leave: the nodes are given back, whose memory is empty then, or the job has moved to
        others."""
        return self._is_replaced or (self.requeue is not None and empty_memory(self.requeue.attempt, now_s))
