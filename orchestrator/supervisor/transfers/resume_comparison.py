"""Comparison of the checkpoint that the next attempt is to resume from with the ledger, before that attempt.

Torn checkpoints are moved out of the scripts' way first. Hosts compare what only they see, or have in their memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState
from orchestrator.core.checkpoints.ledger import Ledger
from orchestrator.supervisor.transfers import checkpoint_disk, completion
from orchestrator.supervisor.transfers.memory_copies import MemoryCopies

UNSURE_S = 5.0
"""The pause before a file that cannot be read is tried again."""

TRANSIT_S_MAX = 60.0
"""How long a checkpoint that no connected host has is waited for, while it is being fetched."""


class ResumeComparison:
    """Comparison before an attempt; the disk is read in a thread."""

    def __init__(
        self,
        ledger: Ledger,
        folders: checkpoint_disk.LocalCheckpointFolders,
        retention: checkpoint_disk.RetentionPolicy,
        memory: MemoryCopies,
        thread: checkpoint_disk.DiskThread,
        notes: list[str],
        finish: Callable[[float, Checkpoint | None, e.CheckpointCompared], None],
    ) -> None:
        """`finish` is called with the result, and the checkpoint if it has changed; `notes`: messages for people are appended
        there."""
        self._ledger, self._folders, self._retention, self._memory = ledger, folders, retention, memory
        self._thread, self._notes, self._finish = thread, notes, finish
        # A comparison whose files could not be read, and when to try again
        self._retry: tuple[float, d.CompareCheckpoint] | None = None
        self.deep = False

    def poll(self, at: float) -> None:
        """Try again when it is due."""
        if self._retry is not None and at >= self._retry[0]:
            self.begin(at, self._retry[1])

    def begin(self, at: float, order: d.CompareCheckpoint) -> None:
        """Begin to compare a checkpoint."""
        self._retry, self.deep = None, order.deep
        checkpoint, kept = self._ledger.checkpoints.get(order.save), self._retention.kept_folder(order.save)
        if checkpoint is not None and (fault := self._memory.find_fault(checkpoint)):
            if checkpoint.is_in_transit and at < order.at + TRANSIT_S_MAX:
                self._retry = (at + UNSURE_S, order)
            else:
                self._conclude(at, order, disk.Comparison(fault, checkpoint.files, ""), checkpoint)
            return
        if checkpoint is not None and (self._memory.is_available(checkpoint) or self.is_for_host(checkpoint)):
            checkpoint = None
        known, folders = list(self._ledger.checkpoints.values()), self._folders
        self._thread.submit(
            lambda: checkpoint_disk.check_before_attempt(folders, checkpoint, kept, known, order),
            lambda at, ready: self._enter_check(at, order, ready),
        )

    def is_for_host(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint is on a disk that hosts see and this machine does not: a host has to compare it."""
        is_theirs = self._folders.is_on_host_disk(checkpoint)
        return is_theirs and not self._retention.kept_folder(checkpoint.number).is_dir()

    def _enter_check(self, at: float, order: d.CompareCheckpoint, ready: checkpoint_disk.PreAttemptCheck) -> None:
        for number, moves in ready.moved.items():
            moved = ", ".join(f"{name} to {to}" for name, to in moves)
            torn = self._ledger.checkpoints.get(number)  # none for `checkpoint_disk.EMPTY_CHECKPOINT`
            if moved:
                self._notes.append(f"torn checkpoint ({torn.why if torn else 'no file yet'}): moved {moved}")
            if moved and torn:
                self._ledger.put(dataclasses.replace(torn, why=f"{torn.why}; moved {moved}", locations=()))
        if ready.comparison is None:
            self._finish(at, None, e.CheckpointCompared(at, order.attempt, order.save, ""))
        elif ready.comparison.is_unsure:
            self._notes.append(f"{ready.comparison.fault}: trying again in {UNSURE_S:g} s")
            self._retry = (at + UNSURE_S, order)
        else:
            checkpoint = dataclasses.replace(self._ledger.checkpoints[order.save], locations=ready.places)
            self._conclude(at, order, ready.comparison, checkpoint)

    def _conclude(
        self, at: float, order: d.CompareCheckpoint, comparison: disk.Comparison, checkpoint: Checkpoint
    ) -> None:
        """Enter the result of a comparison. `checkpoint`: with the locations that were found."""
        known, fault = self._ledger.checkpoints[order.save], comparison.fault
        if fault:
            checkpoint = dataclasses.replace(known, state=CheckpointState.GONE, why=fault)
        else:
            checkpoint = dataclasses.replace(checkpoint, files=comparison.pieces, compared=comparison.compared)
        self._ledger.put(checkpoint)
        has_changed = completion.summarize(checkpoint) != completion.summarize(known)
        event = e.CheckpointCompared(at, order.attempt, order.save, fault)
        self._finish(at, checkpoint if has_changed else None, event)
