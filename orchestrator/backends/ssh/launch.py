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

from orchestrator.backends.ssh.conversation import CLOCKS, Clocks, Conversation, Line
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
class Code:
    """The job's code archive; `unpacked_bytes` is its size when unpacked."""

    path: Path
    blob: w.Blob
    unpacked_bytes: int

    @classmethod
    def of(cls, path: Path) -> Code:
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
class Launch:
    """Everything that a launch of an agent brings to its host."""

    launcher: Launcher
    code: Code
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
    line: Line, launch: Launch, still_wanted: Callable[[], bool] = lambda: True, clocks: Clocks = CLOCKS
) -> LaunchedAgent:
    """Bring an agent up on a host. Raises LaunchError; then no agent runs there, unless only its last reply, that it is
    up, was lost. Raises Cancelled: an agent of an earlier launch may have been dismissed in the meantime."""
    request = w.Launch(
        root=launch.config.root, bundle=launch.launcher.blob, code=launch.code.blob,
        unpacked_bytes=launch.code.unpacked_bytes, config=launch.config,
    )  # fmt: skip
    with _conversing(line, launch.launcher, request, clocks) as conversation:
        conversation.code = launch.code.path
        _, clock_s, _ = _begin(conversation)
        conversation.enter("folder")
        folder = conversation.expect(w.Placed)
        conversation.enter("copy")
        conversation.expect(w.CopiedHere)
        conversation.enter("lease")
        held = conversation.expect_either(w.Leased, w.AlreadyUp)
        if not still_wanted():
            raise Cancelled
        pid = held.pid if isinstance(held, w.AlreadyUp) else _go(conversation)
        return LaunchedAgent(
            root=folder.root, ships=folder.ships, gpus=held.gpus, has_rsync=folder.has_rsync, pid=pid, was_up=isinstance(held, w.AlreadyUp), boot_id=folder.boot_id,
            notes=(*folder.notes, *conversation.notes(clock_s)),
        )  # fmt: skip


def reach(line: Line, launcher: Launcher, config: AgentConfig, clocks: Clocks = CLOCKS) -> w.AgentSeen:
    """Redirect a node's agent to `config.address`; return whether the agent lives. Raises LaunchError."""
    request = w.Reach(config.root, launcher.blob, config.node, config.address)
    with _conversing(line, launcher, request, clocks) as conversation:
        _begin(conversation)
        conversation.enter("folder")
        return conversation.expect(w.AgentSeen)


def clean_up(line: Line, launcher: Launcher, root: str, job: str, clocks: Clocks = CLOCKS) -> w.CleanedUp:
    """End the leftover processes of an ended job on a host, and remove its folder there. Raises LaunchError."""
    with _conversing(line, launcher, w.CleanUp(root, launcher.blob, job), clocks) as conversation:
        _begin(conversation)
        conversation.enter("cleanup")
        return conversation.expect(w.CleanedUp)


def survey(
    line: Line, launcher: Launcher, root: str, programs: tuple[str, ...], clocks: Clocks = CLOCKS
) -> Survey:
    """Return what a host offers to a job whose folder would be `root`; leaves nothing there. Raises LaunchError."""
    with visiting(line, launcher, root, programs, clocks) as visit:
        return visit.survey


class Visit:
    """Session with a surveyed host: steps of a check, one after another."""

    def __init__(self, conversation: Conversation, survey: Survey) -> None:
        self._conversation = conversation
        self.survey = survey

    def ask(self, step: w.Step, wanted: type[T], limit_s: float) -> T:
        """Have the host do a step, within `limit_s`, and return its answer. Raises LaunchError."""
        self._conversation.enter("check", limit_s)
        self._conversation.send(codec.dumps_kind(step).encode() + b"\n")
        return self._conversation.expect(wanted)


@contextlib.contextmanager
def visiting(
    line: Line, launcher: Launcher, root: str, programs: tuple[str, ...], clocks: Clocks = CLOCKS
) -> Iterator[Visit]:
    """Survey a host as `survey` does, and yield a session for further steps. Raises LaunchError."""
    with _conversing(line, launcher, w.SurveyHost(root, launcher.blob, programs), clocks) as conversation:
        yield Visit(conversation, _surveyed(conversation))


def _surveyed(conversation: Conversation) -> Survey:
    python, clock_s, error_s = _begin(conversation)
    conversation.enter("survey")
    host = conversation.expect(w.HostSurveyed)
    return Survey(python.version, clock_s, error_s, conversation.notes(clock_s), host)


def _begin(conversation: Conversation) -> tuple[w.PythonFound, float, float]:
    """Wait for the shell and a Python; return it, by how many seconds the host's clock is ahead, and the error of that:
    it was read at some time of this wait."""
    began_s = conversation.clocks.wall()
    conversation.expect(w.InShell)
    conversation.enter("python")
    python = conversation.expect(w.PythonFound)
    error_s = (conversation.clocks.wall() - began_s) / 2
    return python, python.clock_s - began_s - error_s, error_s


def _go(conversation: Conversation) -> int:
    """Let a monitor that holds its leases start its agent; return its pid."""
    conversation.enter("agent")
    conversation.send(w.GO + b"\n")
    return conversation.expect(w.KeeperUp).pid


@contextlib.contextmanager
def _conversing(line: Line, launcher: Launcher, request: w.Request, clocks: Clocks) -> Iterator[Conversation]:
    """Begin a session, and end it whatever happens."""
    mark = f"orch-{secrets.token_hex(8)}"
    remote = line.run(_COMMAND.format(mark=mark))
    try:
        conversation = Conversation(remote, mark.encode(), launcher.bundle, clocks)
        script = launcher.script.rstrip("\n").encode() + b"\n"
        conversation.send(b"%d\n%s%s\n" % (script.count(b"\n"), script, codec.dumps_kind(request).encode()))
        yield conversation
    finally:
        remote.close()
