"""The virtual agent: what the real one does, without processes. And the line between it and the supervisor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestrator.brain.model import events as e
from orchestrator.core import observations
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat

from . import counts, network
from .savedesk import HERE, Saved
from .stance import Eyes

if TYPE_CHECKING:
    from .boss import Boss
    from .gang import Rank
    from .host import Host

HEARTBEAT_S = 2.0
ACK_S_MAX = 8.0
"""How long an agent waits for the echo of a beat before it takes the line for dead."""


GPUS_S_MAX = 20.0
"""How long it takes at most until an agent whose ranks run sees what has become of their GPUs."""

SICK_GPU = observations.GpuState("3", "wants a reset", "14:02:11 UTC")

AWAY_S = 90.0
"""For how long ranks make steps until an agent without contact takes its supervisor for away."""


class Line:
    """One TCP connection: each way in order, whole, or cut off for good. What a cut swallowed never comes."""

    def __init__(self, agent: Agent, boss: Boss) -> None:
        self.agent = agent
        self.boss = boss
        self.open = True  # as the supervisor sees it
        self.black_up = self.black_down = False
        self.up_s = self.down_s = self.heard_s = self.opened_s = agent.world.now

    def up(self, deliver: Callable[..., None], *args: Any) -> None:
        world = self.agent.world
        self.up_s = max(self.up_s, world.now + world.latency_s())
        world.at(self.up_s, self._arrive_up, deliver, args)

    def _arrive_up(self, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        host = self.agent.host
        self.black_up = self.black_up or host.cut_up > 0 or not host.up
        if self.black_up:
            return
        if not self.open or not self.boss.alive:
            self.agent.line_broke(self)
            return
        self.heard_s = self.agent.world.now
        if deliver != self.boss.line_closed:  # the end of a line is no word of the host
            host.heard_s = self.agent.world.clock
        deliver(*args)

    def down(self, deliver: Callable[..., None], *args: Any) -> None:
        world = self.agent.world
        self.down_s = max(self.down_s, world.now + world.latency_s())
        world.at(self.down_s, self._arrive_down, deliver, args)

    def _arrive_down(self, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        host = self.agent.host
        self.black_down = self.black_down or host.cut_down > 0 or not host.up
        if not self.black_down and self.agent.alive and self.agent.line is self:
            deliver(*args)


class Agent:
    """One agent process."""

    def __init__(self, host: Host, boot: str) -> None:
        self.host = host
        self.world = host.world
        self.boot = boot
        self.alive = True
        self.line: Line | None = None
        self.seen = self.running = self.started = self.ready = self.preparing = 0
        self.address, self.port = "", 0
        self.resume: ResumePoint | None = None  # of the last order to prepare
        # The attempt whose script runs, the launcher call that it has come to, and the one whose ranks were started
        self.script = self.call = self.started_call = self.stopped = 0
        self.listens = False  # on the port, for those who try to reach it
        self.stopping, self.how = False, "asked"
        self.sequence = 0
        self.kept: list[tuple[int, e.Event | Saved]] = []
        self.told: set[int] = set()  # the versions of saves that it has reported
        self.acked_s = self.started_s = self.world.now
        self.quiet_s = self.base_s = self.world.night.limits.fence_s
        self.alone_s = 0.0
        self.opened_s = self.world.now
        self.ticking = False
        self.eyes = Eyes()
        self.gpus: tuple[observations.GpuState, ...] = ()  # as it has reported them

    # The line

    def dial(self) -> None:
        """Connect if the supervisor can be reached; else `Host.reachable` has it dialled again."""
        if not self.alive or self.line is not None or not self.host.reaches_boss():
            return
        line = self.line = Line(self, self.world.boss)
        self.opened_s = self.world.now
        seen = tuple(observations.ReportedRank(rank.number, rank.pid, not rank.alive) for rank in self.host.processes)
        up = e.AgentUp(0.0, self.host.name, self.boot, self.running, self.ready, self.address, self.port, seen)
        line.up(self.world.boss.greet, line, list(self.kept), up)
        self.tick_soon()

    def line_broke(self, line: Line) -> None:
        if self.line is line:
            self.line = None
            self.world.after(self.world.rng.uniform(0.2, 2.0), self.dial)

    def tick_soon(self) -> None:
        if not self.ticking:
            self.ticking = True
            self.world.after(HEARTBEAT_S * self.world.rng.random(), self._tick)

    def _tick(self) -> None:
        self.ticking = self.alive and (self.line is not None or bool(self.running))
        if not self.ticking:
            return
        self.world.after(HEARTBEAT_S, self._tick)
        self._fence()
        line = self.line
        if line is None:
            return
        if self.world.now - max(self.acked_s, line.opened_s) > ACK_S_MAX:
            self.line = None
            self.world.after(self.world.rng.uniform(0.2, 2.0), self.dial)
            line.up(line.boss.line_closed, line)
        elif line.up_s <= self.world.now:
            line._arrive_up(self._beat, (line,))

    def _beat(self, line: Line) -> None:
        """Give a beat over and take its echo, at once: what beats wait for each other is not what nights are about."""
        beats = []
        for rank in self.host.processes:
            rank.gang.settle()
            count = rank.count
            cpu_s = 0.4 * (min(self.world.now, rank.ready_s) - self.started_s) + 0.5 * count
            state, median_step_s = (
                rank.state if rank.alive else "Z",
                self.world.night.step_s if count >= 4 else None,
            )
            beats.append(
                RankHeartbeat(
                    rank.number,
                    count,
                    state,
                    count * 20 + rank.logged,
                    cpu_s + rank.burnt_s,
                    median_step_s=median_step_s,
                    exiting=rank.left,
                    alone=rank.alone,
                    training=rank.training,
                    passes=rank.passes,
                    median_pass_s=self.world.night.step_s if rank.passes else None,
                    nonfinite_losses=rank.nonfinite_losses,
                    parameter_sums=rank.new_sums(),
                    groups=() if rank.is_silent else counts.GROUPS,
                    collective_counts=() if rank.is_silent else counts.marks(rank),
                )
            )
        if not line.black_down and not self.host.cut_down:
            self.acked_s = self.world.now
        alive = tuple(b for b, rank in zip(beats, self.host.processes, strict=True) if rank.alive)
        line.boss.hear_beat(e.FromNode(0.0, self.host.name, reports.Heartbeat(self.running, alive)))

    def post(self, report: reports.NodeReport | Saved) -> None:
        """Report, and keep the report until the supervisor has it in its journal."""
        if not self.alive:
            return
        event = report if isinstance(report, Saved) else e.FromNode(0.0, self.host.name, report)
        self.sequence += 1
        self.kept.append((self.sequence, event))
        if self.line is not None:
            self.line.up(self.line.boss.receive, self.line, self.sequence, event)

    def watch_gpus(self, within_s: float) -> None:
        self.world.after(self.world.rng.uniform(0.1, within_s), self._tell_gpus)

    def _tell_gpus(self) -> None:
        gpus = (SICK_GPU,) if self.host.sick else ()
        if self.alive and gpus != self.gpus:
            self.gpus = gpus
            self.post(reports.GpusChanged(self.seen, gpus))

    def acknowledged(self, sequence: int) -> None:
        self.kept = [(number, report) for number, report in self.kept if number > sequence]

    def _fence(self) -> None:
        """Stop the ranks when nobody was heard for as long as was told, and they made no step; those that have made
        none in their attempt may be left alone for longer."""
        alive, unheard_s = self.host.living(), self.world.now - self.acked_s
        if not alive and self.script and self.quiet_s is not None and unheard_s > self.quiet_s:
            self.script, self.running = 0, 0
            self.post(reports.Stopped(self.seen, "fenced"))
        if not alive or self.quiet_s is None or self.base_s is None or unheard_s <= self.base_s:
            return
        if self.world.slurm is not None and self.world.slurm.claimed != self.host.allocation:
            self.host.lose_agent(keeper=True)  # the job folder says that the job goes on elsewhere
            return
        gang = alive[0].gang
        gang.settle()
        has_stepped = any(rank.count for rank in self.host.processes)
        is_away = gang.stepped_s - max(self.acked_s, self.opened_s) > AWAY_S
        longer_s = self.world.night.limits.disconnected_timeout_s if is_away else 0.0
        limit_s = max(self.quiet_s, longer_s if has_stepped else self.alone_s)
        if min(unheard_s, self.world.now - max(gang.stepped_s, self.started_s)) <= limit_s:
            return
        self.stopping, self.how, self.script = True, "fenced", 0
        for rank in alive:
            self._kill(rank)

    # Orders

    def obey(self, order: orders.NodeOrder, ranks: tuple[int, ...] = ()) -> None:
        """Do what was ordered; `ranks` are those that the attempt has here."""
        if isinstance(order, orders.Dismiss):
            self.host.dismissed(self)
            return
        if order.attempt < self.seen:
            return
        self.seen = order.attempt
        match order:
            case orders.Prepare():
                self._prepare(order, ranks)
            case orders.Probe():
                self.world.after(self.world.rng.uniform(0.05, 1.0), self._probe, order)
            case orders.Start():
                self._start(order, ranks)
            case orders.Stop():
                if order.may_save:
                    self._save(order.attempt)
                self._stop(order.attempt, order.grace_s)
            case orders.Fence():
                self.quiet_s, self.alone_s = order.contact_timeout_s, order.startup_timeout_s
            case orders.Inspect():
                looks = tuple(self.eyes.look(rank) for rank in self.host.living())
                looked = reports.Inspected(order.attempt, order.inspection, looks)
                self.world.after(self.world.look_rng.uniform(*self.world.night.look_s), self.post, looked)
            case _:
                raise AssertionError(f"no order: {order}")

    def _prepare(self, order: orders.Prepare, ranks: tuple[int, ...]) -> None:
        attempt = order.attempt
        if self.preparing == attempt or self.ready == attempt:
            return
        self.preparing, self.resume = attempt, order.resume
        if self.running and self.running < attempt:
            self.stopping, self.script = True, 0
            for rank in self.host.living():
                self._kill(rank)
            self._maybe_stopped("asked")
        setup_s = self.world.night.setup_s if self.host.set_up == 0 else 0.1
        self.world.after(self.world.rng.uniform(0.3, 1.0) * setup_s, self._set_up, order, ranks)

    def _set_up(self, order: orders.Prepare, ranks: tuple[int, ...]) -> None:
        attempt = order.attempt
        if not self.alive or self.seen != attempt or self.preparing != attempt:
            return
        if self.host.living():  # KILL has not worked: it goes on trying
            self.world.after(1.0, self._set_up, order, ranks)
            return
        is_copy = self.world.travels  # one that is bad is brought again
        if order.resume is not None and self._is_spoiled(order.resume) and not is_copy:
            reason = "the checkpoint to resume from is not complete on this host"
            self.post(reports.PrepareFailed(attempt, reason, "", order.resume.save))
            return
        hosts, first = self.world.night.hosts, ranks[:1] == (0,)
        if hosts is not None and self.host.index in hosts.stuck:
            return
        unfit = hosts is not None and self.host.index in hosts.unfit
        if unfit or (self.host.index == 0 and attempt <= self.world.night.setup_fails):
            self.post(reports.PrepareFailed(attempt, "setup line 1 exited with code 1", "no module"))
            return
        self.host.set_up = attempt
        if self.world.night.calls and attempt <= self.stopped:
            return  # its order came while setup lines ran
        if self.world.night.calls:
            self.script = self.running = attempt
            self.call = self.started_call = 0
            self.stopping, self.how, self.host.processes = False, "asked", []
            self.tick_soon()
            self.world.after(self.world.rng.uniform(0.1, 1.0), self._go_on, attempt)
            return
        self.ready = attempt
        self.address = f"10.0.0.{self.host.index + 1}"
        self.port = self.world.rng.randint(20000, 60000) if first else 0
        self.listens = first
        addresses = network.addresses(self.host) if first and hosts and self.world.nodes > 1 else ()
        fault = "/dev/shm has 0.06 GB" if self.host.index == self.world.night.full_node else ""
        self.post(reports.Prepared(attempt, self.address, self.port, addresses, memory_fault=fault))

    def _go_on(self, attempt: int) -> None:
        """The script of an attempt comes to its next launcher call, or to its end."""
        night = self.world.night
        if not self.alive or self.script != attempt or self.stopping:
            return
        is_odd = self.host.index == night.script_odd and self.call + 1 == night.calls
        if is_odd or self.call == night.calls:
            is_first = self.host.index == 0 and attempt == 1
            self.script = 0
            code = night.script_code if is_first else 0
            self.post(reports.LaunchEnded(attempt, self.call, code, "bye"))
            return
        self.call += 1
        self.host.processes = []
        self.ready = attempt
        self.address = f"10.0.0.{self.host.index + 1}"
        self.port = self.world.rng.randint(20000, 60000)
        self.post(reports.Prepared(attempt, self.address, self.port, (), self.call))

    def _is_spoiled(self, resume: ResumePoint) -> bool:
        """Tell whether a save is not whole any more, though it was when it was compared."""
        return self.world.version_read(resume) in self.world.night.spoiled

    def _probe(self, order: orders.Probe) -> None:
        """Try the addresses one after the other; what answers must be the right host."""
        if self.alive and self.seen == order.attempt:
            reached, missed = network.probe(self.host, order)
            self.post(reports.Probed(order.attempt, reached, missed))

    def _start(self, order: orders.Start, ranks: tuple[int, ...]) -> None:
        if self.started >= order.attempt and self.started_call >= self.call:
            return
        if self.world.night.calls and self.script != order.attempt:
            return  # it has stopped its script
        self.started_call = self.call
        self.started = self.running = order.attempt
        self.stopping, self.how, self.listens = False, "asked", False
        self.started_s = self.world.now
        self.alone_s = 0.0
        pids = self.host.spawn(order, self.ready, ranks, self.call)
        self.post(reports.Started(order.attempt, pids))
        if self.host.sick:
            self.watch_gpus(GPUS_S_MAX)
        self.tick_soon()

    def _stop(self, attempt: int, grace_s: float) -> None:
        self.stopped = max(self.stopped, attempt)
        if self.stopping and self.running:
            return
        if not self.running:
            self.post(reports.Stopped(attempt, "asked"))
            return
        self.stopping, self.script = True, 0
        for rank in self.host.living():
            if rank.stands:
                self.world.after(grace_s, self._kill, rank)
            else:
                self.world.after(self.world.rng.uniform(0.05, 1.2) * grace_s, self._end, rank, grace_s)
        self._maybe_stopped("asked")

    def _save(self, attempt: int) -> None:
        """Ranks that are told to save themselves write a checkpoint before they leave, if they all still can."""
        gang = self.world.gangs.get(attempt)
        if (
            gang is not None
            and self.running == attempt
            and any(rank.host is self.host for rank in gang.ranks.values() if not rank.number)
        ):
            gang.save_now()

    def _end(self, rank: Rank, grace_s: float) -> None:
        """A rank leaves on TERM, some with code 0; a stubborn one only on KILL."""
        roll = self.world.rng.random()
        if roll < 0.15:
            rank.gang.die(rank, code=0, ordered=True)
        elif roll < 0.7:
            rank.gang.die(rank, signal=15, ordered=True)
        else:
            self.world.after(grace_s, self._kill, rank)

    def _kill(self, rank: Rank) -> None:
        wait_s = rank.immortal_until_s - self.world.now
        if wait_s <= 0:
            rank.gang.die(rank, signal=9, ordered=True)
        elif wait_s != float("inf"):
            self.world.after(wait_s, self._kill, rank)

    def exited(self, exit: reports.Exited) -> None:
        self.post(dataclasses.replace(exit, ordered=exit.ordered or self.stopping))
        if self.host.sick and exit.code != 0 and not self.stopping:
            self.watch_gpus(3.0)
        if self.stopping:
            self._maybe_stopped(self.how)
        elif self.script:
            if all(not rank.alive and rank.ended_well for rank in self.host.processes):
                self.world.after(self.world.rng.uniform(0.1, 2.0), self._go_on, self.script)
        elif not self.host.living() and self.world.night.says_ended and not self.world.night.calls:
            self._maybe_stopped("ended")

    def _maybe_stopped(self, how: str) -> None:
        if self.running and not self.host.living():
            attempt, self.running = self.running, 0
            gang = self.world.gangs.get(attempt)
            if gang is None:  # only its script has run
                self.post(reports.Stopped(attempt, how))
                return
            save = self.world.last_save(attempt)
            if how == "asked" and save is not None and 0 in gang.ranks and gang.ranks[0].host is self.host:
                self.host.found(attempt, *save)
                is_free = gang.saved_itself or gang.finished or self.world.travels
                is_free = is_free or gang.count < self.world.night.save_steps  # it is of an earlier launcher call
                is_cut_off = not is_free and self.world.rng.random() < 0.2
                if is_cut_off and gang.count >= self.world.night.save_steps:  # else of an earlier launcher call
                    self._cut_off(attempt, *save)
            self.post(reports.Stopped(attempt, how))
            self.world.over(attempt)

    def _cut_off(self, attempt: int, path: str, count: int, version: int) -> None:
        """A kill cuts the rewriting of a save off, which is seen or not."""
        if self.world.ledger.tries[-1].number != attempt:
            return  # its ranks have long been gone
        torn = self.world.files.write(HERE, path, None)
        if self.world.save_rng.random() < 0.5:
            self.post(Saved(0.0, self.host.name, attempt, path, count, torn, is_torn=True))
