"""Which agents are connected, and what do they say? The supervisor's side of every line.

Rules: a stranger (wrong token, job or protocol) is cut off; a node has one connection, and a new one replaces the old;
what an agent had kept is delivered before the news that it is up.
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
from orchestrator.core.wire import connection
from orchestrator.core.wire import messages as m
from orchestrator.core.wire.messages import Envelope
from orchestrator.supervisor.listener import BACKLOG, AgentListener

HELLO_BYTES_MAX = 64 << 10
"""How long a greeting may be: it is read before it is known whose it is."""

BEATS_GATHER_S = 0.1
"""How long beats may wait, so that looking at all nodes is worth it; whatever else comes ends that."""


@dataclass(frozen=True, slots=True)
class AgentGreeted:
    """An agent has said who it is; next comes what it had kept, then `AgentReady`."""

    hello: m.Hello


@dataclass(frozen=True, slots=True)
class AgentReady:
    """An agent is connected; all that it had kept has been delivered before."""

    hello: m.Hello


@dataclass(frozen=True, slots=True)
class AgentDropped:
    """The current connection of a node is no more. `left`: its agent said that it goes, as it was told to."""

    node: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class Wake:
    """A backend has something to tell: it is worth looking."""


LinkEvent = AgentGreeted | AgentReady | Envelope | AgentDropped | Wake


class AgentConnections:
    """All connections to agents; what they say goes into `inbox`."""

    def __init__(self, job: str, token: str, nodes: tuple[str, ...]) -> None:
        self._job = job
        assert token, "an empty token would admit all"
        self._token = token
        self._nodes = frozenset(nodes)
        self._lines: dict[str, tuple[connection.Line, str]] = {}  # of each node, with the boot of its agent
        self._door: AgentListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.inbox: asyncio.Queue[LinkEvent] = asyncio.Queue()
        self._urgent = asyncio.Event()

    async def listen(self, context: ssl.SSLContext, host: str, port: int) -> int:
        """Serve on `port`, or on any free one when it is 0 or taken; return the port."""
        self._loop = asyncio.get_running_loop()
        try:
            listener = socket.create_server((host, port), backlog=BACKLOG)
        except OSError:
            listener = socket.create_server((host, 0), backlog=BACKLOG)
        self._door = AgentListener(listener, context, self._meet)
        return int(listener.getsockname()[1])

    async def listen_again(self, job: JobDir, host: str) -> int:
        """Serve where the supervisor before did, so that agents find this one at once; return the port."""
        try:
            port = int(job.endpoint.read_text().rpartition(":")[2])
        except (OSError, ValueError):
            port = 0
        certificate, key = job.secrets / "certificate.pem", job.secrets / "key.pem"
        return await self.listen(connection.server_context(certificate, key), host, port)

    def connected(self, node: str) -> bool:
        """Tell whether the node has a connection."""
        return node in self._lines

    def incarnation(self, node: str) -> str:
        """Return which agent process is connected for the node, empty when none is."""
        return self._lines[node][1] if node in self._lines else ""

    def send(self, node: str, order: m.Order) -> bool:
        """Send an order if the node is connected; tell whether it was sent, which does not mean that it arrived."""
        if node not in self._lines:
            return False
        try:
            self._lines[node][0].send(order)
        except connection.LineError:
            return False
        return True

    def drop(self, node: str) -> None:
        """Break the node's connection, if it has one; its agent will dial again."""
        if node in self._lines:
            self._lines[node][0].abort()

    async def hear(self, wait_s: float) -> list[LinkEvent]:
        """Return all words that are there, after waiting at most so long for one. Beats wait a little for others."""
        words = []
        if self.inbox.empty():
            try:
                words.append(await asyncio.wait_for(self.inbox.get(), max(0.0, wait_s)))
            except asyncio.TimeoutError:
                return []
        if not self._urgent.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), max(0.0, min(BEATS_GATHER_S, wait_s)))
        self._urgent.clear()
        while not self.inbox.empty():
            words.append(self.inbox.get_nowait())
        return words

    def wake(self) -> None:
        """Put a `Wake` into the inbox, from any thread; one that comes before `listen` or after the end is lost."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._put, Wake())

    async def close(self) -> None:
        """Close everything; what was sent is still delivered, within a second."""
        if self._door is not None:
            self._door.close()
        for one, _ in self._lines.values():
            one.writer.close()
        await asyncio.sleep(0.05)

    async def _meet(self, one: connection.Line, known: Callable[[], None]) -> None:
        """Hear a stranger's greeting, and then what one of our own agents says."""
        try:
            hello = await self._recognise(one)
            known()
            await self._hear(one, hello)
        except connection.LineError:
            pass
        finally:
            one.abort()

    async def _recognise(self, one: connection.Line) -> m.Hello:
        """Return the greeting of one of our own. Raises LineError for anybody else."""
        data, _ = await one.receive(HELLO_BYTES_MAX)
        hello, _ = connection.take_message(data, {"Hello": m.Hello})
        ours = hmac.compare_digest(hello.token.encode("utf-8", "surrogatepass"), self._token.encode())
        if (
            not ours
            or hello.job != self._job
            or hello.node not in self._nodes
            or hello.protocol != m.PROTOCOL
        ):
            raise connection.LineError("a stranger")
        assert isinstance(hello, m.Hello)
        return hello

    async def _hear(self, one: connection.Line, hello: m.Hello) -> None:
        """Pass on what this agent says until the line ends or another replaces it."""
        old = self._lines.pop(hello.node, None)
        if old is not None:
            old[0].abort()
        self._lines[hello.node] = (one, hello.incarnation)
        self._put(AgentGreeted(hello))
        left = False
        try:
            for _ in range(hello.pending):
                await self._pass_on(one, hello)
            self._put(AgentReady(hello))
            while not left:
                left = await self._pass_on(one, hello)
        except connection.LineError:
            pass
        finally:
            one.abort()
            if self._is_current(one, hello):
                del self._lines[hello.node]
                self._put(AgentDropped(hello.node, left))

    async def _pass_on(self, one: connection.Line, hello: m.Hello) -> bool:
        """Pass one word on; tell whether it was the agent's last one."""
        data, raw = await one.receive()
        if not self._is_current(one, hello):
            raise connection.LineError("replaced by a newer connection")
        if data.get("kind") == m.Goodbye.__name__:
            return True
        seq = connection.take_seq(data)
        self._put(Envelope(hello.node, hello.incarnation, seq, data, raw))
        return False

    def _put(self, word: LinkEvent) -> None:
        self.inbox.put_nowait(word)
        if not (isinstance(word, Envelope) and word.data.get("kind") == m.Heartbeat.__name__):
            self._urgent.set()

    def _is_current(self, one: connection.Line, hello: m.Hello) -> bool:
        return hello.node in self._lines and self._lines[hello.node][0] is one
