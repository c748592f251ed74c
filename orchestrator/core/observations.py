"""What agents observe of ranks and hosts: one set of types for the wire, the journal and the brain. Pure data."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankSeen:
    """A rank as its agent sees it at the moment of connecting."""

    rank: int
    pid: int
    exited: bool


class Activity(enum.Enum):
    """What a rank does, as its agent sees it."""

    WAITING_FOR_RANKS = (
        "waiting_for_ranks"  # for other ranks: in a collective, a barrier, the store, the rendezvous
    )
    PROGRESSING = "progressing"  # its stack moves, or it or its children read, write or compute
    SPINNING = "spinning"  # burns processor time in one place: a loop, or one long operation
    SLEEPING = "sleeping"  # in a timed sleep
    BLOCKED = (
        "blocked"  # idle in one place that is no wait for other ranks: a lock, a read, a question, a child
    )
    STOPPED = "stopped"  # state T or t
    EXITING = "exiting"  # has said its last word, and is still there
    UNKNOWN = "unknown"  # a first look, or no way to look

    @property
    def text(self) -> str:
        """The activity in words, such as `waiting for ranks`."""
        return self.value.replace("_", " ")


@dataclass(frozen=True, slots=True)
class EnteredCollective:
    """A collective that a rank entered before its last one in a group; see `Collective`."""

    number: int
    what: str
    shape: str


@dataclass(frozen=True, slots=True)
class Collective:
    """The last collective that a rank has entered in one group. `group` is torch's name of it, `label` its purpose;
    `number` counts the group's collectives from 1; `shape`: `float32[1000]`; `entered_s`: so long ago; `done`: it was
    carried out, so the rank no longer waits in it; `earlier`: the few before it, in order."""

    group: str
    label: str
    ranks: tuple[int, ...]
    number: int
    what: str
    shape: str
    entered_s: float
    done: bool = False
    earlier: tuple[EnteredCollective, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveCounts:
    """How many collectives of each of its groups (in the order of `groups`) a rank had entered after `step` optimizer
    steps of its own, the last of them being step `optimizer_step` of its optimizer number `optimizer`, 0 the first that it used."""

    step: int
    optimizer: int
    optimizer_step: int
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankInspection:
    """What one look has found of a rank.

    `still_s`: for so long, by its host's clock and over looks in a row, nothing of it has moved; 0 at a first look.
    `where`: the user's innermost frame, `train.py:88 load_batch`; `why`: what it is in there, in words; `proven`: it
    cannot go on by itself, whatever the others do; `ends_s`: what is left of a sleep, or of a wait with a time limit; `phase`: import, rendezvous, evaluate,
    save, exit or train, by its stack; `stack`: its main thread's frames, innermost first, as
    `file:line function`, the import machinery's left out; `groups` and `collective_counts`: see `RankHeartbeat`, here with each step at
    which a count grew by another number than before; `unavailable`: the ways to look that did not work here, and why;
    `others_act`: another Python thread of it may enter collectives by itself; `starved_s`: for so much of `still_s` its
    thread was ready to run and had no
    processor; `gpu_use`: the share of time in which its GPU is busy, 0.0 to 1.0, where that is known; `mixed`: the keys of
    groups whose counts are not those of collectives alone.
    """

    rank: int
    pid: int
    state: str
    activity: Activity
    still_s: float
    where: str
    why: str
    proven: bool
    ends_s: float | None
    phase: str
    stack: tuple[str, ...]
    collectives: tuple[Collective, ...]
    groups: tuple[str, ...]
    collective_counts: tuple[CollectiveCounts, ...]
    unavailable: tuple[str, ...]
    others_act: bool = False
    starved_s: float = 0.0
    gpu_use: float | None = None
    mixed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank said as it died."""

    type: str
    message: str
    traceback: str
    where: str


@dataclass(frozen=True, slots=True)
class Address:
    """An IPv4 address of a host and the interface that has it."""

    ip: str
    interface: str


@dataclass(frozen=True, slots=True)
class Reached:
    """An address of the first node that answered, and the interface of this node that led there."""

    address: str
    interface: str


class Retryable(enum.Enum):
    """Whether a launch that failed is worth trying again."""

    TRANSIENT = "transient"  # no answer, a broken line: again, a few times
    PERMANENT = "permanent"  # a wrong key, no Python: not before a person has mended it
    BUSY = "busy"  # others use the host: again, for as long as it takes
