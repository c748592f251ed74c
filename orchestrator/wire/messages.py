"""What do a supervisor and an agent say to each other? Reports go up, orders go down; each names its attempt.

A report here and the brain's event of the same name have the same fields; the supervisor adds when and from whom.
Kept reports carry a sequence number and are said again until acknowledged; `Hello` and `Beat` are not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

PROTOCOL = 1
"""Both ends run the same bundle, so another number means a stranger."""


@dataclass(frozen=True, slots=True)
class RankSeen:
    """A rank as its agent sees it at the moment of connecting."""

    rank: int
    pid: int
    exited: bool


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a new connection. `pending` kept reports follow at once."""

    protocol: int
    job: str
    token: str
    node: str
    boot: str
    host: str
    pid: int
    running: int
    ready: int
    address: str
    port: int
    ranks: tuple[RankSeen, ...]
    pending: int


@dataclass(frozen=True, slots=True)
class RankBeat:
    """One rank's signs of life. `count`: optimizer steps; `state`: letter of /proc; `rate_per_s`: steps a second."""

    rank: int
    count: int
    state: str
    log_bytes: int
    cpu_s: float
    rate_per_s: float | None


@dataclass(frozen=True, slots=True)
class Beat:
    """The regular word of an agent; `beat` numbers it, so that its acknowledgement proves fresh contact."""

    beat: int
    attempt: int
    ranks: tuple[RankBeat, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank said as it died."""

    type: str
    message: str
    traceback: str
    where: str


@dataclass(frozen=True, slots=True)
class Prepared:
    attempt: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    attempt: int
    reason: str
    tail: str


@dataclass(frozen=True, slots=True)
class Started:
    attempt: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exited:
    attempt: int
    rank: int
    code: int | None
    signal: int | None
    count: int
    failure: Failure | None
    oom: bool
    ordered: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    attempt: int
    how: str


@dataclass(frozen=True, slots=True)
class StacksTaken:
    attempt: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckpointFound:
    attempt: int
    path: str
    count: int


@dataclass(frozen=True, slots=True)
class CheckpointSpoiled:
    """A checkpoint that was reported is no more, or its rewriting was cut off."""

    attempt: int
    path: str


KeptReport: TypeAlias = (
    Prepared | PrepareFailed | Started | Exited | Stopped | StacksTaken | CheckpointFound | CheckpointSpoiled
)
Report: TypeAlias = Hello | Beat | KeptReport


@dataclass(frozen=True, slots=True)
class Ack:
    """Everything up to kept report `seq` and beat `beat` has arrived and is on disk."""

    seq: int
    beat: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make the node ready: environment of its ranks, setup lines, the program, and a port when `wants_port`."""

    attempt: int
    env: dict[str, str]
    setup: tuple[str, ...]
    program: str
    wants_port: bool
    port: int | None


@dataclass(frozen=True, slots=True)
class RankStart:
    """One rank to start, with the variables that are its own."""

    rank: int
    local_rank: int
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Start:
    """Start ranks: `argv` in the code snapshot. `defaults` are set only where nothing else has set them."""

    attempt: int
    argv: tuple[str, ...]
    defaults: dict[str, str]
    ranks: tuple[RankStart, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    attempt: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class TakeStacks:
    attempt: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The job is over: go."""


Order: TypeAlias = Ack | Prepare | Start | Stop | TakeStacks | Leave


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """All that an agent is told at its start, as JSON on its standard input: nothing of it shows in argv."""

    job: str
    node: str
    root: str
    token: str
    certificate: str
    address: str
    heartbeat_s: float
    fence_s: float
    checkpoint_glob: str
    checkpoint_keep: int | None
    finds_checkpoints: bool
