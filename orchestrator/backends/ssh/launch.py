"""Launch of an agent on a host: one session with the host's launch script, over one channel.

A host keeps an agent only after it reported that its leases are held and received `GO`. If the connection breaks after
that, the next launch finds the agent alive.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrator.backends.ssh.bootstrap_session import CLOCKS, BootstrapSession, Clocks, HostConnection
from orchestrator.core import codec
from orchestrator.core.errors import Cancelled
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire.agent_config import AgentConfig

T = TypeVar("T")

# No character has a meaning inside single quotes to any login shell: sh, bash, zsh, csh, fish. The script follows on
# standard input after the number of its lines; `read` takes no byte of what comes after them.
_COMMAND = (
    """/bin/sh -c 'read -r n; eval "$(while [ "$n" -gt 0 ]; do IFS= read -r l; printf "%s\\n" "$l"; n=$((n-1)); done)"'"""
    " orch {mark}"
)


@dataclass(frozen=True, slots=True)
class Launcher:
    """The node's launch script and the bundle's bytes: what runs on a host before its agent."""

    script: str
    bundle: bytes

    @property
    def blob(self) -> w.Blob:
        """The bundle's hash and size."""
        return w.Blob(hashlib.sha256(self.bundle).hexdigest(), len(self.bundle))


@dataclass(frozen=True, slots=True)
class CodeArchive:
    """The job's code archive; `unpacked_bytes` is its size when unpacked."""

    path: Path
    blob: w.Blob
    unpacked_bytes: int

    @classmethod
    def read(cls, path: Path) -> CodeArchive:
        """Read an archive's hash and sizes. Raises OSError."""
        digest = hashlib.sha256()
        tail = b""
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                tail = (tail + block)[-4:]
            size_bytes = file.tell()
        # RFC 1952: a gzip file ends with the size of what it holds, modulo 2^32.
        return cls(path, w.Blob(digest.hexdigest(), size_bytes), int.from_bytes(tail, "little"))


@dataclass(frozen=True, slots=True)
class AgentLaunch:
    """Everything that a launch of an agent brings to its host."""

    launcher: Launcher
    code: CodeArchive
    config: AgentConfig  # its `address` is where the agent dials on its own host


@dataclass(frozen=True, slots=True)
class LaunchedAgent:
    """An agent that runs on a host."""

    root: str  # the job's folder there
    ships: bool
    gpus: tuple[str, ...]
    has_rsync: bool
    pid: int
    was_up: bool  # by an earlier launch
    boot_id: str
    notes: tuple[str, ...]  # what may matter later


@dataclass(frozen=True, slots=True)
class Survey:
    """What a host offers, with the Python that would run the agent."""

    version: str
    # By how many seconds its clock is ahead, and how far off that may be
    clock_s: float
    clock_error_s: float
    notes: tuple[str, ...]
    host: w.HostSurveyed


def launch_agent(
    line: HostConnection,
    launch: AgentLaunch,
    still_wanted: Callable[[], bool] = lambda: True,
    clocks: Clocks = CLOCKS,
) -> LaunchedAgent:
    """Bring an agent up on a host. Raises LaunchError; then no agent runs there, unless only its last reply, that it is
    up, was lost. Raises Cancelled: an agent of an earlier launch may have been dismissed in the meantime."""
    request = w.LaunchAgent(
        root=launch.config.root, bundle=launch.launcher.blob, code=launch.code.blob,
        unpacked_bytes=launch.code.unpacked_bytes, config=launch.config,
    )  # fmt: skip
    with _open_session(line, launch.launcher, request, clocks) as session:
        session.code = launch.code.path
        _, clock_s, _ = _await_python(session)
        session.enter("folder")
        folder = session.expect(w.FolderReady)
        session.enter("copy")
        session.expect(w.FilesVerified)
        session.enter("lease")
        leased = session.expect_either(w.Leased, w.AlreadyUp)
        if not still_wanted():
            raise Cancelled
        pid = leased.pid if isinstance(leased, w.AlreadyUp) else _start_agent(session)
        return LaunchedAgent(
            root=folder.root, ships=folder.ships, gpus=leased.gpus, has_rsync=folder.has_rsync, pid=pid, was_up=isinstance(leased, w.AlreadyUp), boot_id=folder.boot_id,
            notes=(*folder.notes, *session.notes(clock_s)),
        )  # fmt: skip


