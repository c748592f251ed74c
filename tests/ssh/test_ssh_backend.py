"""SSH backend: agents come up on hosts, and their connections survive faults. With real sshd and agents."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from orchestrator.backends.api import Copy, CopyResult, Direction, LaunchError
from orchestrator.backends.ssh.backend import SshBackend
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.observations import Retryable
from orchestrator.core.plan_types import PlannedNode
from orchestrator.core.wire import connection, reports
from orchestrator.core.wire.agent_config import AgentConfig, LeaseNeeds
from orchestrator.spec.load import JobSpec, SpecFile
from orchestrator.submission import bundle, planner, render
from orchestrator.submission.credentials import new_certificate
from orchestrator.supervisor import agent_connections
from tests.support.sshd import Desk, Sshd, free_port, needs_sshd

pytestmark = needs_sshd

WAIT_S_MAX = 30.0
TOKEN = "ab" * 32
NODES = ("far", "near")


@dataclass(slots=True)
class Boss:
    """A supervisor that only listens: who is up, and who went down."""

    job: JobDir
    words: queue.Queue[agent_connections.LinkEvent] = field(default_factory=queue.Queue)
    port: int = 0
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _links: agent_connections.AgentConnections | None = None
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        listening = threading.Event()
        threading.Thread(target=self._run, args=(listening,), daemon=True).start()
        assert listening.wait(WAIT_S_MAX)

    def _run(self, listening: threading.Event) -> None:
        async def listen() -> None:
            self._task = asyncio.current_task()
            self._links = agent_connections.AgentConnections(self.job.id, TOKEN, NODES)
            context = connection.server_context(self.job.secrets / "certificate.pem", self.job.secrets / "key.pem")
            self.port = await self._links.listen(context, "127.0.0.1", 0)
            listening.set()
            while True:
                self.words.put(await self._links.inbox.get())

        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(listen())

    def hear(self, kind: type[agent_connections.LinkEvent]) -> agent_connections.LinkEvent:
        """Return the next word of a kind."""
        deadline_s = time.monotonic() + WAIT_S_MAX
        while True:
            word = self.words.get(timeout=max(0.1, deadline_s - time.monotonic()))
            if isinstance(word, kind):
                return word

    def hello(self) -> reports.Hello:
        """Wait until the agent is up."""
        word = self.hear(reports.Hello)
        assert isinstance(word, reports.Hello)
        return word

    def stop(self) -> None:
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)


@dataclass(slots=True)
class World:
    """A job with one host, the far end of which is this machine under another folder."""

    desk: Desk
    sshd: Sshd
    settings: str
    job: JobDir
    far: JobDir
    plan: Plan
    boss: Boss
    backend: SshBackend
    woken: threading.Event = field(default_factory=threading.Event)

    @property
    def config(self) -> AgentConfig:
        return self.config_of("far")

    def config_of(self, node: str) -> AgentConfig:
        return AgentConfig(
            job=self.job.id,
            node=node,
            root=str(self.far.root),
            token=TOKEN,
            certificate=(self.job.secrets / "certificate.pem").read_text(),
            address=f"127.0.0.1:{self.boss.port}",
            heartbeat_s=0.2,
            node_timeout_s=60.0,
            fence_s=60.0,
            checkpoint_glob="*",
            finds_checkpoints=True,
            ships=True,
            needs=LeaseNeeds(0, 0, 0),
        )

    def new_backend(self) -> SshBackend:
        self.backend = SshBackend(self.job, self.plan, self.woken.set)
        return self.backend

    def wait_for(self, seen: Callable[[], object]) -> object:
        """Wait, within a limit, until the backend has something to tell."""
        deadline_s = time.monotonic() + WAIT_S_MAX
        while not (found := seen()):
            assert time.monotonic() < deadline_s, f"nothing: {self.backend.reason('far')!r}"
            self.woken.wait(0.05)
            self.woken.clear()
        return found

    def failure(self) -> LaunchError:
        """Wait for a launch to fail."""
        found = self.wait_for(self.backend.failures)
        assert isinstance(found, list)
        return found[0][1]  # type: ignore[no-any-return]

    def evidence(self) -> str:
        return str(self.wait_for(lambda: self.backend.agent_death("far")))

    def kill_agent(self, node: str = "far") -> None:
        """Kill the keeper, whose end the agent does not outlive; it is nobody's child here."""
        with contextlib.suppress(OSError, ValueError):
            pid = int(json.loads((self.far.node(node) / "agent.json").read_text())["pid"])
            os.kill(pid, signal.SIGKILL)
            self.wait_for(lambda: not _is_running(pid))

    def cut(self) -> None:
        """Kill what serves the connections; the server itself goes on."""
        for pid in self.sshd.sessions():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def world(desk: Desk, tmp_path: Path) -> Iterator[World]:
    settings = _far_home(tmp_path)
    sshd = desk.start(settings)
    desk.know(sshd)
    desk.configure(f"Host far near\n  HostName 127.0.0.1\n  Port {sshd.port}\n")
    plan = _plan(tmp_path)
    job = _job(tmp_path / "home-jobs" / plan.id, plan)
    far = JobDir(tmp_path / "remote" / "jobs" / plan.id)
    boss = Boss(job)
    boss.start()
    one = World(desk, sshd, settings, job, far, plan, boss, SshBackend(job, plan))
    one.new_backend()
    yield one
    one.backend.close()
    for node in NODES:
        one.kill_agent(node)
    boss.stop()


