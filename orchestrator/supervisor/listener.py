"""Listener on the supervisor's port, up to an agent's greeting: so many strangers at once, each for a short time."""

from __future__ import annotations

import asyncio
import socket
import ssl
import traceback
from collections.abc import Awaitable, Callable

from orchestrator.core.jobdir.durable import LINE_BYTES_MAX
from orchestrator.core.wire import connection
from orchestrator.core.wire.accepting import Acceptor

HELLO_S_MAX = 5.0
"""How long a connection may take for TLS and its greeting."""

STRANGERS_MAX = 64
"""How many connections may be before their greeting at once: in TLS, one costs up to a megabyte. The others wait in the
backlog: when a thousand agents dial at once, those that have begun are soon done."""

BACKLOG = 1024

Meet = Callable[[connection.Line, Callable[[], None]], Awaitable[None]]
"""What gets a connection once TLS stands, and a function to call when its sender is known."""


class AgentListener:
    """Listens, and passes on to `meet` the connections with TLS."""

    def __init__(self, listener: socket.socket, context: ssl.SSLContext, meet: Meet) -> None:
        """Needs a running loop."""
        self._context = context
        self._meet = meet
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(
            listener, self._welcome, pending_max=STRANGERS_MAX, pending_s_max=HELLO_S_MAX
        )

    def close(self) -> None:
        """Close the port and cut off all strangers."""
        self._acceptor.close()

    async def _welcome(self, sock: socket.socket, admit: Callable[[], None]) -> None:
        """Begin TLS with a stranger, and pass it on."""
        line = await self._secured(sock)
        if line is not None:
            await self._meet(line, admit)

    async def _secured(self, sock: socket.socket) -> connection.Line | None:
        """Return the connection with TLS; None when the other side cannot."""
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=HELLO_S_MAX
            )
        except OSError as err:
            # The error holds the frames of asyncio in which it was raised, these hold the error, and in between are
            # 256 KiB of buffers: until a full collection, which in a large process hardly ever comes.
            traceback.clear_frames(err.__traceback__)
            return None
        return connection.Line(reader, asyncio.StreamWriter(transport, protocol, reader, self._loop))
