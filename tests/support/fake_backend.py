"""A fake backend and a fake agent, for a supervisor in this process; the line between agent and supervisor is real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.backends import api
from orchestrator.backends.api import Allocation, BulkCopier, LaunchError, Wake
from orchestrator.core import codec
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.wire import connection, orders, reports
from orchestrator.core.wire.agent_config import AgentConfig
from orchestrator.core.wire.connection import PeerConnection
from orchestrator.journal import journal_file
from orchestrator.submission import credentials
from orchestrator.supervisor import supervisor as supervising
from orchestrator.supervisor import translation
from tests.support import jobs

ANSWER_S_MAX = 20.0
SECRET = "hf_0123456789abcdef"
ENVIRON = {"PATH": "/bin", "HF_TOKEN": SECRET}


@dataclass
class Backend(api.Backend):
    """A backend that remembers what it was asked to launch, and says what it is told to: why launches failed, why an
    agent is no more, and why there is no way to a node."""

    launched: list[AgentConfig] = field(default_factory=list)
    failed: list[tuple[str, LaunchError]] = field(default_factory=list)
    evidence: str | None = None
    why: str = ""
    copier: BulkCopier | None = None
    allocation: Allocation | None = None

    def __post_init__(self) -> None:
        self.wake: Wake = lambda: None

    def launch(self, config: AgentConfig) -> None:
        self.launched.append(config)

    def failures(self) -> list[tuple[str, LaunchError]]:
        return self.failed

    def agent_death(self, node: str) -> str | None:
        return self.evidence

    def reason(self, node: str) -> str:
        return self.why


@dataclass
class Node:
    """The agent's side of the line: says reports with their numbers, and waits for orders."""

    job: JobDir
    plan: Plan
    backend: Backend
    seq: int = 0
    acked: orders.Ack | None = None
    one: PeerConnection | None = None

    async def greet(self, *, ships: bool = False, running: int = 0) -> None:
        deadline_s = time.monotonic() + ANSWER_S_MAX
        while not self.backend.launched:
            assert time.monotonic() < deadline_s, "the supervisor launches no agent"
            await asyncio.sleep(0.001)
        config = self.backend.launched[0]
        host, port = connection.parse_address(config.address)
        self.one = await connection.dial(host, port, connection.client_context(config.certificate), ANSWER_S_MAX)
        hello = reports.Hello(
            reports.PROTOCOL, config.job, config.token, "node-0", "boot", "host", 7, running, running, "", 0, (), 0,
            str(self.job.root), ships, (),
        )  # fmt: skip
        self.one.send(hello)

    def say(self, report: reports.Report, seq: int = 0, raw: bytes = b"") -> None:
        assert self.one is not None
        self.one.send(report, seq, raw)

    def report(self, report: reports.ReliableReport) -> None:
        self.seq += 1
        self.say(report, self.seq)

    async def order(self) -> Any:
        """Return the next order; acknowledgements are only remembered."""
        assert self.one is not None
        while True:
            data, _ = await asyncio.wait_for(self.one.receive(), ANSWER_S_MAX)
            order, _ = connection.take_message(data, codec.classes_by_kind(orders.Order))
            if not isinstance(order, orders.Ack):
                return order
            self.acked = order

    async def run(self, attempt: int) -> orders.PrepareNode:
        """Be prepared for an attempt and start its rank; return the order to prepare."""
        prepare = await self.order()
        assert isinstance(prepare, orders.PrepareNode) and prepare.attempt == attempt
        assert prepare.secrets["HF_TOKEN"] == SECRET
        self.report(reports.Prepared(attempt, "", 29500, ()))
        start = await self.order()
        assert isinstance(start, orders.Start) and start.attempt == attempt
        self.report(reports.Started(attempt, (5000,)))
        return prepare

    async def leave(self) -> None:
        """Be dismissed."""
        assert isinstance(await self.order(), orders.Dismiss)
        self.say(reports.Goodbye())

    def news(self, *kinds: type[Any]) -> list[Any]:
        held = (journal_file.unwrap_message(one.news) for one in journal_file.read(self.job.journal))
        return [one for one in held if isinstance(one, kinds)]


def folder_of(folder: Path, **fields: Any) -> tuple[JobDir, Plan]:
    """Make the folder of a job of one rank."""
    job = JobDir(folder / jobs.ID)
    plan = jobs.plan(nodes=1, procs_per_node=1, secrets=["HF_TOKEN"], **fields)
    for made in (job.root, job.requests, job.logs):
        made.mkdir()
    job.plan.write_text(codec.dumps(plan))
    credentials.write_credentials(job.secrets, plan, ENVIRON, fields.get("notify", {}).get("url"))
    return job, plan


def play(folder: Path, act: Callable[[Node], Awaitable[None]], **fields: Any) -> Node:
    """Let `act` be the only node of a job until that is over."""
    job, plan = folder_of(folder, **fields)
    node = Node(job, plan, Backend())
    supervisor = supervising.Supervisor(job, plan, translation.read_secrets(job), node.backend)

    async def both() -> None:
        running = asyncio.create_task(supervisor.run())
        await act(node)
        await asyncio.wait_for(running, ANSWER_S_MAX)

    asyncio.run(both())
    return node
