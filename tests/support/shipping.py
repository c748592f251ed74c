"""What do the tests of an agent that ships share? A home with real lines and a real intake, and agents in folders of
their own, which see nothing of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.core import codec
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.plan_types import PlannedPool
from orchestrator.core.wire import connection, orders, reports
from orchestrator.core.wire.agent_config import AgentConfig, LeaseNeeds
from orchestrator.core.wire.reports import Envelope
from orchestrator.submission.credentials import new_certificate
from orchestrator.supervisor.agent_connections import AgentConnections, AgentDropped
from orchestrator.supervisor.transfers.log_receiver import LogReceiver

from . import fake_host
from .local import FAKE_TORCH, STEPPER, WAIT_S_MAX

TOKEN = "right token"
JOB = "job-1"
_REPORTS = codec.classes_by_kind(reports.Report)

RUN_AGENT = """
import sys
from orchestrator.agent.process.agent import run_agent
from orchestrator.core import codec
from orchestrator.core.wire.agent_config import AgentConfig
sys.exit(run_agent(codec.loads(AgentConfig, sys.stdin.buffer.read())))
"""


@dataclass(slots=True)
class Home:
    """The supervisor's side: takes files in, acknowledges everything, remembers reports."""

    folder: JobDir
    links: AgentConnections
    intake: LogReceiver
    port: int
    certificate: str
    heard: list[tuple[str, Any]] = field(default_factory=list)
    beats: dict[str, reports.Heartbeat] = field(default_factory=dict)
    hellos: list[reports.Hello] = field(default_factory=list)
    acked: dict[str, tuple[str, int]] = field(default_factory=dict)
    at_stopped: dict[str, bytes] = field(default_factory=dict)
    """What was at home of rank 0's log when a node said that its attempt was over."""

    async def serve(self) -> None:
        """Take what agents say until cancelled."""
        while True:
            word = await self.links.inbox.get()
            match word:
                case reports.Hello() as hello:
                    self.hellos.append(hello)
                    self.links.send(hello.node, self.intake.resume_offsets(hello.node))
                case Envelope():
                    self._said(word)
                case AgentDropped():
                    pass
            for node, got in self.intake.take_due_acks():
                self.links.send(node, got)

    def _said(self, said: Envelope) -> None:
        report, _ = connection.take_message(dict(said.data), _REPORTS)
        match report:
            case reports.Chunk():
                self.intake.receive(said.node, report, said.raw)
            case reports.Heartbeat():
                self.beats[said.node] = report
                boot, seq = self.acked.get(said.node, ("", 0))
                self.links.send(said.node, orders.Ack(seq if boot == said.incarnation else 0, report.beat))
            case _:
                boot, seq = self.acked.get(said.node, ("", 0))
                if boot == said.incarnation and said.seq <= seq:
                    return
                self.acked[said.node] = (said.incarnation, said.seq)
                if isinstance(report, reports.Stopped):
                    self.at_stopped[said.node] = self.text(f"logs/attempt-{report.attempt:03d}/rank-00000.log")
                self.heard.append((said.node, report))

    def text(self, path: str) -> bytes:
        """Return what is at home of a file."""
        try:
            return (self.folder.root / path).read_bytes()
        except FileNotFoundError:
            return b""

    def of(self, kind: type[Any], node: str = "") -> list[Any]:
        """Return the reports of a kind, of one node or of all."""
        return [one for who, one in self.heard if isinstance(one, kind) and node in ("", who)]

    async def until(self, condition: Callable[[], Any], what: str, limit_s: float = WAIT_S_MAX) -> Any:
        """Return the first true value of `condition`."""

        async def wait() -> Any:
            while not (value := condition()):
                await asyncio.sleep(0.02)
            return value

        try:
            return await asyncio.wait_for(wait(), limit_s)
        except asyncio.TimeoutError:
            raise AssertionError(f"{what} never came: {self.heard[-5:]} {self.beats}") from None

    async def report(self, kind: type[Any], node: str = "node-0") -> Any:
        """Wait for a report of a node."""
        return (await self.until(lambda: self.of(kind, node), f"{kind.__name__} of {node}"))[-1]


