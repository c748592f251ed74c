"""The virtual world: one clock, one heap of what is to happen, one seeded source of chance; no threads, no real time.

`play` runs a night to its end and raises `Violation` when an oracle is broken. What is real is the brain, the codec
and the journal's replay; all else here behaves like the real parts and nothing is shared with them.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

from orchestrator.brain.model import events as e
from orchestrator.brain.model.events import Planned
from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.observations import Activity
from orchestrator.core.plan_types import PlannedNode

from .boss import Boss, Killed
from .gang import RANK_HARMS, Gang, Rank, harm_rank
from .host import Host
from .journal import Journal
from .ledger import Ledger, Violation
from .night import OF_QUEUES, Ask, Fault, Harm, Naming, Night
from .savedesk import HERE, ROOT, Files, SaveDesk
from .slurm import Slurm

HOSTS_MAX = 9
EVENTS_MAX = 200_000
DAMAGE_S_MAX = 6.0
"""How long after the end of an attempt its saves are damaged at the latest."""

LINGER_S = 8.0
"""How long after the job's end a night goes on: what must not happen any more has time to."""


class World:
    """One night as it is lived."""

    def __init__(self, night: Night) -> None:
        self.night = night
        self.rng = random.Random(night.seed)
        self.now = self.jumped_s = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.counter = itertools.count()
        self.nodes = night.nodes
        self.pids = 1000
        self.boss_away_s = 0.0
        self.struck_s: float | None = None
        self.files = Files()
        self.save_desk = SaveDesk(self.files, self.travels, night.states, not night.sharded)
        self.save_rng = random.Random(night.seed ^ 0x5A7E)
        self.look_rng = random.Random(night.seed ^ 0x100C)
        self.named_rng = random.Random(night.seed ^ 0x71C5)
        self.gangs: dict[int, Gang] = {}
        self.requests: list[Ask | e.AllocationEnded] = []
        self.asks_left = len(night.asks)
        self.asked_s = 0.0
        self.step_faults = [fault for fault in night.faults if fault.step]
        self.journal = Journal(night.seed)
        self.ledger = Ledger(self)
        self.hosts = [Host(self, index) for index in range(HOSTS_MAX)]
        self.boss = Boss(self)
        self.slurm = Slurm(self) if night.lease is not None else None

    # Time and chance

    @property
    def clock(self) -> float:
        """The job clock."""
        return self.now + self.jumped_s

    def at(self, at_s: float, act: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (max(at_s, self.now), next(self.counter), act, args))

    def after(self, wait_s: float, act: Callable[..., None], *args: Any) -> None:
        self.at(self.now + wait_s, act, *args)

    def latency_s(self) -> float:
        return self.rng.uniform(*self.night.latency_s)

    # What is where

    def host(self, name: str) -> Host:
        return self.hosts[int(name[1:])]

    def plan(self) -> tuple[PlannedNode, ...]:
        return self.slurm.plan() if self.slurm is not None else self.night.plan_of(self.nodes)

    def planned(self) -> Planned:
        return Planned(0.0, self.plan(), self.night.limits, self.night.pool_of(self.nodes))

    @property
    def travels(self) -> bool:
        """Tell whether checkpoints have to come home."""
        return self.night.hosts is not None and self.night.hosts.travels

    @property
    def lent(self) -> int:
        """Return which allocation the job has now, 0 where no queue lends nodes."""
        return self.slurm.given if self.slurm is not None else 0

    def version_read(self, resume: ResumePoint | None) -> int:
        """Return the bytes that a script reads which is to begin from a save, 0 for none."""
        if resume is None or self.night.begins_anew:
            return 0
        return self.files.at(resume.path.removeprefix(f"{ROOT}/"))

    def gang(self, attempt: int, base: int, call: int = 0) -> Gang:
        before = self.gangs.get(attempt)
        if before is None or before.call != call:
            base = base if before is None else before.base + before.count
            self.gangs[attempt] = Gang(self, attempt, self.nodes * self.night.ranks, base, call)
            self.gangs[attempt].last_save = before.last_save if before is not None else None
        return self.gangs[attempt]

    def last_save(self, attempt: int) -> tuple[str, int, int] | None:
        """Return path, count and bytes of the last checkpoint that an attempt wrote."""
        return self.gangs[attempt].last_save

    def path_of(self, attempt: int, step: int) -> str:
        """Return what an attempt calls the checkpoint that it writes at a step."""
        match self.night.naming:
            case Naming.ITS_OWN:
                return f"a{attempt}/step-{step}"
            case Naming.STEP:
                return f"step-{step:06d}.pt"
            case Naming.SAVE:
                return f"epoch-{step // self.night.save_steps}.pt"
            case Naming.LAST:
                return "last.pt"

    def journal_high(self, attempt: int) -> int:
        """Return the most steps of one rank of an attempt that the journal tells of, in all its launcher calls together.
        Nodes of an allocation that is over are not heard any more."""
        earlier = high = 0
        ours: set[str] = set()
        for line in map(json.loads, self.journal.lines):
            if line["kind"] == "Planned":
                ours = {node["name"] for node in line["nodes"]}
            held = line.get("report", line)
            if held.get("attempt") != attempt or line.get("node", "") not in {"", *ours}:
                continue
            if held["kind"] == "NextCall":
                earlier = high
            elif held["kind"] in ("Heartbeat", "Exited"):
                high = max([high, *(earlier + rank["steps"] for rank in held.get("ranks", [held]))])
        return high

    # The night

    def play(self, events_max: int = EVENTS_MAX) -> None:
        """Live through the night. Raises Violation."""
        for fault in self.night.faults:
            if not fault.step:
                self.at(fault.at_s, self.strike, fault)
        for ask in self.night.asks:
            self.at(ask.at_s, self._ask, ask)
        if self.night.hosts is not None:
            for until_s in self.night.hosts.ahead:
                self.at(until_s, lambda: self.boss.job_leaves())
        if self.slurm is not None:
            self.boss.alive = False
            self.slurm.submit()
        else:
            self._guarded(self.boss.start, ())
        for _ in range(events_max):
            if not self.heap or self._over():
                self.ledger.morning()
                return
            self.now, _, act, args = heapq.heappop(self.heap)
            if self.now > self.night.must_end_s:
                living = [rank for host in self.hosts for rank in host.living()]
                if any(_logs_for_ever(rank) for rank in living) or (living and all(map(_is_busy, living))):
                    return  # only lines of log tell whether it hangs: it is the user who ends that
                raise Violation(f"the job has not ended after {self.now:.0f} s")
            self._guarded(act, args)
        raise Violation(f"more than {events_max} events in one night")

    def _over(self) -> bool:
        if self.slurm is not None and self.slurm.pending:
            return False
        ended_s = self.ledger.ended_s
        if ended_s is None or self.asks_left:
            return False
        return self.heap[0][0] > max(ended_s, self.asked_s) + LINGER_S

    def _guarded(self, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            act(*args)
        except Killed:
            self._boss_dies()

    def _boss_dies(self) -> None:
        self.end_boss()
        self.after(self.boss_away_s, self._boss_comes, self.boss)

    def end_boss(self) -> None:
        """End the supervisor; nobody starts another one yet."""
        if not self.boss.alive:
            return
        self.ledger.note("supervisor dies")
        self.boss.alive = False
        for line in self.boss.lines.values():
            line.open = False
            self.after(self.latency_s(), line.agent.line_broke, line)

    def _boss_comes(self, before: Boss) -> None:
        if self.slurm is not None and (self.boss is not before or not (self.slurm.nodes or before.desk)):
            return
        self.boss = Boss(self, desk=before.desk)
        self.boss.start()

    def _ask(self, ask: Ask) -> None:
        wish = "cancels" if ask.cancel else "restarts" if ask.restart else f"resumes {ask.path}"
        self.ledger.note(f"user {wish}")
        self.requests.append(ask)
        self.asks_left -= 1
        self.asked_s = self.now
        self.after(0.1, lambda: self.boss.read_requests())
        if self.slurm is not None and not ask.restart:
            self.slurm.cancelled() if ask.cancel else self.slurm.resumed()

    def request(self, what: e.AllocationEnded) -> None:
        """The submit side says what it heard of the queue."""
        self.requests.append(what)
        self.after(0.1, lambda: self.boss.read_requests())

    # What goes wrong

    def over(self, attempt: int) -> None:
        """Ranks of an attempt have ended on a host; by chance something befalls what it saved, before the next begins."""
        if self.save_rng.random() < self.night.damage:
            self.after(self.save_rng.uniform(0.0, DAMAGE_S_MAX), self._damage, attempt)

    def _damage(self, attempt: int) -> None:
        """Damage or delete one of the newest saves, as long as no rank lives and the next attempt has not begun."""
        if self.ledger.tries[-1].number != attempt or any(host.living() for host in self.hosts):
            return
        whole = [save.main for save in self.save_desk.saves.values() if save.state is CheckpointState.WHOLE]
        if not whole:
            return
        path = self.save_rng.choice(whole[-2:])
        if self.save_rng.random() < 0.5:
            self.files.write(HERE, path, None)
            self.ledger.note(f"fault: {path} is damaged")
        else:
            self.files.disk.pop((HERE, path), None)
            self.ledger.note(f"fault: {path} is deleted")

    def strike(self, fault: Fault) -> None:
        """Let a fault happen, if there is still something it can befall."""
        harm = fault.harm
        self.struck_s = self.now
        self.changed()
        self.ledger.note(f"fault: {harm.value} node {fault.node} rank {fault.rank} for {fault.lasts_s:.1f} s")
        host = self.hosts[fault.node]
        if harm in RANK_HARMS:
            ranks = [rank for host in self.hosts for rank in host.living() if rank.number == fault.rank]
            for rank in ranks:
                if not rank.gang.finished:
                    harm_rank(rank, fault)
        elif harm is Harm.AGENT_KILLED:
            host.lose_agent(keeper=False)
        elif harm in OF_QUEUES:
            if self.slurm is not None:
                self.slurm.strike(fault)
        elif harm is Harm.KEEPER_KILLED or (harm is Harm.HOST_LOST and self.night.local):
            host.lose_agent(keeper=True)
        elif harm is Harm.HOST_LOST:
            self._power(host, False)
            self._heal(fault, self._power, host, True)
        elif harm is Harm.GPU_SICK:
            host.sicken(True)
            self._heal(fault, host.sicken, False)
        elif harm is Harm.KEY_CHANGED:
            host.refuses = True
            self._heal(fault, host.trusted)
        elif harm is Harm.LINE_RESET:
            self._reset(host)
        elif harm is Harm.BOSS_KILLED:
            self._doom(fault)
        elif harm is Harm.SLEPT:
            self.jumped_s += fault.lasts_s
            if self.boss.alive:
                self.boss.slept(fault.lasts_s)
        else:
            self._cut(fault)

    def _heal(self, fault: Fault, act: Callable[..., None], *args: Any) -> None:
        if fault.lasts_s != float("inf"):
            self.after(fault.lasts_s, act, *args)

    def changed(self) -> None:
        """Something befalls a host, or is over."""
        if self.ledger.pool is not None:
            self.ledger.pool.changed()

    def _power(self, host: Host, up: bool) -> None:
        self.changed()
        host.up = up
        if not up:
            host.lose_agent(keeper=True, power=True)
            if self.slurm is not None:
                self.slurm.lost_power(host)
        else:
            if self.slurm is not None:
                self.slurm.back(host.index)
            host.reachable()

    def _reset(self, host: Host) -> None:
        line = host.agent.line if host.agent is not None else None
        if line is not None:
            line.agent.line_broke(line)
            if line.open:
                line.boss.line_closed(line)

    def _doom(self, fault: Fault) -> None:
        if not self.boss.alive:
            return
        self.boss_away_s = fault.lasts_s
        self.boss.points_left = self.rng.randint(0, 6)
        self.after(3.0, self._doomed, self.boss)

    def _doomed(self, boss: Boss) -> None:
        if boss.alive:
            raise Killed

    def _cut(self, fault: Fault) -> None:
        hosts = self.hosts if fault.harm is Harm.CUT_ALL else [self.hosts[fault.node]]
        if self.slurm is not None and self.slurm.nodes:  # nothing comes between the supervisor and its own node
            hosts = [host for host in hosts if host.index != self.slurm.lent[0]]
        for host in hosts:
            self._wire(host, fault.harm, 1)
            self._heal(fault, self._wire, host, fault.harm, -1)

    def _wire(self, host: Host, harm: Harm, by: int) -> None:
        self.changed()
        if harm is Harm.CUT_GANG:
            host.cut_gang += by
            for gang in self.gangs.values():
                gang.review()
            return
        host.cut_up += by if harm is not Harm.CUT_DOWN else 0
        host.cut_down += by if harm is not Harm.CUT_UP else 0
        if by < 0:
            host.reachable()


def _is_busy(rank: Rank) -> bool:
    """Tell whether a rank computes or sleeps for as long as it likes, and waits for no other."""
    free = rank.gang.world.night.limits.hang_timeout_s == 0
    return free and rank.stance is not None and rank.stance.activity in (Activity.SPINNING, Activity.SLEEPING)


def _logs_for_ever(rank: Rank) -> bool:
    """Tell whether a stuck rank logs, and no rank has made a step, or none is seen to wait for another."""
    free = rank.gang.world.night.limits.hang_timeout_s == 0
    living = [one for one in rank.gang.ranks.values() if one.alive]
    logs = rank.hung and rank.stance is not None and rank.stance.logs
    return logs and (not rank.count or (free and not any(map(_waits, living))))


def _waits(rank: Rank) -> bool:
    return rank.stance is None or rank.stance.activity is Activity.WAITING_FOR_RANKS
