"""What commands show or ask for, and agents or the brain have found: numbers of ranks, a suspicion, the end of an allocation.

Pure data, and as little as a status needs: `orch status` loads this file and not `observations`, whose types take a while to make.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace


class Measured(float):
    """A number that a program has told: it may be nan or infinite, and that is worth seeing."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a rank uses of its host, with its children. None: not known."""

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
    """How far the training of a rank or a job is: as a script tells, or as it is shown, see `brain/training.py`. None: not known."""

    loss: Measured | None = None
    learning_rate: Measured | None = None
    # Of the work that is done
    percent: float | None = None
    # How long it takes from here
    eta_s: float | None = None
    total_steps: int | None = None

    def completed_by(self, other: Training) -> Training:
        """Return this with what only the other one tells."""
        unknown = [field.name for field in fields(self) if getattr(self, field.name) is None]
        return replace(self, **{name: getattr(other, name) for name in unknown})


NOT_TOLD = Training()


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a Python stack; `line` is 0 where it is not known."""

    file: str
    line: int
    function: str
    # What it runs in, where a person should know that
    within: str = ""

    @property
    def brief(self) -> Frame:
        """The frame with the name of its file alone."""
        return replace(self, file=self.file.rpartition("/")[2])

    def __str__(self) -> str:
        place = f"{self.file}:{self.line} {self.function}".rstrip()
        return f"{place} ({self.within})" if self.within else place


class Follows(enum.Enum):
    """What follows by itself from a suspicion, if nothing changes."""

    # Not known yet: ranks are being inspected
    UNKNOWN = "unknown"
    # A rank goes on in what it does: it is let be
    MOVES = "moves"
    # The user wants that nothing is done, or no limit holds
    NOTHING = "nothing"
    # The attempt is ended
    ENDS = "ends"
    # The node counts as lost
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What looks like a failure, in words; the ranks and the node that it is about, since how long, and what follows in how
    many seconds. `spare`: the node that then takes over, where one is ready."""

    what: str
    ranks: list[int]  # the codec would write a long tuple as a series
    node: str
    for_s: float
    follows: Follows
    in_s: float | None = None
    spare: str = ""
    # Where the first of the ranks stands, in words and as a frame
    where: str = ""
    frame: Frame | None = None


class Cause(enum.Enum):
    """Why an allocation of a queue system ends before its job does."""

    CANCELLED = "cancelled"  # by a person, not through orch
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"  # by a person, not through orch
    NODE_LOST = "node_lost"
    FAILED = "failed"  # see `why`
