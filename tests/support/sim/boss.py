"""The virtual supervisor: the loop's duties to the brain, in their order, and death at every point between them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from orchestrator.brain.brain import SLEPT_S, Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.supervisor.journal.journal_file import Entry

from .agent import Line
from .ledger import Violation

if TYPE_CHECKING:
    from .slurm import Slurm
    from .world import World

LOOKS_MAX = 40
"""How often `decide` may have something to say without any news before that is a loop."""

LINE_SILENT_S_MAX = 9.0
SEND_S_MAX = 15.0
"""How long a checkpoint takes at most to a host that is to begin from it."""


class Killed(Exception):
    """The supervisor dies here."""


class Boss:
    """One supervisor process. All that outlives it is the journal."""

    def __init__(self, world: World, desk: bool = False) -> None:
        """`desk`: on the submit side, for a job that has no nodes any more."""
        self.world = world
        self.desk = desk
        self.record = world.journal.revived()
        self.brain = Brain(self.record.facts, self.record.beaten_at)
        self.alive = True
        self.lines: dict[str, Line] = {}
        self.wakes = 0
        self.wake_s = float("-inf")  # not looked yet
        self.points_left: int | None = None
        self.fetching: list[e.CheckpointFetchStarted] = []
        self._write_beats()
        world.journal.check_record(self.record)

    def start(self) -> None:
        revived = bool(self.world.journal.lines)
        if self.world.slurm is not None:
            revived = revived and self.world.slurm.allocation == self.brain.facts.allocation
            self._enter_allocation(self.world.slurm)
        elif not revived:
            self._take(self.world.planned())
        self._point()
        self._take(dataclasses.replace(e.SupervisorStarted(0.0, 4711), at=self.world.clock))
        if self.world.slurm is not None:
            self.read_requests()
        self.look_at_queue()
        self.look()
        attempt = self.brain.facts.attempt
        for path, name in list(self.brain.facts.fetching.items()):
            assert attempt is not None
            self._fetch(e.CheckpointFetchStarted(0.0, name, attempt.number, path))
        for node in self.brain.facts.every_node():
            host = self.world.host(node.name)
            host.reachable()
            if revived:
                self.world.after(self.world.rng.uniform(0.1, 1.0), host.probe, self.world.lent)
        self.read_requests()
        self.world.after(2.0, self._listen)

    def _enter_allocation(self, slurm: Slurm) -> None:
        """Tell the brain which nodes it has, if it does not know yet."""
        facts = self.brain.facts
        if not self.desk:
            slurm.claimed = slurm.allocation
        if not self.desk and slurm.allocation != facts.allocation:
            self._take(e.AllocationBegan(self.world.clock, slurm.allocation))
        planned = dataclasses.replace(self.world.planned(), at=self.world.clock)
        known = tuple(e.NodePlan(name, ()) for name in facts.nodes)
        if facts.limits is None or (not self.desk and planned.nodes != known):
            self._take(planned)

    def _point(self) -> None:
        """A point between two effects, at which a kill may hit."""
        if self.points_left is not None:
            self.points_left -= 1
            if self.points_left < 0:
                raise Killed

    # News

    def hear(self, event: e.Event) -> None:
        """Journal an event, learn it, and look what follows."""
        self.world.ledger.before_news(self)
        self._point()
        self._take(dataclasses.replace(event, at=self.world.clock))
        self.look()
        if isinstance(event, e.AgentDied):
            for coming in [one for one in self.fetching if one.node == event.node]:
                self._give_up(coming)

    def _take(self, event: e.Event) -> None:
        """Journal an event and learn it."""
        entries = self._write(event)
        self._point()
        self._learn(entries)

    def hear_alive(self, event: e.Event) -> None:
        if self.alive:
            self.hear(event)

    def hear_beat(self, beat: e.Heartbeat) -> None:
        self.world.ledger.before_news(self)
        self.brain.learn(dataclasses.replace(beat, at=self.world.clock))
        if self.record.is_first_step:
            self._write_beats()
        self.world.ledger.desyncs.heard(beat)
        self.world.ledger.notices.heard(beat)
        self.look()

    def receive(self, line: Line, sequence: int, report: e.Event) -> None:
        """Take a report in, once; acknowledge it when it is in the journal."""
        boot = line.agent.boot
        if sequence > self.world.journal.sequences.get(boot, 0):
            event = dataclasses.replace(report, at=self.world.clock)
            self.world.ledger.before_news(self)
            self._point()
            entries = self._write(event)
            self.world.journal.sequences[boot] = sequence
            self._point()
            self._learn(entries)
            if isinstance(event, e.CheckpointFetchStarted):
                self._fetch(event)
        line.down(line.agent.acknowledged, sequence)
        self.look()

    def greet(self, line: Line, kept: list[tuple[int, e.Event]], up: e.AgentUp) -> None:
        node = up.node
        if self.brain.facts.node(node) is None:  # of an allocation long ago: a stranger
            line.open = line.agent.alive = False
            return
        old = self.lines.get(node)
        if old is not None:
            old.open = False
            if self.world.rng.random() < 0.5:
                self.hear(e.AgentDisconnected(0.0, node))
        self.lines[node] = line
        for sequence, report in kept:
            self.receive(line, sequence, report)
        self.hear(up)

    def line_closed(self, line: Line, left: bool = False) -> None:
        line.open = False
        node = line.agent.host.name
        if self.alive and self.lines.get(node) is line:
            del self.lines[node]
            self.hear(e.AgentDisconnected(0.0, node, left))

    def _listen(self) -> None:
        """Close the lines over which nothing comes any more."""
        if not self.alive:
            return
        self.world.after(2.0, self._listen)
        for line in list(self.lines.values()):
            if self.world.now - line.heard_s > LINE_SILENT_S_MAX:
                self.line_closed(line)

    def slept(self, slept_s: float) -> None:
        """The machine slept: the job clock has jumped, and nobody was listened to meanwhile."""
        if slept_s >= SLEPT_S:
            for line in self.lines.values():
                line.open = False
            self.lines.clear()
            self.wake_s = float("-inf")  # not looked yet
            self.hear(e.SupervisorStarted(0.0, 4711))
        else:
            self.look()

    def read_requests(self) -> None:
        if not self.alive:
            return
        for number, ask in enumerate(self.world.requests, start=1):
            if number <= self.brain.facts.requests:
                continue
            if isinstance(ask, e.AllocationEnded):
                self.hear(dataclasses.replace(ask, request=number))
                continue
            if ask.cancel:
                self.hear(e.CancelRequested(0.0, number))
                continue
            if ask.restart:
                self.hear(e.RestartRequested(0.0, number))
                continue
            if (
                self.world.night.hosts is not None
                and self.brain.facts.end is not None
                and not self.world.slurm
            ):
                self._come_anew()
            if ask.nodes and self.brain.facts.end is not None:
                self.world.nodes = ask.nodes
                self.hear(self.world.planned())
            self.hear(e.ResumeRequested(0.0, number, ask.path))
            self.look_at_queue()
            self.look()

    def _come_anew(self) -> None:
        """The supervisor of an ended job has gone home; a resume brings another one."""
        for line in self.lines.values():
            line.open = False
        self.lines.clear()
        self.hear(e.SupervisorStarted(0.0, 4711))

    def look_at_queue(self) -> None:
        """While the job has no hosts yet, learn which jobs were there before it."""
        hosts, facts = self.world.night.hosts, self.brain.facts
        placed = facts.last_places or (facts.attempt is not None and facts.attempt.placed_at is not None)
        if hosts is None or not self.alive or facts.end is not None or placed:
            return
        ahead = tuple(
            f"job-{number}" for number, until_s in enumerate(hosts.ahead) if until_s > self.world.now
        )
        if ahead != facts.ahead:
            self._take(e.QueueSeen(self.world.clock, ahead))

    def job_leaves(self) -> None:
        """An earlier job has its hosts."""
        if self.alive:
            self.world.ledger.before_news(self)
            self.look_at_queue()
            self.look()

    # Checkpoints on their way home

    def _fetch(self, coming: e.CheckpointFetchStarted) -> None:
        hosts = self.world.night.hosts
        assert hosts is not None
        self.fetching.append(coming)
        self.world.after(self.world.rng.uniform(*hosts.copy_s), self._fetched, coming)

    def fetch_on(self, node: str) -> None:
        """The way to a host is open again, and what was under way goes on."""
        for coming in self.fetching:
            if coming.node == node:
                self.world.after(self.world.rng.uniform(0.5, 3.0), self._fetched, coming)

    def _fetched(self, coming: e.CheckpointFetchStarted) -> None:
        world, hosts = self.world, self.world.night.hosts
        assert hosts is not None
        if not self.alive or coming not in self.fetching or not world.host(coming.node).reaches_boss():
            return
        if world.rng.random() < hosts.copies_fail:
            self._give_up(coming)
            return
        self.fetching.remove(coming)
        world.home[coming.path] = world.saved[coming.path]
        count = world.counts[coming.attempt, coming.path]
        self.hear(e.CheckpointFound(0.0, coming.node, coming.attempt, coming.path, count))

    def _give_up(self, coming: e.CheckpointFetchStarted) -> None:
        self.fetching.remove(coming)
        self.hear(e.CheckpointInvalidated(0.0, coming.node, coming.attempt, coming.path))

    # Decisions

    def look(self) -> None:
        """Ask what is to be done, journal it, do it; until there is nothing more to do."""
        for _ in range(LOOKS_MAX):
            decisions, self.wake_s = self.brain.decide(self.world.clock)
            self.world.ledger.after_look(self, decisions)
            if not decisions:
                self._sleep()
                return
            self._write_beats()
            self.world.journal.check_record(self.record)
            entries = self._write(*decisions)
            self._point()
            for entry, decision in zip(entries, decisions, strict=True):
                self._learn([entry])
                self._point()
                self._carry_out(decision)
        raise Violation(f"decide says more than {LOOKS_MAX} times that something is to be done: {decisions}")

    def _write(self, *news: News) -> list[Entry]:
        """Journal beats and this news; return the entries that are still to be learned."""
        entries = []
        for line in news:
            self._learn([self.world.journal.write(beat) for beat in self.brain.beats_before(line)])
            entries.append(self.world.journal.write(line))
            self.world.ledger.written(line)
        return entries

    def _write_beats(self) -> None:
        self._learn([self.world.journal.write(beat) for beat in self.brain.beats()])

    def _learn(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.record.learn(entry)

    def _sleep(self) -> None:
        self.world.journal.keep(self.record)
        self.wakes += 1
        if self.wake_s != float("inf"):
            at_s = max(self.world.now, self.wake_s - self.world.jumped_s) + 1e-6  # never a hair too early
            self.world.at(at_s, self._wake, self.wakes)

    def _wake(self, number: int) -> None:
        if self.alive and number == self.wakes:
            self.look()

    def _carry_out(self, decision: d.Decision) -> None:
        match decision:
            case d.Launch():
                self.world.host(decision.node).launch(self, decision.attempt)
            case d.Prepare() if decision.resume is not None and self.world.travels:
                self.world.after(self.world.rng.uniform(0.2, SEND_S_MAX), self._order, decision)
            case d.Prepare() | d.Probe() | d.Start() | d.Stop() | d.Inspect() | d.Fence() | d.Dismiss():
                self._order(decision)
            case d.Requeue():
                assert self.world.slurm is not None
                self.world.slurm.asked(decision)
            case d.EndJob() if self.world.slurm is not None:
                self.world.slurm.ended()
            case (
                d.BeginAttempt()
                | d.Place()
                | d.Judge()
                | d.Alert()
                | d.ResolveAlert()
                | d.Remark()
                | d.Notice()
                | d.Finish()
                | d.EndJob()
            ):
                pass

    def _order(self, order: d.Prepare | d.Probe | d.Start | d.Stop | d.Inspect | d.Fence | d.Dismiss) -> None:
        line, node = self.lines.get(order.node), self.brain.facts.node(order.node)
        assert node is not None
        # What it was sent for came too late; a spare is sent nothing.
        stale = isinstance(order, d.Prepare) and order.resume is not None and not node.ranks
        if line is not None and not stale:
            line.down(line.agent.obey, order, node.ranks)
