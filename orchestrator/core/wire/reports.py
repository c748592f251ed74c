"""Reports of an agent to its supervisor: each report of an attempt names it.

The brain's event `FromNode` holds the report as it is. Reliable reports carry a sequence number and are sent again until
they are acknowledged; `Hello`, `Heartbeat` and chunks are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from orchestrator.core.checkpoints.checkpoint import CheckpointFile, CopyTarget, HostPart
from orchestrator.core.observations import (
    Address,
    CollectiveCounts,
    Failure,
    Framework,
    GpuState,
    RankInspection,
    ReachableAddress,
    ReportedRank,
)
from orchestrator.core.status_types import ReportedNumber, Training, Usage

PROTOCOL = 10
"""Both ends run the same bundle, so a peer with another number is a stranger."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a new connection."""

    protocol: int
    job: str
    token: str
    node: str
    incarnation: str
    host: str
    pid: int
    # The attempts whose ranks run, and that the node is prepared for; 0 for none
    running: int
    ready: int
    address: str
    port: int
    ranks: tuple[ReportedRank, ...]
    # How many reliable reports follow at once
    pending: int
    # The job's folder on that host
    root: str
    # The supervisor does not see that folder, so logs and checkpoints are sent
    ships: bool
    # The GPUs that the agent has leased, as CUDA_VISIBLE_DEVICES names them
    gpus: tuple[str, ...]
    # Where other agents may fetch from this node's memory, each `address:port`; empty where it holds no checkpoints in memory
    memory_addresses: tuple[str, ...] = ()
    # Nothing has been written there since this agent began
    is_memory_empty: bool = False


@dataclass(frozen=True, slots=True)
class SignTimes:
    """When (job clock) a rank last gave each kind of sign; only in heartbeats that were coalesced for the journal."""

    FORMER: ClassVar[dict[str, str]] = {"exiting_at": ""}

    # Last sign of life, see `suspicion.SIGNS`
    sign_at: float
    # Last optimizer step
    step_at: float
    # Last change of the state in /proc
    state_at: float
    # Last heartbeat
    beat_at: float
    # Last heartbeat that showed it busy on a processor
    busy_at: float = 0.0
    # The longest time between two of its steps, in seconds
    pause_s: float = 0.0
    # Last sign of life other than processor time
    activity_at: float = 0.0
    # Its last finite loss, its steps at the report before that, and at the last report of a loss
    finite_loss: float | None = None
    finite_steps: int = 0
    loss_steps: int = 0
    # Last backward pass of a rank without steps
    pass_at: float = 0.0
    # When it was first seen to have formed torch's default process group
    group_at: float = 0.0


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """One rank's signs of life."""

    rank: int
    # Its script's steps since this process began
    steps: int
    # The letter of /proc
    state: str
    log_bytes: int
    cpu_s: float
    # Bytes that it has read and written
    io_bytes: int = 0
    # Median of its last step times, None before 3 of them
    median_step_s: float | None = None
    # The same of its own work in a step, without waiting for other ranks, where that is known
    own_work_s: float | None = None
    # Its script has ended and the interpreter exits
    exiting: bool = False
    # A key for each of its process groups, equal on all ranks of the group
    groups: tuple[str, ...] = ()
    # Some of its last steps with how many collectives of each group it had run, in order
    collective_counts: tuple[CollectiveCounts, ...] = ()
    # Steps of all its optimizers together: each is progress
    optimizer_steps: int = 0
    # What is to form its process group, where it trains and has formed none
    alone: Framework | None = None
    # The last progress bar in the log of a rank that makes no steps, such as `37/1200 (tqdm)`; empty for none
    progress: str = ""
    # Backward passes that a rank without steps has begun, 0 for few, and their median time
    passes: int = 0
    median_pass_s: float | None = None
    # It has formed torch's default process group
    has_group: bool = False
    # Steps a second
    rate_per_s: float | None = None
    # How many of its losses, or of the norms of its gradients, in a row, up to the last, are not finite; of such norms the
    # step and the norm of the first, and of the last finite one before, if there is one
    nonfinite_losses: int = 0
    gradient_norms: tuple[tuple[int, ReportedNumber], ...] = ()
    # Sums of its parameters since the last heartbeat: the optimizer, its step, the script's step, the sum
    parameter_sums: tuple[tuple[int, ...], ...] = ()
    # What it uses and what its script reports; None: as before
    usage: Usage | None = None
    training: Training | None = None
    # Never sent by agents: set where heartbeats were coalesced into one for the journal, see `Brain.take_heartbeats`
    seen: SignTimes | None = None


@dataclass(frozen=True, slots=True)
class AttemptMessage:
    """What each report and order of an attempt names."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Heartbeat(AttemptMessage):
    """The regular report of an agent."""

    FORMER: ClassVar[dict[str, str]] = {"looks": "scans"}

    ranks: tuple[RankHeartbeat, ...]
    # Its number: the acknowledgement of it proves fresh contact
    beat: int = 0
    # How many times this agent has scanned for checkpoints in the attempt, -1: another agent scans; whether it has found one
    # that it has not reported yet
    scans: int = -1
    has_unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Prepared(AttemptMessage):
    """The node is ready; the first node adds its port, and the addresses where others may reach it (empty: not asked)."""

    address: str
    port: int
    addresses: tuple[Address, ...]
    # Of a node whose script has called a launcher: which call of the attempt it is, from 1
    call: int = 0
    # Why checkpoints are written to disk, although they should be to memory; empty where they are not
    memory_fault: str = ""


@dataclass(frozen=True, slots=True)
class Probed(AttemptMessage):
    """Which of the first node's addresses this node reaches, best first, and how the others failed."""

    reached: tuple[ReachableAddress, ...]
    missed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrepareFailed(AttemptMessage):
    """The node's setup lines failed, or a rank's program cannot be started there."""

    reason: str
    tail: str
    # The number of the checkpoint that is not complete there, if that is the reason
    save: int = 0
    # Another attempt cannot help; what can
    is_final: bool = False
    fix: str = ""


