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

from orchestrator import ending, orders, story
from orchestrator.backends import Backend
from orchestrator.brain import decisions as d
from orchestrator.brain import events as e
from orchestrator.brain.brain import SLEPT_S, Brain
from orchestrator.brain.facts import Link, News
from orchestrator.deeds import Deeds
from orchestrator.ferry import Ferry
from orchestrator.joblock import locked
from orchestrator.journal import Entry, JobClock, Journal, Sleep, read
from orchestrator.links import Down, Greeted, Links, Said, Stir, Up, Word
from orchestrator.plan import Plan
from orchestrator.requests import Requests
from orchestrator.tickets import Queue
from orchestrator.wire import codec, line
from orchestrator.wire import messages as m
from orchestrator.wire.durable import replace_text
from orchestrator.wire.mask import Mask
from orchestrator.wire.paths import JobDir

CHORE_S = 0.5
"""How often requests, agents' processes and the status file are looked after."""

DECISIONS_MAX = 10_000
"""More decisions than that in one look is a bug, not a plan."""

BEATS_S = 60.0
"""How often heartbeats are journaled when nothing else is."""

MUTE_S_MIN = 10.0
MUTE_BEATS = 5
"""A connection without a beat for so long, and for so many times their distance, is taken for dead."""


class Supervisor:
    """The one that acts for a job."""

    def __init__(self, job: JobDir, plan: Plan, private: orders.Private, backend: Backend) -> None:
        self._job = job
        self._plan = plan
        self._mask = Mask(private.secrets.values())
        self._machine = orders.machine()
        self._brain = Brain()
        self._acked: dict[str, tuple[str, int]] = {}  # the last kept report of each node that is on disk
        self._stopped: dict[str, int] = {}  # the last attempt that each node said to be over
        self._said_acks: dict[str, m.Ack] = {}
        self._beats: dict[str, int] = {}
        self._rates: dict[int, float] = {}
        self._requests = Requests(job.requests)
        last_n, latest = self._replay()
        # A resume may have dropped nodes: their agents are still to be stopped and dismissed.
        left = [node.name for node in self._brain.facts.every_node()]
        self._nodes = tuple(dict.fromkeys([*(node.name for node in plan.nodes), *left]))
        self._links = Links(plan.id, private.token, self._nodes)
        self._clock = JobClock(self._machine, latest)
        self._journal = Journal(job.journal, self._machine, last_n)
        self._wake_s = self._chore_due_s = self._beats_due_s = 0.0
        self._stepped = 0  # the latest attempt whose first step is written down
        self._ferry = Ferry(job, plan, backend.carrier, self._checkpoint)
        self._deeds = Deeds(job, plan, private, backend, self._links, self._ferry)
        self._queue = Queue(job, [node.host for node in plan.nodes], plan.created_at)
        self._slept = Sleep(SLEPT_S)
        backend.stir = self._ferry.stir = self._links.stir

    def _checkpoint(self) -> str:
        """Return the checkpoint that the next attempt would start from; it must not be deleted."""
        checkpoint = self._brain.facts.checkpoint
        return checkpoint.path if checkpoint else ""

    def _replay(self) -> tuple[int, Entry | None]:
        """Learn the journal, and which kept reports it holds; return its last number and its latest entry."""
        last_n, latest = 0, None
        for entry in read(self._job.journal):
            self._brain.learn(entry.news)
            last_n = entry.n
            if latest is None or entry.news.at >= latest.news.at:
                latest = entry
            if isinstance(entry.news, e.Stopped):
                self._stopped[entry.news.node] = entry.news.attempt
            if entry.seq:
                node = getattr(entry.news, "node", "")
                self._acked[node] = (entry.boot, entry.seq)
        self._brain.beats()  # those of the journal are in it already
        return last_n, latest

    async def run(self) -> int:
        """Act until the job has ended and its agents have left; return the last request that was taken."""
        port = await self._listen()
        print(f"{story.iso(time.time())} supervisor {os.getpid()} listens on port {port}", flush=True)
        self._begin(port)
        while True:
            self._act()
            if self._is_over():
                break
            due_s = min(self._wake_s, self._chore_due_s)
            words = await self._links.hear(due_s - self._clock.now_s())
            if self._clock.now_s() > due_s + SLEPT_S or self._slept.just_now():
                self._wake_up()
            for word in words:
                self._take(word)
            for node, got in self._ferry.owed():
                self._links.send(node, got)
            if self._clock.now_s() >= self._chore_due_s:
                self._chores()
        self._chores()  # what came last is still learned, and shown
        self._show(durable=True)
        await self._links.close()
        self._deeds.close()
        self._queue.leave()
        self._journal.close()
        if self._job.plan.exists():  # it may have been deleted meanwhile
            self._job.ended.touch()
        return self._brain.facts.requests

    def _begin(self, port: int) -> None:
        """Take up the job where the journal has left it."""
        now_s = self._clock.now_s()
        self._learn_plan(now_s)
        self._learn(e.SupervisorStarted(now_s, os.getpid()))
        self._take_requests(now_s)
        if self._brain.facts.end is not None:
            return
        self._job.ended.unlink(missing_ok=True)
        self._deeds.endpoint = f"127.0.0.1:{port}"
        self._deeds.begin(self._brain.facts, self._stopped, now_s)
        self._chores()
        # Last: whoever waits for this file finds a status that knows of the resume he asked for.
        replace_text(self._job.endpoint, self._deeds.endpoint)

    def _is_over(self) -> bool:
        """Tell whether there is nothing more to do, here or on hosts that may come back; or the job is resumed."""
        facts, now_s = self._brain.facts, self._clock.now_s()
        if facts.ended_at is None:
            return False
        if self._requests.since(facts.requests, now_s):
            return True
        connected = any(self._links.connected(node) for node in self._nodes)
        if not ending.is_done(facts.ended_at, self._ferry.moved_at, connected, now_s):
            return False
        left = ending.unreached(facts, now_s)
        if not left or not self._job.plan.exists():
            return True
        if not self._job.ended.exists():  # whoever wants to resume, collect or clean need not wait for them
            print(f"waiting for {', '.join(left)}, to dismiss what may run there", flush=True)
            self._deeds.seek(left)
            self._show(durable=True)
            self._job.ended.touch()
        return False

    def _wake_up(self) -> None:
        """The machine slept, or this process was stopped: what was not listened to is no silence."""
        self._learn(e.SupervisorStarted(self._clock.now_s(), os.getpid()))
        for node in self._nodes:
            self._links.drop(node)
            self._deeds.look_after(node)

    async def _listen(self) -> int:
        """Listen where the supervisor before did, so that agents find this one at once."""
        try:
            port = int(self._job.endpoint.read_text().rpartition(":")[2])
        except (OSError, ValueError):
            port = 0
        secrets = self._job.secrets
        context = line.server_context(secrets / "certificate.pem", secrets / "key.pem")
        return await self._links.listen(context, "127.0.0.1", port)

    def _learn_plan(self, now_s: float) -> None:
        """Tell the brain the plan, at the beginning and when a resume changed it."""
        planned = orders.planned(self._plan, now_s)
        facts = self._brain.facts
        known = tuple(
            e.NodePlan(node.name, node.ranks if facts.pool is None else ()) for node in facts.nodes.values()
        )
        if (facts.limits, facts.pool, known) != (planned.limits, planned.pool, planned.nodes):
            self._learn(planned)

    # Receive, learn

    def _take(self, word: Word) -> None:
        now_s = self._clock.now_s()
        match word:
            case Greeted(hello):
                node = self._brain.facts.node(hello.node)
                self._ferry.greeted(hello, node.ever_started if node else 0, now_s)
            case Up(hello):
                self._said_acks.pop(hello.node, None)
                self._beats[hello.node] = 0
                self._learn(orders.agent_up(self._plan, hello, now_s))
                have = self._ferry.up(hello)
                if have is not None:
                    self._links.send(hello.node, have)
            case Down(name, left):
                self._said_acks.pop(name, None)
                self._learn(e.AgentSilent(now_s, name, left))
                self._deeds.line_ended(name, left)
            case Said():
                self._take_report(word, now_s)
            case Stir():
                self._chore_due_s = 0.0

    def _take_report(self, said: Said, now_s: float) -> None:
        """Learn one report, each kept one once: it may be said again after a broken line."""
        if not said.seq:
            self._take_passing(said, now_s)
            return
        boot, seq = self._acked.get(said.node, ("", 0))
        if boot == said.boot and said.seq <= seq:
            return
        try:
            if said.data.get("kind") == m.PiecesFound.__name__:
                attempt = self._brain.facts.attempt
                events = self._ferry.found(said, attempt.number if attempt else 0, self._gang(), now_s)
            else:
                events = [self._ferry.at_home(orders.event(self._plan, said, self._mask, now_s))]
        except codec.CodecError as err:
            print(f"{said.node} sent what cannot be read: {err}", flush=True)
            return
        self._acked[said.node] = (said.boot, said.seq)
        for event in events:
            self._learn(event, said.boot, said.seq)
            self._ferry.heard(event)

    def _gang(self) -> orders.Gang:
        return tuple((node.name, node.ranks) for node in self._brain.facts.gang)

    def _take_passing(self, said: Said, now_s: float) -> None:
        """Take a beat, or a piece of a file."""
        if said.data.get("kind") != m.Chunk.__name__:
            self._take_beat(said, now_s)
        elif not self._ferry.take(said, now_s):
            self._links.drop(said.node)

    def _take_beat(self, said: Said, now_s: float) -> None:
        try:
            beat = codec.unpack(m.Beat, {key: value for key, value in said.data.items() if key != "kind"})
        except codec.CodecError as err:
            print(f"{said.node} sent what cannot be read: {err}", flush=True)
            return
        self._beats[said.node] = beat.beat
        for rank in beat.ranks:
            if rank.rate_per_s is None:
                self._rates.pop(rank.rank, None)
            else:
                self._rates[rank.rank] = rank.rate_per_s
        self._learn(orders.beat(said.node, beat, now_s))
        self._ferry.scanned(said.node, beat, now_s)

    def _learn(self, news: News, boot: str = "", seq: int = 0) -> None:
        """Journal and learn. Beats are learned at once and journaled in a fold, before any other news."""
        if isinstance(news, e.Beat):
            self._brain.learn(news)
            if self._clock.now_s() >= self._beats_due_s or self._is_first_step(news):
                self._write_beats()
            return
        self._write_beats()
        self._journal.write(news, boot, seq)
        self._brain.learn(news)

    def _write_beats(self) -> None:
        self._beats_due_s = self._clock.now_s() + BEATS_S
        for beat in self._brain.beats():
            self._journal.write(beat)

    def _is_first_step(self, beat: e.Beat) -> bool:
        """Tell whether this is the first step of its attempt, whose moment the post-mortem tells."""
        if beat.attempt <= self._stepped or not any(rank.count for rank in beat.ranks):
            return False
        self._stepped = beat.attempt
        return True

    # Decide, journal, do

    def _act(self) -> None:
        """Decide until there is nothing more to decide; then tell agents what has safely arrived."""
        for _ in range(DECISIONS_MAX):
            decisions, self._wake_s = self._brain.decide(self._clock.now_s())
            if not decisions:
                break
            for decision in decisions:
                self._learn(decision)
            self._journal.sync()
            for decision in decisions:
                self._do(decision)
        else:
            raise AssertionError(f"the brain does not come to rest: {decisions[:3]}")
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Everything taken so far is on disk: say so to those who said it."""
        self._journal.sync()
        for node in self._nodes:
            boot, seq = self._acked.get(node, ("", 0))
            ack = m.Ack(seq if boot == self._links.boot(node) else 0, self._beats.get(node, 0))
            if self._said_acks.get(node) != ack and self._links.send(node, ack):
                self._said_acks[node] = ack

    def _do(self, decision: d.Decision) -> None:
        """Carry out one decision; turning points are shown and printed."""
        match decision:
            case d.Judge(verdict=verdict):
                self._turning_point(decision)
                self._deeds.judged(verdict, self._brain.facts, self._clock.now_s())
            case d.BeginAttempt() | d.Place() | d.Notice() | d.Finish() | d.EndJob():
                self._turning_point(decision)
            case _:
                pass
        for event in self._deeds.do(decision, self._gang(), self._clock.now_s()):
            self._learn(event)

    def _turning_point(self, decision: d.Decision) -> None:
        self._rates.clear()
        print(f"{story.iso(time.time())} {type(decision).__name__}: {decision.why}", flush=True)
        self._show(durable=True)

    # Chores

    def _chores(self) -> None:
        now_s = self._clock.now_s()
        self._chore_due_s = now_s + CHORE_S
        if self._brain.facts.end is None:  # a resume may come with a new plan, see main()
            self._take_requests(now_s)
            self._look_at_queue(now_s)
        for event in self._deeds.look(self._brain.facts, now_s):
            self._learn(event)
        self._deeds.go_on(self._gang, now_s)
        mute_s = max(MUTE_S_MIN, MUTE_BEATS * self._plan.heartbeat_s)
        for node in self._brain.facts.every_node():
            if node.link is Link.UP and now_s > node.contact_at + mute_s:
                self._links.drop(node.name)
        self._show(durable=False)

    def _look_at_queue(self, now_s: float) -> None:
        """While the job has no hosts, see which jobs of this machine were there before it."""
        facts = self._brain.facts
        if facts.pool is None or facts.run_began_at is not None:
            self._queue.leave()
            return
        ahead = self._queue.ahead(now_s)
        if ahead != facts.ahead:
            self._learn(e.QueueSeen(now_s, ahead))

    def _take_requests(self, now_s: float) -> None:
        for event in self._requests.since(self._brain.facts.requests, now_s):
            self._learn(event)

    def _show(self, durable: bool) -> None:
        """Replace the status file; only turning points are worth an fsync."""
        now, facts = story.Moment(self._clock.now_s(), time.time()), self._brain.facts
        status = story.status(self._plan, facts, now, self._rates, self._deeds.reasons(facts))
        text = json.dumps({**status, "travels": self._ferry.travels()})
        with contextlib.suppress(OSError):  # a full disk must not end the supervisor over a view
            replace_text(self._job.state, text, durable=durable)


def main(root: Path, backend_of: Callable[[JobDir, Plan], Backend]) -> int:
    """Be the supervisor of the job at `root`; return the exit code (0 also when another one is at work)."""
    job = JobDir(root)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that submitted the job may close
    with locked(job) as mine:
        if not mine:
            print("another supervisor is at work", file=sys.stderr)
            return 0
        while True:  # each round takes at least one request
            plan = codec.loads(Plan, job.plan.read_bytes())
            backend = backend_of(job, plan)
            taken = asyncio.run(Supervisor(job, plan, orders.private(job), backend).run())
            # `ended` stands by now, so whoever asks for a resume after this look starts a supervisor himself.
            if not Requests(job.requests).since(taken, 0.0):
                return 0
