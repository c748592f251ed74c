"""Connections of the supervisor to agents: which agents are connected, and what each one sends.

Rules: a peer that fails authentication (wrong token, job or protocol) is disconnected. A node has one connection, and a
new one replaces the old. The reports that an agent had kept are delivered before its greeting.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import connection, orders, reports
from orchestrator.core.wire.port_acceptor import Acceptor

HELLO_S_MAX = 5.0
"""How long a connection may take for TLS and its greeting."""

UNAUTHENTICATED_MAX = 64
"""How many connections may be before their greeting at once: in TLS, one costs up to a megabyte. The others wait in the
backlog: when a thousand agents dial at once, those that have begun are soon done."""

BACKLOG = 1024

HELLO_BYTES_MAX = 64 << 10
"""How long a greeting may be: it is read before its sender is known."""

HEARTBEATS_GATHER_S = 0.1
"""How long heartbeats may wait, so that one round of decisions covers many; any other event ends the wait."""


@dataclass(frozen=True, slots=True)
class AgentDropped:
    """The current connection of a node ended. `left`: its agent, which was dismissed, said goodbye before."""

    node: str
    left: bool = False


class Wake:
    """A backend has something to report: poll it."""


LinkEvent = reports.Hello | reports.Envelope | AgentDropped | Wake
"""A greeting means that its agent is connected; the reports that it had kept have been delivered before."""


class AgentConnections:
    """All connections to agents of one job; what they send goes into `inbox`."""

    def __init__(self, job: str, token: str, nodes: tuple[str, ...]) -> None:
        self._job = job
        assert token, "an empty token would admit all"
        self._token = token
        self._nodes = frozenset(nodes)
        self._links: dict[str, tuple[connection.PeerConnection, str]] = {}  # by node, with the incarnation of its agent
        self.hellos: dict[str, reports.Hello] = {}
        """The latest greeting of each node's agent, which may be gone."""
        self._acceptor: Acceptor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.inbox: asyncio.Queue[LinkEvent] = asyncio.Queue()
        self._urgent = asyncio.Event()

    async def listen(self, context: ssl.SSLContext, host: str, port: int) -> int:
        """Serve on `port`, or on any free one when it is 0 or taken; return the port."""
        self._loop = asyncio.get_running_loop()
        try:
            sock = socket.create_server((host, port), backlog=BACKLOG)
        except OSError:
            sock = socket.create_server((host, 0), backlog=BACKLOG)
        self._acceptor = Acceptor(
            sock, lambda stranger, admit: self._accept(stranger, context, admit), pending_max=UNAUTHENTICATED_MAX,
            pending_s_max=HELLO_S_MAX,
        )  # fmt: skip
        return int(sock.getsockname()[1])

    async def listen_again(self, job: JobDir, host: str) -> int:
        """Serve on the port of the supervisor before, so that agents find this one at once; return the port."""
        try:
            port = int(job.endpoint.read_text().rpartition(":")[2])
        except (OSError, ValueError):
            port = 0
        certificate, key = job.secrets / "certificate.pem", job.secrets / "key.pem"
        return await self.listen(connection.server_context(certificate, key), host, port)

    def is_connected(self, node: str) -> bool:
        """Return whether the node has a connection."""
        return node in self._links

    def incarnation(self, node: str) -> str:
        """Return which agent process is connected for the node, empty when none is."""
        return self._links[node][1] if node in self._links else ""

    def send(self, node: str, order: orders.Order) -> bool:
        """Send an order if the node is connected; return whether it was sent, which does not mean that it arrived."""
        if node not in self._links:
            return False
        try:
            self._links[node][0].send(order)
        except connection.PeerError:
            return False
        return True

    def drop(self, node: str) -> None:
        """Break the node's connection, if it has one; its agent will dial again."""
        if node in self._links:
            self._links[node][0].abort()

    async def receive(self, wait_s: float, gather_s: float = 0.0) -> list[LinkEvent]:
        """Return all link events in the inbox, after waiting at most `wait_s` for one. Heartbeats wait a little for
        others, or `gather_s` if that is longer."""
        link_events = []
        if self.inbox.empty():
            try:
                link_events.append(await asyncio.wait_for(self.inbox.get(), max(0.0, wait_s)))
            except asyncio.TimeoutError:
                return []
        if not self._urgent.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), max(0.0, min(max(HEARTBEATS_GATHER_S, gather_s), wait_s)))
        self._urgent.clear()
        while not self.inbox.empty():
            link_events.append(self.inbox.get_nowait())
        return link_events

    def wake(self) -> None:
        """Put a `Wake` into the inbox, from any thread; a call before `listen` or after the end does nothing."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._put, Wake())

    async def close(self) -> None:
        """Close everything; what was sent is still delivered, within a second."""
        if self._acceptor is not None:
            self._acceptor.close()
        for line, _ in self._links.values():
            line.writer.close()
        await asyncio.sleep(0.05)

    async def _accept(self, client: socket.socket, context: ssl.SSLContext, admit: Callable[[], None]) -> None:
        """Begin TLS with a stranger, read its greeting, and then what it sends if it is one of the job's agents."""
        line = await connection.accept_tls(client, context, HELLO_S_MAX)
        if line is None:
            return
        try:
            hello = await self._authenticate(line)
            admit()
            await self._receive_all(line, hello)
        except connection.PeerError:
            pass
        finally:
            line.abort()

    async def _authenticate(self, line: connection.PeerConnection) -> reports.Hello:
        """Return the greeting of one of the job's agents. Raises LineError for a stranger."""
        data, _ = await line.receive(HELLO_BYTES_MAX)
        hello, _ = connection.take_message(data, {"Hello": reports.Hello})
        is_token_right = hmac.compare_digest(hello.token.encode("utf-8", "surrogatepass"), self._token.encode())
        if (
            not is_token_right
            or hello.job != self._job
            or hello.node not in self._nodes
            or hello.protocol != reports.PROTOCOL
        ):
            raise connection.PeerError("a stranger")
        assert isinstance(hello, reports.Hello)
        return hello

    async def _receive_all(self, line: connection.PeerConnection, hello: reports.Hello) -> None:
        """Pass on what this agent sends until the connection ends or another replaces it."""
        old = self._links.pop(hello.node, None)
        if old is not None:
            old[0].abort()
        self._links[hello.node] = (line, hello.incarnation)
        self.hellos[hello.node] = hello
        said_goodbye = False
        try:
            for _ in range(hello.pending):
                await self._receive_one(line, hello)
            self._put(hello)
            while not said_goodbye:
                said_goodbye = await self._receive_one(line, hello)
        except connection.PeerError:
            pass
        finally:
            line.abort()
            if self._is_current(line, hello):
                del self._links[hello.node]
                self._put(AgentDropped(hello.node, said_goodbye))

    async def _receive_one(self, line: connection.PeerConnection, hello: reports.Hello) -> bool:
        """Pass one message on; return whether it was the agent's goodbye."""
        data, raw = await line.receive()
        if not self._is_current(line, hello):
            raise connection.PeerError("replaced by a newer connection")
        if data.get("kind") == reports.Goodbye.__name__:
            return True
        seq = connection.take_seq(data)
        self._put(reports.Envelope(hello.node, hello.incarnation, seq, data, raw))
        return False

    def _put(self, link_event: LinkEvent) -> None:
        self.inbox.put_nowait(link_event)
        if not (isinstance(link_event, reports.Envelope) and link_event.data.get("kind") == reports.Heartbeat.__name__):
            self._urgent.set()

    def _is_current(self, line: connection.PeerConnection, hello: reports.Hello) -> bool:
        return hello.node in self._links and self._links[hello.node][0] is line
