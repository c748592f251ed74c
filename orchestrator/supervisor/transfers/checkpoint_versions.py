"""Versions of checkpoints whose files are written on hosts that share no disk. Pure: what hosts have said, put together.

A version is an attempt, a name and its steps. A name with a number in it is written once in an attempt, so all parts
under it belong together. A name that is written again is a slot: its parts belong together only where all hosts had
made the same steps, since hosts do not say which of their writings belong together.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath

from orchestrator.agent.outputs.checkpoint_formats import METADATA, PIECE
from orchestrator.core import codec
from orchestrator.core.wire.messages import ManifestEntry


class VersionState(enum.Enum):
    """What came of a version."""

    OPEN = "open"  # hosts may tell more of it
    TOLD = "told"  # it is fetched
    HOME = "home"
    GONE = "gone"  # it cannot come


@dataclass(frozen=True, slots=True)
class Part:
    """What one host has of a checkpoint: in the folder `root/checkpoints`, made when `count` steps had been made.

    Without pieces: the ranks there ended before it was known to be whole.
    """

    node: str
    root: str
    count: int
    pieces: tuple[ManifestEntry, ...]

    def is_all_of(self, name: str) -> bool:
        """Tell whether no other host can have more of the checkpoint: it is one file, and no folder of several."""
        return tuple(piece.name for piece in self.pieces) == (name,)


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a checkpoint: an attempt, a name, and the parts of it that hosts have told.

    `placed` are the nodes that may have a part in it. `is_slot`: its name is written again and again.
    """

    attempt: int
    name: str
    placed: tuple[str, ...]
    parts: tuple[Part, ...]
    is_slot: bool
    state: VersionState = VersionState.OPEN

    @property
    def count(self) -> int:
        """The steps that had certainly been made when it was written."""
        return min(part.count for part in self.parts)

    @property
    def steps(self) -> int:
        """The steps that had been made when its last part was complete."""
        return max(part.count for part in self.parts)

    @property
    def node(self) -> str:
        """The host that was the first to report it."""
        return self.parts[0].node

    @property
    def pieces(self) -> tuple[ManifestEntry, ...]:
        """All files that it consists of."""
        return tuple(piece for part in self.parts for piece in self.taken_from(part.node))

    @property
    def key(self) -> str:
        """Return what no version of other parts is called."""
        return hashlib.sha256(
            codec.dumps(dataclasses.replace(self, state=VersionState.OPEN)).encode()
        ).hexdigest()[:32]

    @property
    def may_be_mixed(self) -> bool:
        """Tell whether its parts may be of several writings of its name: only at the same step they certainly are not."""
        return self.is_slot and len(self.parts) > 1 and not 0 < self.count == self.steps

    @property
    def lacks_metadata(self) -> bool:
        """Tell whether it has pieces of torch.distributed.checkpoint, and not what is written after all of them."""
        names = [PurePosixPath(piece.name) for part in self.parts for piece in part.pieces]
        lists = {name.parent for name in names if name.name.endswith(METADATA)}
        return any(name.suffix == PIECE and name.parent not in lists for name in names)

    def part_of(self, node: str) -> Part | None:
        """Return what a host has of it."""
        return next((part for part in self.parts if part.node == node), None)

    def taken_from(self, node: str) -> tuple[ManifestEntry, ...]:
        """Return the files that are fetched from a host: of those that several have, the first to report gives."""
        before: set[str] = set()
        for part in self.parts:
            if part.node == node:
                return tuple(piece for piece in part.pieces if piece.name not in before)
            before.update(piece.name for piece in part.pieces)
        raise AssertionError(f"{node} has no part in {self.name}")

    def may_take(self, new: Part) -> bool:
        """Tell whether a host's word is new: not said before, nor of a file of which another host has told already."""
        is_other_s = self.placed == (self.node,) != (new.node,) and new.count <= self.steps
        return self.part_of(new.node) != new and not is_other_s

    def seems_whole_without(self, new: Part) -> bool:
        """Tell whether it was taken for whole before a host told of its part."""
        return self.state is VersionState.HOME and not self.is_slot and self.part_of(new.node) is None

    def with_part(self, new: Part) -> Version:
        """Return the version after a host's newest word; a part that has only grown is not written again."""
        old = self.part_of(new.node)
        again = old is not None and not set(old.pieces) <= set(new.pieces)
        parts = (*self.parts, new) if old is None else tuple(new if one is old else one for one in self.parts)
        return dataclasses.replace(self, parts=parts, is_slot=self.is_slot or again, state=VersionState.OPEN)
