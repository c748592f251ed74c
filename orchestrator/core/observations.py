"""Observations of ranks and hosts by agents: one set of types for the wire, the journal and the brain. Pure data."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from orchestrator.core.status_types import Frame

LINE_CHARS_MAX = 300
"""How much of a message is shown in a line."""

NCCL_LAST_ERROR = "Last error:\n"
"""Line of an NCCL exception of torch, before what `ncclGetLastError` returns, which may be empty."""


@dataclass(frozen=True, slots=True)
class ReportedRank:
    """Rank as its agent reports it when it connects."""

    rank: int
    pid: int
    exited: bool


class Activity(enum.Enum):
    """Activity of a rank, as its agent sees it."""

    # In a collective, a barrier, the store or the rendezvous
    WAITING_FOR_RANKS = "waiting_for_ranks"
    # Its stack moves, or it or its children read, write or compute
    PROGRESSING = "progressing"
    # Uses processor time in one place: a loop, or one long operation
    SPINNING = "spinning"
    # In a timed sleep
    SLEEPING = "sleeping"
    # Idle in one place, not for other ranks: a lock, a read, a prompt, a child
    BLOCKED = "blocked"
    # State T or t
    STOPPED = "stopped"
    # Its hook has reported the exit, and the process is still there
    EXITING = "exiting"
    # A first inspection, or nothing could be read
    UNKNOWN = "unknown"

    @property
    def text(self) -> str:
        """The activity as text, such as `waiting for ranks`."""
        return self.value.replace("_", " ")


class Framework(enum.Enum):
    """Framework that forms the process group of a script."""

    TORCH = "torch"
    LIGHTNING = "lightning"
    ACCELERATE = "accelerate"


@dataclass(frozen=True, slots=True)
class EnteredCollective:
    """A collective that a rank entered before its last one in a group; see `Collective`."""

    number: int
    what: str
    shape: str


@dataclass(frozen=True, slots=True)
class Collective:
    """The last collective that a rank has entered in one group."""

    # torch's name of the group, and its purpose
    group: str
    label: str
    ranks: tuple[int, ...]
    # Counts the group's collectives from 1
    number: int
    what: str
    # Such as `float32[1000]`
    shape: str
    # How long ago
    entered_s: float
    # It has completed, so the rank no longer waits in it
    done: bool = False
    # The few before it, in order
    earlier: tuple[EnteredCollective, ...] = ()
    # For how long torch lets it wait, as the author of the group has chosen; None: not known
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class CollectiveCounts:
    """Counts of the collectives that a rank had entered at the end of one of its optimizer steps."""

    # The rank's step then
    step: int
    # The optimizer of the last of them, 0 is the first that the rank used, and the step's number in that optimizer
    optimizer: int
    optimizer_step: int
    # Collectives entered by then, for each of the rank's groups in the order of `groups`
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """Exception of a rank: it died of it, is handling it, or its log ends with the traceback although it exited with code 0.
    Without a type: what else is known of a rank's end, such as the last line of a training script that exited with code 0
    without a step."""

    type: str
    message: str
    traceback: str
    where: Frame | None
    # The file that a library was loading a state from, where it was raised in that
    loading: str = ""

    @property
    def text(self) -> str:
        """The exception in a line: `ValueError: no data at train.py:34 load`. Of NCCL's, its last error."""
        # After it NCCL writes what failed first; the lines before only say which kind of call did.
        lines = (self.message.partition(NCCL_LAST_ERROR)[2].strip() or self.message.strip()).splitlines()
        words = ": ".join(word for word in (self.type, lines[0][:LINE_CHARS_MAX] if lines else "") if word)
        return f"{words} at {self.where}" if self.where else words

    def describe_with(self, what: str) -> str:
        """Return the exception, or what else is known, and what the rank is doing meanwhile."""
        return f"raised {self.text}, then {what}" if self.type else f"{self.text}: {what}"


@dataclass(frozen=True, slots=True)
class RankInspection:
    """State of one rank in one inspection of its node."""

    FORMER: ClassVar[dict[str, str]] = {"has_limit": "", "starved_s": ""}

    rank: int
    pid: int
    # The letter of /proc
    state: str
    activity: Activity
    # How long it has not moved, by its host's clock, over consecutive inspections; 0 at the first
    still_s: float
    # The user's innermost frame; without one the innermost of all
    where: Frame | None
    # What it does there, as text
    why: str
    # import, rendezvous, evaluate, save, exit or train, by its stack
    phase: str
    # Frames of the main thread, innermost first, as `file:line function`, without those of the import machinery
    stack: tuple[str, ...]
    collectives: tuple[Collective, ...]
    # As in `RankHeartbeat`, here with each step at which a count grew by a different number than in the previous step
    groups: tuple[str, ...]
    collective_counts: tuple[CollectiveCounts, ...]
    # What could not be read here, and why
    unavailable: tuple[str, ...]
    # Another of its Python threads may enter collectives
    others_act: bool = False
    # Share of time in which its GPU is busy, 0.0 to 1.0, where that is known
    gpu_use: float | None = None
    # Keys of the groups whose counts are not those of collectives alone
    mixed: tuple[str, ...] = ()
    # The source of the line at `where`
    line: str = ""
    # The exception that its main thread is handling: in `except`, `finally`, `__exit__` or, after its script, `atexit`
    raised: Failure | None = None
    # How many of `stack`, from the first, `where` has called
    inside: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """An IPv4 address of a host and the interface that has it."""

    ip: str
    interface: str


@dataclass(frozen=True, slots=True)
class ReachableAddress:
    """Address of the first node that answered, and the interface of this node that reaches it."""

    address: str
    interface: str


@dataclass(frozen=True, slots=True)
class GpuState:
    """What nvidia-smi says of a GPU that ranks use. `fault`: why it is sick, as in `wants a reset`, and `since` when on its host's
    clock; both empty for one that is not. `remarks`: what else a person should know."""

    gpu: str
    fault: str = ""
    since: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def fault_text(self) -> str:
        """Its fault in a line."""
        return f"its GPU {self.gpu} {self.fault} since {self.since}"


class Retryable(enum.Enum):
    """Whether a failed launch is worth a retry."""

    # No answer, a broken connection: retry a few times
    TRANSIENT = "transient"
    # A wrong key, no Python: not before a person has fixed it
    PERMANENT = "permanent"
    # Other jobs use the host: retry for as long as it takes
    BUSY = "busy"
