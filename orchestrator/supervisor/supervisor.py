"""The supervisor: one process per job, one loop. Receive, learn, decide, journal, do.

Rules: only the holder of the job folder's lock acts; what was learned and decided is on disk before it is done and
before agents are told that it arrived; nothing is decided here. If this process dies, the ranks go on, and the next
one replays the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.backends.api import Backend, NotOursError
from orchestrator.brain.brain import SLEPT_S
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import AgentState, JobGoal
from orchestrator.core import codec
from orchestrator.core.jobdir import full_disk, locks, rank_env
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.locks import locked
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.wire import messages as m
from orchestrator.core.wire.messages import Envelope
from orchestrator.supervisor import allocation_claim, shutdown, translation
from orchestrator.supervisor import status as status_object
from orchestrator.supervisor.agent_connections import (
    AgentConnections,
    AgentDropped,
    AgentGreeted,
    AgentReady,
    LinkEvent,
    Wake,
)
from orchestrator.supervisor.executor import Executor
from orchestrator.supervisor.host_queue import HostQueue
from orchestrator.supervisor.journal import lost_journal
from orchestrator.supervisor.journal import planned as planned_event
from orchestrator.supervisor.journal.journal_file import Sleep
from orchestrator.supervisor.journal.journaled_brain import JournaledBrain
from orchestrator.supervisor.notifications import Notifier
from orchestrator.supervisor.request_inbox import RequestInbox, is_resumed
from orchestrator.supervisor.transfers.transfers import Transfers

CHORE_S = 0.5
"""How often requests, agents' processes and the status file are looked after."""

DECISIONS_MAX = 10_000
"""More decisions than that in one look is a bug, not a plan."""

MUTE_S_MIN, MUTE_BEATS = 10.0, 5
"""A connection without a beat for so long, and for so many times their distance, is taken for dead."""

EVERYWHERE, HERE = "0.0.0.0", "127.0.0.1"


