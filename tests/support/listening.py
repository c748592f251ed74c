"""A supervisor's links that listen on a port of this machine, and agents that dial it: real sockets, and no process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

from orchestrator.core.wire import connection, reports
from orchestrator.core.wire.connection import PeerConnection
from orchestrator.submission.credentials import new_certificate
from orchestrator.supervisor.agent_connections import AgentConnections, LinkEvent

ANSWER_S_MAX = 20.0
TOKEN = "right token"
HELLO = reports.Hello(
    reports.PROTOCOL, "job-1", TOKEN, "node-0", "boot", "host", 7, 0, 0, "", 0, (), 0, "/jobs/job-1", False, ()
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A listening `Links`, and what it takes to reach it."""

    links: AgentConnections
    port: int
    certificate: str

    async def dial(self) -> PeerConnection:
        return await connection.dial("127.0.0.1", self.port, connection.client_context(self.certificate), ANSWER_S_MAX)

    async def greet(self, hello: reports.Hello = HELLO) -> PeerConnection:
        one = await self.dial()
        one.send(hello)
        return one

    async def agent(self) -> PeerConnection:
        """Return the line of an agent that is up."""
        one = await self.greet()
        assert isinstance(await self.hear(), reports.Hello)
        return one

    async def hear(self) -> LinkEvent:
        """Return the next word."""
        return await asyncio.wait_for(self.links.inbox.get(), ANSWER_S_MAX)


def play(folder: Path, act: Callable[[Place], Awaitable[None]]) -> None:
    """Let `act` meet a supervisor's links."""
    certificate, key = new_certificate()
    (folder / "certificate.pem").write_bytes(certificate)
    (folder / "key.pem").write_bytes(key)

    async def run() -> None:
        links = AgentConnections("job-1", TOKEN, ("node-0", "node-1"))
        context = connection.server_context(folder / "certificate.pem", folder / "key.pem")
        port = await links.listen(context, "127.0.0.1", 0)
        try:
            await act(Place(links, port, certificate.decode()))
        finally:
            await links.close()

    asyncio.run(run())
