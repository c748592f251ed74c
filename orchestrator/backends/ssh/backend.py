"""Backend `ssh`: agents on hosts over SSH, with one connection and one thread for each host. It makes no decisions.

The supervisor's calls only record what is wanted (`HostWish`). The workers do it in their own time; `failures`,
`agent_death`, `reason` and the copier report the outcome.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import paramiko

from orchestrator.backends.api import Backend, LaunchError, Wake
from orchestrator.backends.ssh.connect import ssh_config
from orchestrator.backends.ssh.connect.connection import ChannelReceiver, Connection, JumpHosts
from orchestrator.backends.ssh.connect.known_hosts import Policy
from orchestrator.backends.ssh.connect.port_forward import Forward
from orchestrator.backends.ssh.copy.copy_queue import CopyQueue
from orchestrator.backends.ssh.host_worker import HostAction, HostWorker
from orchestrator.backends.ssh.launch import AgentLaunch, CodeArchive, Launcher, launch_agent, redirect_agent
from orchestrator.backends.ssh.session import ConcurrencyLimit, Session, WorkerDependencies
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.observations import Retryable
from orchestrator.core.wire.agent_config import AgentConfig
from orchestrator.core.wire.bootstrap import AgentStatus

FANOUT = 32
"""How many hosts launch at once; as many again reconnect at once."""

CLOSE_S_MAX = 3.0
"""How long it may take to hang up on all hosts together."""

FILES_MAX = 65_536
"""The limit of open files to ask for: a host takes four, and a common limit is 1,024."""


class LaunchPayload:
    """Scripts, bundle and code that travel to hosts; read once, by the first thread that needs them."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._lock = threading.Lock()

    def launcher(self, node: str) -> Launcher:
        """Return what runs on a host before its agent. Raises LaunchError."""
        script = self._job.scripts / f"{node}.sh"
        try:
            return Launcher(script.read_text(), self._bundle)
        except OSError as err:
            raise _unreadable(err) from err

    def launch(self, config: AgentConfig) -> AgentLaunch:
        """Return everything that a launch brings to a host. Raises LaunchError."""
        launcher = self.launcher(config.node)
        try:
            with self._lock:
                return AgentLaunch(launcher, self._code, config)
        except OSError as err:
            raise _unreadable(err) from err

    @functools.cached_property
    def _bundle(self) -> bytes:
        return self._job.bundle.read_bytes()

    @functools.cached_property
    def _code(self) -> CodeArchive:
        return CodeArchive.read(self._job.archive)


@dataclass(frozen=True, slots=True)
class SshSession:
    """Connection to a host, with what is launched over it."""

    connection: Connection
    payload: LaunchPayload
    has_rsync: dict[str, bool]

    def forward(self, taker: ChannelReceiver) -> int:
        """Forward a port of the host's loopback to `taker`."""
        return self.connection.forward(taker)

    def launch(self, config: AgentConfig, still_wanted: Callable[[], bool]) -> AgentStatus:
        """Bring the agent up; the supervisor's log gets what may matter later."""
        agent = launch_agent(self.connection, self.payload.launch(config), still_wanted)
        self.has_rsync[config.node] = agent.has_rsync
        for note in agent.notes:
            print(f"{config.node}: {note}", flush=True)
        return AgentStatus(True, agent.boot_id)

    def reach(self, config: AgentConfig) -> AgentStatus:
        """Send the agent the address to dial, and check whether it lives."""
        return redirect_agent(self.connection, self.payload.launcher(config.node), config)

    def is_alive(self, answer_s_max: float) -> bool:
        """Return whether the far end answers within `answer_s_max`."""
        return self.connection.is_alive(answer_s_max)

    def close(self) -> None:
        """Hang up."""
        self.connection.close()


