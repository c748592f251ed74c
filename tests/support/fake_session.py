"""A host, its sessions and a clock that tests of one host's thread stand on: nothing in it waits for real time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import paramiko

from orchestrator.backends.ssh import host_worker as w
from orchestrator.backends.ssh import session as ses
from orchestrator.backends.ssh.connect import connection
from orchestrator.backends.ssh.connect.port_forward import Forward
from orchestrator.core.errors import Cancelled
from orchestrator.core.wire.agent_config import AgentConfig, LeaseNeeds
from orchestrator.core.wire.bootstrap import AgentStatus

REST_S_MAX = 10.0
CONFIG = AgentConfig(
    job="job-1",
    node="gpu01",
    root="/home/me/.orch/jobs/job-1",
    token="t",
    certificate="c",
    address="127.0.0.1:4000",
    heartbeat_s=1.0,
    node_timeout_s=60.0,
    fence_s=30.0,
    checkpoint_glob="*",
    finds_checkpoints=True,
    ships=True,
    needs=LeaseNeeds(0, 1, 0),
)


class FakeClock(ses.Clock):
    """Time that stands until it is moved; counts how often a worker's thread came to rest in it."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._rest = threading.Condition()
        self._rests = 0
        self._waiting: list[threading.Condition] = []

    def now_s(self) -> float:
        return self._now_s

    def wait(self, changed: threading.Condition, wait_s: float) -> None:
        if changed not in self._waiting:
            self._waiting.append(changed)
        if threading.current_thread().name.startswith("ssh "):
            with self._rest:
                self._rests += 1
                self._rest.notify_all()
        changed.wait(REST_S_MAX)

    def until_rest(self, deed: Callable[[], object]) -> None:
        """Do something that wakes the worker, and wait until it rests again."""
        before = self._rests
        deed()
        with self._rest:
            assert self._rest.wait_for(lambda: self._rests > before, REST_S_MAX), "the worker finds no rest"

    def advance(self, seconds: float) -> None:
        """Let time pass, and what is due be done."""
        self._now_s += seconds
        self.until_rest(self._notify)

    def _notify(self) -> None:
        for changed in self._waiting:
            with changed:
                changed.notify_all()


@dataclass(slots=True)
class FakeHost:
    """What there is to connect to, how it answers, and what was asked of it."""

    refuses: Exception | None = None
    launch_error: Exception | None = None
    unseen: Exception | None = None
    answers: bool = True
    agent: bool = True
    boot: str = "boot-1"
    started: int = 0
    calls: list[str] = field(default_factory=list)
    sessions: list[FakeSession] = field(default_factory=list)
    in_launch: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    may_launch: threading.Semaphore | None = None

    def open(self, node: str) -> ses.Session:
        self.calls.append("open")
        if self.refuses is not None:
            raise self.refuses
        self.sessions.append(FakeSession(self, 30_000 + len(self.sessions)))
        return self.sessions[-1]

    def since(self, deed: Callable[[], object]) -> list[str]:
        """Return what was asked of the host while `deed` was done."""
        before = len(self.calls)
        deed()
        return self.calls[before:]


@dataclass(slots=True)
class FakeSession:
    host: FakeHost
    port: int
    taker: connection.ChannelReceiver | None = None
    closed: bool = False

    def forward(self, taker: connection.ChannelReceiver) -> int:
        self.host.calls.append("forward")
        self.taker = taker
        return self.port

    def launch(self, config: AgentConfig, still_wanted: Callable[[], bool]) -> AgentStatus:
        self.host.calls.append(f"launch {config.address}")
        self.host.in_launch.release()
        if self.host.may_launch is not None:
            assert self.host.may_launch.acquire(timeout=REST_S_MAX)
        if self.host.launch_error is not None:
            raise self.host.launch_error
        if not still_wanted():
            raise Cancelled
        self.host.started += 1
        return AgentStatus(True, self.host.boot)

    def reach(self, config: AgentConfig) -> AgentStatus:
        self.host.calls.append(f"reach {config.address}")
        if self.host.unseen is not None:
            raise self.host.unseen
        return AgentStatus(self.host.agent, self.host.boot)

    def is_alive(self, answer_s_max: float) -> bool:
        self.host.calls.append("ask")
        return self.host.answers and not self.closed

    def close(self) -> None:
        self.host.calls.append("close")
        self.closed = True


@dataclass(slots=True)
class FakeForward:
    ended: Callable[[], None]
    is_over: bool = False

    def hang_up(self) -> None:
        self.is_over = True
        self.ended()


@dataclass(slots=True)
class World:
    clock: FakeClock = field(default_factory=FakeClock)
    host: FakeHost = field(default_factory=FakeHost)
    busy: bool = False
    woken: int = 0
    forwards: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    workers: list[w.HostWorker] = field(default_factory=list)
    launches: ses.ConcurrencyLimit = field(default_factory=lambda: ses.ConcurrencyLimit(2))

    def worker(self) -> w.HostWorker:
        dependencies = ses.WorkerDependencies(
            open=self.host.open,
            forward=self._forward,
            launches=self.launches,
            reconnects=ses.ConcurrencyLimit(2),
            busy=lambda node: self.busy,
            wake=self._wake,
            clock=self.clock,
        )
        self.workers.append(w.HostWorker("gpu01", dependencies))
        return self.workers[-1]

    def _wake(self) -> None:
        self.woken += 1

    def _forward(self, channel: paramiko.Channel, address: str, ended: Callable[[], None]) -> Forward:
        forward = FakeForward(ended)
        self.forwards.append((address, forward.hang_up))
        return cast(Forward, forward)

    def dial(self) -> Callable[[], None]:
        """Be an agent that dials; return how to hang up."""
        taker = self.host.sessions[-1].taker
        assert taker is not None
        taker(cast(paramiko.Channel, None))
        return self.forwards[-1][1]

    def launched(self) -> w.HostWorker:
        """Return a worker whose agent is up and has dialled."""
        worker = self.worker()
        self.clock.until_rest(lambda: worker.launch(CONFIG))
        assert worker.take_failure() is None
        self.dial()
        self.host.calls.clear()
        return worker