class Supervisor:
    """The one that acts for a job."""

    def __init__(self, job: JobDir, plan: Plan, private: translation.JobSecrets, backend: Backend) -> None:
        self._job = job
        self._plan = plan
        self._mask = private.mask
        self._said_acks: dict[str, m.Ack] = {}
        self._beats: dict[str, int] = {}
        self._rates: dict[int, float] = {}
        self._requests = RequestInbox(job.requests, job.plan)
        self._memory = JournaledBrain(job, planned_event.machine())
        # A resume may have dropped nodes: their agents are still to be stopped and dismissed.
        left = [node.name for node in self._memory.facts.every_node()]
        self._nodes = tuple(dict.fromkeys([*(node.name for node in plan.nodes), *left]))
        self._links = AgentConnections(plan.id, private.token, self._nodes)
        self._allocation = backend.allocation
        self.requeue: d.Requeue | None = None  # the nodes are to be given back
        self._replaced = ""  # by the allocation in which the job is now
        self._wake_s = self._chore_due_s = 0.0
        self._ferry = Transfers(job, plan, backend.carrier, self._checkpoint)
        self._deeds = Executor(job, plan, private, backend, self._links, self._ferry)
        self._queue = (
            HostQueue(job, [node.host for node in plan.nodes], plan.created_at) if plan.ssh else None
        )
        env = {**private.outer, **plan.env, **private.secrets}
        self._notifier = Notifier(plan, job.root, env, self._mask, private.webhook)
        self._slept = Sleep(SLEPT_S)
        self._patience = full_disk.Patience()
        self._seeks = False  # hosts that could not be dismissed
        backend.stir = self._ferry.stir = self._links.stir

    def _checkpoint(self) -> str:
        """Return the checkpoint that the next attempt would start from; it must not be deleted."""
        checkpoint = self._memory.facts.checkpoint
        return checkpoint.path if checkpoint else ""

    @property
    def end(self) -> d.JobEnd | None:
        """How the job ended, None while it has not."""
        return self._memory.facts.end

    async def run(self) -> int:
        """Act until the job has ended and its agents have left; return the last request that was taken."""
        port = await self._links.listen_again(self._job, EVERYWHERE if self._allocation is not None else HERE)
        print(f"{status_object.iso(time.time())} supervisor {os.getpid()} listens on port {port}", flush=True)
        self._begin(port)
        while True:
            if self._is_idle():
                break
            self._act()
            if self.requeue is not None or self._replaced or self._is_over():
                break
            due_s = min(self._wake_s, self._chore_due_s)
            words = await self._links.hear(due_s - self._memory.now_s())
            if self._memory.now_s() > due_s + SLEPT_S or self._slept.just_now():
                self._wake_up()
            for word in words:
                self._take(word)
            for node, got in self._ferry.owed():
                self._links.send(node, got)
            if self._memory.now_s() >= self._chore_due_s:
                with self._patience:
                    self._chores()
        self._notifier.close()
        self._chores()  # what came last is still learned, and shown
        self._show(durable=True)
        await self._links.close()
        self._deeds.close()
        if self._queue is not None:
            self._queue.leave()
        self._memory.close()
        if self.end is not None and self._job.plan.exists():  # it may have been deleted meanwhile
            full_disk.wait_for(self._job.ended.touch)
            if self._is_resumed():  # whoever asked has taken that file away already
                self._job.ended.unlink(missing_ok=True)
        return self._memory.facts.requests

    def _begin(self, port: int) -> None:
        """Take up the job where the journal has left it."""
        now_s = self._memory.now_s()
        self._learn_allocation(now_s)
        self._learn_plan(now_s)
        self._memory.learn(e.SupervisorStarted(now_s, os.getpid()))
        self._take_requests(now_s)
        hosts = self._allocation.addresses() if self._allocation is not None else [HERE]
        self._deeds.endpoint = "\n".join(f"{host}:{port}" for host in hosts)
        if self._memory.facts.end is not None:
            return
        self._job.ended.unlink(missing_ok=True)
        self._deeds.begin(self._memory.facts, self._memory.stopped, now_s)
        self._chores()
        # Last: whoever waits for this file finds a status that knows of the resume he asked for.
        self._deeds.say_where()

    def _is_idle(self) -> bool:
        """Tell whether there are no nodes to act on, nor an end to bring the job to: it waits in a queue by itself."""
        facts = self._memory.facts
        if self._plan.slurm is None or self._allocation is not None or facts.end is not None:
            return False
        return facts.over is None and not (facts.goal is JobGoal.CANCEL and facts.attempt is None)

    def _is_over(self) -> bool:
        """Tell whether there is nothing more to do, here or on hosts that may come back; or the job is resumed."""
        facts, now_s = self._memory.facts, self._memory.now_s()
        if facts.ended_at is None or self._memory.is_full:
            return False
        if self._requests.since(facts.requests, now_s):
            return True
        busy = self._notifier.is_busy or any(self._links.connected(node) for node in self._nodes)
        if not shutdown.is_done(facts.ended_at, self._ferry.moved_at, busy, now_s):
            return False
        left = shutdown.unreached(facts, now_s)
        if not left or not self._job.plan.exists():
            return True
        if not self._seeks:  # whoever wants to resume, collect or clean need not wait for them
            self._seeks = True
            print(f"waiting for {', '.join(left)}, to dismiss what may run there", flush=True)
            self._deeds.seek(left)
            self._show(durable=True)
            full_disk.wait_for(self._job.ended.touch)
        return False

    def _is_resumed(self) -> bool:
        """Tell whether somebody has resumed the job since its end: of that end nothing must be shown any more."""
        return self.end is not None and is_resumed(self._job.requests, self._memory.facts.requests)

    def _wake_up(self) -> None:
        """The machine slept, this process was stopped, or the disk was full: what was not acted on is no silence."""
        self._memory.learn(e.SupervisorStarted(self._memory.now_s(), os.getpid()))
        for node in self._nodes:
            self._links.drop(node)
            self._deeds.look_after(node)

    def _learn_allocation(self, now_s: float) -> None:
        """Tell the brain of other nodes than before; those that it has decided to give back are still to be given."""
        allocation = self._allocation
        if allocation is None:
            return
        if allocation.id != self._memory.facts.allocation:
            self._memory.learn(e.AllocationBegan(now_s, allocation.id))
        elif self._memory.facts.end is None:
            self.requeue = self._memory.requeue

    def _learn_plan(self, now_s: float) -> None:
        """Tell the brain the plan, at the beginning and when a resume changed it."""
        planned = planned_event.planned(self._plan, now_s)
        facts = self._memory.facts
        if self._plan.slurm is not None and self._allocation is None and facts.limits is not None:
            return  # the nodes are those of the last allocation
        known = tuple(
            e.NodePlan(node.name, node.ranks if facts.pool is None else ()) for node in facts.nodes.values()
        )
        if (facts.limits, facts.pool, known) != (planned.limits, planned.pool, planned.nodes):
            self._memory.learn(planned)

    # Receive, learn

    def _take(self, word: LinkEvent) -> None:
        now_s = self._memory.now_s()
        match word:
            case AgentGreeted(hello):
                node = self._memory.facts.node(hello.node)
                self._ferry.greeted(hello, node.ever_started if node else 0, now_s)
            case AgentReady(hello):
                self._said_acks.pop(hello.node, None)
                self._beats[hello.node] = 0
                self._memory.learn(translation.agent_up(self._plan, hello, now_s))
                have = self._ferry.up(hello)
                if have is not None:
                    self._links.send(hello.node, have)
            case AgentDropped(name, left):
                self._said_acks.pop(name, None)
                self._memory.learn(e.AgentDisconnected(now_s, name, left))
                self._deeds.line_ended(name, left)
            case Envelope():
                self._take_report(word, now_s)
            case Wake():
                self._chore_due_s = 0.0

    def _take_report(self, said: Envelope, now_s: float) -> None:
        """Learn one report, each kept one once: it may be said again after a broken line."""
        if not said.seq:
            self._take_passing(said, now_s)
            return
        if self._memory.has(said.incarnation, said.seq):
            return
        try:
            if said.data.get("kind") == m.ManifestReported.__name__:
                attempt = self._memory.facts.attempt
                events = self._ferry.found(said, attempt.number if attempt else 0, self._gang(), now_s)
            else:
                events = [self._ferry.at_home(translation.event(self._plan, said, self._mask, now_s))]
        except codec.CodecError as err:
            print(f"{said.node} sent what cannot be read: {err}", flush=True)
            return
        self._memory.learn_kept(events, said.incarnation, said.seq)
        for event in events:
            self._ferry.heard(event)

    def _gang(self) -> rank_env.Gang:
        return tuple((node.name, node.ranks) for node in self._memory.facts.gang)

    def _take_passing(self, said: Envelope, now_s: float) -> None:
        """Take a beat, a piece of a file, or a hint."""
        match said.data.get("kind"):
            case m.Chunk.__name__:
                if not self._ferry.take(said, now_s):
                    self._links.drop(said.node)
            case m.NodeSignalled.__name__:
                if self._allocation is not None:
                    self._allocation.look()
            case _:
                self._take_beat(said, now_s)

    def _take_beat(self, said: Envelope, now_s: float) -> None:
        try:
            beat = codec.unpack(
                m.Heartbeat, {key: value for key, value in said.data.items() if key != "kind"}
            )
        except codec.CodecError as err:
            print(f"{said.node} sent what cannot be read: {err}", flush=True)
            return
        self._beats[said.node] = beat.beat
        for rank in beat.ranks:
            if rank.rate_per_s is None:
                self._rates.pop(rank.rank, None)
            else:
                self._rates[rank.rank] = rank.rate_per_s
        self._memory.learn(translation.beat(said.node, beat, now_s))
        self._ferry.scanned(said.node, beat, now_s)

    # Decide, journal, do

    def _act(self) -> None:
        """Decide until there is nothing more to decide; then tell agents what has safely arrived."""
        if self._memory.waited(SLEPT_S):
            self._wake_up()
        for _ in range(DECISIONS_MAX):
            decisions, self._wake_s = self._memory.decide()
            if not decisions:
                break
            for decision in decisions:
                self._do(decision)
        else:
            raise AssertionError(f"the brain does not come to rest: {decisions[:3]}")
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Say what is on disk to those who said it; what a full disk keeps waiting, they say again after a break."""
        self._memory.sync()
        for node in self._nodes:
            ack = m.Ack(self._memory.acked(self._links.incarnation(node)), self._beats.get(node, 0))
            if self._said_acks.get(node) != ack and self._links.send(node, ack):
                self._said_acks[node] = ack

    def _do(self, decision: d.Decision) -> None:
        """Carry out one decision; turning points are shown and printed."""
        match decision:
            case d.Judge(verdict=verdict):
                self._turning_point(decision)
                self._deeds.judged(verdict, self._memory.facts, self._memory.now_s())
            case d.BeginAttempt() | d.Place() | d.Alert() | d.ResolveAlert() | d.Finish() | d.EndJob():
                self._turning_point(decision)
            case d.Requeue():
                self._turning_point(decision)
                self.requeue = decision
            case _:
                pass
        for event in self._deeds.carry_out(decision, self._gang(), self._memory.now_s()):
            self._memory.learn(event)

    def _turning_point(self, decision: d.Decision) -> None:
        self._rates.clear()
        print(f"{status_object.iso(time.time())} {type(decision).__name__}: {decision.why}", flush=True)
        self._notifier.tell(decision, self._memory.facts, status_object.iso(time.time()))
        self._show(durable=True)

    # Chores

    def _chores(self) -> None:
        now_s = self._memory.now_s()
        self._chore_due_s = now_s + CHORE_S
        self._replaced = (
            allocation_claim.replaced(self._job, self._allocation.id) if self._allocation is not None else ""
        )
        if self._memory.facts.end is None:  # a resume may come with a new plan, see main()
            self._take_requests(now_s)
            self._look_at_queue(now_s)
        for event in self._deeds.look(self._memory.facts, now_s):
            self._memory.learn(event)
        for words in self._notifier.said():
            print(f"{status_object.iso(time.time())} {words}", flush=True)
        self._deeds.go_on(self._gang, now_s)
        mute_s = max(MUTE_S_MIN, MUTE_BEATS * self._plan.heartbeat_s)
        for node in self._memory.facts.every_node():
            if node.agent_state is AgentState.UP and now_s > node.contact_at + mute_s:
                self._links.drop(node.name)
        self._show(durable=False)

    def _look_at_queue(self, now_s: float) -> None:
        """While the job has no hosts, see which jobs of this machine were there before it."""
        facts = self._memory.facts
        if self._queue is None:
            return
        if facts.pool is None or facts.run_began_at is not None:
            self._queue.leave()
            return
        ahead = self._queue.ahead(now_s)
        if ahead != facts.ahead:
            self._memory.learn(e.QueueSeen(now_s, ahead))

    def _take_requests(self, now_s: float) -> None:
        for event in self._requests.since(self._memory.facts.requests, now_s):
            self._memory.learn(event)

    def _show(self, durable: bool) -> None:
        """Replace the status file; only turning points are worth an fsync."""
        if self._is_resumed():
            return
        now, facts = status_object.Now(self._memory.now_s(), time.time()), self._memory.facts
        status = status_object.status(self._plan, facts, now, self._rates, self._deeds.reasons(facts))
        with contextlib.suppress(OSError):  # a full disk must not end the supervisor over a view
            status["travels"] = self._ferry.travels()
            replace_text(self._job.state, json.dumps(status), durable=durable)


def main(root: Path, backend_of: Callable[[JobDir, Plan], Backend], allocation: str = "") -> int:
    """Be the supervisor of the job at `root`; return the exit code (0 also when another one is at work).

    In an allocation, which is named, the code is for the batch script, see `stay`. Raises JournalError.
    """
    job = JobDir(root)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that submitted the job may close
    with locked(job) as mine:
        if not mine:
            print(f"another supervisor is at work{locks.by_whom(job.lock)}", file=sys.stderr)
            return allocation_claim.announce_allocation(job, allocation)
        while True:  # each round takes at least one request
            plan = codec.loads(Plan, job.plan.read_bytes())
            try:
                backend = backend_of(job, plan)
                allocation_claim.claim(job, backend.allocation.id if backend.allocation is not None else "")
            except NotOursError as err:
                print(err, file=sys.stderr)
                return allocation_claim.OVER
            lost_journal.require_journal(job, plan)
            supervisor = Supervisor(
                job, allocation_claim.placed(plan, backend.allocation), translation.read_secrets(job), backend
            )
            taken = asyncio.run(supervisor.run())
            if plan.slurm is not None:
                return allocation_claim.leave(backend.allocation, supervisor.requeue, supervisor.end)
            # `ended` stands by now, so whoever asks for a resume after this look starts a supervisor himself.
            if not RequestInbox(job.requests).since(taken, 0.0):
                return 0
