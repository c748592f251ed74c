"""Events that the brain learns. Each is stamped `at` (job clock, seconds); those about ranks name their attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.core.checkpoints.save import Save
from orchestrator.core.end_cause import Cause
from orchestrator.core.observations import RankSeen, Retryable
from orchestrator.core.planned import Limits, PlannedNode, PlannedPool
from orchestrator.core.wire import messages as m


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan: always the first event, and again when a resume changed it.

    With a pool, nodes have no ranks yet: `Place` gives them some in each attempt.
    """

    at: float
    nodes: tuple[PlannedNode, ...]
    limits: Limits
    pool: PlannedPool | None


@dataclass(frozen=True, slots=True)
class SupervisorStarted:
    """A supervisor took the lock. It has no contact yet, so earlier silence does not count."""

    at: float
    pid: int


@dataclass(frozen=True, slots=True)
class AgentUp:
    """An agent connected. `incarnation` names its process; `running` and `ready` are attempts, 0 for none."""

    at: float
    node: str
    incarnation: str
    running: int
    ready: int
    address: str
    port: int
    ranks: tuple[RankSeen, ...]


@dataclass(frozen=True, slots=True)
class AgentDisconnected:
    """The connection to an agent ended.

    `left`: the agent said goodbye after it was dismissed. Without that, the end of the connection says nothing about the
    agent or its ranks.
    """

    at: float
    node: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class AgentDied:
    """The backend knows that the agent's process has ended."""

    at: float
    node: str
    evidence: str


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """An agent could not be started: at which stage, why, whether another try may help, and how a person mends it."""

    at: float
    node: str
    stage: str
    reason: str
    trouble: Retryable
    fix: str = ""


@dataclass(frozen=True, slots=True)
class QueueSeen:
    """Which earlier jobs of this submit machine wait for the same hosts; one event for each change."""

    at: float
    ahead: tuple[str, ...]


@dataclass(frozen=True)
class FromNode:
    """When the supervisor heard a report, and from which node; the fields of the report follow."""

    at: float
    node: str


@dataclass(frozen=True)
class Prepared(m.Prepared, FromNode):
    """A node is set up for an attempt."""


@dataclass(frozen=True)
class Probed(m.Probed, FromNode):
    """A node has tried the addresses of the first one."""


@dataclass(frozen=True)
class PrepareFailed(m.PrepareFailed, FromNode):
    """A node cannot be made ready."""


@dataclass(frozen=True)
class LaunchEnded(m.LaunchEnded, FromNode):
    """A node's script ended."""


@dataclass(frozen=True)
class Started(m.Started, FromNode):
    """The ranks of a node run."""


@dataclass(frozen=True)
class Exited(m.Exited, FromNode):
    """A rank's process ended."""


@dataclass(frozen=True)
class Stopped(m.Stopped, FromNode):
    """Nothing of an attempt runs on a node any more."""


@dataclass(frozen=True)
class Inspected(m.Inspected, FromNode):
    """A node has answered an inspection; its evidence is on disk."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The regular report of an agent on its ranks. The latest of a node replaces the previous one."""

    at: float
    node: str
    attempt: int
    ranks: tuple[m.RankHeartbeat, ...]


@dataclass(frozen=True, slots=True)
class SaveChanged:
    """A save is new in the ledger, or its state has changed. Its pieces stay in the ledger."""

    at: float
    save: Save


@dataclass(frozen=True, slots=True)
class SaveCompared:
    """The answer to `CompareSave`; `fault`: how the save differs from the ledger, empty if it does not. What has come of
    it was told before."""

    at: float
    attempt: int
    save: int
    fault: str


@dataclass(frozen=True, slots=True)
class BeganElsewhere:
    """What an attempt has saved shows that its script began at step `step`, and not from the save that it was given."""

    at: float
    attempt: int
    step: int
    # The save that shows it, and the attempt's own steps then
    main: str
    steps: int


@dataclass(frozen=True, slots=True)
class AllocationBegan:
    """The queue system gave the job nodes; an allocation before it is over. `allocation`: Slurm's id of the job and
    how often it was requeued, `1234.0`."""

    at: float
    allocation: str


@dataclass(frozen=True, slots=True)
class AllocationEnding:
    """The nodes will be taken away, at `ends_at` (job clock) if that is known."""

    at: float
    allocation: str
    cause: Cause
    why: str
    ends_at: float | None


@dataclass(frozen=True, slots=True)
class AllocationEnded:
    """Request number `request`: the queue system says that the allocation is over for good, without a supervisor; the
    job is no longer in any queue."""

    at: float
    request: int
    allocation: str
    cause: Cause
    why: str


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Request number `request` of the job folder: the user wants the job to stop for good."""

    at: float
    request: int


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """Request number `request`: end the present attempt, and begin the next one from the newest checkpoint."""

    at: float
    request: int


@dataclass(frozen=True, slots=True)
class InspectRequested:
    """Request number `request`: the user wants to see what all ranks do; nothing else follows."""

    at: float
    request: int


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Request number `request`: go on with an ended job, from the save of this number, or the newest for 0."""

    at: float
    request: int
    save: int = 0


Event: TypeAlias = (
    Planned
    | SupervisorStarted
    | AgentUp
    | AgentDisconnected
    | AgentDied
    | LaunchFailed
    | QueueSeen
    | Prepared
    | PrepareFailed
    | LaunchEnded
    | Probed
    | Started
    | Exited
    | Heartbeat
    | Stopped
    | Inspected
    | SaveChanged
    | SaveCompared
    | BeganElsewhere
    | AllocationBegan
    | AllocationEnding
    | AllocationEnded
    | CancelRequested
    | RestartRequested
    | InspectRequested
    | ResumeRequested
)
