"""The virtual supervisor: the loop's duties to the brain, in their order, and death at every point between them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from orchestrator.brain.brain import SLEEP_S_MIN, Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core.checkpoints.checkpoint import CompletionReason
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.wire import orders, reports
from orchestrator.journal.journal_file import JournalEntry
from tests.support.brain_story import planned_node

from .agent import Line
from .ledger import Violation
from .savedesk import Attempt, Saved, SaveDesk

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
        self.brain = Brain(self.record.facts, self.record.heartbeat_at)
        self.alive = True
        self.lines: dict[str, Line] = {}
        self.wakes = 0
        self.wake_s = float("-inf")  # not looked yet
        self.points_left: int | None = None
        self.fetching: list[int] = []  # saves, by number
        self.told: set[int] = set()  # attempts of which it is known what their script had read
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
        self.saves.begin(self.world.clock, self.brain.facts)
        self._take_saves()
        if self.world.slurm is not None:
            self.read_requests()
        self.look_at_queue()
        self.look()
        for save in self.saves.coming():
            self._fetch(save.number)
        for number in self.saves.open:
            self._close_later(number)
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
        known = tuple(planned_node(name) for name in facts.nodes)
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
            for number in [one for one in self.fetching if self._host_of(one) == event.node]:
                self._fetch_ends(number, f"the agent on {event.node} is gone")

    def _take(self, event: e.Event) -> None:
        """Journal an event and learn it."""
        entries = self._write(event)
        self._point()
        self._learn(entries)

    def hear_alive(self, event: e.Event) -> None:
        if self.alive:
            self.hear(event)

    def hear_beat(self, beat: e.FromNode) -> None:
        self.world.ledger.before_news(self)
        self.brain.learn(dataclasses.replace(beat, at=self.world.clock))
        if self.record.is_first_step:
            self._write_beats()
        assert isinstance(beat.report, reports.Heartbeat)
        self.world.ledger.desyncs.heard(beat.report)
        self.world.ledger.notices.heard(beat.report)
        self.look()
        self._tell_beginning(beat.report)

    def _tell_beginning(self, beat: reports.Heartbeat) -> None:
        """Learn once in an attempt, after its first step, which save its script had read; none where there is none to read."""
        attempt = self.brain.facts.attempt
        is_due = self.world.night.tells_reads and attempt is not None and attempt.number not in self.told
        if (
            not is_due
            or attempt is None
            or beat.attempt != attempt.number
            or not any(rank.steps for rank in beat.ranks)
        ):
            return
        self.told.add(attempt.number)
        if attempt.resume is not None:
            save = 0 if self.world.night.begins_anew else attempt.resume.save
            self.hear(e.CheckpointRead(0.0, attempt.number, save))

    def receive(self, line: Line, sequence: int, report: e.Event | Saved) -> None:
        """Take a report in, once; acknowledge it when it is in the journal."""
        boot = line.agent.boot
        if sequence > self.world.journal.sequences.get(boot, 0):
            report = dataclasses.replace(report, at=self.world.clock)
            self.world.ledger.before_news(self)
            self._point()
            if isinstance(report, Saved):
                self._enter(report, boot, sequence)
            else:
                entries = self._write(report)
                self.world.journal.sequences[boot] = sequence
                self._point()
                self._learn(entries)
            if isinstance(report, e.FromNode) and isinstance(report.report, reports.Stopped):
                self._close_saves(report.report.attempt)
        line.down(line.agent.acknowledged, sequence)
        self.look()

    def greet(self, line: Line, kept: list[tuple[int, e.Event | Saved]], up: e.AgentUp) -> None:
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
        if slept_s >= SLEEP_S_MIN:
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
            if number <= self.brain.facts.last_request:
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
            if self.world.night.hosts is not None and self.brain.facts.end is not None and not self.world.slurm:
                self._come_anew()
            if ask.nodes and self.brain.facts.end is not None:
                self.world.nodes = ask.nodes
                self.hear(self.world.planned())
            self.hear(e.ResumeRequested(0.0, number, self.saves.named(ask.path)))
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
        placed = facts.last_hosts or (facts.attempt is not None and facts.attempt.placed_at is not None)
        if hosts is None or not self.alive or facts.end is not None or placed:
            return
        ahead = tuple(f"job-{number}" for number, until_s in enumerate(hosts.ahead) if until_s > self.world.now)
        if ahead != facts.jobs_ahead:
            self._take(e.QueueSeen(self.world.clock, ahead))

    def job_leaves(self) -> None:
        """An earlier job has its hosts."""
        if self.alive:
            self.world.ledger.before_news(self)
            self.look_at_queue()
            self.look()

    # Saves

    @property
    def saves(self) -> SaveDesk:
        return self.world.save_desk

    def _attempt(self) -> Attempt:
        facts = self.brain.facts
        attempt = facts.attempt
        if attempt is None:
            return Attempt(0, 0, 0)
        return Attempt(attempt.number, attempt.call_step, len(facts.ranks))

    def _enter(self, report: Saved, boot: str, sequence: int) -> None:
        """Enter a save in the ledger, then journal what follows; the report is known with the first line of that."""
        longest_s = self.world.night.closes_s[1]
        save = self.saves.seen(self.world.clock, report, self._attempt(), closes=not longest_s)
        self._take_saves(boot, sequence)
        self.world.journal.sequences[boot] = sequence
        if save is None:
            stale = f"{report.node} reports {report.path} of attempt {report.attempt}, which is not entered"
            self.world.ledger.note(stale)
        else:
            self.world.ledger.entered(report)
            if save.number in self.saves.open:
                self._close_later(save.number)
            elif save.is_in_transit and save.number not in self.fetching:
                self._fetch(save.number)

    def _take_saves(self, boot: str = "", sequence: int = 0) -> None:
        """Journal and learn what is new of saves."""
        for event in self.saves.news():
            self._point()
            entries = self._write(event)
            if boot:
                self.world.journal.sequences[boot] = sequence
            self._point()
            self._learn(entries)
            self.saves.mirror(self.brain.facts)

    def _hear_saves(self) -> None:
        self.world.ledger.before_news(self)
        self._take_saves()
        self.look()

    def _close_later(self, number: int) -> None:
        self.world.after(self.world.save_rng.uniform(*self.world.night.closes_s), self._goes_on, number)

    def _goes_on(self, number: int) -> None:
        """Close a save if every rank has gone on since; while some stand, look again later."""
        report = self.saves.open.get(number)
        gang = self.world.gangs.get(report.attempt) if report is not None else None
        if not self.alive or report is None or gang is None or report.attempt != self._attempt().number:
            return
        if gang.stepping:
            self.world.ledger.before_news(self)
            self._close(number, is_whole=True, by=CompletionReason.STEPS)
            self.look()
        elif any(rank.alive for rank in gang.ranks.values()):
            self._close_later(number)

    def _close_saves(self, attempt: int) -> None:
        """Close the books on an attempt of which nothing runs any more: what its format writes last tells."""
        gang = self.world.gangs.get(attempt)
        if gang is None or any(rank.alive for rank in gang.ranks.values()):
            return
        for number in [one for one, report in self.saves.open.items() if report.attempt == attempt]:
            self._close(number, is_whole=self.world.save_rng.random() < 0.5, by=CompletionReason.FINAL_FILE)

    def _close(self, number: int, *, is_whole: bool, by: CompletionReason) -> None:
        self.saves.close(self.world.clock, number, self._attempt(), is_whole=is_whole, by=by)
        self._take_saves()
        if self.saves.saves[number].is_in_transit:
            self._fetch(number)

    def _compared(self, order: d.CompareCheckpoint) -> None:
        if self.alive:
            self._close_saves(order.attempt)
            self.saves.compared(self.world.clock, order)
            self._hear_saves()

    # Saves on their way home

    def _host_of(self, number: int) -> str:
        return self.saves.saves[number].locations[0].host

    def _fetch(self, number: int) -> None:
        hosts = self.world.night.hosts
        assert hosts is not None
        self.fetching.append(number)
        self.world.after(self.world.rng.uniform(*hosts.copy_s), self._fetched, number)

    def fetch_on(self, node: str) -> None:
        """The way to a host is open again, and what was under way goes on."""
        for number in self.fetching:
            if self._host_of(number) == node:
                self.world.after(self.world.rng.uniform(0.5, 3.0), self._fetched, number)

    def _fetched(self, number: int) -> None:
        world, hosts = self.world, self.world.night.hosts
        assert hosts is not None
        is_on = self.alive and number in self.fetching
        if is_on and world.host(self._host_of(number)).reaches_boss():
            self._fetch_ends(number, "the copy broke off" if world.rng.random() < hosts.copies_fail else "")

    def _fetch_ends(self, number: int, fault: str) -> None:
        self.fetching.remove(number)
        if not self.saves.saves[number].is_in_transit:
            return  # another one has come in its place
        self.saves.fetched(self.world.clock, number, fault)
        self._hear_saves()

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

    def _write(self, *news: News) -> list[JournalEntry]:
        """Journal beats and this news; return the entries that are still to be learned."""
        entries = []
        for line in news:
            self._learn([self.world.journal.write(beat) for beat in self.brain.heartbeats_before(line)])
            entries.append(self.world.journal.write(line))
            self.world.ledger.written(line)
        return entries

    def _write_beats(self) -> None:
        self._learn([self.world.journal.write(beat) for beat in self.brain.take_heartbeats()])

    def _learn(self, entries: list[JournalEntry]) -> None:
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
            case d.To(order=orders.Prepare(resume=ResumePoint())) if self.world.travels:
                self.world.after(self.world.rng.uniform(0.2, SEND_S_MAX), self._order, decision)
            case d.To():
                self._order(decision)
            case d.Requeue():
                assert self.world.slurm is not None
                self.world.slurm.asked(decision)
            case d.CompareCheckpoint():
                self.world.after(self.world.save_rng.uniform(*self.world.night.compare_s), self._compared, decision)
            case d.DistrustCheckpoint() | d.Judge():
                self.saves.mirror(self.brain.facts)
            case d.EndJob():
                self.saves.mirror(self.brain.facts)
                if self.world.slurm is not None:
                    self.world.slurm.ended()
            case d.BeginAttempt() | d.Place() | d.Notice() | d.Finish() | d.NextCall():
                pass

    def _order(self, to: d.To) -> None:
        line, node, order = self.lines.get(to.node), self.brain.facts.node(to.node), to.order
        assert node is not None
        # What it was sent for came too late; a spare is sent nothing.
        stale = isinstance(order, orders.Prepare) and order.resume is not None and not node.ranks
        if line is not None and not stale:
            line.down(line.agent.obey, order, node.ranks)
