"""Connection of an agent to its supervisor: login, orders, reports until they are acknowledged, reconnection.

Acknowledgements of fresh heartbeats prove contact, counted from when the heartbeat was sent: so the agent considers itself
lost before the supervisor does.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable

from orchestrator.core import codec
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import connection, orders, reports
from orchestrator.core.wire.agent_config import AgentConfig

REPORTS_MAX = 10_000
"""More than any job produces between two contacts; past it the oldest are dropped."""


class Outbox:
    """Numbered reports, oldest first."""

    def __init__(self) -> None:
        self._reports: deque[tuple[int, reports.ReliableReport]] = deque()
        self._last_seq = 0

    def add(self, report: reports.ReliableReport) -> int:
        """Keep a report and return its number, from 1."""
        self._last_seq += 1
        if len(self._reports) >= REPORTS_MAX:
            self._reports.popleft()
        self._reports.append((self._last_seq, report))
        return self._last_seq

    def acknowledge(self, seq: int) -> None:
        """Drop all reports up to `seq`."""
        while self._reports and self._reports[0][0] <= seq:
            self._reports.popleft()

    def pending(self) -> tuple[tuple[int, reports.ReliableReport], ...]:
        """Return the unacknowledged reports with their numbers, in order."""
        return tuple(self._reports)


CONNECT_S_MAX = 10.0
REDIAL_S_MIN = 0.1
REDIAL_S_MAX = 2.0
BEATS_UNACKNOWLEDGED_MAX = 1000

SILENT_S_MIN = 10.0
SILENT_BEATS_MIN = 5
"""A connection without an acknowledgement for this time, and for this number of heartbeats, counts as dead."""

NODE_ENDPOINT = "endpoint"
"""The file in the node's own folder with the address to dial, `host:port`; the side that forwards a port writes it."""

_ORDERS = codec.classes_by_kind(orders.Order)


BUFFERED_BYTES_MAX = 1 << 20
"""How much of the pending reports may wait in a connection to be sent."""