@dataclass(slots=True)
class Host:
    """A host's job folder and its agent."""

    home: Home
    config: AgentConfig
    process: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> Path:
        return Path(self.config.root)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def launch(self) -> None:
        """Start the agent, as the landing does: its words go to `agent.log`."""
        folder = JobDir(self.root).node(self.config.node)
        folder.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OF_THE_HOST": "yes"}
        with (folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN_AGENT], stdin=subprocess.PIPE, stdout=log, stderr=log, env=env
            )
        assert self.process.stdin is not None
        self.process.stdin.write(codec.dumps(self.config).encode())
        self.process.stdin.close()

    async def up(self) -> None:
        """Start the agent and wait for its greeting."""
        seen = len(self.home.hellos)
        self.launch()
        await self.home.until(lambda: len(self.home.hellos) > seen, "the agent's greeting")

    def say(self, order: orders.Order) -> None:
        assert self.home.links.send(self.config.node, order)

    async def start(self, script: str, attempt: int = 1, ranks: int = 1, **change: Any) -> None:
        """Run a script as the ranks of an attempt."""
        for name, text in {**FAKE_TORCH, "train.py": STEPPER + script}.items():
            self.write(f"code/{name}", text)
        order = prepare(attempt, ranks, **change)
        self.say(order)
        await self.home.until(
            lambda: any(one.attempt == attempt for one in self.home.of(reports.Prepared, self.config.node)),
            "Prepared",
        )
        self.say(orders.Start(attempt, "127.0.0.1", 29500))

    async def end(self) -> int:
        """Dismiss the agent and return its exit code."""
        self.say(orders.Dismiss(0))
        process = self.process
        assert process is not None
        await self.home.until(lambda: process.poll() is not None, "the agent's end")
        return int(process.returncode)


def prepare(attempt: int, ranks: int = 1, **fields: Any) -> orders.PrepareNode:
    """Return an order for ranks of node-0 alone, as new interpreters whose program is this Python, by a plan with these
    fields."""
    words = {"argv": ("nonesuch", "train.py"), "pythons": ("nonesuch", sys.executable), "starts_fresh": True}
    plan = replace(fake_host.plan(**words, **fields), pool=PlannedPool(1, ranks, 0, 0))
    return orders.PrepareNode(attempt, None, plan, ("node-0",))


def play(folder: Path, act: Callable[[Home, Callable[..., Host]], Awaitable[None]]) -> None:
    """Let `act` meet a home, and a maker of hosts; afterwards no agent is left."""
    certificate, key = new_certificate()
    (folder / "certificate.pem").write_bytes(certificate)
    (folder / "key.pem").write_bytes(key)
    hosts: list[Host] = []

    async def main() -> None:
        home = await _home(folder, certificate.decode())
        serving = asyncio.create_task(home.serve())

        def host(node: str = "node-0", **change: Any) -> Host:
            hosts.append(Host(home, replace(_config(folder, home, node), **change)))
            (hosts[-1].root / "checkpoints").mkdir(parents=True, exist_ok=True)
            return hosts[-1]

        try:
            await act(home, host)
        finally:
            serving.cancel()
            await home.links.close()
            home.intake.close()

    try:
        asyncio.run(main())
    finally:
        for one in hosts:
            if one.process is not None and one.process.poll() is None:
                one.process.kill()
                one.process.wait(WAIT_S_MAX)


async def _home(folder: Path, certificate: str) -> Home:
    job = JobDir(folder / "home")
    job.root.mkdir(exist_ok=True)
    links = AgentConnections(JOB, TOKEN, ("node-0", "node-1"))
    context = connection.server_context(folder / "certificate.pem", folder / "key.pem")
    port = await links.listen(context, "127.0.0.1", 0)
    return Home(job, links, LogReceiver(job), port, certificate)


def _config(folder: Path, home: Home, node: str) -> AgentConfig:
    root = folder / f"host of {node}"
    return AgentConfig(
        job=JOB, node=node, root=str(root), token=TOKEN, certificate=home.certificate,
        address=f"127.0.0.1:{home.port}", heartbeat_s=0.2, node_timeout_s=60.0, fence_s=60.0, checkpoint_glob="*",
        finds_checkpoints=False, ships=True, needs=LeaseNeeds(0, 0, 0),
    )  # fmt: skip
