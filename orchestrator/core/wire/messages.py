"""What do a supervisor and an agent say to each other? Reports go up, orders go down; each names its attempt.

A report here and the brain's event of the same name have the same fields; the supervisor adds when and from whom.
Kept reports carry a sequence number and are said again until acknowledged; `Hello` and `Heartbeat` are not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from orchestrator.core.observations import (
    Address,
    CollectiveCounts,
    Failure,
    RankInspection,
    RankSeen,
    Reached,
)

PROTOCOL = 5
"""Both ends run the same bundle, so another number means a stranger."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a new connection. `pending` kept reports follow at once.

    `root` is the job's folder on that host; `ships`: the supervisor does not see it, so logs and checkpoints travel;
    `gpus` are those that the agent has leased, as CUDA_VISIBLE_DEVICES names them.
    """

    protocol: int
    job: str
    token: str
    node: str
    incarnation: str
    host: str
    pid: int
    running: int
    ready: int
    address: str
    port: int
    ranks: tuple[RankSeen, ...]
    pending: int
    root: str
    ships: bool
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """One rank's signs of life. `steps`: optimizer steps; `state`: letter of /proc; `rate_per_s`: steps a second.

    `io_bytes`: what it has read and written; `median_step_s`: the median of its last step times, None before 3 of them;
    `own_work_s`: the same of its own work in a step, without waiting for other ranks, where that is known; `exiting`: it has
    said its last word; `groups`: a key for each of its groups, equal on all of a group's ranks, and `collective_counts`: some of its
    last steps with their counts, in order.
    """

    rank: int
    steps: int
    state: str
    log_bytes: int
    cpu_s: float
    rate_per_s: float | None
    io_bytes: int = 0
    median_step_s: float | None = None
    own_work_s: float | None = None
    exiting: bool = False
    groups: tuple[str, ...] = ()
    collective_counts: tuple[CollectiveCounts, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The regular word of an agent; `beat` numbers it, so that its acknowledgement proves fresh contact.

    `reported_through_step`: all checkpoint pieces that were complete when each rank here had made so many steps have been reported;
    -1 when that is not known (yet).
    """

    beat: int
    attempt: int
    ranks: tuple[RankHeartbeat, ...]
    reported_through_step: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """The node is ready; the first one adds its port, and where others might reach it (empty: not asked)."""

    attempt: int
    address: str
    port: int
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Probed:
    """Which of the first node's addresses this node reaches, best first, and how the others failed."""

    attempt: int
    reached: tuple[Reached, ...]
    missed: tuple[str, ...]


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
    steps: int
    failure: Failure | None
    oom: bool
    ordered: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    attempt: int
    how: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """The answer to `Inspect` number `inspection`; the pages with all stacks are in the node's evidence folder by then."""

    attempt: int
    inspection: int
    ranks: tuple[RankInspection, ...]


@dataclass(frozen=True, slots=True)
class CheckpointFound:
    attempt: int
    path: str
    steps: int


@dataclass(frozen=True, slots=True)
class CheckpointInvalidated:
    """A checkpoint that was reported is no more, or its rewriting was cut off."""

    attempt: int
    path: str


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One file of a checkpoint: its name below `checkpoints/`, its size, time of its last byte, sha256."""

    name: str
    size_bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ManifestReported:
    """What a host has of a complete checkpoint that must travel; `name` is its name in the checkpoint folder, `steps`
    the optimizer steps of that attempt's processes when it was written. Without pieces: ranks ended before what they
    wrote here was known to be whole, so it must not be taken for whole without this host's part."""

    attempt: int
    name: str
    steps: int
    manifest: tuple[ManifestEntry, ...]


