"""The virtual queue system: it lends nodes, signals, kills, takes nodes for lost, and forgets nothing.

The supervisor lives on the first node of an allocation and dies with it. What runs on a node that is taken for lost
lives on beside the job, until its agent fences itself or the node is back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.plan_types import PlannedNode
from orchestrator.core.status_types import AllocationEndCause
from tests.support.brain_story import planned_node

from .boss import Boss
from .ledger import Violation
from .night import Fault, Harm

if TYPE_CHECKING:
    from .host import Host
    from .world import World

SIGNAL_S = 5.0
"""So long before ranks' grace begins the supervisor hears of the time limit: margin for what it does after it."""

LEAVE_S = 4.0
"""How long after the job's end its supervisor leaves."""

LOOK_S = 10.0
"""How often the queue looks for free nodes, and the submit side at the queue."""


class Slurm:
    """The queue and the one job in it. `number`: of the job, anew with each resume; `restarts`: of its requeues."""

    def __init__(self, world: World) -> None:
        lease = world.night.lease
        assert lease is not None
        self.world, self.lease = world, lease
        self.number, self.restarts = 0, 0
        self.nodes: list[int] = []  # of the allocation, less those that it has lost; empty: there is none
        self.lent: list[int] = []  # all that the allocation began with, the first one first
        self.lost: set[int] = set()  # nodes that it takes for lost
        self.avoided: set[int] = set()
        self.given = 0  # so many allocations
        self.pending = self.over = False
        self.warned: Boss | None = None  # who heard of the time limit
        self.late_word = ""  # the allocation of which it is said too late that it is over
        self.claimed = ""  # the allocation that the job folder names

    @property
    def allocation(self) -> str:
        return f"{self.number}.{self.restarts}"

    def plan(self) -> tuple[PlannedNode, ...]:
        return tuple(planned_node(f"n{index}") for index in self.lent)

    def has(self, host: Host) -> bool:
        return host.index in self.nodes

    # The queue

    def submit(self) -> None:
        self.number += 1
        self.restarts, self.over, self.pending = 0, False, True
        self._wait()

    def _wait(self) -> None:
        self.world.after(self.world.rng.uniform(*self.lease.wait_s), self._give, self.number)

    def _give(self, number: int) -> None:
        """Give nodes to the job that waits, other ones than before where there are enough."""
        world = self.world
        if not self.pending or number != self.number:
            return
        wanted = world.nodes + self.lease.spares
        free = [h.index for h in world.hosts[: self.lease.count] if h.up and h.index not in self.lost]
        good = [index for index in free if index not in self.avoided]
        free = good if len(good) >= wanted else free
        if len(free) < wanted:
            world.after(LOOK_S, self._give, number)
            return
        self.pending, self.given = False, self.given + 1
        self.nodes = sorted(world.rng.sample(free, wanted)) if self.lease.mixes else free[:wanted]
        self.lent = list(self.nodes)
        world.ledger.note(f"queue: allocation {self.allocation} of {', '.join(f'n{i}' for i in self.nodes)}")
        world.changed()
        if self.lease.stay_s < float("inf"):
            warn_s = max(1.0, self.lease.stay_s - self.lease.grace_s - SIGNAL_S - 2.0)
            world.after(warn_s, self._warn, self.given)
            world.after(self.lease.stay_s, self._limit, self.given)
        if self.late_word not in ("", self.allocation):
            world.requests.append(
                e.AllocationEnded(0.0, 0, self.late_word, AllocationEndCause.FAILED, "not in the queue")
            )
            self.late_word = ""
        self._bring_boss(Boss(world))

    def _bring_boss(self, boss: Boss) -> None:
        self.world.boss = boss
        boss.start()

    def _warn(self, given: int) -> None:
        world, boss = self.world, self.world.boss
        if given != self.given or not self.nodes or not boss.alive:
            return
        self.warned = boss
        ends_at = world.clock + self.lease.stay_s - (self.lease.stay_s - self.lease.grace_s - SIGNAL_S - 2.0)
        boss.hear(e.AllocationEnding(0.0, self.allocation, AllocationEndCause.TIME_LIMIT, "the limit is near", ends_at))

    def _limit(self, given: int) -> None:
        """The time is over; who had been warned and goes back to the queue has done so before."""
        world = self.world
        if given != self.given or not self.nodes:
            return
        warned = self.warned is world.boss and world.boss.alive and not world.jumped_s
        if warned and world.ledger.end is None and self.lease.requeues and not world.ledger.cancelled:
            raise Violation("the job has not gone back to the queue before its time limit")
        self._finish("TIMEOUT", AllocationEndCause.TIME_LIMIT)

    def strike(self, fault: Fault) -> None:
        """Let what a queue does befall the job, if it has nodes or waits for some."""
        match fault.harm:
            case Harm.PREEMPTED if self.nodes:
                self._signal(
                    AllocationEndCause.PREEMPTED,
                    "by a job of higher priority",
                    lambda: self._requeue(self.given),
                )
            case Harm.REQUEUED if self.nodes:
                self._signal(AllocationEndCause.REQUEUED, "by root", lambda: self._requeue(self.given))
            case Harm.SCANCEL if self.nodes:
                self._signal(
                    AllocationEndCause.CANCELLED,
                    "by root",
                    lambda: self._finish("CANCELLED", AllocationEndCause.CANCELLED),
                )
            case Harm.SCANCEL if self.pending:
                self._finish("CANCELLED", AllocationEndCause.CANCELLED)
            case Harm.STALE_WORD if self.nodes:
                self.world.request(
                    e.AllocationEnded(0.0, 0, self.allocation, AllocationEndCause.FAILED, "not in the queue")
                )
            case Harm.LATE_WORD if self.nodes:
                self.late_word = self.allocation
            case Harm.SLURMD_LOST:
                self._lose(fault.node, fault.lasts_s)
            case _:
                pass

    def _signal(self, cause: AllocationEndCause, why: str, then: Callable[[], None]) -> None:
        """TERM to everything, after a while KILL. Keepers and agents ignore TERM; the supervisor asks why it came."""
        world = self.world
        given, boss, killed_s = self.given, world.boss, world.now + self.lease.kill_s
        if self.lease.term_kills:
            for host in [world.hosts[index] for index in self.nodes]:
                for rank in host.living():
                    world.after(world.rng.uniform(0.0, 0.3), lambda rank=rank: rank.gang.die(rank, signal=15))

        def say() -> None:
            if boss.alive and given == self.given and self.nodes:
                ends_at = killed_s + world.jumped_s if self.lease.tells else None
                boss.hear(e.AllocationEnding(0.0, self.allocation, cause, why, ends_at))

        def kill() -> None:
            if given == self.given and self.nodes:
                then()

        world.after(world.rng.uniform(0.02, 1.2), say)
        world.after(self.lease.kill_s, kill)

    # Lost nodes

    def lost_power(self, host: Host) -> None:
        """A node is silent; after a while that is known. The supervisor is gone at once if it is the first one."""
        is_first = bool(self.nodes) and host.index == self.lent[0]
        if is_first:
            self.world.end_boss()
        given = self.given if is_first else 0
        self.world.after(self.world.rng.uniform(*self.lease.noticed_s), self._notice, host, given)

    def _notice(self, host: Host, given: int) -> None:
        """Lose a node that is still silent; the first one of the allocation `given` also when it has booted again."""
        if not host.up:
            self._lose(host.index, float("inf"))
        elif given == self.given and self.nodes:
            self._lose(host.index, LOOK_S)

    def _lose(self, index: int, lasts_s: float) -> None:
        """Take a node for lost; the job goes on without it unless it is the first one. What runs there lives on."""
        world = self.world
        world.ledger.note(f"queue: n{index} is taken for lost")
        world.changed()
        is_first, had = bool(self.nodes) and index == self.lent[0], self.given
        if index in self.nodes:
            self.nodes.remove(index)
        if is_first:
            self._requeue(had)
        self.lost.add(index)
        if lasts_s < float("inf"):
            world.after(lasts_s, self.back, index)

    def back(self, index: int) -> None:
        """A lost node is there again; what had run on it is killed, unless the job still has it."""
        self.lost.discard(index)
        self.world.changed()
        if index not in self.nodes:
            self.world.hosts[index].lose_agent(keeper=True)

    # The end of an allocation

    def asked(self, decision: d.Requeue) -> None:
        """The supervisor asks to be queued again, and leaves."""
        self.avoided |= {int(name[1:]) for name in decision.avoid}
        self.world.after(self.world.rng.uniform(0.05, 1.5), self._requeue, self.given)

    def _requeue(self, given: int) -> None:
        if self.pending or self.over or given != self.given:
            return
        self._take("requeued")
        self.restarts += 1
        self.pending = True
        self._wait()

    def _finish(self, state: str, cause: AllocationEndCause) -> None:
        """The job is in the queue no more; the submit side sees that after a while."""
        self._take(state)
        self.pending, self.over = False, True
        self.world.after(self.world.rng.uniform(1.0, LOOK_S), self._tell, self.number, cause, state)

    def _tell(self, number: int, cause: AllocationEndCause, state: str) -> None:
        world = self.world
        if number == self.number and self.over and world.ledger.end is None and not world.boss.alive:
            world.requests.append(e.AllocationEnded(0.0, 0, self.allocation, cause, state))
            self._bring_boss(Boss(world, desk=True))

    def _take(self, how: str) -> None:
        """Kill all of the job on the nodes that can be reached; the rest lives on."""
        world = self.world
        world.ledger.note(f"queue: allocation {self.allocation} is over: {how}")
        world.changed()
        world.end_boss()
        self.nodes, nodes = [], self.nodes
        for host in [world.hosts[index] for index in nodes]:
            host.lose_agent(keeper=True)

    def ended(self) -> None:
        """The supervisor of an ended job leaves, and the allocation with it."""
        given = self.given
        self.world.after(LEAVE_S, lambda: self._leave(given))

    def _leave(self, given: int) -> None:
        if given == self.given and self.world.ledger.end is not None:
            if self.nodes:
                self._take("the job has ended")
            self.world.end_boss()
            self.pending, self.over = False, True

    # The user

    def cancelled(self) -> None:
        """A job that waits is cancelled in the queue, too."""
        if self.pending:
            self._finish("CANCELLED", AllocationEndCause.CANCELLED)

    def resumed(self) -> None:
        """An ended job is submitted anew."""
        if self.world.ledger.end is not None and not self.pending:
            if self.nodes:
                self._take("the job has ended")
            self.world.end_boss()
            self.submit()
