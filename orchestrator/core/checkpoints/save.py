"""A checkpoint: all files that ranks write between two steps of all ranks. Pure data.

- OPEN while a rank that writes has not gone on, or while it is on its way into the job folder.
- WHOLE once every rank has gone on, or its format's last word is there, and every file is as its format demands.
- TORN when the attempt ended before that. GONE when a file of it was deleted or changed later. DISTRUSTED when
  attempts could not begin from it. PRUNED when `checkpoint.keep` deleted it.
Only WHOLE checkpoints are resumed from.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

START = "./"
"""What the key of a checkpoint begins with that lies where the ranks start; of one elsewhere it is the path of its folder."""


class SaveState(enum.Enum):
    """Life cycle of a checkpoint."""

    OPEN = "open"
    WHOLE = "whole"
    TORN = "torn"
    GONE = "gone"
    DISTRUSTED = "distrusted"
    PRUNED = "pruned"


class Format(enum.Enum):
    """What has written a checkpoint, as its files show."""

    TORCH = "torch.save"
    SAFETENSORS = "safetensors"
    DCP = "torch.distributed.checkpoint"
    ACCELERATE = "Accelerate"
    TRAINER = "HF Trainer"
    LIGHTNING = "Lightning"
    DEEPSPEED = "DeepSpeed"
    MEGATRON = "Megatron"
    UNKNOWN = "unknown"


class Content(enum.Enum):
    """What a checkpoint holds, the best to resume from first; `PART` and `OTHER` are never resumed from."""

    STATE = "state"
    WEIGHTS = "weights alone"
    BEST = "the best so far"
    AVERAGE = "an average"
    PART = "a part of the state alone"
    OTHER = "no state of a training"


class Closing(enum.Enum):
    """How it is known that nothing more is written to a checkpoint."""

    STEPS = "every rank has made a step since"
    END = "every rank has ended with code 0"
    LAST_WORD = "its format writes that last"
    LIKENESS = "it has the files of the save before, each whole"
    SILENCE = "nothing was written to it for a while, and ranks make no steps"
    ADOPTED = "a person has adopted it"
    NONE = ""


class StepSource(enum.Enum):
    """How the step of a checkpoint is known."""

    STATED = "stated"
    COUNTED = "counted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Piece:
    """A file of a checkpoint: its name below the checkpoint place, size, time of its last byte, sha256 (empty until it was
    read). Also any file of a job on a host, by its name in the job's folder there."""

    name: str
    size_bytes: int
    mtime_ns: int
    sha256: str = ""

    @property
    def stamp(self) -> tuple[str, int, int]:
        """What tells this file from all that were written under its name."""
        return self.name, self.size_bytes, self.mtime_ns


@dataclass(frozen=True, slots=True)
class Place:
    """Where pieces lie: a folder that their names are relative to, on a host, or where the job folder is (no host).

    `names`: the pieces that are there; empty for all.
    """

    host: str
    root: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """A file that a checkpoint must have, by its name in the place, with at least this many bytes."""

    name: str
    size_bytes: int
    by: str


@dataclass(frozen=True, slots=True)
class GroupReading:
    """What the files of a group say; of hosts that share no disk each reads its own, and `merged` joins them.

    `faults`: what is damaged, or marks the group as unfinished. `is_proved`: the formats of all files that have one show
    that they are whole. `is_said_done`: what the format writes last is there, as far as one host can see.
    """

    format: Format
    content: Content
    fits_any_size: bool
    faults: tuple[str, ...] = ()
    # The disk did not give a file, which proves nothing
    is_unsure: bool = False
    needs: tuple[Need, ...] = ()
    is_proved: bool = False
    is_said_done: bool = False
    step: int | None = None
    cites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """What one host has reported of a checkpoint that is open; hosts that share a disk report it once.

    `steps`: optimizer steps of its ranks at the last byte; `closed_by`: how it is known that they write no more to it;
    `stale`: files that are still those of the checkpoint before.
    """

    host: str
    root: str
    steps: int
    pieces: tuple[Piece, ...]
    reading: GroupReading
    closed_by: Closing
    stale: tuple[str, ...] = ()
    # None of its names was there before its attempt, as a hook has seen
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint, as the ledger has it. `number` grows from 1 and is its identity."""

    number: int
    # What its files have in common: a folder, or a folder with the numbers in their names; see `START` for where it lies
    key: str
    # The key without its numbers
    series: str
    # The file or folder that ORCH_RESUME_FROM names
    main: str
    attempt: int
    world_size: int
    # Optimizer steps that its attempt had made by then; 0: none
    steps: int
    format: Format
    content: Content
    # It can be loaded by another number of ranks
    fits_any_size: bool
    state: SaveState
    # The state in words, where it is neither open nor whole; for an open one what it still lacks
    why: str = ""
    closed_by: Closing = Closing.NONE
    # The job's step, and how it is known
    step: int | None = None
    step_source: StepSource = StepSource.UNKNOWN
    # What it states of its step
    stated: int | None = None
    # Time of its last byte
    written_ns: int = 0
    pieces: tuple[Piece, ...] = ()
    places: tuple[Place, ...] = ()
    # Names of other checkpoints that it calls best, or points to
    cites: tuple[str, ...] = ()
    # What was compared with the ledger last, in words
    compared: str = ""
    # It is on its way into the job folder
    is_coming: bool = False
    # None of its names was there before its attempt
    is_new: bool = False
    # It is put out of the way of scripts: its files, or those of the checkpoints before it, show that it is not whole; a torn one
    # without that may have been written to its end
    is_damaged: bool = False
    # While it is open
    parts: tuple[Part, ...] = ()

    @property
    def path(self) -> str:
        """Where it is resumed from: its main file or folder in the first of its places."""
        root = self.places[0].root if self.places else ""
        return root if self.main == "." else f"{root}/{self.main}"

    @property
    def host(self) -> str:
        """The host whose disk its path is on, if only that may have it."""
        return next((one.host for one in self.places if one.host and one.root == self.places[0].root), "")

    @property
    def stamps(self) -> frozenset[tuple[str, int, int]]:
        """What tells its files from all that were written under their names."""
        return frozenset(piece.stamp for piece in self.pieces)

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def area(self) -> str:
        """The folder that its names are relative to: empty where `checkpoint.path` says, `START` where ranks start, else its path."""
        if self.is_named or self.key.startswith(START):
            return "" if self.is_named else START
        roots = [place.root for place in self.places] or [part.root for part in self.parts]
        return roots[0] if roots else self.key.rpartition("/")[0] or "/"

    @property
    def is_named(self) -> bool:
        """Tell whether it lies where `checkpoint.path` says, or a person has adopted it."""
        return not self.key.startswith((START, "/"))

    @property
    def is_slot(self) -> bool:
        """Tell whether its names are written again and again."""
        return self.key == self.series

    @property
    def is_hashed(self) -> bool:
        """Tell whether all of its bytes can be compared."""
        return bool(self.pieces) and all(piece.sha256 for piece in self.pieces)

    @property
    def is_candidate(self) -> bool:
        """Tell whether a training could be resumed from what it holds."""
        return self.content not in (Content.PART, Content.OTHER)
