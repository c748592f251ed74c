"""The supervisor: one process per job, one loop. Receive, learn, decide, journal, carry out.

Rules: only the holder of the job folder's lock acts. What was learned and decided is on disk before it is carried out
and before agents get their acknowledgement. Nothing is decided here. If this process dies, the ranks keep running,
and the next supervisor replays the journal.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

from orchestrator.agent.outputs import rank_files
from orchestrator.backends.api import Backend
from orchestrator.brain.brain import SLEPT_S
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import codec
from orchestrator.core.host import host_memory, procfs
from orchestrator.core.jobdir import full_disk, locks, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.series import SeriesWriter
from orchestrator.core.planned import Gang
from orchestrator.core.wire import reports
from orchestrator.journal.journal_file import Sleep
from orchestrator.journal.journaled_brain import JournaledBrain
from orchestrator.supervisor import allocation_claim, translation
from orchestrator.supervisor import status as status_object
from orchestrator.supervisor.agent_connections import (
    AgentConnections,
    AgentDropped,
    AgentReady,
    LinkEvent,
    Wake,
)
from orchestrator.supervisor.executor import Executor, may_shut_down, rank_gang, save_gang, undismissed_hosts
from orchestrator.supervisor.heartbeat_tracker import HeartbeatTracker, WorkShare
from orchestrator.supervisor.host_queue import HostQueue
from orchestrator.supervisor.notifications import OWED_S_MAX, Notifier
from orchestrator.supervisor.request_inbox import RequestInbox, is_resumed
from orchestrator.supervisor.transfers.log_receiver import LogReceiveError, LogReceiver
from orchestrator.supervisor.transfers.save_desk import SaveDesk

CHORE_S = 0.5
"""How often requests, agents' processes and the status file are checked."""

WORK_SHARE_MAX = 0.05
"""The share of a processor for decisions on heartbeats, and as much again for the status file."""

DECIDE_PAUSE_S_MAX = 0.5
STATUS_PAUSE_S_MAX = 2.0
"""The longest that either is delayed for that."""

DECISIONS_MAX = 10_000
"""More rounds of decisions in a row than this are a bug."""

TURNING_POINTS = (d.BeginAttempt, d.DistrustSave, d.Place, d.Judge, d.Notice, d.Finish, d.EndJob, d.Requeue)
"""The decisions that are printed, and shown in a durable status."""

EVERYWHERE, HERE = "0.0.0.0", "127.0.0.1"


