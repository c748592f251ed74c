"""Record of a checkpoint: all files that ranks write between two steps of all ranks. Pure data.

- OPEN while a rank may still write to it, or while it is being copied into the job folder.
- WHOLE (complete) once every rank has made a later step, or the file that its format writes last is there, and every
  file is valid in its format.
- TORN when the attempt ended before that.
- GONE when a file of it was deleted or changed later.
- DISTRUSTED when attempts could not resume from it.
- PRUNED when `checkpoint.keep` deleted it.
Only WHOLE checkpoints are resumed from.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

START_PREFIX = "./"
"""Prefix of the key of a checkpoint in the working folder of the ranks; elsewhere the prefix is the path of its folder."""


class CheckpointState(enum.Enum):
    """Life cycle of a checkpoint."""

    OPEN = "open"
    WHOLE = "whole"
    TORN = "torn"
    GONE = "gone"
    DISTRUSTED = "distrusted"
    PRUNED = "pruned"


class Format(enum.Enum):
    """Library that has written a checkpoint, by its files."""

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
    """Content of a checkpoint, the best to resume from first; `PART` and `OTHER` are never resumed from."""

    STATE = "state"
    WEIGHTS = "weights alone"
    BEST = "the best so far"
    AVERAGE = "an average"
    PART = "a part of the state alone"
    OTHER = "no state of a training"


class CompletionReason(enum.Enum):
    """Reason why a checkpoint counts as fully written."""

    STEPS = "every rank has made a step since"
    END = "every rank has ended with code 0"
    FINAL_FILE = "its format writes that last"
    SAME_FILE_SET = "it has the files of the save before, each whole"
    NO_WRITES = "nothing was written to it for a while, and ranks make no steps"
    ADOPTED = "a person has adopted it"
    NONE = ""


class StepSource(enum.Enum):
    """Source of the step of a checkpoint."""

    STATED = "stated"
    COUNTED = "counted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """File of a checkpoint: name below the checkpoint folder, size, time of its last byte, sha256 (empty until it was read).
    Also any file of a job on a host, by its name in the job's folder there."""

    name: str
    size_bytes: int
    mtime_ns: int
    sha256: str = ""

    @property
    def stamp(self) -> tuple[str, int, int]:
        """Identity of this version of the file."""
        return self.name, self.size_bytes, self.mtime_ns


@dataclass(frozen=True, slots=True)
class FileLocation:
    """Location of files: the folder that their names are relative to, on a host, or on the supervisor's disk (no host).

    `names`: the files that are there; empty for all. `is_memory`: the folder is in the host's memory.
    """

    host: str
    root: str
    names: tuple[str, ...] = ()
    is_memory: bool = False


class CopyTarget(enum.Enum):
    """Goal of a copy of a checkpoint that is in memory: the disk of the host that wrote it, the memory in which ranks look for it, or
    the part of another host's memory that is kept for its neighbour."""

    DISK = "disk"
    MEMORY = "memory"
    NEIGHBOUR = "neighbour"


@dataclass(frozen=True, slots=True)
class RequiredFile:
    """File that a checkpoint must have: its name, its least size, and the file that lists it."""

    name: str
    size_bytes: int
    by: str


