"""Orders of a supervisor to an agent, each with its attempt, and acknowledgements of reports.

The brain's decision `To` holds an order, which is sent as it is; only `Prepare` is sent as a `PrepareNode`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointFile, CopyTarget, FileLocation
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.wire.reports import AttemptMessage


@dataclass(frozen=True, slots=True)
class Ack:
    """All reliable reports up to `seq` and heartbeats up to `beat` have arrived and are on disk."""

    seq: int
    beat: int


@dataclass(frozen=True, slots=True)
class Prepare(AttemptMessage):
    """Make the node ready: the environment of its ranks, setup lines, the program, and on the first node a port. The script of a
    plan that has one is run then: `Prepared` follows when it calls a launcher.

    The node must hold the checkpoint to start from, complete, before this order.
    """

    resume: ResumePoint | None


@dataclass(frozen=True, slots=True)
class PrepareNode(Prepare):
    """`Prepare` as it is sent, with all that the node needs for it; the checkpoint's path is as the node sees it."""

    # As `Plan.for_node` has it
    plan: Plan
    # The nodes of the attempt in the order of their ranks; a spare is none of them
    nodes: tuple[str, ...]
    # What the ranks inherit of the submitter's environment, and the job's secrets
    outer: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    # The checkpoint to resume from, which was copied here; whether all its bytes are to be compared
    checkpoint: Checkpoint | None = None
    deep: bool = False
    # Torn checkpoints of the attempt before: to be moved out of the scripts' way
    torn: tuple[Checkpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe(AttemptMessage):
    """Try to reach the first node at each of these addresses and this port; report `Probed`."""

    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class Start(AttemptMessage):
    """Start the ranks of the prepared node; they meet at this address and port."""

    address: str
    port: int
    # Over which this node reaches the address; empty: not known
    interface: str = ""


@dataclass(frozen=True, slots=True)
class Stop(AttemptMessage):
    """Stop the node's ranks: TERM, after `grace_s` KILL, and report `Stopped` when no process is left."""

    FORMER: ClassVar[dict[str, str]] = {"saves": "may_save"}

    grace_s: float
    # The gang is whole and its nodes will be taken away: ranks get the user's signal to save a checkpoint, not TERM
    may_save: bool = False


@dataclass(frozen=True, slots=True)
class Inspect(AttemptMessage):
    """Sample every rank of the node, compare it with the sample before, and write the evidence."""

    inspection: int


@dataclass(frozen=True, slots=True)
class Fence(AttemptMessage):
    """How long this agent may be without contact before it stops its ranks."""

    FORMER: ClassVar[dict[str, str]] = {"quiet_s": "contact_timeout_s", "alone_s": "startup_timeout_s"}

    # Without contact and without a step of its ranks
    contact_timeout_s: float
    # The same, if it is longer, as long as they have made no step in this attempt
    startup_timeout_s: float


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete a checkpoint that `checkpoint.keep` does not keep, as it is on this host."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class CopyCheckpoint:
    """Copy files of a checkpoint to this host's disk, from its memory, or into its memory, from other hosts; `CheckpointCopied` follows.

    `sources`: where files are, the nearest first, with the names that are to be fetched from there; a source without a host is on this
    one. `addresses`: by host, where its agent listens.
    """

    number: int
    files: tuple[CheckpointFile, ...]
    target: CopyTarget
    sources: tuple[FileLocation, ...] = ()
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # A later checkpoint overwrites its names: its files are never links
    is_overwritten: bool = False
    # The newest checkpoint that is safe, whose copies for other hosts stay; 0 for none
    safe: int = 0


@dataclass(frozen=True, slots=True)
class Dismiss(AttemptMessage):
    """The job is over: exit."""


@dataclass(frozen=True, slots=True)
class ResumeOffsets:
    """How many bytes the supervisor has of each of this node's files, by path relative to the job folder; 0 of the others.
    Sent once after each `Hello` of an agent that ships; the agent sends what comes after."""

    files: dict[str, int]


@dataclass(frozen=True, slots=True)
class ChunkAck:
    """How many bytes of chunks have been received since this connection began."""

    bytes: int


NodeOrder: TypeAlias = Prepare | Probe | Start | Stop | Inspect | Fence | Dismiss
"""What the brain orders."""

AttemptOrder: TypeAlias = PrepareNode | Probe | Start | Stop | Inspect | Fence
Order: TypeAlias = AttemptOrder | Ack | Discard | CopyCheckpoint | Dismiss | ResumeOffsets | ChunkAck
