"""What do a host and the launching side say to each other before there is an agent? Requests go in, words come out.

A request is one line of JSON on the standard input of the node's launch script; raw bytes follow when a word `SendBlob`
asks for them, and the line `GO` after `Leased`. A word is a line `<mark> <json>` on standard output, wherever in the
line it begins; everything else there is noise: what a login shell prints unasked. The mark is new for each launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.core.wire.messages import AgentConfig

GO = b"go"
"""The line after which a keeper that holds its leases starts its agent; without it, it ends."""

GO_S_MAX = 15.0
"""How long a keeper waits for it: whoever launched it has vanished."""

REQUEST_BYTES_MAX = 1 << 20
WORD_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that may have to travel: asked for by `SendBlob` only when the host has none with this hash."""

    sha256: str
    size_bytes: int


# Requests. Each has a bundle and the job's folder: the few lines that run before the bundle is there read no more.


@dataclass(frozen=True, slots=True)
class Launch:
    """Bring the agent of `config` up. `root` may begin with `~`, which the host resolves; `unpacked_bytes` is what the
    code archive grows to; `executes`: the entry point is a program of the snapshot, so that `noexec` matters."""

    root: str
    bundle: Blob
    code: Blob
    unpacked_bytes: int
    executes: bool
    config: AgentConfig


@dataclass(frozen=True, slots=True)
class Reach:
    """Say how the agent of `node` is; from now on it dials `endpoint` (`host:port`; empty: leave that as it is)."""

    root: str
    bundle: Blob
    node: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class CleanUp:
    """End what an ended job has left running on this host, and remove its folder, unless it is the submitter's own."""

    root: str
    bundle: Blob
    job: str


@dataclass(frozen=True, slots=True)
class SurveyHost:
    """Say what there is for a job, and leave nothing. `programs`: the first that is there runs the ranks."""

    root: str
    bundle: Blob
    programs: tuple[str, ...]


Request: TypeAlias = Launch | Reach | CleanUp | SurveyHost


# Words


@dataclass(frozen=True, slots=True)
class InShell:
    """The login shell has let us through."""


@dataclass(frozen=True, slots=True)
class PythonFound:
    """A Python that will do. `clock_s`: the host's time, in seconds since 1970."""

    path: str
    version: str
    clock_s: float


@dataclass(frozen=True, slots=True)
class SendBlob:
    """Send the bytes of `bundle` or `code` now."""

    what: str


@dataclass(frozen=True, slots=True)
class Working:
    """Something that takes long goes on, such as unpacking, or waiting for another launch in the same folder."""

    at: str


@dataclass(frozen=True, slots=True)
class Placed:
    """The job's folder is ready to be filled. `notes`: what may matter later."""

    root: str
    ships: bool
    has_rsync: bool
    boot_id: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopiedHere:
    """Bundle and code are there, and right."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The keeper holds what its agent needs, and waits for `GO`."""

    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AlreadyUp:
    """The node's agent lives, from an earlier launch: it will dial. `gpus` are those that it has leased."""

    pid: int
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeeperUp:
    """The keeper has got its `GO`, and goes on without us."""

    pid: int


@dataclass(frozen=True, slots=True)
class Failed:
    """It ends here. `trouble` is one of `transient`, `permanent`, `busy`."""

    stage: str
    reason: str
    fix: str
    trouble: str


@dataclass(frozen=True, slots=True)
class AgentSeen:
    """Whether the node's agent is there; `boot_id`: of the host's kernel; `words`: the last line that it left."""

    alive: bool
    boot_id: str
    words: str


@dataclass(frozen=True, slots=True)
class CleanedUp:
    """What was cleaned up. `kept`: why the folder was not removed, empty when it is gone."""

    killed: int
    kept: str


@dataclass(frozen=True, slots=True)
class HostSurveyed:
    """What a host has. `fault`, with its `fix`: why the job's folder cannot be made; empty for none. `program`: what
    would run the ranks, empty when none of those asked for is there; `torch`: its version, or what went wrong."""

    root: str
    fault: str
    fix: str
    free_bytes: int
    noexec: bool
    cores: int
    gpus: tuple[str, ...]
    interfaces: tuple[str, ...]
    has_rsync: bool
    program: str
    torch: str


Word: TypeAlias = (
    InShell
    | PythonFound
    | SendBlob
    | Working
    | Placed
    | CopiedHere
    | Leased
    | AlreadyUp
    | KeeperUp
    | Failed
    | AgentSeen
    | CleanedUp
    | HostSurveyed
)