class Supervisor:
    """The loop of one job, and all parts that it drives."""

    def __init__(
        self, job: JobDir, plan: Plan, job_secrets: translation.JobSecrets, backend: Backend
    ) -> None:
        self._job = job
        self._plan = plan
        self._mask = job_secrets.mask
        self._signature = locks.Signature(job.lock)
        self._heartbeats = HeartbeatTracker(plan.heartbeat_s)
        self._requests = RequestInbox(job.requests, job.plan)
        self._brain = JournaledBrain(job, procfs.boot_id())
        # A resume may have dropped nodes: their agents are still to be stopped and dismissed.
        earlier = [node.name for node in self._brain.facts.every_node()]
        self._nodes = tuple(dict.fromkeys([*(node.name for node in plan.nodes), *earlier]))
        self._connections = AgentConnections(plan.id, job_secrets.token, self._nodes)
        self.stay = allocation_claim.SlurmStay(job, plan, backend.allocation)
        self._wake_s = self._chore_due_s = self._show_due_s = 0.0
        self._rounds = WorkShare(WORK_SHARE_MAX, DECIDE_PAUSE_S_MAX)
        self._views = WorkShare(WORK_SHARE_MAX, STATUS_PAUSE_S_MAX)
        self._logs = LogReceiver(job)
        self._moved_s = 0.0  # when bytes of a transfer last came
        self._desk = SaveDesk(job, plan, backend.copier, self._connections.wake)
        self._executor = Executor(job, plan, job_secrets, backend, self._connections, self._desk)
        hosts = [node.host for node in plan.nodes]
        self._queue = HostQueue(job, hosts, plan.created_at) if plan.ssh else None
        env = {**job_secrets.outer, **plan.env, **job_secrets.secrets}
        self._notifier = Notifier(plan, job.root, env, self._mask, job_secrets.webhook)
        self._slept, self._minded_s = Sleep(SLEPT_S), self._brain.now_s()
        self._patience = full_disk.Patience()
        self._series = SeriesWriter(job.series)
        self._shared: tuple[str, ...] = ()  # which other jobs write the same files
        self._seeks = False  # waits for hosts whose agents could not be dismissed, or for notifications
        backend.wake = self._connections.wake

    @property
    def end(self) -> d.JobEnd | None:
        """How the job ended, None while it has not."""
        return self._brain.facts.end

    async def run(self) -> int:
        """Act until the job has ended and its agents have left; return the number of the last request taken."""
        host = EVERYWHERE if self.stay.addresses else HERE
        port = await self._connections.listen_again(self._job, host)
        print(f"{status_object.iso(time.time())} supervisor {os.getpid()} listens on port {port}", flush=True)
        self._begin(port)
        while not self.stay.is_idle(self._brain.facts):
            with self._rounds:
                self._decide()
                self._acknowledge()
            if self.stay.is_over or self._is_over():
                break
            due_s = min(self._wake_s, self._chore_due_s)
            link_events = await self._connections.hear(due_s - self._brain.now_s(), self._rounds.pause_s)
            self._mind_pause()
            for link_event in link_events:
                self._handle(link_event)
            for node, chunk_ack in self._logs.owed():
                self._connections.send(node, chunk_ack)
            if self._brain.now_s() >= self._chore_due_s:
                with self._patience:
                    self._chores()
        self._notifier.close()
        self._chores()  # the last events are still learned and shown
        self._show(durable=True)
        await self._connections.close()
        self._executor.close()
        self._logs.close()
        self._desk.close()
        if self._queue is not None:
            self._queue.leave()
        self._brain.close()
        if self.end is not None and self._job.plan.exists():  # it may be deleted by now
            full_disk.wait_for(self._job.ended.touch)
            if self._is_resumed():
                self._job.ended.unlink(missing_ok=True)  # as the resume has done already
        return self._brain.facts.requests

    def _begin(self, port: int) -> None:
        """Continue the job from the end of the journal."""
        now_s = self._brain.now_s()
        self._learn(self.stay.begin(self._brain.facts, self._brain.requeue, now_s))
        self._brain.learn(e.SupervisorStarted(now_s, os.getpid()))
        self._desk.begin(self._brain.facts, now_s)
        self._learn(self._desk.news(now_s))
        self._learn(self._requests.since(self._brain.facts.requests, now_s))
        self._executor.endpoint = "\n".join(f"{host}:{port}" for host in self.stay.addresses or [HERE])
        if self._brain.facts.end is not None:
            return
        self._job.ended.unlink(missing_ok=True)
        self._executor.begin(self._brain.facts)
        self._chores()
        # Last: a process that waits for this file then finds a status that knows of its resume.
        self._executor.publish_endpoint()

    def _is_over(self) -> bool:
        """Return whether nothing is left to do, here or on hosts that may come back; or the job is resumed."""
        facts, now_s = self._brain.facts, self._brain.now_s()
        if facts.ended_at is None:
            return False
        if self._requests.since(facts.requests, now_s):
            return True
        connected = any(self._connections.connected(node) for node in self._nodes)
        if not may_shut_down(facts.ended_at, self._moved_s, connected, now_s):
            return False
        hosts = undismissed_hosts(facts, now_s)
        owes = self._notifier.is_busy and now_s < facts.ended_at + OWED_S_MAX
        if not (hosts or owes) or not self._job.plan.exists():
            return True
        if not self._seeks:  # resume, collect and clean need not wait for these hosts, nor for notifications
            self._seeks = True
            print(
                f"waiting for {', '.join((*hosts, *['notifications'] * owes))} after the job's end",
                flush=True,
            )
            self._executor.keep_reachable(hosts)
            self._show(durable=True)
            full_disk.wait_for(self._job.ended.touch)
        return False

    def _is_resumed(self) -> bool:
        """Return whether the job was resumed after its end: the status must no longer show that end."""
        return self.end is not None and is_resumed(self._job.requests, self._brain.facts.requests)

    def _mind_pause(self) -> None:
        """Reset all connections after a pause (suspend, a stopped process, a full disk): the silence of nodes meant nothing."""
        before_s, self._minded_s = self._minded_s, self._brain.now_s()
        if self._minded_s < before_s + SLEPT_S and not self._slept.just_now():
            return
        self._signature.require()
        self._brain.learn(e.SupervisorStarted(self._brain.now_s(), os.getpid()))
        for node in self._nodes:
            self._connections.drop(node)
            self._executor.check_reachable(node)

    # Receive, learn

    def _handle(self, link_event: LinkEvent) -> None:
        now_s = self._brain.now_s()
        match link_event:
            case AgentReady(hello):
                self._heartbeats.reset(hello.node)
                self._brain.learn(translation.agent_up(self._plan, hello, now_s))
                if hello.ships:
                    self._connections.send(hello.node, self._logs.have(hello.node))
            case AgentDropped(name, left):
                self._heartbeats.reset(name)
                self._brain.learn(e.AgentDisconnected(now_s, name, left))
                self._executor.connection_ended(name, left)
            case reports.Envelope():
                try:
                    self._receive(link_event, now_s)
                except codec.CodecError as err:
                    print(f"{link_event.node} sent an unreadable report: {err}", flush=True)
            case Wake():
                self._learn(self._desk.news(now_s))
                self._chore_due_s = 0.0

    def _learn(self, events: Iterable[e.Event]) -> None:
        for event in events:
            self._brain.learn(event)

    def _receive(self, report: reports.Envelope, now_s: float) -> None:
        """Learn a report. A reliable one, which may come again after a broken connection, is learned once. Raises CodecError."""
        if not report.seq:
            self._receive_unreliable(report, now_s)
            return
        if self._brain.has(report.incarnation, report.seq):
            return
        events: list[e.Event] = []
        match report.data.get("kind"):
            case reports.SaveSeen.__name__:
                seen = translation.unpacked(reports.SaveSeen, report)
                self._desk.seen(now_s, report.node, seen, save_gang(self._brain.facts))
            case reports.SaveHashed.__name__:
                self._desk.hashed(now_s, report.node, translation.unpacked(reports.SaveHashed, report))
            case reports.CheckpointsRead.__name__:
                read = translation.unpacked(reports.CheckpointsRead, report)
                self._desk.read(now_s, report.node, read, save_gang(self._brain.facts))
            case _:
                event = translation.event(self._plan, report, self._mask, now_s)
                self._desk.learn(event)
                events = [event]
        self._brain.learn_kept([*events, *self._desk.news(now_s)], report.incarnation, report.seq)
        if report.data["kind"] == reports.Stopped.__name__:
            self._close_saves(now_s)

    def _close_saves(self, now_s: float) -> None:
        """Complete the checkpoints of nodes that have stopped, and learn how all checkpoints have changed."""
        self._desk.over(now_s, save_gang(self._brain.facts))
        self._learn(self._desk.news(now_s))

    def _receive_unreliable(self, report: reports.Envelope, now_s: float) -> None:
        """Learn from a heartbeat, a chunk of a file, or a hint, which arrive once or not at all. Raises CodecError."""
        match report.data.get("kind"):
            case reports.Chunk.__name__:
                self._receive_chunk(report, now_s)
            case reports.NodeSignalled.__name__:
                self.stay.signalled()
            case _:
                heartbeat = self._heartbeats.receive(report)
                self._brain.learn(e.FromNode(now_s, report.node, heartbeat))
                self._desk.beat(now_s, report.node, heartbeat, save_gang(self._brain.facts))
                self._learn(self._desk.news(now_s))

    def _receive_chunk(self, report: reports.Envelope, now_s: float) -> None:
        """Write a chunk of a file; if bytes before it are missing, the node starts again over a new connection."""
        try:
            self._logs.receive(report.node, translation.unpacked(reports.Chunk, report), report.raw)
            self._moved_s = now_s
        except (LogReceiveError, codec.CodecError) as err:
            print(f"{report.node}: {err}", flush=True)
            self._connections.drop(report.node)

    # Decide, journal, do

    def _decide(self) -> None:
        """Decide and carry out until no decision is left."""
        for _ in range(DECISIONS_MAX):
            self._mind_pause()
            decisions, self._wake_s = self._brain.decide()
            if not decisions:
                break
            gang = rank_gang(self._brain.facts)
            for decision in decisions:
                self._do(decision, gang)
        else:
            raise AssertionError(f"the brain does not come to rest: {decisions[:3]}")

    def _acknowledge(self) -> None:
        """Acknowledge the reports that are on disk; the others are sent again over the next connection."""
        self._brain.sync()
        for node in self._nodes:
            ack = self._heartbeats.ack_due(node, self._brain.acked(self._connections.incarnation(node)))
            if ack is not None and self._connections.send(node, ack):
                self._heartbeats.sent(node, ack)

    def _do(self, decision: d.Decision, gang: Gang) -> None:
        """Carry out one decision and notify of it; show and print it if it is a turning point."""
        self._notifier.tell(decision, self._brain.facts, status_object.iso(time.time()))
        if isinstance(decision, TURNING_POINTS):
            print(f"{status_object.iso(time.time())} {type(decision).__name__}: {decision.why}", flush=True)
            self._show(durable=True)
        if isinstance(decision, d.Judge):
            self._remember(decision.verdict)
        elif isinstance(decision, d.Requeue):
            self.stay.requeue = decision
        elif isinstance(decision, (d.DistrustSave, d.EndJob)):
            self._desk.mirror(self._brain.facts)
        self._learn(self._executor.carry_out(decision, gang, self._brain.now_s()))

    def _remember(self, verdict: d.Verdict) -> None:
        """Record in the job home that a host was lost, for later jobs."""
        if verdict.kind is d.Kind.NODE_LOST and verdict.node and self._plan.backend != "local":
            fault = f"{verdict.kind.value}: {verdict.summary}"
            with contextlib.suppress(OSError):
                note = host_memory.Note(verdict.node, time.time(), fault, self._plan.id)
                host_memory.write(self._job.root.parents[1], note)

    # Chores

    def _chores(self) -> None:
        self._signature.require()
        now_s = self._brain.now_s()
        self._chore_due_s = now_s + CHORE_S
        self.stay.look()
        if self._brain.facts.end is None:  # a resume may come with a new plan, see main()
            self._learn(self._requests.since(self._brain.facts.requests, now_s))
            self._learn(self._queue.news(self._brain.facts, now_s) if self._queue is not None else ())
        self._learn(self._executor.poll(self._brain.facts, now_s))
        self._desk.mirror(self._brain.facts)
        self._close_saves(now_s)
        for note in (*self._desk.notes, *self._notifier.faults()):
            print(f"{status_object.iso(time.time())} {note}", flush=True)
        self._desk.notes.clear()
        self._learn(self._executor.end_sends(rank_gang(self._brain.facts), now_s))
        if self._desk.copies.has_moved:
            self._moved_s, self._desk.copies.has_moved = now_s, False
        for node in self._heartbeats.mute(self._brain.facts, now_s):
            self._connections.drop(node)
        if now_s >= self._show_due_s:
            with self._views:
                self._show(durable=False)
            self._show_due_s = now_s + self._views.pause_s

    def _show(self, durable: bool) -> None:
        """Replace the status file; only a turning point is worth an fsync."""
        if self._is_resumed():
            return
        now, facts = status_object.Now(self._brain.now_s(), time.time()), self._brain.facts
        if not self._shared and (durable or (facts.made and self._series.is_due(now.wall_s))):
            self._shared = rank_files.shared(self._job)
        with contextlib.suppress(OSError):  # a full disk must not end the supervisor over a view
            travels, reasons = self._desk.copies.travels(), self._executor.reasons(facts)
            status = status_object.status(self._plan, facts, now, reasons, travels, self._shared)
            status_file.write(self._job, status_file.stamped(status, procfs.boot_id()), durable=durable)
            if status.state == "RUNNING" and self._series.is_due(now.wall_s):
                self._series.add(status_object.sample(status, facts, now.wall_s))
