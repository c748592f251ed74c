"""Nodes as their agents have greeted: where the job's folder is there, whether it is this disk, and their logs on their way
here.

Rules: where a host sees the job folder nothing is transferred. A file lands in the job folder under the name that it has on
the host.
"""

from __future__ import annotations

from orchestrator.core import codec
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m
from orchestrator.core.wire.messages import Envelope
from orchestrator.supervisor.transfers.log_receiver import LogReceiveError, LogReceiver


class Transfers:
    """The nodes of one job and the files that they send."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self.logs = LogReceiver(job)
        self._hellos: dict[str, m.Hello] = {}
        self.moved_at = 0.0

    def greeted(self, hello: m.Hello) -> None:
        """Take an agent's greeting, the first message of a connection."""
        self._hellos[hello.node] = hello

    def up(self, hello: m.Hello) -> m.ResumeOffsets | None:
        """A node's agent is connected: return where its files go on; None for one that sees the job folder."""
        return self.logs.have(hello.node) if hello.ships else None

    def root(self, node: str) -> JobDir:
        """Return the job's folder as the node sees it."""
        hello = self._hellos.get(node)
        return JobDir.at(hello.root) if hello is not None else self._job

    def ships(self, node: str) -> bool:
        """Tell whether the node does not see this machine's job folder."""
        hello = self._hellos.get(node)
        return hello is not None and hello.ships

    def may_ship(self, node: str) -> bool:
        """Tell whether the node may not see this machine's job folder: its agent has not said that it does."""
        hello = self._hellos.get(node)
        return hello is None or hello.ships

    def receive(self, envelope: Envelope, at: float) -> bool:
        """Take a piece of a file; False when the node must begin again, over a new connection."""
        try:
            self.logs.receive(
                envelope.node, codec.unpack_kind({"Chunk": m.Chunk}, envelope.data), envelope.raw
            )
        except (LogReceiveError, codec.CodecError) as err:
            print(f"{envelope.node}: {err}", flush=True)
            return False
        self.moved_at = at
        return True
