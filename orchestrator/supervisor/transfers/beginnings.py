"""The save from which an attempt's script began, by what its ranks had read when they made their first step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from orchestrator.core.checkpoints.choice import NAMED
from orchestrator.core.checkpoints.save import START, Format, Save
from orchestrator.core.wire import reports
from orchestrator.supervisor.transfers.closing import Gang

UNSEEN_FORMATS = (Format.UNKNOWN, Format.SAFETENSORS)
"""What a script may read by a library that opens files itself, so that no hook sees it."""


@dataclass(slots=True)
class Beginnings:
    """What the nodes of the current attempt have reported."""

    _reports: dict[str, reports.CheckpointsRead] = field(default_factory=dict)

    def learn(
        self,
        node: str,
        report: reports.CheckpointsRead,
        gang: Gang,
        saves: Collection[Save],
        newest: Save | None,
    ) -> int | None:
        """Return the number of the save that the attempt began from, 0 for none of them; None while that is not known.

        The node of rank 0 is believed before others, since rank 0 may read for all. That nothing was read all nodes have to
        say, and that only counts where the `newest` save is of a format whose reading a hook sees.
        """
        known = {name: one for name, one in self._reports.items() if one.attempt == gang.attempt}
        self._reports = {**known, node: report}
        heard = [self._reports[name] for name in gang.nodes if name in self._reports]
        found = [save for one in heard if (save := _last_read(one, saves)) is not None]
        have_all = len(heard) == len(gang.nodes)
        if found:
            return found[0].number if have_all or node == gang.nodes[0] else None
        is_seen = newest is not None and newest.format not in UNSEEN_FORMATS
        return 0 if have_all and is_seen and all(one.is_known for one in heard) else None


def _last_read(report: reports.CheckpointsRead, saves: Collection[Save]) -> Save | None:
    """Return the save that was read last, of those that a training can be resumed from."""
    owners: dict[str, Save] = {}
    for save in sorted(saves, key=lambda save: save.number):
        if save.attempt < report.attempt and save.state in NAMED and save.is_candidate:
            prefix = "" if save.is_named else save.area if save.area == START else f"{save.area}/"
            owners |= {f"{prefix}{piece.name}": save for piece in save.pieces}
    return next((owners[name] for name in reversed(report.names) if name in owners), None)
