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
from orchestrator.brain.brain import SLEEP_S_MIN
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import codec
from orchestrator.core.host import host_health, procfs
from orchestrator.core.jobdir import full_disk, locks, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.series import SeriesWriter
from orchestrator.core.plan_types import Gang
from orchestrator.core.wire import reports
from orchestrator.journal.journal_file import SuspendDetector
from orchestrator.journal.journaled_brain import JournaledBrain
from orchestrator.supervisor import allocation_claim, translation
from orchestrator.supervisor import status as status_object
from orchestrator.supervisor.agent_connections import (
    AgentConnections,
    AgentDropped,
    LinkEvent,
    Wake,
)
from orchestrator.supervisor.executor import (
    Executor,
    checkpoint_gang,
    current_gang,
    may_shut_down,
    undismissed_hosts,
)
from orchestrator.supervisor.heartbeat_tracker import HeartbeatTracker, WorkShare
from orchestrator.supervisor.host_queue import HostQueue
from orchestrator.supervisor.notifications import DELIVERY_S_MAX, Notifier
from orchestrator.supervisor.request_inbox import RequestInbox, is_resumed
from orchestrator.supervisor.transfers.checkpoint_tracker import CheckpointTracker
from orchestrator.supervisor.transfers.log_receiver import LogReceiveError, LogReceiver

CHORE_S = 0.5
"""How often requests, agents' processes and the status file are checked."""

WORK_SHARE_MAX = 0.05
"""The share of a processor for decisions on heartbeats, and as much again for the status file."""

DECIDE_PAUSE_S_MAX = 0.5
STATUS_PAUSE_S_MAX = 2.0
"""The longest that either is delayed for that."""

DECISIONS_MAX = 10_000
"""More rounds of decisions in a row than this are a bug."""

TURNING_POINTS = (
    d.BeginAttempt,
    d.DistrustCheckpoint,
    d.Place,
    d.Judge,
    d.Notice,
    d.Finish,
    d.EndJob,
    d.Requeue,
)
"""The decisions that are printed, and shown in a durable status."""

ANY_ADDRESS, LOOPBACK = "0.0.0.0", "127.0.0.1"


