"""How does an agent stay in touch? It dials, greets, hears orders, keeps what was not acknowledged, and dials again.

Contact is proved by acknowledgements of fresh beats, counted from when the beat was sent: so this side always thinks
itself forgotten before the other side does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable

from orchestrator.node.spool import Spool
from orchestrator.wire import codec, line
from orchestrator.wire import messages as m
from orchestrator.wire.paths import JobDir

CONNECT_S_MAX = 10.0
REDIAL_S_MIN = 0.1
REDIAL_S_MAX = 2.0
BEATS_UNACKNOWLEDGED_MAX = 1000

MUTE_S_MIN = 10.0
MUTE_BEATS = 5
"""A connection whose beats are not acknowledged for so long, and for so many heartbeats, is taken for dead."""

_ORDERS = codec.by_kind(m.Order)


class Contact:
    """One agent's line to its supervisor, whichever connection carries it now."""

    def __init__(
        self, config: m.AgentConfig, greet: Callable[[int], m.Hello], obey: Callable[[m.Order], None]
    ) -> None:
        """`greet` makes the first message of a connection from the number of pending reports; `obey` gets orders."""
        self._config = config
        self._endpoint = JobDir.at(config.root).endpoint
        self._greet = greet
        self._obey = obey
        self._spool = Spool()
        self._line: line.Line | None = None
        self._redial_s = REDIAL_S_MIN
        self._connected_at = 0.0
        self._beats = 0
        self._beats_sent: deque[tuple[int, float]] = deque(maxlen=BEATS_UNACKNOWLEDGED_MAX)
        self.proved_at = time.monotonic()

    @property
    def connected(self) -> bool:
        """Tell whether a connection is open, which proves nothing about what is at its other end."""
        return self._line is not None

    async def keep(self) -> None:
        """Dial until cancelled."""
        context = line.client_context(self._config.certificate)
        while True:
            try:
                host, port = self._address()
                self._line = await line.dial(host, port, context, CONNECT_S_MAX)
                self._connected_at = time.monotonic()
                await self._listen(self._line)
            except (OSError, ValueError) as err:
                print(f"{time.strftime('%H:%M:%S')} line: {err}", file=sys.stderr, flush=True)
            self.close()
            await asyncio.sleep(self._redial_s)
            self._redial_s = min(self._redial_s * 2, REDIAL_S_MAX)

    def close(self) -> None:
        """Drop the connection, if there is one; what was sent is still delivered."""
        if self._line is not None:
            self._line.writer.close()
            self._line = None

    def _address(self) -> tuple[str, int]:
        """Return where the supervisor is now: its file says so when it came back elsewhere."""
        try:
            address = self._endpoint.read_text()
        except OSError:
            address = self._config.address
        host, _, port = address.strip().rpartition(":")
        return host, int(port)

    async def _listen(self, source: line.Line) -> None:
        pending = self._spool.pending()
        source.send(self._greet(len(pending)))
        for seq, report in pending:
            source.send(report, seq)
        while True:
            order, _ = line.take_message(await source.receive(), _ORDERS)
            self._redial_s = REDIAL_S_MIN  # only a line that carried something was worth dialling
            if isinstance(order, m.Ack):
                self._acknowledged(order)
            else:
                self._obey(order)

    def _acknowledged(self, ack: m.Ack) -> None:
        self._spool.acknowledge(ack.seq)
        while self._beats_sent and self._beats_sent[0][0] <= ack.beat:
            self.proved_at = self._beats_sent.popleft()[1]

    def report(self, report: m.KeptReport) -> None:
        """Say something that must arrive: now if it can be, and again after every break until it is acknowledged."""
        self._send(report, self._spool.keep(report))

    def beat(self, attempt: int, ranks: tuple[m.RankBeat, ...]) -> None:
        """Say the regular word, if there is a connection; give up one that only seems to be."""
        if self._line is None:
            return
        mute_s = time.monotonic() - max(self.proved_at, self._connected_at)
        if mute_s > max(MUTE_S_MIN, MUTE_BEATS * self._config.heartbeat_s):
            self._line.abort()
            return
        self._beats += 1
        self._beats_sent.append((self._beats, time.monotonic()))
        self._send(m.Beat(self._beats, attempt, ranks))

    def _send(self, message: m.Report, seq: int = 0) -> None:
        if self._line is None:
            return
        try:
            self._line.send(message, seq)
        except line.LineError:
            self._line.abort()