@dataclass(frozen=True, slots=True)
class GroupReading:
    """Result of reading a group's files; hosts that share no disk read their own files, and `merged` joins the results.

    `faults`: what is damaged, or marks the group as unfinished. `is_proved`: the formats of all files that have one prove
    them complete. `is_marked_complete`: the file that the format writes last is there, as far as one host can see.
    """

    FORMER: ClassVar[dict[str, str]] = {"is_said_done": "is_marked_complete"}

    format: Format
    content: Content
    fits_any_size: bool
    faults: tuple[str, ...] = ()
    # A file could not be read, which proves nothing
    is_unsure: bool = False
    needs: tuple[RequiredFile, ...] = ()
    is_proved: bool = False
    is_marked_complete: bool = False
    step: int | None = None
    cites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostPart:
    """Part of an open checkpoint that one host has reported; hosts that share a disk report it once.

    `steps`: optimizer steps of its ranks at the last byte; `closed_by`: why it counts as fully written; `stale`: files
    that are still those of the previous checkpoint.
    """

    FORMER: ClassVar[dict[str, str]] = {"pieces": "files"}

    host: str
    root: str
    steps: int
    files: tuple[CheckpointFile, ...]
    reading: GroupReading
    closed_by: CompletionReason
    stale: tuple[str, ...] = ()
    # None of its names existed before its attempt, as a hook has seen
    is_new: bool = False
    # For how long its ranks made no steps because of it, the longest; None: not known
    stall_s: float | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint, as the ledger has it. `number` counts from 1 and identifies it."""

    FORMER: ClassVar[dict[str, str]] = {"pieces": "files", "places": "locations", "is_coming": "is_in_transit"}

    number: int
    # Common part of its files: a folder, or a folder with the numbers in their names; `START_PREFIX` marks where it lies
    key: str
    # The key without its numbers
    series: str
    # The file or folder that ORCH_RESUME_FROM names
    main: str
    attempt: int
    world_size: int
    # Optimizer steps that its attempt had made by then
    steps: int
    format: Format
    content: Content
    # Another number of ranks can load it
    fits_any_size: bool
    state: CheckpointState
    # Why it is in a state other than open or whole; for an open one what is still missing
    why: str = ""
    closed_by: CompletionReason = CompletionReason.NONE
    # The job's step, and its source
    step: int | None = None
    step_source: StepSource = StepSource.UNKNOWN
    # The step that its files or name state
    stated: int | None = None
    # Time of its last byte
    written_ns: int = 0
    files: tuple[CheckpointFile, ...] = ()
    locations: tuple[FileLocation, ...] = ()
    # Names of other checkpoints that it calls best, or points to
    cites: tuple[str, ...] = ()
    # What was last compared with the ledger, as text
    compared: str = ""
    # It is being copied into the job folder
    is_in_transit: bool = False
    # None of its names existed before its attempt
    is_new: bool = False
    # Quarantine it: its files, or those of earlier checkpoints, show that it is incomplete; a torn one without this flag may
    # have been written to its end
    is_damaged: bool = False
    # While it is open
    parts: tuple[HostPart, ...] = ()
    # For how long ranks made no steps because of it; None: not known
    stall_s: float | None = None

    @property
    def path(self) -> str:
        """Path to resume from: its main file or folder in the first of its locations."""
        root = self.locations[0].root if self.locations else ""
        return root if self.main == "." else f"{root}/{self.main}"

    @property
    def host(self) -> str:
        """The host with its path, if the path may be on that host's disk alone."""
        return next((one.host for one in self.locations if one.host and one.root == self.locations[0].root), "")

    @property
    def stamps(self) -> frozenset[tuple[str, int, int]]:
        """Identity of these versions of its files."""
        return frozenset(piece.stamp for piece in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.files)

    @property
    def base_folder(self) -> str:
        """Folder that its names are relative to: empty for `checkpoint.path`, `START_PREFIX` for where ranks start, else its path."""
        if self.is_named or self.key.startswith(START_PREFIX):
            return "" if self.is_named else START_PREFIX
        roots = [place.root for place in self.locations] or [part.root for part in self.parts]
        return roots[0] if roots else self.key.rpartition("/")[0] or "/"

    @property
    def is_named(self) -> bool:
        """Return whether it lies at `checkpoint.path`, or a person has adopted it."""
        return not self.key.startswith((START_PREFIX, "/"))

    @property
    def is_overwritten(self) -> bool:
        """Return whether its files are overwritten by the next one."""
        return self.key == self.series

    @property
    def is_hashed(self) -> bool:
        """Return whether all of its files have a sha256."""
        return bool(self.files) and all(piece.sha256 for piece in self.files)

    @property
    def is_candidate(self) -> bool:
        """Return whether training could resume from its content."""
        return self.content not in (Content.PART, Content.OTHER)
