"""Transfers of logs and checkpoints, both ways, between the job folder and hosts that do not see its disk.

Rules: where a host sees the job folder nothing is transferred. A file lands in the job folder under the name that it
has on the host. A checkpoint counts once it is whole in the job folder; before an attempt begins from it, it is on
every host. Nothing here waits: large files are copied by the backend's `BulkCopier`, and a thread does what may take
long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from orchestrator.backends.api import BulkCopier, Wake
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
"""How many tasks that may take long (hashing, deleting) run at once."""

Ready = tuple[d.Prepare, tuple[m.ManifestEntry, ...]]
"""The order to prepare a node whose checkpoint has arrived, and the files of the checkpoint."""


class Transfers:
    """All transfers of one job."""

    def __init__(
        self, job: JobDir, plan: Plan, carrier: BulkCopier | None, in_use: Callable[[], str]
    ) -> None:
        """`in_use` returns the checkpoint that must not be deleted. `wake` is set by the supervisor."""
        self._job = job
        self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="transfers")
        self._log_receiver = LogReceiver(job)
        later, (place, _) = self._pool.submit, job.checkpoint_place(plan.checkpoint_glob)
        self._checkpoint_fetch = (
            CheckpointFetch(job, carrier, plan.checkpoint_keep, in_use, later, place.name)
            if carrier is not None
            else None
        )
        self._hellos: dict[str, m.Hello] = {}
        self._incarnations: dict[str, str] = {}
        self._sending: dict[str, d.Prepare] = {}
        self._hashing: list[tuple[d.Prepare, Future[tuple[m.ManifestEntry, ...]]]] = []
        self._events: list[e.Event] = []
        self.wake: Wake = lambda: None
        self.moved_at = 0.0

    def begin(self, facts: Facts, stopped: Mapping[str, int], at: float) -> None:
        """Go on where the previous supervisor left off. `stopped`: the last attempt that each node said to be over."""
        self._incarnations = {node.name: node.incarnation for node in facts.every_node() if node.incarnation}
        if self._checkpoint_fetch is not None:
            self._checkpoint_fetch.begin(at, tuple(facts.fetching), stopped)

    # Nodes

    def greeted(self, hello: m.Hello, started: int, at: float) -> None:
        """Take an agent's greeting, the first message of a connection. `started`: the last attempt that had ranks
        there; what an earlier agent had not reported of it will not come."""
        if self._incarnations.get(hello.node, hello.incarnation) != hello.incarnation:
            self.lost(hello.node, started, at)
        self._incarnations[hello.node] = hello.incarnation
        self._hellos[hello.node] = hello

    def up(self, hello: m.Hello) -> m.ResumeOffsets | None:
        """A node's agent is connected: return where its files go on; None for one that sees the job folder."""
        return self._log_receiver.have(hello.node) if hello.ships else None

    def root(self, node: str) -> JobDir:
        """Return the job's folder as the node sees it."""
        hello = self._hellos.get(node)
        return JobDir.at(hello.root) if hello is not None else self._job

    def ships(self, node: str) -> bool:
        """Tell whether the node does not see this machine's job folder."""
        hello = self._hellos.get(node)
        return hello is not None and hello.ships

    def lost(self, node: str, attempt: int, at: float) -> None:
        """A node's agent, the last that had ranks of this attempt, has died or was given up for its silence: what it
        has not reported will not come."""
        self._incarnations.pop(node, None)
        self._forget_sends(node)
        if self._checkpoint_fetch is not None:
            self._checkpoint_fetch.lost(at, node, attempt)

    # Logs

    def take(self, envelope: Envelope, at: float) -> bool:
        """Take a piece of a file; False when the node must begin again, over a new connection."""
        data = {key: value for key, value in envelope.data.items() if key != "kind"}
        try:
            self._log_receiver.take(envelope.node, codec.unpack(m.Chunk, data), envelope.raw)
        except (LogReceiveError, codec.CodecError) as err:
            print(f"{envelope.node}: {err}", flush=True)
            return False
        self.moved_at = at
        return True

    def owed(self) -> list[tuple[str, m.ChunkAck]]:
        """Return the acknowledgements that are due, by node."""
        return self._log_receiver.owed()

    # Checkpoints into the job folder

    def found(self, envelope: Envelope, attempt: int, gang: Gang, at: float) -> list[e.Event]:
        """Take a node's report of its part of a checkpoint; only those of the current attempt, with its gang, are
        fetched.

        Raises CodecError when the report cannot be read.
        """
        data = {key: value for key, value in envelope.data.items() if key != "kind"}
        report = codec.unpack(m.ManifestReported, data)
        if report.attempt != attempt:
            return []
        placed = tuple(name for name, _ in gang)
        assert self._checkpoint_fetch is not None, "a host that does not see this disk was reached"
        self._checkpoint_fetch.found(at, envelope.node, str(self.root(envelope.node).root), report, placed)
        return self.news(at)

    def scanned(self, node: str, beat: m.Heartbeat, at: float) -> None:
        """Note how far a node has reported its checkpoints."""
        if self._checkpoint_fetch is not None and beat.reported_through_step >= 0:
            self._checkpoint_fetch.scanned(at, node, beat.attempt, beat.reported_through_step)

    def learned(self, event: e.Event) -> None:
        """Take an event of a node that the brain has learned, which may concern its checkpoints."""
        if self._checkpoint_fetch is not None and isinstance(event, e.Stopped):
            self._checkpoint_fetch.stopped(event.at, event.node, event.attempt)

    def localized(self, event: e.Event) -> e.Event:
        """Return a node's event; one of a checkpoint with its path on this machine."""
        if not isinstance(event, (e.CheckpointFound, e.CheckpointInvalidated)):
            return event
        path, root = Path(event.path), self.root(event.node).root
        if not path.is_relative_to(root):
            return event
        return dataclasses.replace(event, path=str(self._job.root / path.relative_to(root)))

    def news(self, at: float) -> list[e.Event]:
        """Return what the brain is to learn of transfers since the last call."""
        if self._checkpoint_fetch is not None:
            self._checkpoint_fetch.tidy(at)
            for copied in self._checkpoint_fetch.carrier.copied():
                self.moved_at = at
                self._checkpoint_fetch.copied(at, copied)
                self._sent(self._sending.pop(copied.copy.key, None), copied.error, at)
            for note in self._checkpoint_fetch.notes:
                print(note, flush=True)
            self._events += self._checkpoint_fetch.news
            self._checkpoint_fetch.notes, self._checkpoint_fetch.news = [], []
        events, self._events = self._events, []
        return events

    # Checkpoints to hosts

    def send(self, decision: d.Prepare, at: float) -> bool:
        """Begin to send the checkpoint of an attempt to a node, or go on with it; True when there is nothing to send."""
        node, resume = decision.node, decision.resume
        if resume is None or self._checkpoint_fetch is None or not self.ships(node):
            return True
        if not Path(resume.path).is_relative_to(self._job.root):
            return True  # the user says that all hosts see that place
        try:
            copy = self._checkpoint_fetch.send(at, resume.path, node, str(self.root(node).root))
        except (OrchError, OSError) as err:
            self._failed(decision, str(err), at)
            return False
        self._forget_sends(node)
        self._sending[copy.key] = decision
        return False

    def let_go(self, node: str, at: float) -> None:
        """The ranks of a node are started: nothing more is sent there, which could be written over what they save, and
        no failure to send counts."""
        if self._checkpoint_fetch is None:
            return
        self._checkpoint_fetch.end_sends(at, node)
        self._forget_sends(node)
        self._hashing = [(order, future) for order, future in self._hashing if order.node != node]
        self._events = [
            event for event in self._events if not (isinstance(event, e.PrepareFailed) and event.node == node)
        ]

    def _forget_sends(self, node: str) -> None:
        self._sending = {key: order for key, order in self._sending.items() if order.node != node}

    def arrived(self, at: float) -> list[Ready]:
        """Return the nodes whose checkpoint has arrived since the last call, to be verified there."""
        ready: list[Ready] = []
        for decision, future in [(decision, future) for decision, future in self._hashing if future.done()]:
            self._hashing.remove((decision, future))
            try:
                ready.append((decision, future.result()))
            except (OrchError, OSError) as err:
                self._failed(decision, str(err), at)
        return ready

    def path_there(self, node: str, path: str) -> str:
        """Return where a checkpoint of this machine lies on a node."""
        here = Path(path)
        if not here.is_relative_to(self._job.root):
            return path
        if self._checkpoint_fetch is not None and self.ships(node):
            return self._checkpoint_fetch.resume_path(path, str(self.root(node).root))
        return str(self.root(node).root / here.relative_to(self._job.root))

    def travels(self) -> list[TransferStatus]:
        """Return the transfers under way, as `orch status --json` shows them; `done_bytes` is None while not known."""
        if self._checkpoint_fetch is None:
            return []
        done_bytes = self._checkpoint_fetch.carrier.progress()
        return [
            {
                "name": in_flight.name,
                "node": in_flight.copy.node,
                "direction": in_flight.copy.direction.value,
                "bytes": in_flight.size_bytes,
                "done_bytes": done_bytes.get(in_flight.copy.key),
            }
            for in_flight in self._checkpoint_fetch.copies
        ]

    def close(self) -> None:
        """Close files and threads; deletions under way go on to their end."""
        self._log_receiver.close()
        self._pool.shutdown(wait=False)

    def _sent(self, decision: d.Prepare | None, error: str, at: float) -> None:
        """Go on with a checkpoint that was sent to a node; `decision` is None for a copy of another kind."""
        if decision is None or self._checkpoint_fetch is None or decision.resume is None:
            return
        if error:
            self._failed(decision, error, at)
            return
        future = self._pool.submit(self._checkpoint_fetch.pieces, decision.resume.path)
        self._hashing.append((decision, future))
        future.add_done_callback(lambda _: self.wake())

    def _failed(self, decision: d.Prepare, why: str, at: float) -> None:
        path = decision.resume.path if decision.resume else ""
        reason = f"{path} could not be brought there: {why}"
        self._events.append(e.PrepareFailed(at, decision.node, decision.attempt, reason, ""))
