"""What travels between this machine and hosts that do not see its disk? Logs and checkpoints, both ways.

Rules: where a host sees the job folder nothing travels; what comes home lands under the name that the host has it
under; a checkpoint counts when it is at home and whole; before an attempt begins from it, it is on every host.
Nothing here waits: bulk is copied by the backend's carrier, and what may take long is done by a thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from orchestrator.backends.api import Carrier, Wake
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.core import codec
from orchestrator.core.errors import OrchError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.rank_env import Gang
from orchestrator.core.jobdir.status_file import TransferStatus
from orchestrator.core.wire import messages as m
from orchestrator.core.wire.messages import Envelope
from orchestrator.supervisor.transfers.checkpoint_fetch import CheckpointFetch
from orchestrator.supervisor.transfers.log_receiver import LogReceiveError, LogReceiver

THREADS_MAX = 2
"""How many deeds that may take long (hashing, deleting) are done at once."""

Ready = tuple[d.Prepare, tuple[m.ManifestEntry, ...]]
"""A node to which its checkpoint was brought, and the files of it."""


class Transfers:
    """All that travels for one job."""

    def __init__(self, job: JobDir, plan: Plan, carrier: Carrier | None, in_use: Callable[[], str]) -> None:
        """`in_use` tells which checkpoint must not be deleted. `stir` is set by the supervisor."""
        self._job = job
        self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="ferry")
        self._intake = LogReceiver(job)
        later = self._pool.submit
        self._carry = (
            CheckpointFetch(job, carrier, plan.checkpoint_keep, in_use, later)
            if carrier is not None
            else None
        )
        self._hellos: dict[str, m.Hello] = {}
        self._boots: dict[str, str] = {}
        self._sending: dict[str, d.Prepare] = {}
        self._hashing: list[tuple[d.Prepare, Future[tuple[m.ManifestEntry, ...]]]] = []
        self._events: list[e.Event] = []
        self.stir: Wake = lambda: None
        self.moved_at = 0.0

    def begin(self, facts: Facts, stopped: Mapping[str, int], at: float) -> None:
        """Go on where the supervisor before left off. `stopped`: the last attempt that each node said to be over."""
        self._boots = {node.name: node.incarnation for node in facts.every_node() if node.incarnation}
        if self._carry is not None:
            self._carry.begin(at, tuple(facts.fetching), stopped)

    # Nodes

    def greeted(self, hello: m.Hello, started: int, at: float) -> None:
        """A node's agent says who it is, before all else. `started`: the last attempt that had ranks there; what an
        agent before this one had not told of it will not come."""
        known = self._boots.get(hello.node, hello.incarnation)
        if known != hello.incarnation:
            self.lost(hello.node, started, at)
        self._boots[hello.node] = hello.incarnation
        self._hellos[hello.node] = hello

    def up(self, hello: m.Hello) -> m.ResumeOffsets | None:
        """A node's agent is connected: return what is told to one whose files travel, None for the others."""
        return self._intake.have(hello.node) if hello.ships else None

    def root(self, node: str) -> JobDir:
        """Return the job's folder as the node sees it."""
        hello = self._hellos.get(node)
        return JobDir.at(hello.root) if hello is not None else self._job

    def ships(self, node: str) -> bool:
        """Tell whether the node does not see this machine's job folder."""
        hello = self._hellos.get(node)
        return hello is not None and hello.ships

    def lost(self, node: str, attempt: int, at: float) -> None:
        """A node's agent is gone or given up for its silence, the last that had ranks of this attempt: what it has not
        told will not come."""
        self._boots.pop(node, None)
        if self._carry is not None:
            self._carry.lost(at, node, attempt)

    # Logs

    def take(self, said: Envelope, at: float) -> bool:
        """Take a piece of a file; False when the node must begin again, over a new connection."""
        data = {key: value for key, value in said.data.items() if key != "kind"}
        try:
            self._intake.take(said.node, codec.unpack(m.Chunk, data), said.raw)
        except (LogReceiveError, codec.CodecError) as err:
            print(f"{said.node}: {err}", flush=True)
            return False
        self.moved_at = at
        return True

    def owed(self) -> list[tuple[str, m.ChunkAck]]:
        """Return what is to be confirmed, by node."""
        return self._intake.owed()

    # Checkpoints home

    def found(self, said: Envelope, attempt: int, gang: Gang, at: float) -> list[e.Event]:
        """A node reports its part of a checkpoint; only those of the current attempt, with its gang, are fetched.

        Raises CodecError when the report cannot be read.
        """
        data = {key: value for key, value in said.data.items() if key != "kind"}
        report = codec.unpack(m.ManifestReported, data)
        if report.attempt != attempt:
            return []
        placed = tuple(name for name, _ in gang)
        assert self._carry is not None, "a host that does not see this disk was reached"
        self._carry.found(at, said.node, str(self.root(said.node).root), report, placed)
        return self.news(at)

    def scanned(self, node: str, beat: m.Heartbeat, at: float) -> None:
        """A node tells how far it has reported its checkpoints."""
        if self._carry is not None and beat.reported_through_step >= 0:
            self._carry.scanned(at, node, beat.attempt, beat.reported_through_step)

    def heard(self, event: e.Event) -> None:
        """A node's news that tells something of its checkpoints too."""
        if self._carry is not None and isinstance(event, e.Stopped):
            self._carry.stopped(event.at, event.node, event.attempt)

    def at_home(self, event: e.Event) -> e.Event:
        """Return a node's news of a checkpoint with its path as this machine knows it."""
        if not isinstance(event, (e.CheckpointFound, e.CheckpointInvalidated)):
            return event
        path, root = Path(event.path), self.root(event.node).root
        if not path.is_relative_to(root):
            return event
        return dataclasses.replace(event, path=str(self._job.root / path.relative_to(root)))

    def news(self, at: float) -> list[e.Event]:
        """Return what the brain is to learn of what has travelled since the last call."""
        if self._carry is not None:
            self._carry.tidy(at)
            for done in self._carry.carrier.copied():
                self.moved_at = at
                self._carry.copied(at, done)
                self._sent(self._sending.pop(done.copy.key, None), done.error, at)
            for note in self._carry.notes:
                print(note, flush=True)
            self._events += self._carry.news
            self._carry.notes, self._carry.news = [], []
        events, self._events = self._events, []
        return events

    # Checkpoints to hosts

    def send(self, decision: d.Prepare, at: float) -> bool:
        """Begin to bring the checkpoint of an attempt to a node; True when there is nothing to bring."""
        node, resume = decision.node, decision.resume
        if resume is None or self._carry is None or not self.ships(node):
            return True
        if not Path(resume.path).is_relative_to(self._job.root):
            return True  # of a place that the user says all hosts see
        try:
            copy = self._carry.send(resume.path, node, str(self.root(node).root))
        except (OrchError, OSError) as err:
            self._failed(decision, str(err), at)
            return False
        self._sending[copy.key] = decision
        return False

    def arrived(self, at: float) -> list[Ready]:
        """Return the nodes that have their checkpoint since the last call, to be verified there."""
        ready: list[Ready] = []
        for decision, future in [one for one in self._hashing if one[1].done()]:
            self._hashing.remove((decision, future))
            try:
                ready.append((decision, future.result()))
            except (OrchError, OSError) as err:
                self._failed(decision, str(err), at)
        return ready

    def path_there(self, node: str, path: str) -> str:
        """Return where a checkpoint of this machine lies on a node."""
        home = Path(path)
        if not home.is_relative_to(self._job.root):
            return path
        if self._carry is not None and self.ships(node):
            return self._carry.resume_path(path, str(self.root(node).root))
        return str(self.root(node).root / home.relative_to(self._job.root))

    def travels(self) -> list[TransferStatus]:
        """Return what travels now, as `orch status --json` shows it; `done_bytes` is None while it is not known."""
        if self._carry is None:
            return []
        done_bytes = self._carry.carrier.progress()
        return [
            {
                "name": one.name,
                "node": one.copy.node,
                "direction": one.copy.direction.value,
                "bytes": one.size_bytes,
                "done_bytes": done_bytes.get(one.copy.key),
            }
            for one in self._carry.trips
        ]

    def close(self) -> None:
        """Give files and threads back; what is being deleted is deleted."""
        self._intake.close()
        self._pool.shutdown(wait=False)

    def _sent(self, decision: d.Prepare | None, error: str, at: float) -> None:
        """See what became of a checkpoint that was brought to a node, None for a copy of another kind."""
        if decision is None or self._carry is None or decision.resume is None:
            return
        if error:
            self._failed(decision, error, at)
            return
        future = self._pool.submit(self._carry.pieces, decision.resume.path)
        self._hashing.append((decision, future))
        future.add_done_callback(lambda _: self.stir())

    def _failed(self, decision: d.Prepare, why: str, at: float) -> None:
        path = decision.resume.path if decision.resume else ""
        reason = f"{path} could not be brought there: {why}"
        self._events.append(e.PrepareFailed(at, decision.node, decision.attempt, reason, ""))
