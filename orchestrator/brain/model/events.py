"""Events that the brain learns. Each is stamped `at` (job clock, seconds); those about ranks name their attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.core.checkpoints.save import Save
from orchestrator.core.end_cause import Cause
from orchestrator.core.host_facts import HostFacts
from orchestrator.core.limits import Limits
from orchestrator.core.observations import (
    Address,
    CollectiveCounts,
    Failure,
    Framework,
    RankInspection,
    RankSeen,
    Reached,
    Retryable,
)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node of the plan and the global ranks that live on it; none where the brain places them, see `Pool`."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QueueTerms:
    """What a job may do whose nodes are an allocation of a queue system, and to whose queue it can go back.

    `grace_s`: how long ranks may take to save themselves when the allocation is about to end.
    """

    requeues_at_time_limit: bool
    grace_s: float


@dataclass(frozen=True, slots=True)
class Pool:
    """How many of the planned nodes an attempt needs, with how many ranks on each, and how many more are kept ready.

    `seed` spreads the tries of jobs that compete for the same hosts. With a queue the nodes are those of the present
    allocation. `readies_spares`: whether spares are made ready beside the ranks, and not only when they are needed.
    """

    nodes: int
    ranks_each: int
    spares: int
    seed: int
    queue: QueueTerms | None = None
    readies_spares: bool = True


@dataclass(frozen=True, slots=True)
class SignTimes:
    """When (job clock) a rank last gave each kind of sign; only in heartbeats that were coalesced for the journal."""

    # Last sign of life, see `suspicion.SIGNS`.
    sign_at: float
    # Last optimizer step.
    step_at: float
    # Last change of the state in /proc.
    state_at: float
    # Last heartbeat.
    beat_at: float
    # Last heartbeat that showed it busy on a processor.
    busy_at: float = 0.0
    # When it first reported that it exits.
    exiting_at: float = 0.0
    # The longest time between two of its steps, in seconds.
    pause_s: float = 0.0
    # Last sign of life other than processor time.
    activity_at: float = 0.0


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """One rank's signs of life."""

    rank: int
    # Its script's steps since this process began.
    steps: int
    # The letter in /proc/PID/stat.
    state: str
    # The length of its log, the processor time it has used, and the bytes it has read and written.
    log_bytes: int
    cpu_s: float
    io_bytes: int = 0
    # The median of its last step times; None before three of them.
    median_step_s: float | None = None
    # The median of its own work in a step, without waiting for other ranks; None where it is not known.
    own_work_s: float | None = None
    # Its script has ended and the interpreter exits.
    exiting: bool = False
    # A key for each of its process groups, equal on all ranks of a group, and for some of its last steps, in order, how
    # many collectives of each group it had run.
    groups: tuple[str, ...] = ()
    collective_counts: tuple[CollectiveCounts, ...] = ()
    # Steps of all its optimizers together. What is to form its process group, where it trains and has formed none. The
    # last progress bar in its log, where it makes no steps.
    optimizer_steps: int = 0
    alone: Framework | None = None
    progress: str = ""
    # Never sent by agents: set where heartbeats were coalesced into one for the journal, see `Brain.beats`.
    seen: SignTimes | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan: always the first event, and again when a resume changed it.

    With a pool, nodes have no ranks yet: `Place` gives them some in each attempt.
    """

    at: float
    nodes: tuple[NodePlan, ...]
    limits: Limits
    pool: Pool | None


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
    """An agent could not be started: at which stage, why, and whether another try may help."""

    at: float
    node: str
    stage: str
    reason: str
    trouble: Retryable


@dataclass(frozen=True, slots=True)
class QueueSeen:
    """Which earlier jobs of this submit machine wait for the same hosts; one event for each change."""

    at: float
    ahead: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A node is set up for an attempt; the first node adds where the others will meet, or might (`addresses`)."""

    at: float
    node: str
    attempt: int
    address: str
    port: int
    addresses: tuple[Address, ...]
    # Only the first time that an agent is ready
    host: HostFacts | None = None


@dataclass(frozen=True, slots=True)
class Probed:
    """Which of the first node's addresses this node reaches, best first, and how the others failed."""

    at: float
    node: str
    attempt: int
    reached: tuple[Reached, ...]
    missed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """A node's setup lines failed, or a rank's program cannot be started there."""

    at: float
    node: str
    attempt: int
    reason: str
    tail: str
    # The number of the save that is not whole there, if that is why
    save: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """All ranks of a node were started; their process ids in the order of the node's ranks, and how, for people."""

    at: float
    node: str
    attempt: int
    pids: tuple[int, ...]
    how: str = ""


@dataclass(frozen=True, slots=True)
class Exited:
    """A rank's process ended. Exactly one of `code` and `signal` is set.

    `steps`: its steps; `oom`: the kernel's OOM killer was at work on its host; `ordered`: its agent was stopping it;
    `alone`: as in `RankHeartbeat`.
    """

    at: float
    node: str
    attempt: int
    rank: int
    code: int | None
    signal: int | None
    steps: int
    failure: Failure | None
    oom: bool
    ordered: bool
    alone: Framework | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The regular report of an agent on its ranks. The latest of a node replaces the previous one."""

    at: float
    node: str
    attempt: int
    ranks: tuple[RankHeartbeat, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing of an attempt, nor of any before it, still runs on this node. `how`: asked, fenced or ended."""

    at: float
    node: str
    attempt: int
    how: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """A node has answered inspection number `inspection`; its evidence is on disk."""

    at: float
    node: str
    attempt: int
    inspection: int
    ranks: tuple[RankInspection, ...]


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