@dataclass(frozen=True, slots=True)
class LaunchEnded(AttemptMessage):
    """The node's script ended, with `code` (negative: the signal), after this many launcher calls; the end of what it wrote."""

    calls: int
    code: int
    tail: str


@dataclass(frozen=True, slots=True)
class Started(AttemptMessage):
    """All ranks of the node were started; their process ids in the order of its ranks."""

    pids: tuple[int, ...]
    # How they were started, for people; whether as forks, which is how ranks start where nothing speaks against it
    how: str = ""
    are_forks: bool = False


@dataclass(frozen=True, slots=True)
class Exited(AttemptMessage):
    """A rank's process ended. Exactly one of `code` and `signal` is set."""

    rank: int
    code: int | None
    signal: int | None
    steps: int
    failure: Failure | None
    # The kernel's OOM killer was at work on its host
    oom: bool
    # Its agent was stopping it
    ordered: bool
    # As in `RankHeartbeat`
    alone: Framework | None = None
    progress: str = ""
    training: Training | None = None
    # Who else used the GPU of a rank that found it full, each in a phrase
    gpu_users: tuple[str, ...] = ()
    # How full the folder for checkpoints in memory was, in a phrase; empty where it had room
    memory_full: str = ""


@dataclass(frozen=True, slots=True)
class Stopped(AttemptMessage):
    """Nothing of an attempt, nor of any before it, still runs on this node."""

    # asked, fenced or ended
    how: str


@dataclass(frozen=True, slots=True)
class Inspected(AttemptMessage):
    """The answer to `Inspect` number `inspection`; the files with all stacks are in the node's evidence folder by then."""

    inspection: int
    ranks: tuple[RankInspection, ...]


@dataclass(frozen=True, slots=True)
class GpusChanged(AttemptMessage):
    """Report that the faults or remarks of the GPUs of this node have changed. Those that are not named are healthy."""

    gpus: tuple[GpuState, ...]


@dataclass(frozen=True, slots=True)
class CheckpointSeen(AttemptMessage):
    """A checkpoint that ranks have written where this agent scans, or its part of one. Reported again when it has changed."""

    # See `file_groups.FileGroup`
    key: str
    series: str
    main: str
    part: HostPart


@dataclass(frozen=True, slots=True)
class CheckpointHashed(AttemptMessage):
    """The files of a reported checkpoint, with their sha256."""

    key: str
    files: tuple[CheckpointFile, ...]


@dataclass(frozen=True, slots=True)
class CheckpointsRead(AttemptMessage):
    """The files that may be of checkpoints which the node's ranks had read when all of them had made a step: relative to the
    checkpoints' folder, below `checkpoint.START_PREFIX` to where ranks start, or absolute; the last one read last.

    `is_known`: a hook was at work in each process that makes their steps, so what is not named was not read.
    """

    names: tuple[str, ...]
    is_known: bool


@dataclass(frozen=True, slots=True)
class CheckpointCopied:
    """Answer to `CopyCheckpoint`; or, with number 0, the report of an agent that leaves: everything in its memory is on its disk.

    `names`: the files that are at `root` now; `error`: why they are not; `evicted`: the numbers of checkpoints whose files have left
    the memory of this host since.
    """

    number: int
    target: CopyTarget
    root: str
    names: tuple[str, ...]
    error: str = ""
    evicted: tuple[int, ...] = ()
    # Those of other hosts whose copies are not kept here any more
    dropped: tuple[int, ...] = ()


NodeReport: TypeAlias = (
    Prepared | PrepareFailed | LaunchEnded | Probed | Started | Exited | Stopped | Inspected | GpusChanged
)
ReliableReport: TypeAlias = NodeReport | CheckpointSeen | CheckpointHashed | CheckpointsRead | CheckpointCopied


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one of this node's append-only files, from `offset` on; they follow the message raw, see `connection`.

    `path` is relative to the job folder, with forward slashes. Not sent again: after a break `ResumeOffsets` says where to
    continue.
    """

    path: str
    offset: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The last message of a dismissed agent. Not sent again: a supervisor that misses it checks on the agent."""


@dataclass(frozen=True, slots=True)
class NodeSignalled:
    """Slurm has signalled the processes of this node to end. Not sent again: it only makes the supervisor ask Slurm."""


Report: TypeAlias = Hello | Heartbeat | Chunk | Goodbye | NodeSignalled | ReliableReport


@dataclass(frozen=True, slots=True)
class Envelope:
    """A report as plain data, with its sender."""

    node: str
    # The agent process that sent it
    incarnation: str
    # Numbers the reliable reports of that process; 0 for the others
    seq: int
    data: dict[str, Any]
    # The bytes of a chunk
    raw: bytes = b""