def _far_home(folder: Path) -> str:
    """Return the setting that gives logins a home of their own, where no shell finds what this user has in his."""
    home = folder / "far-home"
    home.mkdir(exist_ok=True)
    return f"SetEnv HOME={home}"


def _plan(folder: Path) -> Plan:
    data = {
        "name": "gpt",
        "nodes": 1,
        "procs_per_node": 1,
        "entrypoint": "train.py",
        "backend": "ssh",
        "ssh": {"hosts": "far", "remote_dir": str(folder / "remote")},
    }
    spec = JobSpec.model_validate(data)
    file = SpecFile(folder / "job.yaml", "", spec, folder, folder)
    hosts = tuple(PlannedNode(node, node, "", (), (), 0) for node in NODES)
    there = planner.Inventory("here", (), "/usr/bin/python3")
    pool = planner._pool(file, there, "gpt-1")
    local = planner.plan_job(
        SpecFile(folder / "job.yaml", "", JobSpec.model_validate({**data, "backend": "local"}), folder, folder),
        there, "gpt-1", 0.0,
    )  # fmt: skip
    return replace(
        local,
        backend="ssh",
        nodes=hosts,
        pool=pool,
        ssh=planner.make_ssh_plan(spec),
        pythons=(local.program, "python3"),
    )


def _job(root: Path, plan: Plan) -> JobDir:
    """Make a job folder as a submit leaves it, as far as a launch reads it."""
    job = JobDir(root)
    for folder in (job.scripts, job.code, job.secrets, job.checkpoints):
        folder.mkdir(parents=True)
    certificate, key = new_certificate()
    (job.secrets / "certificate.pem").write_bytes(certificate)
    (job.secrets / "key.pem").write_bytes(key)
    (job.secrets / "token").write_text(TOKEN)
    (job.code / "train.py").write_text("print('hello')\n")
    job.bundle.write_bytes(bundle.build())
    for file in render.render(plan, job, "/usr/bin/python3"):
        (job.scripts / file.name).write_text(file.text)
    with tarfile.open(job.archive, "w:gz") as archive:
        archive.add(job.code / "train.py", "train.py")
    return job


def test_agent_starts_and_connects_through_forwarded_port(world: World) -> None:
    world.backend.launch(world.config)
    hello = world.boss.hello()
    assert (hello.node, hello.job, hello.root, hello.ships) == (
        "far",
        world.job.id,
        str(world.far.root),
        True,
    )
    assert (world.far.code / "train.py").read_text() == "print('hello')\n"
    assert world.backend.failures() == []
    assert world.backend.reason("far") == ""


def test_hosts_sharing_a_disk_launch_concurrently(world: World) -> None:
    """Hosts that share a disk are launched at once."""
    for node in NODES:
        world.backend.launch(world.config_of(node))
    assert {world.boss.hello().node for _ in NODES} == set(NODES)
    assert world.backend.failures() == []
    assert (world.far.code / "train.py").exists()


def test_broken_connection_is_reopened_and_agent_reconnects(world: World) -> None:
    """A broken connection is opened again, and the agent reconnects."""
    world.backend.launch(world.config)
    first = world.boss.hello()
    for _ in range(2):
        world.cut()
        world.boss.hear(agent_connections.AgentDropped)
        world.backend.check_reachable("far")
        again = world.boss.hello()
        assert (again.pid, again.incarnation) == (first.pid, first.incarnation)
    assert world.backend.agent_death("far") is None
    assert world.backend.failures() == []


def test_hanging_connection_is_noticed_by_its_check(world: World) -> None:
    world.backend.launch(world.config)
    first = world.boss.hello()
    for pid in world.sshd.sessions():
        os.kill(pid, signal.SIGSTOP)
    world.backend.check_reachable("far")
    assert world.boss.hello().pid == first.pid


