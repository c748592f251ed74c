"""A virtual machine: power, wires, the keeper beside the agent, and the processes of ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from orchestrator.brain.model import events as e
from orchestrator.core import observations
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.wire import orders, reports

from .agent import GPUS_S_MAX, Agent
from .gang import SYNTAX, UNLOADABLE, Rank
from .savedesk import Saved

if TYPE_CHECKING:
    from .boss import Boss
    from .world import World


LATE_S = 3600.0
"""How much later than the others a rank comes that is late: it imports all the while."""


class Host:
    """One node's machine. `cut_*` count the faults that cut a wire now."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.name = f"n{index}"
        self.up = True
        self.cut_up = self.cut_down = self.cut_gang = 0
        self.agent: Agent | None = None
        self.keeper = False
        self.boots = self.launches = self.set_up = 0
        self.processes: list[Rank] = []
        self.refuses = world.night.hosts is not None and index in world.night.hosts.bad
        self.heard_s = float("-inf")
        self.sick = False  # one of its GPUs is
        self.allocation = ""  # in which its keeper was started

    def living(self) -> list[Rank]:
        return [rank for rank in self.processes if rank.alive]

    def reaches_boss(self) -> bool:
        boss = self.world.boss
        return boss.alive and not boss.desk and self.up and not self.cut_up and not self.cut_down

    def reachable(self) -> None:
        """A wire is whole again, or the supervisor is back: the agent, which dials again and again, gets through."""
        if self.world.travels:
            self.world.boss.fetch_on(self.name)
        if self.agent is not None:
            self.world.after(self.world.rng.uniform(0.2, 2.0), self.agent.dial)

    def trusted(self) -> None:
        """It shows the key again that is known."""
        self.refuses = False

    def sicken(self, sick: bool) -> None:
        """A GPU is sick, or healthy again."""
        self.sick = sick
        if self.agent is not None and self.agent.running:
            self.agent.watch_gpus(GPUS_S_MAX)

    # Agents

    def launch(self, boss: Boss, attempt: int) -> None:
        """What a backend does; after a while an agent, a word of failure, or nothing."""
        self.launches += 1
        night, rng = self.world.night, self.world.rng
        if night.hosts is not None:
            self.world.after(rng.uniform(0.05, 3.0), self._land, boss)
        elif self.index == 0 and self.launches <= night.launch_fails:
            failed = e.LaunchFailed(0.0, self.name, "start", "no python3 there", observations.Retryable.TRANSIENT)
            self.world.after(rng.uniform(0.05, 3.0), boss.hear_alive, failed)
        elif self.index == 0 and self.launches <= night.launch_fails + night.launch_lost:
            pass
        elif self.up:
            self.world.after(rng.uniform(0.05, 3.0), self._boot)
        elif rng.random() < 0.7:
            failed = e.LaunchFailed(0.0, self.name, "connect", "no route to host", observations.Retryable.TRANSIENT)
            self.world.after(rng.uniform(1.0, 3.0), boss.hear_alive, failed)

    def _land(self, boss: Boss) -> None:
        """What launching over ssh comes to."""
        night, hosts = self.world.night, self.world.night.hosts
        assert hosts is not None
        if self.index == 0 and self.launches <= night.launch_fails + night.launch_lost:
            if self.launches <= night.launch_fails:
                boss.hear_alive(
                    e.LaunchFailed(0.0, self.name, "python", "it broke off", observations.Retryable.TRANSIENT)
                )
        elif not (self.up and self.reaches_boss()) or (self.world.slurm and not self.world.slurm.has(self)):
            failed = e.LaunchFailed(0.0, self.name, "connect", "no route to host", observations.Retryable.TRANSIENT)
            patience_s = self.world.rng.choice((5.0, 5.0, 12.0))
            self.world.after(self.world.rng.uniform(0.0, patience_s), boss.hear_alive, failed)
        elif self.refuses:
            failed = e.LaunchFailed(
                0.0, self.name, "host key", f"{self.name}'s key is new", observations.Retryable.PERMANENT
            )
            boss.hear_alive(failed)
        elif self.agent is None and not self.keeper and hosts.is_busy(self.index, self.world.now, self.world.now):
            boss.hear_alive(
                e.LaunchFailed(0.0, self.name, "lease", "gpu-0 is held by job-7", observations.Retryable.BUSY)
            )
        else:
            self._boot()

    def _boot(self) -> None:
        if not self.up or self.agent is not None or self.keeper:
            return  # the folder's lock is held: a second agent leaves at once
        self.keeper = True
        self.allocation = self.world.slurm.allocation if self.world.slurm is not None else ""
        self._new_agent()

    def _new_agent(self) -> None:
        if not self.keeper or self.agent is not None:
            return
        self.boots += 1
        self.processes = []
        self.agent = Agent(self, f"{self.name}.{self.boots}")
        self.agent.dial()

    def lose_agent(self, *, keeper: bool, power: bool = False, told: bool = False) -> None:
        """End the agent; its ranks die with it. A keeper that is left starts another one. `told`: it was dismissed."""
        agent, self.agent = self.agent, None
        self.keeper = self.keeper and not keeper
        if agent is not None:
            agent.alive = False
            if agent.line is not None and not power:
                agent.line.up(agent.line.boss.line_closed, agent.line, told)
        for rank in self.living():
            rank.gang.die(rank, signal=9, told=False)
        if self.keeper:
            self.world.after(self.world.rng.uniform(0.3, 1.5), self._new_agent)
        elif agent is not None and (self.world.night.local or self.world.slurm) and not power:
            self.world.after(self.world.rng.uniform(0.1, 2.0), self.probe, self.world.lent)

    def dismissed(self, agent: Agent) -> None:
        if self.agent is agent:
            self.lose_agent(keeper=True, told=True)

    def probe(self, lent: int = 0) -> None:
        """The backend looks whether the agent lives; where nothing answers it cannot say. `lent`: in which allocation,
        since of those before this one it knows nothing."""
        is_known = self.world.slurm is None or self.allocation == self.world.slurm.allocation
        if self.up and self.agent is None and not self.keeper and lent == self.world.lent and is_known:
            self.world.boss.hear_alive(e.AgentDied(0.0, self.name, "its agent was killed by SIGKILL, says its keeper"))

    # Ranks

    def spawn(self, order: orders.Start, ready: int, ranks: tuple[int, ...], call: int = 0) -> tuple[int, ...]:
        world = self.world
        assert self.agent is not None
        resume = self.agent.resume
        version = world.version_read(resume)
        gang = world.gang(order.attempt, world.files.step(version), call)
        fatal = self._dies_of(resume, version)
        world.ledger.starting(self, order, ready, resume)
        self.processes = []
        for number in ranks:
            world.pids += 1
            ready_s = world.now + world.rng.uniform(*world.night.start_s)
            if number == world.night.late_rank and order.attempt == 1:
                ready_s += LATE_S
            rank = Rank(number, self, gang, world.pids, ready_s)
            self.processes.append(rank)
            gang.ranks[number] = rank
            world.at(ready_s, gang.review)
            if fatal is not None:
                world.at(ready_s - 1.0, lambda rank=rank: rank.gang.die(rank, code=1, failure=fatal))
        return tuple(rank.pid for rank in self.processes)

    def _dies_of(self, resume: ResumePoint | None, version: int) -> observations.Failure | None:
        """Return what every rank of a script dies of before its first step, if it does."""
        night = self.world.night
        if night.syntax_error:
            return SYNTAX
        if version not in night.unloadable or resume is None:
            return None
        loading = resume.path if night.names_unloadable else ""
        kind = UNLOADABLE.type if night.raises_unloadable else ""
        return dataclasses.replace(UNLOADABLE, type=kind, loading=loading)

    def exited(
        self, rank: Rank, code: int | None, signal: int | None, failure: observations.Failure | None, oom: bool, ordered: bool
    ) -> None:  # fmt: skip
        if self.agent is not None:
            gang = rank.gang
            count = 0 if self.world.night.prints else gang.count
            exit = reports.Exited(
                gang.attempt,
                rank.number,
                code,
                signal,
                count,
                failure,
                oom,
                ordered,
                rank.alone,
            )
            self.agent.exited(exit)

    def found(self, attempt: int, path: str, count: int, version: int) -> None:
        """The agent sees a save, and reports it once."""
        agent = self.agent
        if agent is not None and agent.started == attempt and version not in agent.told:
            agent.told.add(version)
            agent.post(Saved(0.0, self.name, attempt, path, count, version))
