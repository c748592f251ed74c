"""Decisions of the brain. Each is stamped `at` (job clock, seconds), names its attempt, and says why in one line."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.brain.model.events import NodePlan
from orchestrator.core.checkpoints.choice import Passed


class Kind(enum.Enum):
    """The kinds of verdict, as the contract names them."""

    CRASH = "crash"
    OOM = "oom"
    HANG = "hang"
    NODE_LOST = "node_lost"
    START_TIMEOUT = "start_timeout"
    RENDEZVOUS = "rendezvous"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    NO_PROGRESS = "no_progress"
    LAUNCH = "launch"
    DESYNC = "desync"


class Topic(enum.Enum):
    """What a notice is about."""

    ALONE = "alone"
    STEPS = "steps"


class JobEnd(enum.Enum):
    """How a job ends."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What went wrong in an attempt, whose fault it was, and how that is known."""

    kind: Kind
    # The ranks at fault, and their node; empty where it is none or several.
    ranks: tuple[int, ...]
    node: str
    # One line, and the lines that prove it.
    summary: str
    evidence: tuple[str, ...]
    # Equal for two failures that a person would call the same.
    signature: str
    # The job's optimizer step at which it happened; None when no step was seen.
    step: int | None
    # The job clock at the last sign of progress or the death: `Judge.at - since_s` is the time that detection took.
    since_s: float
    # Whether another attempt may help.
    retry: bool
    # Where the ranks at fault are and what they do there, and what the others wait in; empty where unknown.
    culprit: str = ""
    waiting: str = ""
    # How long a hang that no state proves was waited for; 0 where there is proof.
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A save to start from: its number in the ledger, its main file or folder, and the job's step that it holds, None
    where that is not known."""

    path: str
    step: int | None
    save: int = 0


@dataclass(frozen=True, slots=True)
class BeginAttempt:
    """Begin an attempt; `passed`: newer saves than the one it starts from, each with why not."""

    at: float
    why: str
    attempt: int
    resume: Checkpoint | None
    passed: tuple[Passed, ...] = ()


@dataclass(frozen=True, slots=True)
class CompareSave:
    """Close the books on what the attempt has saved, and compare a save (0: none) with the ledger; `deep`: all of its
    bytes. `SaveCompared` follows."""

    at: float
    why: str
    attempt: int
    save: int
    deep: bool


@dataclass(frozen=True, slots=True)
class DistrustSave:
    """Give up a save that attempts could not begin from."""

    at: float
    why: str
    attempt: int
    save: int
    # A rank raised while it loaded the save itself; else two attempts only ended alike
    is_certain: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """Start an agent on a node."""

    at: float
    why: str
    attempt: int
    node: str


@dataclass(frozen=True, slots=True)
class Place:
    """Give the ranks of an attempt their nodes, in the order of the ranks."""

    at: float
    why: str
    attempt: int
    nodes: tuple[NodePlan, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Run the setup lines if they have not run, find a free port on the first node, report `Prepared`.

    The node must hold `resume`, complete, before this order.
    """

    at: float
    why: str
    attempt: int
    node: str
    resume: Checkpoint | None


@dataclass(frozen=True, slots=True)
class Probe:
    """Try whether the node reaches the first one at these addresses; report `Probed`."""

    at: float
    why: str
    attempt: int
    node: str
    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start the node's ranks, which meet at `address:port` over `interface` (empty: the system's choice)."""

    at: float
    why: str
    attempt: int
    node: str
    address: str
    port: int
    interface: str
    resume: Checkpoint | None


@dataclass(frozen=True, slots=True)
class Inspect:
    """Inspect every rank of the node, write what it does to the evidence folder, and report `Inspected`."""

    at: float
    why: str
    attempt: int
    node: str
    inspection: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Give a node's agent its fence: how long its ranks may go on without contact.

    `quiet_s` counts from the last contact or step; `alone_s` replaces it, where longer, until the first step of its ranks in
    this attempt.
    """

    at: float
    why: str
    attempt: int
    node: str
    quiet_s: float
    alone_s: float


@dataclass(frozen=True, slots=True)
class Judge:
    """The verdict on an attempt; its ranks are to be stopped."""

    at: float
    why: str
    attempt: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Alert:
    """A verdict that the user is only notified of; the attempt goes on."""

    at: float
    why: str
    attempt: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ResolveAlert:
    """The last alert is over: the job moves again."""

    at: float
    why: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """What looks like a hang, and at which place. It only informs."""

    at: float
    why: str
    attempt: int
    place: str


@dataclass(frozen=True, slots=True)
class Remark:
    """Something about a rank that a person should know. It only informs."""

    at: float
    why: str
    attempt: int
    rank: int


@dataclass(frozen=True, slots=True)
class Notice:
    """Something about all ranks, or about how the job is set up, that a person should know. It only informs."""

    at: float
    why: str
    attempt: int
    topic: Topic
    # What it said before no longer holds.
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """The attempt is over without a verdict: every rank ended well, or the user cancelled."""

    at: float
    why: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the node's ranks: TERM, after `grace_s` KILL, and report `Stopped` when no process is left.

    `saves`: the gang is whole and its nodes will be taken away, so ranks get the user's signal to save a checkpoint instead
    of TERM.
    """

    at: float
    why: str
    attempt: int
    node: str
    grace_s: float
    saves: bool = False


@dataclass(frozen=True, slots=True)
class EndJob:
    at: float
    why: str
    attempt: int
    end: JobEnd


@dataclass(frozen=True, slots=True)
class Requeue:
    """Give the allocation back and wait in the queue for another one, under the same id.

    `avoid`: nodes that cannot be used, each with its reason.
    """

    at: float
    why: str
    attempt: int
    avoid: dict[str, str]


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell a node's agent that its work is done."""

    at: float
    why: str
    attempt: int
    node: str


Decision: TypeAlias = (
    BeginAttempt
    | CompareSave
    | DistrustSave
    | Launch
    | Place
    | Prepare
    | Probe
    | Start
    | Inspect
    | Fence
    | Judge
    | Alert
    | ResolveAlert
    | Suspect
    | Remark
    | Notice
    | Finish
    | Stop
    | EndJob
    | Requeue
    | Dismiss
)