def test_unavailable_server_is_retried_until_it_returns(world: World) -> None:
    """A server that is down for a while is retried until it is back."""
    world.backend.launch(world.config)
    first = world.boss.hello()
    world.sshd.stop()
    world.boss.hear(agent_connections.AgentDropped)
    world.wait_for(lambda: "connect:" in world.backend.reason("far"))
    world.desk.configure(f"Host far near\n  HostName 127.0.0.1\n  Port {world.desk.start(world.settings).port}\n")
    # The same key, on another port: that it is known there, too, is the user's matter.
    known = world.desk.home / ".ssh" / "known_hosts"
    config = (world.desk.home / ".ssh" / "config").read_text()
    port = config.split()[-1]
    known.write_text(known.read_text() + known.read_text().replace(str(world.sshd.port), port))
    assert world.boss.hello().pid == first.pid
    assert world.backend.reason("far") == ""


def test_dead_agent_is_reported_as_gone(world: World) -> None:
    world.backend.launch(world.config)
    world.boss.hello()
    world.kill_agent()
    world.boss.hear(agent_connections.AgentDropped)
    world.backend.check_reachable("far")
    assert world.evidence().startswith("its agent is no longer running")
    world.backend.launch(world.config)
    assert world.boss.hello().node == "far"


def test_revived_supervisor_finds_agent_again(world: World) -> None:
    world.backend.launch(world.config)
    first = world.boss.hello()
    world.backend.close()
    world.boss.hear(agent_connections.AgentDropped)
    world.new_backend().keep_reachable(world.config)
    assert world.boss.hello().pid == first.pid


def test_revived_supervisor_learns_that_agent_is_gone(world: World) -> None:
    world.backend.keep_reachable(world.config)
    assert world.evidence().startswith("its agent is no longer running")


def test_launch_onto_living_agent_connects_to_it(world: World) -> None:
    """A launch on a host where an agent is already running connects to it."""
    world.backend.launch(world.config)
    first = world.boss.hello()
    world.backend.close()
    world.boss.hear(agent_connections.AgentDropped)
    world.new_backend().launch(world.config)
    assert world.boss.hello().pid == first.pid


def test_host_of_dismissed_agent_still_serves_files(world: World) -> None:
    world.backend.launch(world.config)
    world.boss.hello()
    (world.far.checkpoints / "last.pt").write_bytes(b"weights" * 1000)
    world.backend.release("far")
    world.kill_agent()
    copy = Copy("k", "far", Direction.FETCH, str(world.far.checkpoints), world.job.checkpoints, ("last.pt",))
    assert world.backend.copier is not None
    copier = world.backend.copier
    copier.copy(copy)
    assert world.wait_for(copier.copied) == [CopyResult(copy, "")]
    assert (world.job.checkpoints / "last.pt").read_bytes() == b"weights" * 1000


def test_unknown_host_key_is_reported_with_its_fix(world: World) -> None:
    """A host with an unknown key is reported with what would make it known."""
    (world.desk.home / ".ssh" / "known_hosts").write_text("")
    world.backend.launch(world.config)
    failure = world.failure()
    assert (failure.stage, failure.retryable) == ("host key", Retryable.PERMANENT)
    assert "ssh-keyscan" in failure.fix


def test_unreachable_host_is_reported_and_can_launch_later(world: World) -> None:
    """A host where nothing listens is reported and can be launched later."""
    config = (world.desk.home / ".ssh" / "config").read_text()
    world.desk.configure(f"Host far near\n  HostName 127.0.0.1\n  Port {free_port()}\n")
    world.backend.launch(world.config)
    failure = world.failure()
    assert (failure.stage, failure.retryable) == ("connect", Retryable.TRANSIENT)
    world.desk.configure(config)
    world.backend.launch(world.config)
    assert world.boss.hello().node == "far"


def test_server_forbidding_forwards_is_reported(world: World) -> None:
    strict = world.desk.start(f"{world.settings}\nAllowTcpForwarding no")
    world.desk.know(strict)
    world.desk.configure(f"Host far near\n  HostName 127.0.0.1\n  Port {strict.port}\n")
    world.backend.launch(world.config)
    failure = world.failure()
    assert (failure.stage, failure.retryable) == ("forward", Retryable.PERMANENT)
    assert not world.far.root.exists(), "an agent that could not be heard is not brought there"


def test_close_is_quick_and_keeps_the_agent(world: World) -> None:
    """Closing is quick and leaves the agent running."""
    world.backend.launch(world.config)
    pid = world.boss.hello().pid
    began_s = time.monotonic()
    world.backend.close()
    assert time.monotonic() - began_s < 3.0
    world.boss.hear(agent_connections.AgentDropped)
    assert _is_running(pid)
