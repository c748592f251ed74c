"""Connection between supervisor and agent: lines of JSON over TLS, with the job's own certificate pinned and the job's token.

Rules: a line has a limit, and so have the raw bytes that may follow it; a stranger is cut off before anything that it
sends is trusted; a peer that is too slow to read is cut off, since what waits for it is bounded.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.core import codec
from orchestrator.core.jobdir.durable import LINE_BYTES_MAX

SEND_BYTES_MAX = 8 << 20
"""How much may be queued for one peer before the connection is closed."""

SEQUENCE_KEY = "#"
"""The key for the number of a reliable report, next to the message's own fields."""

SEQ_MAX = (1 << 63) - 1

RAW = "raw"
"""The key for how many raw bytes follow the line, next to the message's own fields."""

RAW_BYTES_MAX = 256 << 10

NEXT_DIAL_S = 0.3
"""How long one of several addresses may take before the next is tried as well."""


class PeerError(ConnectionError):
    """The peer violated the protocol, or closed the connection."""


@dataclass(slots=True)
class PeerConnection:
    """One connection: sends and receives messages."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, message: object, seq: int = 0, raw: bytes = b"") -> None:
        """Queue one message with its raw bytes. `seq`: the number of a reliable report, 0 for others.

        Raises LineError when the peer has stopped reading or the connection is closing.
        """
        assert len(raw) <= RAW_BYTES_MAX, f"{len(raw)} raw bytes behind one message"
        transport = self.writer.transport
        if transport.is_closing():
            raise PeerError("the connection is closed")
        data = codec.pack_without_defaults(message)
        if seq:
            data[SEQUENCE_KEY] = seq
        if raw:
            data[RAW] = len(raw)
        self.writer.write(codec.dumps_plain(data).encode() + b"\n" + raw)
        if transport.get_write_buffer_size() > SEND_BYTES_MAX:
            self.abort()
            raise PeerError(f"the peer has left more than {SEND_BYTES_MAX} bytes unread")

    async def receive(self, bytes_max: int = LINE_BYTES_MAX) -> tuple[dict[str, Any], bytes]:
        """Return the next message as plain data, and its raw bytes.

        Raises LineError at the end of the connection, and for anything but a message.
        """
        try:
            text = await self.reader.readuntil(b"\n")
            if len(text) > bytes_max:
                raise PeerError(f"the peer sent a line of more than {bytes_max} bytes")
            data = _message(text)
            raw_bytes = data.pop(RAW, 0)
            if type(raw_bytes) is not int or not 0 <= raw_bytes <= RAW_BYTES_MAX:
                raise PeerError("the peer announced raw bytes beyond the limit")
            return data, await self.reader.readexactly(raw_bytes) if raw_bytes else b""
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as err:
            raise PeerError(f"the connection ended: {err}") from err
        except PeerError:
            raise
        except OSError as err:
            # The reader keeps the error, whose frames would keep the reader and all of its buffers.
            raise PeerError(f"the connection ended: {err}") from err.with_traceback(None)

    def abort(self) -> None:
        """Close at once, without a message."""
        self.writer.transport.abort()


def _message(text: bytes) -> dict[str, Any]:
    try:
        return codec.loads_plain(text)
    except codec.CodecError as err:
        raise PeerError(f"the peer sent no message: {err}") from err


def take_seq(data: dict[str, Any]) -> int:
    """Take the number of a reliable report out of received data, 0 for none. Raises LineError."""
    seq = data.pop(SEQUENCE_KEY, 0)
    if type(seq) is not int or not 0 <= seq <= SEQ_MAX:
        raise PeerError("the peer sent a report with an invalid number")
    return seq


def take_message(data: dict[str, Any], classes: Mapping[str, type[Any]]) -> tuple[Any, int]:
    """Turn received data into one of `classes` and its sequence number (0 for none). Raises LineError."""
    seq = take_seq(data)
    try:
        return codec.unpack_kind(classes, data), seq
    except codec.CodecError as err:
        raise PeerError(str(err)) from err


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the supervisor's side of TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


def client_context(certificate_pem: str) -> ssl.SSLContext:
    """Return an agent's side of TLS: it trusts the job's certificate and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # The address is often a forwarded port; the pinned certificate is the identity.
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate_pem)
    return context


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    return host, int(port)


async def dial_any(targets: Sequence[tuple[str, int]], context: ssl.SSLContext, connect_s_max: float) -> PeerConnection:
    """Connect to the address that answers first; start with the next one each time none has for `NEXT_DIAL_S`.

    Only the right peer can answer, since its certificate is pinned. Raises OSError when none does.
    """
    if len(targets) == 1:
        return await dial(*targets[0], context, connect_s_max)
    trying: set[asyncio.Task[PeerConnection]] = set()
    untried, failure = list(targets), PeerError("there is no address to dial")
    try:
        while untried or trying:
            if untried:
                trying.add(asyncio.ensure_future(dial(*untried.pop(0), context, connect_s_max)))
            done, trying = await asyncio.wait(
                trying, timeout=NEXT_DIAL_S if untried else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    trying |= done - {task}
                    return task.result()
                if not isinstance(error, OSError):
                    raise error
                failure = error if isinstance(error, PeerError) else PeerError(str(error))
        raise failure
    finally:
        for task in trying:
            task.add_done_callback(_drop_late_connection)
            task.cancel()


def _drop_late_connection(task: asyncio.Task[PeerConnection]) -> None:
    """Drop a connection that opened after another one had been chosen."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()


async def dial(host: str, port: int, context: ssl.SSLContext, connect_s_max: float) -> PeerConnection:
    """Connect to a supervisor. Raises OSError (LineError among them) within `connect_s_max`."""
    opening = asyncio.open_connection(
        host,
        port,
        ssl=context,
        server_hostname="orch",
        limit=LINE_BYTES_MAX,
        ssl_handshake_timeout=connect_s_max,
    )
    try:
        reader, writer = await asyncio.wait_for(opening, connect_s_max)
    except asyncio.TimeoutError as err:
        raise PeerError(f"no answer from {host}:{port} within {connect_s_max:g} s") from err
    return PeerConnection(reader, writer)


async def accept_tls(sock: socket.socket, context: ssl.SSLContext, handshake_s_max: float) -> PeerConnection | None:
    """Return an accepted connection with TLS; None when the other side cannot."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=LINE_BYTES_MAX)
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=context, ssl_handshake_timeout=handshake_s_max
        )
    except OSError as err:
        # The error holds the frames of asyncio in which it was raised, these hold the error, and in between are
        # 256 KiB of buffers: until a full collection, which in a large process hardly ever comes.
        traceback.clear_frames(err.__traceback__)
        return None
    return PeerConnection(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
