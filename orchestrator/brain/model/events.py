"""Events that the brain learns. Each is stamped `at` (job clock, seconds); a report names its attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from orchestrator.core.checkpoints.checkpoint import Checkpoint
from orchestrator.core.observations import ReportedRank, Retryable
from orchestrator.core.plan_types import Limits, PlannedNode, PlannedPool
from orchestrator.core.status_types import AllocationEndCause
from orchestrator.core.wire.reports import Heartbeat, NodeReport


@dataclass(frozen=True, slots=True)
class _EventFields:
    """What each event has."""

    at: float


@dataclass(frozen=True, slots=True)
class _AboutNode(_EventFields):
    """When the supervisor learned something, and of which node."""

    node: str


@dataclass(frozen=True, slots=True)
class _Requested(_EventFields):
    """When a request was read, and its number in the job folder."""

    request: int


@dataclass(frozen=True, slots=True)
class Planned(_EventFields):
    """The plan: always the first event, and again when a resume changed it.

    With a pool, nodes have no ranks yet: `Place` gives them some in each attempt.
    """

    nodes: tuple[PlannedNode, ...]
    limits: Limits
    pool: PlannedPool | None


@dataclass(frozen=True, slots=True)
class SupervisorStarted(_EventFields):
    """A supervisor took the lock. It has no contact yet, so earlier silence does not count."""

    pid: int


@dataclass(frozen=True, slots=True)
class AgentUp(_AboutNode):
    """An agent connected. `incarnation` names its process; `running` and `ready` are attempts, 0 for none."""

    incarnation: str
    running: int
    ready: int
    address: str
    port: int
    ranks: tuple[ReportedRank, ...]


@dataclass(frozen=True, slots=True)
class AgentDisconnected(_AboutNode):
    """The connection to an agent ended.

    `left`: the agent said goodbye after it was dismissed. Without that, the end of the connection says nothing about the
    agent or its ranks.
    """

    left: bool = False


@dataclass(frozen=True, slots=True)
class AgentDied(_AboutNode):
    """The backend knows that the agent's process has ended."""

    evidence: str


@dataclass(frozen=True, slots=True)
class LaunchFailed(_AboutNode):
    """An agent could not be started: at which stage, why, whether another try may help, and the fix."""

    stage: str
    reason: str
    trouble: Retryable
    fix: str = ""


@dataclass(frozen=True, slots=True)
class QueueSeen(_EventFields):
    """Which earlier jobs of this submit machine wait for the same hosts; one event for each change."""

    ahead: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FromNode(_AboutNode):
    """A report of a node's agent. The latest heartbeat of a node replaces the previous one."""

    report: NodeReport | Heartbeat


def is_heartbeat(news: object) -> TypeGuard[FromNode]:
    """Return whether this is the heartbeat of an agent."""
    return isinstance(news, FromNode) and isinstance(news.report, Heartbeat)


@dataclass(frozen=True, slots=True)
class CheckpointChanged(_EventFields):
    """A checkpoint is new in the ledger, or its state has changed. Its files stay in the ledger."""

    save: Checkpoint


@dataclass(frozen=True, slots=True)
class CheckpointCompared(_EventFields):
    """The answer to `CompareSave`; `fault`: how the checkpoint differs from the ledger, empty if it does not. A
    `CheckpointChanged` comes before it."""

    attempt: int
    save: int
    fault: str


@dataclass(frozen=True, slots=True)
class ResumedElsewhere(_EventFields):
    """A checkpoint of an attempt shows that its script began at step `step`, and not from the checkpoint that it was given."""

    attempt: int
    step: int
    # The checkpoint that shows it, and the attempt's own steps then
    main: str
    steps: int


@dataclass(frozen=True, slots=True)
class CheckpointRead(_EventFields):
    """The checkpoint that the ranks of an attempt had read before their first step. `save`: its number, 0: they had read none,
    but perhaps the file `other`, which no rank of this job had saved."""

    attempt: int
    save: int
    other: str = ""


@dataclass(frozen=True, slots=True)
class AllocationBegan(_EventFields):
    """The queue system gave the job nodes; an allocation before it is over. `allocation`: Slurm's id of the job and
    how often it was requeued, `1234.0`."""

    allocation: str


@dataclass(frozen=True, slots=True)
class AllocationEnding(_EventFields):
    """The nodes will be taken away, at `ends_at` (job clock) if that is known."""

    allocation: str
    cause: AllocationEndCause
    why: str
    ends_at: float | None


@dataclass(frozen=True, slots=True)
class AllocationEnded(_Requested):
    """Request number `request`: the queue system says that the allocation is over for good, without a supervisor; the
    job is no longer in any queue."""

    allocation: str
    cause: AllocationEndCause
    why: str


@dataclass(frozen=True, slots=True)
class CancelRequested(_Requested):
    """Request number `request` of the job folder: the user wants the job to stop for good."""


@dataclass(frozen=True, slots=True)
class RestartRequested(_Requested):
    """Request number `request`: end the present attempt, and begin the next one from the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class InspectRequested(_Requested):
    """Request number `request`: the user wants to see what all ranks do; nothing else follows."""


@dataclass(frozen=True, slots=True)
class ResumeRequested(_Requested):
    """Request number `request`: resume an ended job from the checkpoint of this number, or from the newest for 0."""

    save: int = 0


Event: TypeAlias = (
    Planned
    | SupervisorStarted
    | AgentUp
    | AgentDisconnected
    | AgentDied
    | LaunchFailed
    | QueueSeen
    | FromNode
    | CheckpointChanged
    | CheckpointCompared
    | ResumedElsewhere
    | CheckpointRead
    | AllocationBegan
    | AllocationEnding
    | AllocationEnded
    | CancelRequested
    | RestartRequested
    | InspectRequested
    | ResumeRequested
)
