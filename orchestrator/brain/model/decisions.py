"""Decisions of the brain. Each is stamped `at` (job clock, seconds), names its attempt, and has a reason in one line."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from orchestrator.core.checkpoints.resume_choice import ResumePoint, SkippedCheckpoint
from orchestrator.core.plan_types import Gang
from orchestrator.core.status_types import Frame
from orchestrator.core.text import one_line_fault
from orchestrator.core.wire.orders import NodeOrder


class VerdictKind(enum.Enum):
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
    DIVERGED = "diverged"


@dataclass(frozen=True, slots=True)
class _DecisionFields:
    """What each decision has."""

    at: float
    why: str
    attempt: int


class NoticeTopic(enum.Enum):
    """What a notice is about."""

    HANG = "hang"
    DESYNC = "desync"
    SUSPECT = "suspect"  # what looks like a hang; its key is the place
    SLOW = "slow"  # a rank, its key, that does its own work slower than its peers
    ALONE = "alone"  # all ranks train alone
    STEPS = "steps"  # a checkpoint contains another step than orch counted
    LOSS = "loss"  # the loss is not finite
    REPLICAS = "replicas"  # ranks no longer hold the same parameters, or none ever did
    MEMORY = "memory"  # checkpoints are on disk, although they should be in memory
    END = "end"  # every rank exited with code 0, and what they printed says otherwise


class JobEnd(enum.Enum):
    """How a job ends."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class FailureCause(enum.Enum):
    """What a failure is recognised by; each comment says what its signature holds."""

    OTHER = "other"  # nothing: the kind says all
    EXCEPTION = "exception"  # its type, and where it was raised
    SIGNAL = "signal"  # its number, and the rank
    FATAL_SIGNAL = "fatal signal"  # its number, and where it hit the rank
    EXIT_CODE = "exit code"  # the code
    STANDSTILL = "standstill"  # where the culprits stand
    NETWORK = "network"  # nothing: all ranks wait in one collective
    FIRST_STEP = "first step"  # where the ranks without one stand
    STOPPED = "stopped"  # the ranks that are stopped or zombies
    LEAVING = "leaving"  # of earlier versions: a rank that never ended
    NEVER_CAME = "never came"  # where those stand that have not come to the rendezvous
    COUNTS = "counts"  # the ranks that have run other collectives
    NODE = "node"  # its name
    SETUP = "setup"  # why it failed
    PLACEMENT = "placement"  # nothing: too few nodes can be used
    ALLOCATION = "allocation"  # nothing: the queue took the nodes away
    UNREACHABLE = "unreachable"  # the node, and the first one, which it cannot reach


@dataclass(frozen=True, slots=True)
class FailureSignature:
    """Equal for two failures that a person would call the same. `kind` stays where a verdict becomes `no_progress`."""

    kind: VerdictKind
    cause: FailureCause = FailureCause.OTHER
    place: tuple[str, ...] = ()
    # Where in the program it happened
    frames: tuple[Frame, ...] = ()

    @property
    def frame(self) -> Frame | None:
        """The first of its frames."""
        return next(iter(self.frames), None)

    @property
    def texts(self) -> tuple[str, ...]:
        """All of it as texts, to be compared."""
        return (self.kind.value, self.cause.value, *self.place, *map(str, self.frames))


class EvidenceKind(enum.Enum):
    """What a piece of evidence is, and so how it is shown."""

    NOTE = "note"  # a sentence
    WAYS = "ways"  # in which ways ranks were inspected
    RANKS = "ranks"  # where some of the ranks stand
    HOST = "host"  # what is wrong with a node
    OUTPUT = "output"  # lines that a program has written
    TRACEBACK = "traceback"  # the same: a traceback with its exception
    SUMMARY = "summary"  # the summary in other words
    LIKEWISE = "likewise"  # how the attempt before ended


