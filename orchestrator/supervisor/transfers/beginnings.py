"""Resume source of an attempt: the checkpoint that its script resumed from, by what its ranks read before their first step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from orchestrator.core.checkpoints.choice import NAMED
from orchestrator.core.checkpoints.save import START, Format, Save, SaveState
from orchestrator.core.wire import reports
from orchestrator.supervisor.transfers.closing import Gang

STATES = frozenset((".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".distcp"))
"""Suffixes of files that hold the state of a model."""

UNSEEN_FORMATS = (Format.UNKNOWN, Format.SAFETENSORS)
"""Formats that a library may read with its own file functions, so that no hook sees it."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The checkpoint that an attempt resumed from; 0 for none, but its ranks may have read the file `other`."""

    save: int
    other: str = ""


@dataclass(slots=True)
class Beginnings:
    """Reports of the nodes of the current attempt."""

    _reports: dict[str, reports.CheckpointsRead] = field(default_factory=dict)
    # By attempt: the step in the file of another job that its ranks have read
    stated: dict[int, int] = field(default_factory=dict)

    def learn(
        self,
        node: str,
        report: reports.CheckpointsRead,
        gang: Gang,
        saves: Collection[Save],
        newest: Save | None,
    ) -> Beginning | None:
        """Return what the attempt resumed from; None while that is not known.

        The node of rank 0 counts first, since rank 0 may read for all. "Nothing was read" needs the reports of all nodes, a
        `newest` checkpoint in a format whose reading a hook sees, and no unknown file read beside a checkpoint.
        """
        known = {name: one for name, one in self._reports.items() if one.attempt == gang.attempt}
        self._reports = {**known, node: report}
        heard = [self._reports[name] for name in gang.nodes if name in self._reports]
        owners = _owners(saves, gang.attempt)
        found = [owners[name] for one in heard for name in reversed(one.names) if name in owners]
        have_all = len(heard) == len(gang.nodes)
        if found:
            return Beginning(found[0].number) if have_all or node == gang.nodes[0] else None
        others = [name for one in heard for name in one.names if PurePosixPath(name).suffix in STATES]
        if have_all and newest is None and others:
            return Beginning(0, others[-1])
        if not have_all or newest is None or not all(one.is_known for one in heard):
            return None
        folders = {PurePosixPath(name).parent for name in owners}
        is_seen = newest.format not in UNSEEN_FORMATS
        is_unsure = any(PurePosixPath(name).parent in folders for name in others)
        return Beginning(0) if is_seen and not is_unsure else None


def _owners(saves: Collection[Save], attempt: int) -> dict[str, Save]:
    """Return, by the file names that agents report, the newest checkpoint of earlier attempts that each file belongs to, if it can
    be resumed from."""
    owners: dict[str, Save] = {}
    for save in sorted(saves, key=lambda save: save.number):
        may_be_whole = save.state in NAMED or (save.state is SaveState.TORN and not save.is_damaged)
        if save.attempt < attempt and may_be_whole and save.is_candidate:
            prefix = "" if save.is_named else save.area if save.area == START else f"{save.area}/"
            owners |= {f"{prefix}{piece.name}": save for piece in save.pieces}
    return owners