class Supervisor:
    """The loop of one job, and all parts that it drives."""

    def __init__(self, job: JobDir, plan: Plan, job_secrets: translation.JobSecrets, backend: Backend) -> None:
        self._job = job
        self._plan = plan
        self._mask = job_secrets.mask
        self._signature = locks.LockSignature(job.lock)
        self._heartbeats = HeartbeatTracker(plan.heartbeat_s)
        self._requests = RequestInbox(job.requests, job.plan)
        self._brain = JournaledBrain(job, procfs.boot_id())
        # A resume may have dropped nodes: their agents are still to be stopped and dismissed.
        earlier = [node.name for node in self._brain.facts.every_node()]
        self._nodes = tuple(dict.fromkeys([*(node.name for node in plan.nodes), *earlier]))
        self._connections = AgentConnections(plan.id, job_secrets.token, self._nodes)
        self.allocation_session = allocation_claim.AllocationSession(job, plan, backend.allocation)
        self._wake_s = self._chore_due_s = self._status_due_s = 0.0
        self._decide_share = WorkShare(WORK_SHARE_MAX, DECIDE_PAUSE_S_MAX)
        self._status_share = WorkShare(WORK_SHARE_MAX, STATUS_PAUSE_S_MAX)
        self._logs = LogReceiver(job)
        self._transferred_s = 0.0  # when bytes of a transfer last came
        self._checkpoint_tracker = CheckpointTracker(job, plan, backend.copier, self._connections.wake)
        self._executor = Executor(job, plan, job_secrets, backend, self._connections, self._checkpoint_tracker)
        hosts = [node.host for node in plan.nodes]
        self._queue = HostQueue(job, hosts, plan.created_at) if plan.ssh else None
        env = {**job_secrets.environment, **plan.env, **job_secrets.secrets}
        self._notifier = Notifier(plan, job.root, env, self._mask, job_secrets.webhook)
        self._sleep_detector, self._checked_s = SuspendDetector(SLEEP_S_MIN), self._brain.now_s()
        self._defer_exhaustion = full_disk.DeferExhaustion()
        self._series = SeriesWriter(job.series)
        self._shared_file_notices: tuple[str, ...] = ()  # which other jobs write the same files
        self._is_lingering = False  # waits for hosts whose agents could not be dismissed, or for notifications
        backend.wake = self._connections.wake

    @property
    def end(self) -> d.JobEnd | None:
        """How the job ended, None while it has not."""
        return self._brain.facts.end

    async def run(self) -> int:
        """Act until the job has ended and its agents have left; return the number of the last request taken."""
        host = ANY_ADDRESS if self.allocation_session.addresses else LOOPBACK
        port = await self._connections.listen_again(self._job, host)
        print(f"{status_object.iso(time.time())} supervisor {os.getpid()} listens on port {port}", flush=True)
        self._begin(port)
        while not self.allocation_session.is_idle(self._brain.facts):
            with self._decide_share:
                self._decide()
                self._acknowledge()
            empty_memory, now_s = self._executor.empty_memory, self._brain.now_s()
            if self.allocation_session.must_leave(empty_memory, now_s) or self._is_over():
                break
            due_s = min(self._wake_s, self._chore_due_s)
            link_events = await self._connections.receive(due_s - self._brain.now_s(), self._decide_share.pause_s)
            self._check_pause()
            for link_event in link_events:
                self._handle(link_event)
            for node, chunk_ack in self._logs.take_due_acks():
                self._connections.send(node, chunk_ack)
            if self._brain.now_s() >= self._chore_due_s:
                with self._defer_exhaustion:
                    self._chores()
        self._notifier.close()
        self._chores()  # the last events are still learned and shown
        self._write_status(durable=True)
        await self._connections.close()
        self._executor.close()
        self._logs.close()
        self._checkpoint_tracker.close()
        if self._queue is not None:
            self._queue.leave()
        self._brain.close()
        if self.end is not None and self._job.plan.exists():  # it may be deleted by now
            full_disk.retry_while_full(self._job.ended.touch)
            if self._is_resumed():
                self._job.ended.unlink(missing_ok=True)  # as the resume has done already
        return self._brain.facts.last_request

    def _begin(self, port: int) -> None:
        """Continue the job from the end of the journal."""
        now_s = self._brain.now_s()
        self._learn(self.allocation_session.begin(self._brain.facts, self._brain.requeue, now_s))
        self._brain.learn(e.SupervisorStarted(now_s, os.getpid()))
        self._checkpoint_tracker.begin(self._brain.facts, now_s)
        self._learn(self._checkpoint_tracker.take_events(now_s))
        self._learn(self._requests.read_after(self._brain.facts.last_request, now_s))
        self._executor.endpoint = "\n".join(
            f"{host}:{port}" for host in self.allocation_session.addresses or [LOOPBACK]
        )
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
        if self._checkpoint_tracker.is_saving:
            self._transferred_s = now_s
        if self._requests.read_after(facts.last_request, now_s):
            return True
        connected = any(map(self._connections.is_connected, self._nodes)) or self._checkpoint_tracker.is_saving
        if not may_shut_down(facts.ended_at, self._transferred_s, connected, now_s):
            return False
        hosts = undismissed_hosts(facts, now_s)
        has_pending_notifications = self._notifier.is_busy and now_s < facts.ended_at + DELIVERY_S_MAX
        if not (hosts or has_pending_notifications) or not self._job.plan.exists():
            return True
        if not self._is_lingering:  # resume, collect and clean need not wait for these hosts, nor for notifications
            self._is_lingering = True
            print(
                f"waiting for {', '.join((*hosts, *['notifications'] * has_pending_notifications))} after the job's end",
                flush=True,
            )
            self._executor.keep_reachable(hosts)
            self._write_status(durable=True)
            full_disk.retry_while_full(self._job.ended.touch)
        return False

    def _is_resumed(self) -> bool:
        """Return whether the job was resumed after its end: the status must no longer show that end."""
        return self.end is not None and is_resumed(self._job.requests, self._brain.facts.last_request)

    def _check_pause(self) -> None:
        """Reset all connections after a pause (suspend, a stopped process, a full disk): the silence of nodes meant nothing."""
        previous_s, self._checked_s = self._checked_s, self._brain.now_s()
        if self._checked_s < previous_s + SLEEP_S_MIN and not self._sleep_detector.has_suspended():
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
            case reports.Hello():
                self._heartbeats.reset(link_event.node)
                self._brain.learn(translation.to_agent_up(self._plan, link_event, now_s))
                self._checkpoint_tracker.memory.connected(now_s, link_event)
                if link_event.ships:
                    self._connections.send(link_event.node, self._logs.resume_offsets(link_event.node))
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
                self._learn(self._checkpoint_tracker.take_events(now_s))
                self._chore_due_s = 0.0

    def _learn(self, events: Iterable[e.Event]) -> None:
        for event in events:
            self._brain.learn(event)

    def _receive(self, report: reports.Envelope, now_s: float) -> None:
        """Learn a report. A reliable one, which may come again after a broken connection, is learned once. Raises CodecError."""
        if not report.seq:
            self._receive_unreliable(report, now_s)
            return
        if self._brain.has_report(report.incarnation, report.seq):
            return
        events: list[e.Event] = []
        match report.data.get("kind"):
            case reports.CheckpointSeen.__name__:
                seen = translation.unpack_report(reports.CheckpointSeen, report)
                self._checkpoint_tracker.enter_report(now_s, report.node, seen, checkpoint_gang(self._brain.facts))
            case reports.CheckpointHashed.__name__:
                self._checkpoint_tracker.enter_hashes(
                    now_s, report.node, translation.unpack_report(reports.CheckpointHashed, report)
                )
            case reports.CheckpointCopied.__name__:
                copied = translation.unpack_report(reports.CheckpointCopied, report)
                self._checkpoint_tracker.memory.enter_copied(now_s, report.node, copied)
            case reports.CheckpointsRead.__name__:
                read = translation.unpack_report(reports.CheckpointsRead, report)
                self._checkpoint_tracker.enter_reads(now_s, report.node, read, checkpoint_gang(self._brain.facts))
            case _:
                event = translation.to_event(self._plan, report, self._mask, now_s)
                self._checkpoint_tracker.enter_event(event)
                events = [event]
        self._brain.learn_reliable(
            [*events, *self._checkpoint_tracker.take_events(now_s)], report.incarnation, report.seq
        )
        if report.data["kind"] == reports.Stopped.__name__:
            self._close_checkpoints(now_s)

    def _close_checkpoints(self, now_s: float) -> None:
        """Complete the checkpoints of nodes that have stopped, and learn how all checkpoints have changed."""
        self._checkpoint_tracker.close_stopped(now_s, checkpoint_gang(self._brain.facts))
        self._learn(self._checkpoint_tracker.take_events(now_s))

    def _receive_unreliable(self, report: reports.Envelope, now_s: float) -> None:
        """Learn from a heartbeat, a chunk of a file, or a hint, which arrive once or not at all. Raises CodecError."""
        match report.data.get("kind"):
            case reports.Chunk.__name__:
                self._receive_chunk(report, now_s)
            case reports.NodeSignalled.__name__:
                self.allocation_session.check_ending()
            case _:
                heartbeat = self._heartbeats.receive(report)
                self._brain.learn(e.FromNode(now_s, report.node, heartbeat))
                self._checkpoint_tracker.enter_heartbeat(
                    now_s, report.node, heartbeat, checkpoint_gang(self._brain.facts)
                )
                self._learn(self._checkpoint_tracker.take_events(now_s))

    def _receive_chunk(self, report: reports.Envelope, now_s: float) -> None:
        """Write a chunk of a file; if bytes before it are missing, the node starts again over a new connection."""
        try:
            self._logs.receive(report.node, translation.unpack_report(reports.Chunk, report), report.raw)
            self._transferred_s = now_s
        except (LogReceiveError, codec.CodecError) as err:
            print(f"{report.node}: {err}", flush=True)
            self._connections.drop(report.node)

    # Decide, journal, do

    def _decide(self) -> None:
        """Decide and carry out until no decision is left."""
        for _ in range(DECISIONS_MAX):
            self._check_pause()
            decisions, self._wake_s = self._brain.decide()
            if not decisions:
                break
            gang = current_gang(self._brain.facts)
            for decision in decisions:
                self._carry_out(decision, gang)
        else:
            raise AssertionError(f"the brain does not come to rest: {decisions[:3]}")

    def _acknowledge(self) -> None:
        """Acknowledge the reports that are on disk; the others are sent again over the next connection."""
        self._brain.sync()
        for node in self._nodes:
            ack = self._heartbeats.ack_due(node, self._brain.acked_seq(self._connections.incarnation(node)))
            if ack is not None and self._connections.send(node, ack):
                self._heartbeats.note_ack_sent(node, ack)

    def _carry_out(self, decision: d.Decision, gang: Gang) -> None:
        """Carry out one decision and notify of it; show and print it if it is a turning point."""
        self._notifier.notify(decision, self._brain.facts, status_object.iso(time.time()))
        if isinstance(decision, TURNING_POINTS):
            print(f"{status_object.iso(time.time())} {type(decision).__name__}: {decision.why}", flush=True)
            self._write_status(durable=True)
        if isinstance(decision, d.Judge):
            self._record_failed_host(decision.verdict)
        elif isinstance(decision, d.BeginAttempt):
            past = self._brain.facts.past_attempts[self._brain.facts.resumed_after :]
            self._record_failed_host(past[-1].verdict if past else None)
        elif isinstance(decision, d.Requeue):
            self.allocation_session.requeue = decision
        elif isinstance(decision, (d.DistrustCheckpoint, d.EndJob)):
            self._checkpoint_tracker.apply_decisions(self._brain.facts)
        self._learn(self._executor.carry_out(decision, gang, self._brain.now_s()))

    def _record_failed_host(self, verdict: d.Verdict | None) -> None:
        """Record in the job home that a host was lost, or is at fault, for later jobs. What its fault is may be known only after
        its verdict."""
        if verdict is None or not verdict.node or self._plan.backend == "local":
            return
        if verdict.kind is d.VerdictKind.NODE_LOST or verdict.host_fault:
            fault = f"{verdict.kind.value}: {verdict.host_fault or verdict.summary}"
            with contextlib.suppress(OSError):
                note = host_health.HostHealth(verdict.node, time.time(), fault, self._plan.id)
                host_health.write(self._job.root.parents[1], note)

    # Chores

    def _chores(self) -> None:
        self._signature.require()
        now_s = self._brain.now_s()
        self._chore_due_s = now_s + CHORE_S
        self.allocation_session.check_replaced()
        if self._brain.facts.end is None:  # a resume may come with a new plan, see main()
            self._learn(self._requests.read_after(self._brain.facts.last_request, now_s))
            self._learn(self._queue.poll(self._brain.facts, now_s) if self._queue is not None else ())
        self._learn(self._executor.poll(self._brain.facts, now_s))
        self._checkpoint_tracker.apply_decisions(self._brain.facts)
        self._close_checkpoints(now_s)
        for note in (*self._checkpoint_tracker.notes, *self._notifier.take_faults()):
            print(f"{status_object.iso(time.time())} {note}", flush=True)
        self._checkpoint_tracker.notes.clear()
        self._executor.send_copies(current_gang(self._brain.facts), now_s)
        self._learn(self._executor.finish_sends(current_gang(self._brain.facts), now_s))
        if self._checkpoint_tracker.copies.has_transferred:
            self._transferred_s, self._checkpoint_tracker.copies.has_transferred = now_s, False
        for node in self._heartbeats.find_silent_nodes(self._brain.facts, now_s):
            self._connections.drop(node)
        if now_s >= self._status_due_s:
            with self._status_share:
                self._write_status(durable=False)
            self._status_due_s = now_s + self._status_share.pause_s

    def _write_status(self, durable: bool) -> None:
        """Replace the status file; only a turning point is worth an fsync."""
        if self._is_resumed():
            return
        now, facts = status_object.Now(self._brain.now_s(), time.time()), self._brain.facts
        if not self._shared_file_notices and (durable or (facts.steps_made and self._series.is_due(now.wall_s))):
            self._shared_file_notices = rank_files.find_shared_files(self._job)
        with contextlib.suppress(OSError):  # a full disk must not end the supervisor over a view
            tracker, reasons = self._checkpoint_tracker, self._executor.unreachable_reasons(facts)
            notes = (tracker.copies.list_transfers(), self._shared_file_notices, tracker.checkpoints)
            status = status_object.status(self._plan, facts, now, reasons, *notes)
            status_file.write(self._job, status_file.stamp(status, procfs.boot_id()), durable=durable)
            if status.state == "RUNNING" and self._series.is_due(now.wall_s):
                self._series.add(status_object.sample(status, facts, now.wall_s))
