"""The supervisor link of an agent: what proves contact, and what is sent again. Real connections, no processes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.agent.process.supervisor_link import SupervisorLink
from orchestrator.core.checkpoints.checkpoint import CheckpointFile
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import connection, orders, reports
from orchestrator.core.wire.reports import Envelope
from orchestrator.submission.credentials import new_certificate
from orchestrator.supervisor.agent_connections import AgentConnections, AgentDropped, LinkEvent
from tests.support import fake_host

ANSWER_S_MAX = 20.0
TOKEN = "right token"


@dataclass(frozen=True, slots=True)
class Pair:
    """A link, and the connections that it dials."""

    link: SupervisorLink
    links: AgentConnections

    async def hear(self) -> LinkEvent:
        return await asyncio.wait_for(self.links.inbox.get(), ANSWER_S_MAX)

    async def greeted(self) -> list[int]:
        """Wait until the agent is up; return the numbers of the reports that came before that word."""
        numbers = []
        while not isinstance(word := await self.hear(), reports.Hello):
            numbers += [word.seq] if isinstance(word, Envelope) else []
        return numbers

    async def until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + ANSWER_S_MAX
        while not condition():
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.001)


def _play(folder: Path, act: Callable[[Pair], Awaitable[None]]) -> None:
    """Let `act` meet a link that keeps dialling, by the endpoint in its node's own folder."""
    certificate, key = new_certificate()
    (folder / "certificate.pem").write_bytes(certificate)
    (folder / "key.pem").write_bytes(key)
    config = fake_host.config(root=str(folder), token=TOKEN, certificate=certificate.decode())

    def hello(pending: int) -> reports.Hello:
        return reports.Hello(
            reports.PROTOCOL, config.job, TOKEN, "node-0", "boot", "host", 7, 0, 0, "", 0, (), pending, str(folder), False, ()
        )  # fmt: skip

    async def play() -> None:
        links = AgentConnections(config.job, TOKEN, ("node-0",))
        context = connection.server_context(folder / "certificate.pem", folder / "key.pem")
        port = await links.listen(context, "127.0.0.1", 0)
        own = JobDir(folder).node("node-0")
        own.mkdir(parents=True)
        (own / "endpoint").write_text(f"127.0.0.1:{port}\n")
        JobDir(folder).endpoint.write_text("127.0.0.1:9")  # as the submit machine has it
        link = SupervisorLink(config, hello, lambda order: None)
        keeping = asyncio.create_task(link.run())
        try:
            await act(Pair(link, links))
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
            link.close()
            await links.close()

    asyncio.run(play())


def test_contact_dates_from_sending_of_acknowledged_heartbeat(tmp_path: Path) -> None:
    """Contact is proved by an acknowledged heartbeat, as of when that was sent."""

    async def act(pair: Pair) -> None:
        link = pair.link
        await pair.greeted()
        before_s = link.proved_at
        link.send_heartbeat(1, (), scans=-1, has_unfinished=False)
        sent_s = time.monotonic()
        assert isinstance(await pair.hear(), Envelope)
        assert link.proved_at == before_s, "that it arrived is not known yet"
        pair.links.send("node-0", orders.Ack(0, 1))
        await pair.until(lambda: link.proved_at > before_s)
        assert link.proved_at <= sent_s

    _play(tmp_path, act)


@pytest.mark.slow
def test_report_is_repeated_on_new_connections_until_acknowledged(tmp_path: Path) -> None:
    async def act(pair: Pair) -> None:
        await pair.greeted()
        pair.link.report(reports.Stopped(1, "asked"))
        assert isinstance(await pair.hear(), Envelope)
        for _ in range(2):
            pair.links.drop("node-0")
            assert await pair.hear() == AgentDropped("node-0")
            assert await pair.greeted() == [1]
        pair.links.send("node-0", orders.Ack(1, 0))
        await pair.until(lambda: not pair.link.has_pending)
        pair.links.drop("node-0")
        assert await pair.hear() == AgentDropped("node-0")
        assert await pair.greeted() == []

    _play(tmp_path, act)


@pytest.mark.slow
def test_reports_beyond_connection_capacity_arrive_in_order(
    tmp_path: Path,
) -> None:
    """More reports than a connection holds arrive in order, with those made meanwhile."""
    files = tuple(CheckpointFile(f"step-{n}/part.pt", 1, 1, "0" * 64) for n in range(200))

    async def act(pair: Pair) -> None:
        await pair.greeted()
        pair.link.close()
        assert await pair.hear() == AgentDropped("node-0")
        for _ in range(600):  # 16 MB, after a weekend without the supervisor
            pair.link.report(reports.CheckpointHashed(1, "step", files))
        numbers: list[int] = []
        while len(numbers) < 601:
            word = await pair.hear()
            numbers += [word.seq] if isinstance(word, Envelope) else []
            if len(numbers) == 300 and isinstance(word, Envelope):
                pair.link.report(reports.Stopped(1, "asked"))
        assert numbers == list(range(1, 602))

    _play(tmp_path, act)
