"""Resume source of an attempt: the checkpoint that its script resumed from, by what its ranks read before their first step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TypeAlias

from orchestrator.core.checkpoints import steps
from orchestrator.core.checkpoints.checkpoint import START_PREFIX, Checkpoint, CheckpointState, Format
from orchestrator.core.checkpoints.resume_choice import OVERRIDE_STATES
from orchestrator.core.wire import reports
from orchestrator.supervisor.transfers.completion import CheckpointGang

MODEL_FILE_ENDINGS = frozenset((".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".distcp"))
"""Suffixes of files that hold the state of a model."""

UNHOOKED_FORMATS = (Format.UNKNOWN, Format.SAFETENSORS)
"""Formats that a library may read with its own file functions, so that no hook sees it."""


DetectedSource: TypeAlias = tuple[int, str]
"""The checkpoint that an attempt resumed from; 0 for none, but its ranks may have read the file that is named beside it."""


@dataclass(slots=True)
class ResumeSourceTracker:
    """Reports of the nodes of the current attempt."""

    _reports: dict[str, reports.CheckpointsRead] = field(default_factory=dict)
    # By attempt: the step in the file of another job that its ranks have read
    stated_steps: dict[int, int] = field(default_factory=dict)

    def add_report(
        self,
        node: str,
        report: reports.CheckpointsRead,
        gang: CheckpointGang,
        checkpoints: Collection[Checkpoint],
        newest: Checkpoint | None,
    ) -> DetectedSource | None:
        """Return what the attempt resumed from; None while that is not known.

        The node of rank 0 counts first, since rank 0 may read for all. "Nothing was read" needs the reports of all nodes, a
        `newest` checkpoint in a format whose reading a hook sees, and no unknown file read beside a checkpoint.
        """
        current = {name: one for name, one in self._reports.items() if one.attempt == gang.attempt}
        self._reports = {**current, node: report}
        received = [self._reports[name] for name in gang.nodes if name in self._reports]
        owners = _checkpoints_by_file(checkpoints, gang.attempt)
        sources = [owners[name] for one in received for name in reversed(one.names) if name in owners]
        are_all_received = len(received) == len(gang.nodes)
        if sources:
            return (sources[0].number, "") if are_all_received or node == gang.nodes[0] else None
        unowned = [name for one in received for name in one.names if PurePosixPath(name).suffix in MODEL_FILE_ENDINGS]
        if are_all_received and newest is None and unowned:
            return (0, unowned[-1])
        if not are_all_received or newest is None or not all(one.is_known for one in received):
            return None
        folders = {PurePosixPath(name).parent for name in owners}
        is_seen = newest.format not in UNHOOKED_FORMATS
        is_unsure = any(PurePosixPath(name).parent in folders for name in unowned)
        return (0, "") if is_seen and not is_unsure else None

    def assign_step(
        self, checkpoint: Checkpoint, others: list[Checkpoint], base_step: int
    ) -> tuple[Checkpoint, int | None]:
        """Return a checkpoint with the job's step, and the step at which its attempt truly began if the checkpoint shows that it was not
        `base_step`. `others`: all other checkpoints of the job."""
        misstated, read = steps.are_steps_misstated([*others, checkpoint]), self.stated_steps.get(checkpoint.attempt, 0)
        began = steps.find_true_start(checkpoint, base_step, others, misstated=misstated, read=read)
        step, source = steps.job_step(checkpoint, base_step if began is None else began, misstated=misstated)
        return replace(checkpoint, step=step, step_source=source), began


def _checkpoints_by_file(checkpoints: Collection[Checkpoint], attempt: int) -> dict[str, Checkpoint]:
    """Return, by the file names that agents report, the newest checkpoint of earlier attempts that each file belongs to, if it can
    be resumed from."""
    owners: dict[str, Checkpoint] = {}
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.number):
        may_be_whole = checkpoint.state in OVERRIDE_STATES or (
            checkpoint.state is CheckpointState.TORN and not checkpoint.is_damaged
        )
        if checkpoint.attempt < attempt and may_be_whole and checkpoint.is_candidate:
            prefix = (
                ""
                if checkpoint.is_named
                else checkpoint.base_folder
                if checkpoint.base_folder == START_PREFIX
                else f"{checkpoint.base_folder}/"
            )
            owners |= {f"{prefix}{piece.name}": checkpoint for piece in checkpoint.files}
    return owners
