"""Listener on the supervisor's port, up to an agent's greeting: during a flood of connections, too, agents get in,
and memory and descriptors suffice.

Rules: a connection counts from accept on. A silent one costs only a descriptor: TLS begins with the first byte, since
from then on a connection costs up to a megabyte. The number of connections in TLS is limited, at once and by the time.
One connection too many evicts the oldest of the address that has the most, see `Crowd`. A flood is reported in one
line with a count.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable

from orchestrator.core.jobdir.durable import LINE_BYTES_MAX
from orchestrator.core.wire import connection
from orchestrator.core.wire.accepting import Acceptor, Crowd

FIRST_BYTE_S_MAX = 3.0
"""How long a new connection may be silent, or wait for its turn; an agent begins TLS at once."""

HELLO_S_MAX = 10.0
"""How long a connection may take for TLS and its greeting."""

SILENT_MAX = 256
"""How many connections may be silent at once."""

STRANGERS_MAX = 64
"""How many connections may be in TLS or before their greeting at once."""

PACE_S = 0.1
TLS_MAX = 20
"""How many connections may begin TLS in each tenth of a second: each takes a millisecond of a processor. The others
wait for their turn: when a thousand agents dial at once, those that have begun are soon done."""

TLS_OF_ONE_MAX = 10
"""How many of these may come from one address."""

BACKLOG = 1024

TLS_HANDSHAKE = b"\x16"
"""The first byte of TLS (RFC 8446, 5.1: a record of type handshake)."""

FLOOD_MIN = 20
"""Fewer strangers than this that are turned away are not worth a line."""

TELL_S_MIN, TELL_S_MAX = 5.0, 3600.0
"""How long strangers are counted before a line is printed: twice as long each time, until fewer come."""

Meet = Callable[[connection.Line, Callable[[], None]], Awaitable[None]]
"""What gets a connection once TLS stands, and a function to call when its sender is known."""


class AgentListener:
    """Listens, and passes on to `meet` the connections with TLS."""

    def __init__(self, listener: socket.socket, context: ssl.SSLContext, meet: Meet) -> None:
        """Needs a running loop."""
        self._context = context
        self._meet = meet
        self._loop = asyncio.get_running_loop()
        self._silent: Crowd[socket.socket] = Crowd(SILENT_MAX)
        self._strangers: Crowd[asyncio.Task[None]] = Crowd(STRANGERS_MAX)
        self._timers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: dict[asyncio.Task[None], socket.socket] = {}
        self._pace = _Pace()
        self._turned_away = _Tally(self._loop, listener.getsockname()[1])
        self._acceptor = Acceptor(listener, self._wait, self._turned_away.add_failure)

    def close(self) -> None:
        """Close the port and cut off all strangers."""
        self._acceptor.close()
        self._turned_away.close()
        for sock in self._silent.everyone():
            self._forget(sock)
            sock.close()
        for task in self._strangers.everyone():
            task.cancel()

    @property
    def waiting(self) -> int:
        """The number of strangers: silent, or before their greeting."""
        return len(self._silent) + len(self._strangers)

    # Silent

    def _wait(self, sock: socket.socket, address: str) -> None:
        """Wait for the first byte of a new connection."""
        self._timers[sock] = self._loop.call_later(FIRST_BYTE_S_MAX, self._put_out, sock, "said nothing")
        self._loop.add_reader(sock, self._begin, sock, address)
        out = self._silent.add(sock, address)
        if out is not None:
            self._put_out(out, "too many at once")

    def _put_out(self, sock: socket.socket, why: str) -> None:
        address = self._forget(sock)
        sock.close()
        self._turned_away.add(why, address)

    def _forget(self, sock: socket.socket) -> str:
        self._loop.remove_reader(sock)
        self._timers.pop(sock).cancel()
        return self._silent.remove(sock)

    def _try_again(self, sock: socket.socket, address: str) -> None:
        """Go on with a connection that had to wait for its turn, if it has not been put out."""
        if sock in self._silent:
            self._loop.add_reader(sock, self._begin, sock, address)

    # Strangers

    def _begin(self, sock: socket.socket, address: str) -> None:
        """Read ahead the first byte of a connection, or see that it has ended."""
        try:
            first = sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if first != TLS_HANDSHAKE:
            self._put_out(sock, "no TLS")
        elif not self._pace.allows(address, time.monotonic()):
            self._loop.remove_reader(sock)
            self._loop.call_later(PACE_S, self._try_again, sock, address)
        else:
            self._forget(sock)
            self._let_in(sock, address)

    def _let_in(self, sock: socket.socket, address: str) -> None:
        task = self._loop.create_task(self._welcome(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # One that is cancelled before it has begun would leave its socket open; for the others this changes nothing.
        task.add_done_callback(lambda _: sock.close())
        self._sockets[task] = sock
        task.add_done_callback(self._sockets.pop)
        out = self._strangers.add(task, address)
        if out is not None:
            self._turned_away.add("too many at once", self._strangers.remove(out))
            # Cancelled in this moment, asyncio would leave a transport on a descriptor that the next connection gets.
            with contextlib.suppress(OSError):
                self._sockets[out].shutdown(socket.SHUT_RDWR)

    async def _welcome(self, sock: socket.socket) -> None:
        """Begin TLS with a stranger, and pass it on."""
        task = asyncio.current_task()
        assert task is not None
        deadline = self._loop.call_later(HELLO_S_MAX, task.cancel)

        def admit() -> None:
            if task not in self._strangers:
                raise connection.LineError("put out")
            deadline.cancel()
            self._strangers.remove(task)

        try:
            line = await self._secured(sock)
            if line is not None:
                await self._meet(line, admit)
        except asyncio.CancelledError:
            pass  # put out, or the loop ends; kept with the task, the error would keep what `_secured` releases
        finally:
            deadline.cancel()
            if task in self._strangers:
                self._turned_away.add("none of ours", self._strangers.remove(task))

    async def _secured(self, sock: socket.socket) -> connection.Line | None:
        """Return the connection with TLS; None when the other side cannot."""
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=HELLO_S_MAX
            )
        except (OSError, asyncio.CancelledError) as err:
            # The error holds the frames of asyncio in which it was raised, these hold the error, and in between are
            # 256 KiB of buffers: until a full collection, which in a large process hardly ever comes.
            traceback.clear_frames(err.__traceback__)
            if isinstance(err, OSError):
                return None
            raise
        return connection.Line(reader, asyncio.StreamWriter(transport, protocol, reader, self._loop))


class _Pace:
    """The number of connections that have begun TLS in this `PACE_S`, in all and from each address."""

    def __init__(self) -> None:
        self._span = 0
        self._counts: Counter[str] = Counter()

    def allows(self, address: str, now_s: float) -> bool:
        """Tell whether another connection may begin TLS, and count it if so."""
        span = int(now_s / PACE_S)
        if span != self._span:
            self._span = span
            self._counts.clear()
        if self._counts.total() >= TLS_MAX or self._counts[address] >= TLS_OF_ONE_MAX:
            return False
        self._counts[address] += 1
        return True


class _Tally:
    """The connections that were turned away: counted, and printed from time to time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self._loop = loop
        self._port = port
        self._counts: Counter[str] = Counter()
        self._latest = ""
        self._failed = ""
        self._span_s = TELL_S_MIN
        self._timer: asyncio.TimerHandle | None = None

    def add(self, why: str, address: str) -> None:
        """Count a connection that was turned away."""
        self._counts[why] += 1
        self._latest = address
        if self._timer is None:
            self._timer = self._loop.call_later(self._span_s, self._print)

    def add_failure(self, why: str) -> None:
        """Count a connection that could not be accepted. It may have been an agent's, so a line is printed for a
        single one."""
        self._failed = why
        self.add(why, "")

    def close(self) -> None:
        """Stop counting."""
        if self._timer is not None:
            self._timer.cancel()

    def _print(self) -> None:
        count = self._counts.total()
        if count >= FLOOD_MIN or self._failed:
            why = ", ".join(f"{number} {why}" for why, number in sorted(self._counts.items()))
            source = f", the last from {self._latest}" if self._latest else ""
            text = (
                f"port {self._port}: {count} connections turned away in {self._span_s:.0f} s ({why}){source}"
            )
            print(text, flush=True)
            self._span_s = min(self._span_s * 2, TELL_S_MAX)
        else:
            self._span_s = TELL_S_MIN
        self._counts.clear()
        self._failed, self._timer = "", None
