"""Decisions of the brain. Each is stamped `at` (job clock, seconds), names its attempt, and says why in one line."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.brain.model.events import NodePlan


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


class JobEnd(enum.Enum):
    """How a job ends."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What went wrong in an attempt, whose fault it was, and how that is known.

    `signature` is equal for two failures that a person would call the same; `step` is the job's optimizer step at
    which it happened, None when no step was seen; `since_s` is the job clock at the last sign of progress or the
    death, so that `at - since_s` of the judgement is the time it took to detect. `culprit` says where the ranks at
    fault are and what they do there, `waiting` what the others wait in; both empty where there is no such thing.
    `patience_s`: of a hang that no state proves, for how long it was waited for; 0 where there is proof.
    """

    kind: Kind
    ranks: tuple[int, ...]
    node: str
    summary: str
    evidence: tuple[str, ...]
    signature: str
    step: int | None
    since_s: float
    retry: bool
    culprit: str = ""
    waiting: str = ""
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to start from, and the job's step it holds; None where only the user knows."""

    path: str
    step: int | None


@dataclass(frozen=True, slots=True)
class BeginAttempt:
    at: float
    why: str
    attempt: int
    resume: Checkpoint | None


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

    `resume` is to be there and whole before.
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
    """Start the node's ranks, which meet at `address:port` over `interface` (empty: whichever)."""

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
    """See what every rank of the node is doing, and write it to the evidence folder; report `Looked`."""

    at: float
    why: str
    attempt: int
    node: str
    inspection: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Tell a node's agent for how long it may go without contact: `quiet_s` without a step of its ranks as well, and
    `alone_s`, if that is longer, as long as they have made none in this attempt."""

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
    """A suspicion that the user wants to be told of, and nothing done about."""

    at: float
    why: str
    attempt: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ResolveAlert:
    """What was noticed last is not so any more: the job moves again."""

    at: float
    why: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """What looks like a hang, and at which place; nothing is done about it."""

    at: float
    why: str
    attempt: int
    place: str


@dataclass(frozen=True, slots=True)
class Remark:
    """Something of a rank that a person should know, and nothing is done about."""

    at: float
    why: str
    attempt: int
    rank: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The attempt is over without a verdict: every rank ended well, or the user cancelled."""

    at: float
    why: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the node's ranks: TERM, after `grace_s` KILL, and report `Stopped` when nothing is left.

    `saves`: the gang is whole and its nodes will be taken away, so that instead of TERM ranks get the signal at which
    the user wants them to save themselves.
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
    """Give the allocation back and wait for another in the queue, under the same id; `avoid`: nodes that did not do,
    each with its reason."""

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
    | Finish
    | Stop
    | EndJob
    | Requeue
    | Dismiss
)
