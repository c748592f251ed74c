"""Versions of checkpoints whose files are written on hosts that share no disk, put together from the hosts' reports.
Pure.

A version is an attempt, a name and its steps. A name with a number in it is written once in an attempt, so all parts
under it belong together. A name that is written again is a slot: its parts belong together only where all hosts had
made the same steps, since hosts do not report which of their writings belong together. One file that several hosts write
(rank 0 of each host saves `snapshot.pt`) is no part: the one of the most steps counts, of equal ones the first reported.
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
    """Life cycle of a version: it ends as installed or given up."""

    EXPECTED = "expected"  # hosts may report more of it
    FETCHING = "fetching"  # all hosts have reported
    INSTALLED = "installed"  # whole in the job folder
    GIVEN_UP = "given_up"  # it cannot come


@dataclass(frozen=True, slots=True)
class Part:
    """What one host has of a checkpoint: in its folder `root/checkpoints`, written when `steps` steps had been made.

    Without pieces: the ranks there ended before it was known to be whole.
    """

    node: str
    root: str
    steps: int
    pieces: tuple[ManifestEntry, ...]

    def is_all_of(self, name: str) -> bool:
        """Tell whether no other host can have more of the checkpoint: it is one file, and no folder of several."""
        return tuple(piece.name for piece in self.pieces) == (name,)


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a checkpoint: an attempt, a name, and the parts of it that hosts have reported.

    `placed` are the nodes that may have a part in it. `is_slot`: its name is written again and again.
    """

    attempt: int
    name: str
    placed: tuple[str, ...]
    parts: tuple[Part, ...]
    is_slot: bool
    state: VersionState = VersionState.EXPECTED

    @property
    def is_open(self) -> bool:
        """Tell whether it is on its way: neither installed nor given up."""
        return self.state in (VersionState.EXPECTED, VersionState.FETCHING)

    @property
    def steps_begun(self) -> int:
        """The steps that had certainly been made when it was written."""
        return min(part.steps for part in self.parts)

    @property
    def steps(self) -> int:
        """The steps that had been made when its last part was complete."""
        return max(part.steps for part in self.parts)

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
        """A name that no version of other parts has."""
        return hashlib.sha256(
            codec.dumps(dataclasses.replace(self, state=VersionState.EXPECTED)).encode()
        ).hexdigest()[:32]

    @property
    def may_be_mixed(self) -> bool:
        """Tell whether its parts may be of several writings of its name: only at the same step they certainly are
        not."""
        return self.is_slot and len(self.parts) > 1 and not 0 < self.steps_begun == self.steps

    @property
    def lacks_metadata(self) -> bool:
        """Tell whether it has pieces of torch.distributed.checkpoint, and not the metadata file that is written
        last."""
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

    @property
    def is_one_file(self) -> bool:
        """Tell whether it is one file, of which each host that writes it has all."""
        return self.parts[0].is_all_of(self.name)

    def may_take(self, new: Part) -> bool:
        """Tell whether a host's part is new: not reported before, nor of a file that another host has reported
        already."""
        if self.is_one_file and new.node != self.node:
            return self.is_slot and new.steps > self.steps
        return self.part_of(new.node) != new

    def seems_whole_without(self, new: Part) -> bool:
        """Tell whether it was taken for whole before a host reported its part."""
        return self.state is VersionState.INSTALLED and not self.is_slot and self.part_of(new.node) is None

    def with_part(self, new: Part) -> Version:
        """Return the version with a host's newest part; a part that has only grown does not count as written again.
        One file takes the place of another host's."""
        if self.is_one_file and new.node != self.node:
            return dataclasses.replace(self, placed=(new.node,), parts=(new,), state=VersionState.EXPECTED)
        old = self.part_of(new.node)
        again = old is not None and not set(old.pieces) <= set(new.pieces)
        parts = (*self.parts, new) if old is None else tuple(new if one is old else one for one in self.parts)
        return dataclasses.replace(
            self, parts=parts, is_slot=self.is_slot or again, state=VersionState.EXPECTED
        )


class NodeReports:
    """How far each node has reported the checkpoints on it, which decides for which nodes a version still waits.

    `lost`: the last attempt of each node whose agent was lost before it had reported all.
    """

    def __init__(self, lost: dict[str, int]) -> None:
        self.lost = lost
        self._scanned: dict[
            str, tuple[int, int]
        ] = {}  # the last attempt and the steps through which all is reported
        self._stopped: dict[str, int] = {}  # the last attempt that was stopped

    def scan(self, node: str, attempt: int, steps: int) -> bool:
        """Note that a node has reported all up to `steps` steps; tell whether that is new."""
        is_new = not self.is_lost(node, attempt) and (attempt, steps) > self._scanned.get(node, (0, -1))
        if is_new:
            self._scanned[node] = (attempt, steps)
        return is_new

    def stop(self, node: str, attempt: int) -> None:
        """Note that a node has stopped an attempt."""
        self._stopped[node] = max(attempt, self._stopped.get(node, 0))

    def lose(self, node: str, attempt: int) -> bool:
        """Note that a node was lost in an attempt; tell whether it had not stopped it."""
        is_running = self._stopped.get(node, 0) < attempt
        if is_running:
            self.lost[node] = max(attempt, self.lost.get(node, 0))
        return is_running

    def is_lost(self, node: str, attempt: int) -> bool:
        """Tell whether the node was lost in this attempt or a later one."""
        return self.lost.get(node, 0) >= attempt

    def pending(self, version: Version) -> list[str]:
        """Return the nodes that have not reported whether they have a part in a version."""
        if version.placed == (version.node,):
            return []
        return [node for node in version.placed if not self._is_past(node, version)]

    def why_never(self, version: Version, pending: list[str]) -> str:
        """Return why it will never be known that a version is whole; empty while it may be. `pending`: as returned
        above."""
        for part in version.parts:
            if not part.pieces:
                return f"the ranks on {part.node} ended before their part in it was known to be whole"
        for node in pending:
            if self.is_lost(node, version.attempt):
                return f"{node} was lost before it had told whether it has a part in it"
        if not pending and version.may_be_mixed:
            return "its parts were written at different steps"
        if all(self._has_stopped(node, version) for node in version.placed) and version.lacks_metadata:
            return "it was cut off before its .metadata was written"
        return ""

    def _is_past(self, node: str, version: Version) -> bool:
        """Tell whether the node has reported its part in a version, if it has one."""
        attempt, steps = self._scanned.get(node, (0, -1))
        if attempt == version.attempt and steps > version.steps:
            return True
        return self._has_stopped(node, version) and not self.is_lost(node, version.attempt)

    def _has_stopped(self, node: str, version: Version) -> bool:
        return self._stopped.get(node, 0) >= version.attempt
