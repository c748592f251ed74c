"""Pruning of checkpoints: deletes those that `checkpoint.keep` does not keep, here and on the hosts that wrote them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace

from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState
from orchestrator.core.checkpoints.resume_choice import find_expendable
from orchestrator.core.jobdir.plan import Plan
from orchestrator.supervisor.transfers.checkpoint_disk import DiskThread, LocalCheckpointFolders


class CheckpointPruner:
    """Prunes the checkpoints of one job; without `checkpoint.keep` it keeps all."""

    def __init__(
        self,
        plan: Plan,
        folders: LocalCheckpointFolders,
        thread: DiskThread,
        notes: list[str],
        enter_pruned: Callable[[float, Checkpoint], None],
    ) -> None:
        """`enter_pruned` enters a checkpoint that was deleted here; `notes`: messages for people are appended there."""
        self._keep, self._keep_every = plan.checkpoint_keep, plan.checkpoint_keep_every
        self._folders, self._thread, self._notes, self._enter_pruned = folders, thread, notes, enter_pruned
        self._begun: set[int] = set()

    def prune(self, checkpoints: Collection[Checkpoint], newest: Checkpoint | None) -> None:
        """Begin to delete what is not kept, as far as it lies in the job's own folder."""
        if self._keep is None:
            return
        for checkpoint in find_expendable(checkpoints, self._keep, self._keep_every, newest):
            is_own = checkpoint.is_named or self._folders.is_in_job_folder(checkpoint)
            if checkpoint.number not in self._begun and is_own and self._folders.is_in_place(checkpoint):
                self._begun.add(checkpoint.number)
                delete = functools.partial(disk.delete_checkpoint, checkpoint, self._folders.folder(checkpoint))
                self._thread.submit(delete, functools.partial(self._finish, checkpoint))

    def _finish(self, checkpoint: Checkpoint, at: float, why: str) -> None:
        if why:
            self._notes.append(f"{checkpoint.main} was not deleted, though checkpoint.keep is {self._keep}: {why}")
        else:
            self._enter_pruned(at, replace(checkpoint, state=CheckpointState.PRUNED, why="checkpoint.keep"))
