"""Heartbeats of all agents: acknowledgements, connections that have gone silent, and how long decisions on heartbeats are delayed.

Heartbeats are not kept: the brain learns each one; only what acknowledgements need is remembered here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from orchestrator.brain.model.facts import Facts
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.core import codec
from orchestrator.core.wire import orders
from orchestrator.core.wire.reports import Envelope, Heartbeat

SILENT_S_MIN, SILENT_HEARTBEATS = 10.0, 5
"""A connection is taken for dead after this time without a heartbeat, but not before this many of them are missing."""


class HeartbeatTracker:
    """The heartbeats of one job's agents."""

    def __init__(self, heartbeat_s: float) -> None:
        """`heartbeat_s`: the interval at which agents send heartbeats."""
        self._silent_s = max(SILENT_S_MIN, SILENT_HEARTBEATS * heartbeat_s)
        self._heartbeats: dict[str, int] = {}  # the number of the latest, by node
        self._acks: dict[str, orders.Ack] = {}  # the latest sent over the current connection, by node

    def reset(self, node: str) -> None:
        """Begin again for a node with a new connection, or with none."""
        self._heartbeats.pop(node, None)
        self._acks.pop(node, None)

    def receive(self, report: Envelope) -> Heartbeat:
        """Remember a heartbeat and return it. Raises CodecError when it cannot be read."""
        heartbeat = codec.unpack_kind({Heartbeat.__name__: Heartbeat}, report.data)
        self._heartbeats[report.node] = heartbeat.beat
        return heartbeat

    def ack_due(self, node: str, seq: int) -> orders.Ack | None:
        """Return the acknowledgement of reports up to `seq` and of the latest heartbeat; None when it was sent
        already."""
        ack = orders.Ack(seq, self._heartbeats.get(node, 0))
        return ack if self._acks.get(node) != ack else None

    def note_ack_sent(self, node: str, ack: orders.Ack) -> None:
        """Remember that an acknowledgement was sent."""
        self._acks[node] = ack

    def find_silent_nodes(self, facts: Facts, now_s: float) -> Iterator[str]:
        """Yield the nodes whose connection is open but silent for too long."""
        for node in facts.every_node():
            if node.agent_state is AgentState.UP and now_s > node.contact_at + self._silent_s:
                yield node.name


class WorkShare:
    """Limit on the share of a processor that repeated work may take: the more it costs, the longer it is delayed.

    Measures the work inside a `with` block, in processor time of this thread. `pause_s`: how long to wait until the next.
    """

    def __init__(self, share_max: float, pause_s_max: float) -> None:
        self._share_max, self._pause_s_max = share_max, pause_s_max
        self._began_s = 0.0
        self.pause_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.pause_s = min((time.thread_time() - self._began_s) / self._share_max, self._pause_s_max)