class SshBackend(Backend):
    """Agents of one job on hosts over SSH."""

    def __init__(self, job: JobDir, plan: Plan, wake: Wake = lambda: None) -> None:
        assert plan.ssh is not None
        self.wake = wake
        self._ssh = plan.ssh
        self._policy: Policy = "accept-new" if plan.ssh.host_keys == "accept-new" else "strict"
        self._hosts = {node.name: node.host for node in plan.nodes}
        self._payload = LaunchPayload(job)
        self._jumps = JumpHosts()
        self._hosts_with_rsync: dict[str, bool] = {}
        self._copies = CopyQueue(self.connection_of, self._has_rsync, self._wake, plan.ssh.copy_mb_s)
        self.copier = self._copies
        launches, reconnects = ConcurrencyLimit(FANOUT), ConcurrencyLimit(FANOUT)
        self._dependencies = WorkerDependencies(
            self._open, _forward, launches, reconnects, self._copies.busy, self._wake
        )
        self._workers: dict[str, HostWorker] = {}
        _allow_many_files()

    def launch(self, config: AgentConfig) -> None:
        """Begin to bring the agent to its host; not twice when that is under way."""
        self._worker(config.node).launch(config)

    def failures(self) -> list[tuple[str, LaunchError]]:
        """Return the launches, by node, that failed since the last call."""
        failures = [(node, worker.take_failure()) for node, worker in self._workers.items()]
        return [(node, failure) for node, failure in failures if failure is not None]

    def agent_death(self, node: str) -> str | None:
        """Return what shows that the node's agent died, once; None when that is not known."""
        worker = self._workers.get(node)
        return worker.take_evidence() if worker is not None else None

    def keep_reachable(self, config: AgentConfig) -> None:
        """Keep a connection open to an agent that an earlier supervisor launched, and check whether it is there."""
        self._worker(config.node).keep_reachable(config)

    def check_reachable(self, node: str) -> None:
        """Check at once whether the connection to a node works, and whether its agent is there."""
        if node in self._workers:
            self._workers[node].check(HostAction.CHECK_AGENT)

    def release(self, node: str) -> None:
        """Close the connection to a node, after a while."""
        if node in self._workers:
            self._workers[node].release()

    def reason(self, node: str) -> str:
        """Return why there is no connection to a node now; empty when there is one, or none is wanted."""
        return self._workers[node].reason if node in self._workers else ""

    def connection_of(self, node: str) -> Connection | None:
        """Return an open connection to a node's host; opens one if need be, which may take a while."""
        session = self._worker(node).borrow_session()
        assert session is None or isinstance(session, SshSession)
        return session.connection if session is not None else None

    def close(self) -> None:
        """Hang up on all hosts; agents keep running."""
        deadline_s = time.monotonic() + CLOSE_S_MAX
        workers = list(self._workers.values())
        for worker in workers:
            worker.close()
        self._copies.close()
        for worker in workers:
            worker.join(max(0.0, deadline_s - time.monotonic()))
        self._jumps.close()

    def _worker(self, node: str) -> HostWorker:
        return self._workers.setdefault(node, HostWorker(node, self._dependencies))

    def _open(self, node: str) -> Session:
        target = ssh_config.resolve(self._hosts.get(node, node), self._ssh.user, self._ssh.port)
        connection = Connection.open(target, host_keys=self._policy, jumps=self._jumps)
        return SshSession(connection, self._payload, self._hosts_with_rsync)

    def _has_rsync(self, node: str) -> bool:
        """Assume rsync where an earlier supervisor launched the agent: a copy then tries it."""
        return self._hosts_with_rsync.get(node, True)

    def _wake(self) -> None:
        self.wake()


def _forward(channel: paramiko.Channel, address: str, ended: Wake) -> Forward:
    host, _, port = address.rpartition(":")
    return Forward(channel, (host, int(port)), ended)


def _unreadable(err: OSError) -> LaunchError:
    reason = f"{err.filename} cannot be read: {err.strerror}"
    return LaunchError("copy", reason, "submit the job again", Retryable.PERMANENT)


def _allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(FILES_MAX, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
