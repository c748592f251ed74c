"""Orders of a supervisor to an agent, each with its attempt, and acknowledgements of reports.

The brain's decision `To` holds an order, which is sent as it is; only `Prepare` is sent as a `PrepareNode`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.core.checkpoints.checkpoint import Checkpoint
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.wire.reports import OfAttempt


@dataclass(frozen=True, slots=True)
class Ack:
    """All reliable reports up to `seq` and heartbeats up to `beat` have arrived and are on disk."""

    seq: int
    beat: int


@dataclass(frozen=True, slots=True)
class Prepare(OfAttempt):
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
    # The save to start from, which was brought here; whether all its bytes are to be compared
    save: Checkpoint | None = None
    deep: bool = False
    # Saves of the attempt before that are torn: to be moved out of the scripts' way
    torn: tuple[Checkpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe(OfAttempt):
    """Try to reach the first node at each of these addresses and this port; report `Probed`."""

    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class Start(OfAttempt):
    """Start the ranks of the prepared node; they meet at this address and port."""

    address: str
    port: int
    # Over which this node reaches the address; empty: not known
    interface: str = ""


@dataclass(frozen=True, slots=True)
class Stop(OfAttempt):
    """Stop the node's ranks: TERM, after `grace_s` KILL, and report `Stopped` when no process is left."""

    grace_s: float
    # The gang is whole and its nodes will be taken away: ranks get the user's signal to save a checkpoint, not TERM
    saves: bool = False


@dataclass(frozen=True, slots=True)
class Inspect(OfAttempt):
    """Sample every rank of the node, compare it with the sample before, and write the evidence."""

    inspection: int


@dataclass(frozen=True, slots=True)
class Fence(OfAttempt):
    """How long this agent may go without contact before it stops its ranks."""

    # Without contact and without a step of its ranks
    quiet_s: float
    # The same, if it is longer, as long as they have made no step in this attempt
    alone_s: float


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete a save that `checkpoint.keep` does not keep; it is as it lies on this host."""

    save: Checkpoint


@dataclass(frozen=True, slots=True)
class Dismiss(OfAttempt):
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
Order: TypeAlias = AttemptOrder | Ack | Discard | Dismiss | ResumeOffsets | ChunkAck