def redirect_agent(
    line: HostConnection, launcher: Launcher, config: AgentConfig, clocks: Clocks = CLOCKS
) -> w.AgentStatus:
    """Redirect a node's agent to `config.address`; return whether the agent lives. Raises LaunchError."""
    request = w.QueryAgent(config.root, launcher.blob, config.node, config.address)
    with _open_session(line, launcher, request, clocks) as session:
        _await_python(session)
        session.enter("folder")
        return session.expect(w.AgentStatus)


def clean_up(line: HostConnection, launcher: Launcher, root: str, job: str, clocks: Clocks = CLOCKS) -> w.CleanedUp:
    """End the leftover processes of an ended job on a host, and remove its folder there. Raises LaunchError."""
    with _open_session(line, launcher, w.CleanUp(root, launcher.blob, job), clocks) as session:
        _await_python(session)
        session.enter("cleanup")
        return session.expect(w.CleanedUp)


def survey(
    line: HostConnection, launcher: Launcher, root: str, programs: tuple[str, ...], clocks: Clocks = CLOCKS
) -> Survey:
    """Return what a host offers to a job whose folder would be `root`; leaves nothing there. Raises LaunchError."""
    with open_host_session(line, launcher, root, programs, clocks) as session:
        return session.survey


class HostSession:
    """Session with a surveyed host: steps of a check, one after another."""

    def __init__(self, conversation: BootstrapSession, survey: Survey) -> None:
        self._conversation = conversation
        self.survey = survey

    def run_step(self, step: w.CheckStep, reply_type: type[T], limit_s: float) -> T:
        """Have the host do a step, within `limit_s`, and return its answer. Raises LaunchError."""
        self._conversation.enter("check", limit_s)
        self._conversation.send(codec.dumps_kind(step).encode() + b"\n")
        return self._conversation.expect(reply_type)


@contextlib.contextmanager
def open_host_session(
    line: HostConnection, launcher: Launcher, root: str, programs: tuple[str, ...], clocks: Clocks = CLOCKS
) -> Iterator[HostSession]:
    """Survey a host as `survey` does, and yield a session for further steps. Raises LaunchError."""
    with _open_session(line, launcher, w.SurveyHost(root, launcher.blob, programs), clocks) as session:
        yield HostSession(session, _read_survey(session))


def _read_survey(session: BootstrapSession) -> Survey:
    python, clock_s, error_s = _await_python(session)
    session.enter("survey")
    host = session.expect(w.HostSurveyed)
    return Survey(python.version, clock_s, error_s, session.notes(clock_s), host)


def _await_python(session: BootstrapSession) -> tuple[w.PythonFound, float, float]:
    """Wait for the shell and a Python; return it, by how many seconds the host's clock is ahead, and the error of that:
    it was read at some time of this wait."""
    began_s = session.clocks.wall()
    session.expect(w.InShell)
    session.enter("python")
    python = session.expect(w.PythonFound)
    error_s = (session.clocks.wall() - began_s) / 2
    return python, python.clock_s - began_s - error_s, error_s


def _start_agent(session: BootstrapSession) -> int:
    """Let a monitor that holds its leases start its agent; return its pid."""
    session.enter("agent")
    session.send(w.GO + b"\n")
    return session.expect(w.AgentMonitorUp).pid


@contextlib.contextmanager
def _open_session(
    line: HostConnection, launcher: Launcher, request: w.HostRequest, clocks: Clocks
) -> Iterator[BootstrapSession]:
    """Begin a session, and end it whatever happens."""
    mark = f"orch-{secrets.token_hex(8)}"
    remote = line.run(_COMMAND.format(mark=mark))
    try:
        session = BootstrapSession(remote, mark.encode(), launcher.bundle, clocks)
        script = launcher.script.rstrip("\n").encode() + b"\n"
        session.send(b"%d\n%s%s\n" % (script.count(b"\n"), script, codec.dumps_kind(request).encode()))
        yield session
    finally:
        remote.close()