ReliableReport: TypeAlias = (
    Prepared
    | PrepareFailed
    | Probed
    | Started
    | Exited
    | Stopped
    | Inspected
    | CheckpointFound
    | CheckpointInvalidated
    | ManifestReported
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one of this node's append-only files, from `offset` on; they follow the message raw, see `line`.

    `path` is relative to the job folder, with forward slashes. Not kept: after a break the sizes of `ResumeOffsets` tell where
    to go on.
    """

    path: str
    offset: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The last word of an agent that was told to leave. Not kept: whoever does not hear it looks for the agent."""


@dataclass(frozen=True, slots=True)
class NodeSignalled:
    """Slurm has told the processes of this node to end. Not kept: it only makes the supervisor ask Slurm."""


Report: TypeAlias = Hello | Heartbeat | Chunk | Goodbye | NodeSignalled | ReliableReport


@dataclass(frozen=True, slots=True)
class Ack:
    """Everything up to kept report `seq` and beat `beat` has arrived and is on disk."""

    seq: int
    beat: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make the node ready: environment of its ranks, setup lines, the program, and a port when `wants_port`.

    `own_env`: `env` is added to the agent's own environment and does not replace it. `programs`: the first that the
    node has becomes the ranks' program. `wants_addresses`: listen on the port until `Start`, so that others can probe
    it, and say all addresses. `resume`: the pieces of the checkpoint to start from, to be verified here.
    """

    attempt: int
    env: dict[str, str]
    own_env: bool
    setup: tuple[str, ...]
    programs: tuple[str, ...]
    wants_port: bool
    wants_addresses: bool
    port: int | None
    resume: tuple[ManifestEntry, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Try to reach the first node at each of these addresses and this port; report `Probed`."""

    attempt: int
    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class RankStart:
    """One rank to start, with the variables that are its own."""

    rank: int
    local_rank: int
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Start:
    """Start ranks: `argv` in the code snapshot. `defaults` are set only where nothing else has set them.

    `finds`: this agent looks for the attempt's checkpoints, if it may; on shared disks one of the gang does.
    """

    attempt: int
    argv: tuple[str, ...]
    defaults: dict[str, str]
    ranks: tuple[RankStart, ...]
    finds: bool = True


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the node's ranks: `signal` (a name, without SIG), after `grace_s` KILL."""

    attempt: int
    grace_s: float
    signal: str = "TERM"


@dataclass(frozen=True, slots=True)
class Inspect:
    """See what every rank of the node is doing, compare it with the look before, and write the evidence down."""

    attempt: int
    inspection: int


@dataclass(frozen=True, slots=True)
class Fence:
    """How long this agent may go without contact before it stops its ranks: `quiet_s` without a step of theirs as well,
    and `alone_s`, if that is longer, as long as they have made none."""

    attempt: int
    quiet_s: float
    alone_s: float


@dataclass(frozen=True, slots=True)
class Dismiss:
    """The job is over: go."""


@dataclass(frozen=True, slots=True)
class ResumeOffsets:
    """How many bytes the supervisor has of each of this node's files (by path relative to the job folder; those not
    named: none). Said once after each `Hello` of an agent that ships; the agent sends what is beyond."""

    files: dict[str, int]


@dataclass(frozen=True, slots=True)
class ChunkAck:
    """So many bytes of chunks have been taken in since this connection began."""

    bytes: int


Order: TypeAlias = Ack | Prepare | Probe | Start | Stop | Inspect | Fence | Dismiss | ResumeOffsets | ChunkAck


@dataclass(frozen=True, slots=True)
class Needs:
    """What an agent must lease of its host before it comes up: GPUs, or slots out of `slots_there` (0: as many as
    the host has cores). All 0: nothing, as on backend local."""

    gpus: int
    slots: int
    slots_there: int


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """All that an agent is told at its start, as JSON on its standard input: nothing of it shows in argv.

    `fence_s`: so long it goes by itself until a `Fence` says another time; None: without end, since it is on the
    supervisor's own machine. `gpus` are those that its keeper has leased; only the keeper fills them in. `allocated`: it runs in a step of
    Slurm, which signals all of a job's processes when it takes the nodes away: TERM is not for us then. `node` is empty
    where one text goes to many nodes, and each knows what it is called.
    """

    job: str
    node: str
    root: str
    token: str
    certificate: str
    address: str
    heartbeat_s: float
    fence_s: float | None
    checkpoint_glob: str
    checkpoint_keep: int | None
    finds_checkpoints: bool
    ships: bool
    needs: Needs
    gpus: tuple[str, ...] = ()
    allocated: bool = False


@dataclass(frozen=True, slots=True)
class Envelope:
    """A report as plain data; `seq` numbers the kept reports of the agent process `incarnation`, 0 is a beat or a chunk.

    `raw`: the bytes of a chunk.
    """

    node: str
    incarnation: str
    seq: int
    data: dict[str, Any]
    raw: bytes = b""
