"""How does a host get its agent? By one conversation with its launch script, over one channel.

An agent is only left on a host when the host has said that it holds what it needs and was told to go; where the line
breaks after that, the agent is found alive the next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.backends.ssh.conversation import CLOCKS, Clocks, Conversation, Line
from orchestrator.backends.ssh.session import Unwanted
from orchestrator.core import codec
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire.messages import AgentConfig

# Nothing in it means anything inside single quotes to any login shell: sh, bash, zsh, csh, fish. The script follows on
# standard input after the number of its lines; `read` takes no byte of what comes after them.
_COMMAND = (
    """/bin/sh -c 'read -r n; eval "$(while [ "$n" -gt 0 ]; do IFS= read -r l; printf "%s\\n" "$l"; n=$((n-1)); done)"'"""
    " orch {mark}"
)


@dataclass(frozen=True, slots=True)
class Launcher:
    """What runs on a host before there is an agent: the node's launch script, and the bundle's bytes."""

    script: str
    bundle: bytes

    @property
    def parcel(self) -> w.Blob:
        """The bundle's hash and size."""
        return w.Blob(hashlib.sha256(self.bundle).hexdigest(), len(self.bundle))


@dataclass(frozen=True, slots=True)
class Code:
    """The job's code archive; `unpacked_bytes` is what it grows to."""

    path: Path
    parcel: w.Blob
    unpacked_bytes: int

    @classmethod
    def of(cls, path: Path) -> Code:
        """Read an archive's hash and sizes. Raises OSError."""
        digest = hashlib.sha256()
        tail = b""
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
                tail = (tail + piece)[-4:]
            size_bytes = file.tell()
        # RFC 1952: a gzip file ends with the size of what it holds, modulo 2^32.
        return cls(path, w.Blob(digest.hexdigest(), size_bytes), int.from_bytes(tail, "little"))


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be brought up. `config.address` is where the agent dials on its own host; `executes`: the entry point
    is a program of the code snapshot, which a disk mounted `noexec` will not run."""

    kit: Launcher
    code: Code
    executes: bool
    config: AgentConfig


@dataclass(frozen=True, slots=True)
class Landed:
    """An agent that was left on a host; `was_up`: by an earlier launch. `root`: of the job there; `clock_s`: by how much
    the host's clock is ahead; `notes`: what may matter later."""

    root: str
    ships: bool
    gpus: tuple[str, ...]
    python: str
    version: str
    has_rsync: bool
    clock_s: float
    pid: int
    was_up: bool
    boot_id: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """What a host has, with the Python that would run the agent."""

    python: str
    version: str
    clock_s: float
    notes: tuple[str, ...]
    looked: w.HostSurveyed


def launch_agent(
    line: Line, launch: Launch, still_wanted: Callable[[], bool] = lambda: True, clocks: Clocks = CLOCKS
) -> Landed:
    """Bring an agent up on a host. Raises LaunchError; then nothing of it goes on there, unless only the last word,
    that it is up, was lost. Raises Unwanted, too: an agent of an earlier launch may have been dismissed meanwhile."""
    request = w.Launch(
        root=launch.config.root, bundle=launch.kit.parcel, code=launch.code.parcel,
        unpacked_bytes=launch.code.unpacked_bytes, executes=launch.executes, config=launch.config,
    )  # fmt: skip
    with _talking(line, launch.kit, request, clocks) as talk:
        talk.code = launch.code.path
        python, clock_s = _begin(talk)
        talk.enter("folder")
        placed = talk.hear(w.Placed)
        talk.enter("copy")
        talk.hear(w.CopiedHere)
        talk.enter("lease")
        held = talk.hear_one_of(w.Leased, w.AlreadyUp)
        if not still_wanted():
            raise Unwanted
        pid = held.pid if isinstance(held, w.AlreadyUp) else _go(talk)
        return Landed(
            root=placed.root, ships=placed.ships, gpus=held.gpus, python=python.path, version=python.version,
            has_rsync=placed.has_rsync, clock_s=clock_s, pid=pid, was_up=isinstance(held, w.AlreadyUp), boot_id=placed.boot_id,
            notes=(*placed.notes, *talk.notes(clock_s)),
        )  # fmt: skip


def reach(line: Line, kit: Launcher, config: AgentConfig, clocks: Clocks = CLOCKS) -> w.AgentSeen:
    """Tell a node's agent to dial `config.address` from now on, and see whether it is there. Raises LaunchError."""
    request = w.Reach(config.root, kit.parcel, config.node, config.address)
    with _talking(line, kit, request, clocks) as talk:
        _begin(talk)
        talk.enter("folder")
        return talk.hear(w.AgentSeen)


def sweep(line: Line, kit: Launcher, root: str, job: str, clocks: Clocks = CLOCKS) -> w.CleanedUp:
    """End what an ended job left running on a host and remove its folder there. Raises LaunchError."""
    with _talking(line, kit, w.CleanUp(root, kit.parcel, job), clocks) as talk:
        _begin(talk)
        talk.enter("sweep")
        return talk.hear(w.CleanedUp)


def survey(
    line: Line, kit: Launcher, root: str, programs: tuple[str, ...], clocks: Clocks = CLOCKS
) -> Survey:
    """Look what a host has for a job whose folder would be `root`; nothing is left there. Raises LaunchError."""
    with _talking(line, kit, w.SurveyHost(root, kit.parcel, programs), clocks) as talk:
        python, clock_s = _begin(talk)
        talk.enter("look")
        looked = talk.hear(w.HostSurveyed)
        return Survey(python.path, python.version, clock_s, talk.notes(clock_s), looked)


def _begin(talk: Conversation) -> tuple[w.PythonFound, float]:
    """Come as far as a Python; return it, and by how many seconds the host's clock is ahead."""
    talk.hear(w.InShell)
    talk.enter("python")
    python = talk.hear(w.PythonFound)
    return python, python.clock_s - talk.clocks.wall()


def _go(talk: Conversation) -> int:
    """Let a keeper that holds its leases start its agent; return its pid."""
    talk.enter("agent")
    talk.send(w.GO + b"\n")
    return talk.hear(w.KeeperUp).pid


@contextlib.contextmanager
def _talking(line: Line, kit: Launcher, request: w.Request, clocks: Clocks) -> Iterator[Conversation]:
    """Begin a conversation, and end it whatever happens."""
    mark = f"orch-{secrets.token_hex(8)}"
    remote = line.run(_COMMAND.format(mark=mark))
    try:
        talk = Conversation(remote, mark.encode(), kit.bundle, clocks)
        script = kit.script.rstrip("\n").encode() + b"\n"
        talk.send(b"%d\n%s%s\n" % (script.count(b"\n"), script, codec.dumps_kind(request).encode()))
        yield talk
    finally:
        remote.close()