@dataclass(frozen=True, slots=True)
class Evidence:
    """A piece of the evidence of a verdict: of which node it is, and the fix, where one is known."""

    text: str
    kind: EvidenceKind = EvidenceKind.NOTE
    node: str = ""
    fix: str = ""

    def __str__(self) -> str:
        return one_line_fault(self.text, self.node, self.fix)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What went wrong in an attempt, whose fault it was, and how that is known."""

    FORMER: ClassVar[dict[str, str]] = {"patience_s": "stall_timeout_s"}

    kind: VerdictKind
    # The ranks at fault, and their node; empty where it is none or several.
    ranks: tuple[int, ...]
    node: str
    # One line, but for its end, and what proves it.
    head: str
    proof: tuple[Evidence, ...]
    signature: FailureSignature
    # The job's optimizer step at which it happened; None when no step was seen.
    step: int | None
    # The job clock at the last sign of progress or the death: `Judge.at - since_s` is the time that detection took.
    since_s: float
    # Whether another attempt may help.
    retry: bool
    # Where the ranks at fault are and what they do there, and what the others wait in; empty where unknown.
    culprit: str = ""
    waiting: str = ""
    # The stall timeout of a hang without proof; 0 where there is proof.
    stall_timeout_s: float = 0.0
    # The end of the summary, which the evidence repeats.
    end: str = ""
    # What is wrong with the host of these ranks; empty where nothing is known.
    host_fault: str = ""

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        return self.head + self.end

    @property
    def evidence(self) -> tuple[str, ...]:
        """The pieces of evidence as texts."""
        return tuple(str(piece) for piece in self.proof)


@dataclass(frozen=True, slots=True)
class BeginAttempt(_DecisionFields):
    """Begin an attempt; `passed_over`: newer checkpoints than `resume`, each with why it is not used."""

    FORMER: ClassVar[dict[str, str]] = {"passed": "passed_over"}

    resume: ResumePoint | None
    passed_over: tuple[SkippedCheckpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class CompareCheckpoint(_DecisionFields):
    """Close all checkpoints of the attempt, and compare one (0: none) with the ledger; `deep`: all of its bytes.
    `SaveCompared` follows."""

    save: int
    deep: bool


@dataclass(frozen=True, slots=True)
class DistrustCheckpoint(_DecisionFields):
    """Distrust a checkpoint that attempts could not resume from."""

    save: int
    # A rank raised while it loaded the checkpoint; else two attempts only failed in the same way
    is_certain: bool


@dataclass(frozen=True, slots=True)
class Launch(_DecisionFields):
    """Start an agent on a node."""

    node: str


@dataclass(frozen=True, slots=True)
class To:
    """Give an order to the agent of a node."""

    at: float
    why: str
    node: str
    order: NodeOrder

    @property
    def attempt(self) -> int:
        """The attempt that the order names."""
        return self.order.attempt


@dataclass(frozen=True, slots=True)
class Place(_DecisionFields):
    """Give the ranks of an attempt their nodes."""

    nodes: Gang


@dataclass(frozen=True, slots=True)
class NextCall(_DecisionFields):
    """The scripts of all nodes have reached launcher call `call`: the same gang starts again in the same attempt."""

    call: int


@dataclass(frozen=True, slots=True)
class Judge(_DecisionFields):
    """The verdict on an attempt; its ranks are to be stopped."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Notice(_DecisionFields):
    """Something that a person should know; it does not affect the attempt."""

    topic: NoticeTopic
    # Which of several things of one topic it is: a rank, a place.
    key: str = ""
    fix: str = ""
    # Of a hang or a desync.
    verdict: Verdict | None = None
    # What the last one of this topic and key said no longer holds.
    withdrawn: bool = False


class AttemptEnd(enum.Enum):
    """How an attempt ends without a verdict."""

    DONE = "done"  # every rank ended well
    CANCELLED = "cancelled"
    RESTART = "restart"  # the user asked for one


@dataclass(frozen=True, slots=True)
class Finish(_DecisionFields):
    """The attempt is over without a verdict."""

    ending: AttemptEnd = AttemptEnd.DONE


@dataclass(frozen=True, slots=True)
class EndJob(_DecisionFields):
    end: JobEnd


@dataclass(frozen=True, slots=True)
class Requeue(_DecisionFields):
    """Give the allocation back and wait in the queue for another one, under the same id.

    `avoid`: nodes that cannot be used, each with its reason.
    """

    avoid: dict[str, str]


Decision: TypeAlias = (
    BeginAttempt
    | CompareCheckpoint
    | DistrustCheckpoint
    | Launch
    | To
    | Place
    | NextCall
    | Judge
    | Notice
    | Finish
    | EndJob
    | Requeue
)