class SupervisorLink:
    """Link of one agent to its supervisor, over one connection after the other."""

    def __init__(
        self,
        config: AgentConfig,
        greet: Callable[[int], reports.Hello],
        obey: Callable[[orders.Order], None],
        launcher: str = "",
    ) -> None:
        """`greet` makes the first message of a connection from the number of pending reports; `obey` receives orders;
        `launcher` is the address of a host on which the supervisor may run."""
        self._config = config
        self._launcher = launcher
        job = JobDir.at(config.root)
        self._endpoints = (job.node(config.node) / NODE_ENDPOINT, job.endpoint)
        self._greet = greet
        self._obey = obey
        self._outbox = Outbox()
        self._line: connection.PeerConnection | None = None
        # Whether all pending reports were sent over this connection, and else the last of them, and when more were read.
        self._is_caught_up = False
        self._sent = 0
        self._drained_at = 0.0
        self._redial_s = REDIAL_S_MIN
        self.connected_at = 0.0
        self._disconnected_at = time.monotonic()
        self._last_error = ""
        self._beats = 0
        self._beats_sent: deque[tuple[int, float]] = deque(maxlen=BEATS_UNACKNOWLEDGED_MAX)
        self.proved_at = time.monotonic()

    @property
    def connected(self) -> bool:
        """Whether a connection is open, which proves nothing about its other end."""
        return self._line is not None

    @property
    def disconnected_s(self) -> float:
        """The time (s) since the last connection ended; 0 while one is open."""
        return 0.0 if self._line is not None else time.monotonic() - self._disconnected_at

    @property
    def has_pending(self) -> bool:
        """Whether a report that must arrive is not acknowledged yet."""
        return bool(self._outbox.pending())

    async def run(self) -> None:
        """Dial until cancelled."""
        context = connection.client_context(self._config.certificate)
        while True:
            try:
                self._line = await connection.dial_any(self._addresses(), context, CONNECT_S_MAX)
                self.connected_at = time.monotonic()
                await self._listen(self._line)
            except (OSError, ValueError) as err:
                self._print_error(str(err))
            self.close()
            await asyncio.sleep(self._redial_s)
            self._redial_s = min(self._redial_s * 2, REDIAL_S_MAX)

    def close(self) -> None:
        """Close the connection, if one is open; what was sent is still delivered."""
        if self._line is not None:
            self._line.writer.close()
            self._line = None
            self._disconnected_at = time.monotonic()

    def _print_error(self, text: str) -> None:
        """Print why there is no connection, once for each reason: a night without one must not fill the disk."""
        if text != self._last_error:
            self._last_error = text
            print(f"{time.strftime('%H:%M:%S')} connection: {text}", file=sys.stderr, flush=True)

    def _addresses(self) -> list[tuple[str, int]]:
        """Return the addresses to dial, likely ones first: a file names the new one when the supervisor has moved.

        The node's own file comes first: over SSH the connection goes through a port of this host. Raises ValueError.
        """
        text = self._config.address
        for path in self._endpoints:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                text = ownership.read_regular(path).decode()
                break
        addresses = [connection.parse_address(word) for word in text.split()]
        if self._launcher and addresses:
            addresses.insert(0, (self._launcher, addresses[0][1]))
        return list(dict.fromkeys(addresses))

    async def _listen(self, source: connection.PeerConnection) -> None:
        self._is_caught_up, self._sent = False, 0
        source.send(self._greet(len(self._outbox.pending())))
        catching_up = asyncio.create_task(self._catch_up(source)) if not self._send_pending(source) else None
        try:
            await self._receive(source)
        finally:
            if catching_up is not None:
                catching_up.cancel()

    def _send_pending(self, source: connection.PeerConnection) -> bool:
        """Send pending reports, in order, as many as the connection takes at once; return whether all were sent."""
        for seq, report in self._outbox.pending():
            if seq <= self._sent:
                continue
            if source.writer.transport.get_write_buffer_size() > BUFFERED_BYTES_MAX:
                return False
            source.send(report, seq)
            self._sent = seq
        self._is_caught_up = True
        return True

    async def _catch_up(self, source: connection.PeerConnection) -> None:
        """Send the other pending reports as they are read. Nothing else is sent before."""
        try:
            while not self._send_pending(source):
                await source.writer.drain()
                self._drained_at = time.monotonic()
        except OSError:
            source.abort()

    async def _receive(self, source: connection.PeerConnection) -> None:
        while True:
            data, _ = await source.receive()
            order, _ = connection.take_message(data, _ORDERS)
            self._redial_s = REDIAL_S_MIN  # only a connection that carried a message resets the pause
            self._last_error = ""
            if isinstance(order, orders.Ack):
                self._acknowledge(order)
            else:
                self._obey(order)

    def _acknowledge(self, ack: orders.Ack) -> None:
        self._outbox.acknowledge(ack.seq)
        while self._beats_sent and self._beats_sent[0][0] <= ack.beat:
            self.proved_at = self._beats_sent.popleft()[1]

    def report(self, report: reports.ReliableReport) -> None:
        """Send a report that must arrive: now if possible, and on every new connection until it is acknowledged."""
        self._send(report, self._outbox.add(report))

    def send_chunk(self, chunk: reports.Chunk, raw: bytes) -> bool:
        """Send bytes of a file, if a connection is open; return whether they were sent."""
        return self._send(chunk, raw=raw)

    def send_heartbeat(
        self, attempt: int, ranks: tuple[reports.RankHeartbeat, ...], scans: int, has_unfinished: bool
    ) -> None:
        """Send a heartbeat, if a connection is open; abort one that seems dead."""
        if self._line is None:
            return
        silent_s = time.monotonic() - max(self.proved_at, self.connected_at, self._drained_at)
        if silent_s > max(SILENT_S_MIN, SILENT_BEATS_MIN * self._config.heartbeat_s):
            self._line.abort()
            return
        if not self._is_caught_up:
            return
        self._beats += 1
        self._beats_sent.append((self._beats, time.monotonic()))
        self._send(reports.Heartbeat(attempt, ranks, self._beats, scans, has_unfinished))

    def report_signal(self) -> None:
        """Report that Slurm has signalled this node's processes to end, if a connection is open."""
        self._send(reports.NodeSignalled())

    def say_goodbye(self) -> None:
        """Say goodbye and close the connection."""
        self._send(reports.Goodbye())
        self.close()

    def _send(self, message: reports.Report, seq: int = 0, raw: bytes = b"") -> bool:
        if self._line is None or not self._is_caught_up:
            return False
        try:
            self._line.send(message, seq, raw)
        except connection.PeerError:
            self._line.abort()
            return False
        return True
