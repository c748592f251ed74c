"""The supervisor: one process per job, one loop. Receive, learn, decide, journal, do.

Rules: only the holder of the job folder's lock acts; what was learned and decided is on disk before it is done and
before agents are told that it arrived; nothing is decided here. If this process dies, the ranks go on, and the next
one replays the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator import orders, story
from orchestrator.backends import Backend, LaunchError
from orchestrator.brain import decisions as d
from orchestrator.brain import events as e
from orchestrator.brain.brain import SLEPT_S, Brain
from orchestrator.brain.facts import Link, News
from orchestrator.journal import Entry, JobClock, Journal, read
from orchestrator.links import Down, Links, Said, Up, Word
from orchestrator.plan import Plan
from orchestrator.requests import Requests
from orchestrator.wire import codec, line
from orchestrator.wire import messages as m
from orchestrator.wire.durable import replace_text
from orchestrator.wire.mask import Mask
from orchestrator.wire.paths import JobDir

CHORE_S = 0.5
"""How often requests, agents' processes and the status file are looked after."""

LOCK_S_MAX = 1.0
"""How long to wait for the lock: whoever only looks at it holds it for an instant."""

DECISIONS_MAX = 10_000
"""More decisions than that in one look is a bug, not a plan."""

DISMISS_S_MAX = 5.0
"""How long the supervisor of an ended job waits for its agents to leave."""

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
        self._private = private
        self._backend = backend
        self._mask = Mask(private.secrets.values())
        self._machine = orders.machine()
        self._brain = Brain()
        self._acked: dict[str, tuple[str, int]] = {}  # the last kept report of each node that is on disk
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

    def _replay(self) -> tuple[int, Entry | None]:
        """Learn the journal, and which kept reports it holds; return its last number and its latest entry."""
        last_n, latest = 0, None
        for entry in read(self._job.journal):
            self._brain.learn(entry.news)
            last_n = entry.n
            if latest is None or entry.news.at >= latest.news.at:
                latest = entry
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
            words = await self._hear(due_s)
            if self._clock.now_s() > due_s + SLEPT_S:
                self._wake_up()
            for word in words:
                self._take(word)
            if self._clock.now_s() >= self._chore_due_s:
                self._chores()
        self._show(durable=True)
        await self._links.close()
        self._journal.close()
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
        self._chores()
        # Last: whoever waits for this file finds a status that knows of the resume he asked for.
        replace_text(self._job.endpoint, f"127.0.0.1:{port}")

    def _is_over(self) -> bool:
        """Tell whether the job has ended, and its agents have left, had the time to, or are wanted again."""
        facts, now_s = self._brain.facts, self._clock.now_s()
        if facts.ended_at is None:
            return False
        connected = any(self._links.connected(node) for node in self._nodes)
        late = now_s > facts.ended_at + DISMISS_S_MAX
        return not connected or late or bool(self._requests.since(facts.requests, now_s))

    def _wake_up(self) -> None:
        """The machine slept, or this process was stopped: what was not listened to is no silence."""
        self._learn(e.SupervisorStarted(self._clock.now_s(), os.getpid()))
        for node in self._nodes:
            self._links.drop(node)

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
        names = {name: node.ranks for name, node in facts.nodes.items()}
        if facts.limits != planned.limits or names != {node.name: node.ranks for node in planned.nodes}:
            self._learn(planned)

    async def _hear(self, due_s: float) -> list[Word]:
        """Return what agents said, waiting no longer than until the next deadline or chore is due."""
        inbox, words = self._links.inbox, []
        if inbox.empty():
            try:
                words.append(await asyncio.wait_for(inbox.get(), max(0.0, due_s - self._clock.now_s())))
            except asyncio.TimeoutError:
                return []
        while not inbox.empty():
            words.append(inbox.get_nowait())
        return words

    # Receive, learn

    def _take(self, word: Word) -> None:
        now_s = self._clock.now_s()
        match word:
            case Up(hello):
                self._said_acks.pop(hello.node, None)
                self._beats[hello.node] = 0
                self._learn(orders.agent_up(self._plan, hello, now_s))
            case Down(node):
                self._said_acks.pop(node, None)
                self._learn(e.AgentSilent(now_s, node))
            case Said():
                self._take_report(word, now_s)

    def _take_report(self, said: Said, now_s: float) -> None:
        """Learn one report, each kept one once: it may be said again after a broken line."""
        if not said.seq:
            self._take_beat(said, now_s)
            return
        boot, seq = self._acked.get(said.node, ("", 0))
        if boot == said.boot and said.seq <= seq:
            return
        try:
            event = orders.event(self._plan, said, self._mask, now_s)
        except codec.CodecError as err:
            print(f"{said.node} sent what cannot be read: {err}", flush=True)
            return
        self._acked[said.node] = (said.boot, said.seq)
        self._learn(event, said.boot, said.seq)

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
        """Carry out one decision; the rest of them are facts already."""
        match decision:
            case d.Launch(node=node):
                self._launch(node)
            case d.Prepare(node=node):
                self._links.send(node, orders.prepare(self._plan, decision, self._private))
            case d.Start(node=node):
                self._links.send(node, orders.start(self._plan, self._job, decision))
            case d.Stop(node=node, attempt=attempt, grace_s=grace_s):
                self._links.send(node, m.Stop(attempt, grace_s))
            case d.TakeStacks(node=node, attempt=attempt):
                self._links.send(node, m.TakeStacks(attempt))
            case d.Dismiss(node=node):
                self._links.send(node, m.Leave())
            case d.BeginAttempt() | d.Judge() | d.Notice() | d.Finish() | d.EndJob():
                self._rates.clear()
                print(f"{story.iso(time.time())} {type(decision).__name__}: {decision.why}", flush=True)
                self._show(durable=True)

    def _launch(self, node: str) -> None:
        address = self._job.endpoint.read_text()
        try:
            self._backend.launch(orders.agent_config(self._plan, self._job, self._private, node, address))
        except LaunchError as err:
            self._learn(e.LaunchFailed(self._clock.now_s(), node, err.stage, self._mask.apply(err.reason)))

    # Chores

    def _chores(self) -> None:
        now_s = self._clock.now_s()
        self._chore_due_s = now_s + CHORE_S
        if self._brain.facts.end is None:  # a resume may come with a new plan, see main()
            self._take_requests(now_s)
        for node in self._brain.facts.every_node():
            if node.link in (Link.LAUNCHING, Link.SILENT) and not self._links.connected(node.name):
                evidence = self._backend.gone(node.name)
                if evidence is not None:
                    self._learn(e.AgentGone(now_s, node.name, self._mask.apply(evidence)))
            if node.link is Link.UP and now_s > node.contact_at + self._mute_s_max():
                self._links.drop(node.name)
        self._show(durable=False)

    def _take_requests(self, now_s: float) -> None:
        for event in self._requests.since(self._brain.facts.requests, now_s):
            self._learn(event)

    def _mute_s_max(self) -> float:
        return max(MUTE_S_MIN, MUTE_BEATS * self._plan.heartbeat_s)

    def _show(self, durable: bool) -> None:
        """Replace the status file; only turning points are worth an fsync."""
        now = story.Moment(self._clock.now_s(), time.time())
        text = json.dumps(story.status(self._plan, self._brain.facts, now, self._rates))
        with contextlib.suppress(OSError):  # a full disk must not end the supervisor over a view
            replace_text(self._job.state, text, durable=durable)


@contextlib.contextmanager
def locked(job: JobDir) -> Iterator[bool]:
    """Hold the job's lock, or learn within `LOCK_S_MAX` that another supervisor does."""
    fd = os.open(job.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _lock(fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    deadline_s = time.monotonic() + LOCK_S_MAX
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
            continue
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        return True


def main(root: Path, backend: Backend) -> int:
    """Be the supervisor of the job at `root`; return the exit code (0 also when another one is at work)."""
    job = JobDir(root)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that submitted the job may close
    with locked(job) as mine:
        if not mine:
            print("another supervisor is at work", file=sys.stderr)
            return 0
        while True:  # each round takes at least one request
            plan = codec.loads(Plan, job.plan.read_bytes())
            taken = asyncio.run(Supervisor(job, plan, orders.private(job), backend).run())
            # `ended` stands by now, so whoever asks for a resume after this look starts a supervisor himself.
            if not Requests(job.requests).since(taken, 0.0):
                return 0
