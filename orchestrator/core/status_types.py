"""Types that a status shows: training and resource numbers of ranks, a suspicion, the end of an allocation.

Pure data, and only what a status needs: `orch status` loads this file and not `observations`, whose types load slowly.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace


class ReportedNumber(float):
    """Number that a program has reported: it may be nan or infinite, which is worth showing."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of the host that a rank and its children use. None: not known."""

    # Of one processor, since the measurement before: 1.0 is one processor fully used
    cpu_share: float | None = None
    # Resident; what processes share counts in each of them
    memory_bytes: int | None = None
    # Of its GPU, the busiest of several: 0 to 1
    gpu_share: float | None = None
    gpu_memory_bytes: int | None = None


NOT_MEASURED = Usage()


@dataclass(frozen=True, slots=True)
class Training:
    """Training numbers of a rank as its script reports them, or of a job, see `brain/training.py`. None: not known."""

    loss: ReportedNumber | None = None
    learning_rate: ReportedNumber | None = None
    # Of the work that is done
    percent: float | None = None
    # How long it takes from here
    eta_s: float | None = None
    total_steps: int | None = None

    def fill_from(self, other: Training) -> Training:
        """Return this with missing numbers taken from the other one."""
        unknown = [field.name for field in fields(self) if getattr(self, field.name) is None]
        return replace(self, **{name: getattr(other, name) for name in unknown})


NOT_REPORTED = Training()


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a Python stack; `line` is 0 where it is not known."""

    file: str
    line: int
    function: str
    # What it runs in, if a person should know that
    within: str = ""

    @property
    def brief(self) -> Frame:
        """The frame with the name of its file alone."""
        return replace(self, file=self.file.rpartition("/")[2])

    def __str__(self) -> str:
        place = f"{self.file}:{self.line} {self.function}".rstrip()
        return f"{place} ({self.within})" if self.within else place


class NextAction(enum.Enum):
    """Next action of orch on a suspicion, if nothing changes."""

    # Not known yet: ranks are being inspected
    UNKNOWN = "unknown"
    # A rank shows activity: it is left alone
    MOVES = "moves"
    # The user wants no action, or no limit applies
    NOTHING = "nothing"
    # The attempt is ended
    ENDS = "ends"
    # The node counts as lost
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Possible failure as text; its ranks and node, how long it has lasted, and the next action with its time in seconds.
    `spare`: the node that then takes over, if one is ready."""

    what: str
    ranks: list[int]  # the codec would write a long tuple as a series
    node: str
    for_s: float
    follows: NextAction
    in_s: float | None = None
    spare: str = ""
    # Where the first of the ranks is stuck, as text and as a frame
    where: str = ""
    frame: Frame | None = None


class AllocationEndCause(enum.Enum):
    """Why an allocation of a queue system ends before its job does."""

    CANCELLED = "cancelled"  # by a person, not through orch
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"  # by a person, not through orch
    NODE_LOST = "node_lost"
    FAILED = "failed"  # see `why`
