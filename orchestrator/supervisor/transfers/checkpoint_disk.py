"""Checkpoints on this machine's disk: a thread compares, moves, keeps and deletes them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.backends.api import Wake
from orchestrator.brain.model import decisions as d
from orchestrator.core.checkpoints import disk, file_groups, formats, ledger, tree
from orchestrator.core.checkpoints.checkpoint import (
    START_PREFIX,
    Checkpoint,
    CheckpointState,
    FileLocation,
)
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.supervisor.transfers.checkpoint_copies import restrict_to_host, shares_files

EMPTY_CHECKPOINT = 0
"""In place of the number of a checkpoint whose folder has no file yet."""


@dataclass(frozen=True, slots=True)
class PreAttemptCheck:
    """Check of a checkpoint before an attempt: its comparison, its locations, and what was moved away, by the number of its
    checkpoint or `EMPTY_CHECKPOINT`."""

    comparison: disk.Comparison | None
    places: tuple[FileLocation, ...]
    moved: dict[int, list[tuple[str, str]]]


class LocalCheckpointFolders:
    """Folders of a job's checkpoints: that of `checkpoint.path`, the folder where its ranks start, and others."""

    def __init__(self, job: JobDir, plan: Plan) -> None:
        self.job = job
        self.checkpoint_folder = tree.split_glob(*plan.checkpoint_location(job))[0]
        self._pattern_folder, self._glob = job.checkpoint_location(plan.checkpoint_glob)
        self._is_ssh = plan.ssh is not None
        self._is_named_by_hosts = Path(plan.checkpoint_glob).is_absolute()

    def is_copied(self, checkpoint: Checkpoint) -> bool:
        """Return whether checkpoints like this one are fetched from hosts that do not see the job folder; those at an absolute path
        are not, since hosts are taken to share it."""
        return self._is_ssh and (
            not self._is_named_by_hosts if checkpoint.is_named else checkpoint.base_folder == START_PREFIX
        )

    def is_on_host_disk(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint is on a disk that hosts see and this machine does not."""
        return (
            self._is_ssh
            and not self.is_copied(checkpoint)
            and not os.path.lexists(self.folder(checkpoint) / checkpoint.main)
        )

    def folder(self, checkpoint: Checkpoint) -> Path:
        """Return the folder that the names of a checkpoint are relative to."""
        if checkpoint.is_named:
            return self.checkpoint_folder
        return self.job.code if checkpoint.base_folder == START_PREFIX else Path(checkpoint.base_folder)

    def stated_step(self, name: str) -> int:
        """Return the step in a file, in its name, or in that of its folder; `name`: as an agent reports it; 0 for none."""
        if not name:
            return 0
        path = self.job.code / name if name.startswith(START_PREFIX) else Path(name)
        with contextlib.suppress(OSError):
            stated = formats.read_file(path.parent, path.name, path.stat().st_size).step
            return stated or file_groups.find_step(path.name) or file_groups.find_step(path.parent.name) or 0
        return 0

    def local_path(self, name: str) -> Path:
        """Return the local path of a file of the job's folder on a host: files that match `checkpoint.path` go into one folder,
        wherever the ranks have them."""
        path = self.job.root / name
        own = str(path.relative_to(self._pattern_folder)) if path.is_relative_to(self._pattern_folder) else None
        return path if own is None or not tree.matches_glob(own, self._glob) else self.checkpoint_folder / own

    def is_in_place(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint is in its folder on this machine."""
        return (
            bool(checkpoint.locations)
            and not checkpoint.locations[0].host
            and checkpoint.locations[0].root == str(self.folder(checkpoint))
            and not (checkpoint.state is CheckpointState.WHOLE and checkpoint.locations[0].names)
        )

    def is_in_job_folder(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint is in the job's own folder, also if links are followed."""
        path = os.path.realpath(self.folder(checkpoint) / checkpoint.main)
        return Path(path).is_relative_to(os.path.realpath(self.job.root))


def check_before_attempt(
    homes: LocalCheckpointFolders,
    checkpoint: Checkpoint | None,
    kept: Path,
    checkpoints: Iterable[Checkpoint],
    order: d.CompareCheckpoint,
) -> PreAttemptCheck:
    """Move torn checkpoints of `checkpoints` away, except for files of the unchanged checkpoint `checkpoint`, and compare that one; if it is
    not in its place, use its kept copy, and put that back if its place is free."""
    comparison = disk.compare(checkpoint, deep=order.deep) if checkpoint is not None else None
    is_whole = comparison is not None and (not comparison.fault or comparison.is_unsure)
    unchanged = checkpoint if checkpoint is not None and is_whole and homes.is_in_place(checkpoint) else None
    moved = {
        one.number: disk.quarantine(homes.folder(one), one)
        for one in find_movable(checkpoints, order.attempt, homes)
        if unchanged is None or not shares_files(unchanged, one)
    }
    if unchanged is not None and homes.is_in_job_folder(unchanged):
        moved[EMPTY_CHECKPOINT] = disk.quarantine_unfinished(homes.folder(unchanged), unchanged, order.attempt)
    if checkpoint is None or comparison is None:
        return PreAttemptCheck(None, (), moved)
    if not comparison.fault or not kept.is_dir():
        return PreAttemptCheck(comparison, checkpoint.locations, moved)
    place = FileLocation("", str(kept))
    kept_comparison = disk.compare(dataclasses.replace(checkpoint, locations=(place,)), deep=order.deep)
    if kept_comparison.fault:
        return PreAttemptCheck(comparison, checkpoint.locations, moved)
    try:
        is_back = disk.restore(checkpoint, kept, Path(checkpoint.locations[0].root))
    except OSError:
        is_back = False
    return PreAttemptCheck(kept_comparison, checkpoint.locations if is_back else (place, *checkpoint.locations), moved)


class DiskThread:
    """One thread for slow work on the disk; callbacks run in the thread that calls `run_callbacks`."""

    def __init__(self, wake: Wake) -> None:
        """`wake` is called, from the thread, when `finish` has something to do."""
        self._wake = wake
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saves")
        self._tasks: list[tuple[Future[Any], Callable[[float, Any], None]]] = []

    def submit(self, work: Callable[[], Any], then: Callable[[float, Any], None] = lambda _at, _: None) -> None:
        """Run `work` in the thread, in order; then call `then` with the time and its result."""
        future = self._pool.submit(work)
        self._tasks.append((future, then))
        future.add_done_callback(lambda _: self._wake())

    def run_callbacks(self, at: float) -> None:
        """Run the callbacks of finished work."""
        for future, then in [pair for pair in self._tasks if pair[0].done()]:
            self._tasks.remove((future, then))
            then(at, future.result())

    def close(self) -> None:
        """End the thread, once what it has begun is done."""
        self._pool.shutdown(wait=False)


class RetentionPolicy:
    """Keeps a copy of the last complete checkpoint in `folder/NUMBER`, in case its script overwrites or deletes it."""

    def __init__(self, homes: LocalCheckpointFolders, folder: Path, thread: DiskThread, notes: list[str]) -> None:
        """`notes`: messages for people are appended there."""
        self._homes, self._folder, self._thread = homes, folder, thread
        self._notes, self._is_noted = notes, False
        # Of the files of the last checkpoint, by key and attempt
        self._inodes: dict[tuple[str, int], dict[str, int]] = {}

    def kept_folder(self, number: int) -> Path:
        """Return the folder of a kept copy, if there is one."""
        return self._folder / str(number)

    def keep(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint; once it is kept, older copies are deleted. One that is written only once and is on another disk is not
        copied."""
        root = self._homes.folder(checkpoint)
        try:
            stats = {piece.name: (root / piece.name).stat() for piece in checkpoint.files}
            is_near = all(one.st_dev == self._folder.parent.stat().st_dev for one in stats.values())
        except OSError:
            return
        if not checkpoint.is_named and not checkpoint.is_overwritten and not is_near:
            return
        inodes = {name: one.st_ino for name, one in stats.items()}
        # If a script renames new files into place, our links keep the old ones; in an earlier attempt orch may have renamed them.
        previous_inodes = self._inodes.get((checkpoint.key, checkpoint.attempt), {})
        copies = checkpoint.is_overwritten and any(
            previous_inodes.get(name, inode) == inode for name, inode in inodes.items()
        )
        self._inodes = {(checkpoint.key, checkpoint.attempt): inodes}

        def keep() -> bool:
            """Return whether the disk is full."""
            try:
                older = self._list_kept(checkpoint.number)
                place = self.kept_folder(checkpoint.number)
                is_kept = all(disk.matches_record(place, piece) for piece in checkpoint.files)
                if is_kept or disk.keep_copy(checkpoint, place, copies=copies, older=older):
                    self._delete_before(checkpoint.number)
            except OSError as err:
                return full_disk.is_full(err)  # else it is written again
            return False

        def note_full_disk(_: float, is_full: bool) -> None:
            if is_full and not self._is_noted:
                self._is_noted = True
                what = "is not kept: the disk is too full, and a script that dies while it overwrites it loses it"
                self._notes.append(f"{checkpoint.main} {what}")

        self._thread.submit(keep, note_full_disk)

    def copy(self, checkpoint: Checkpoint, then: Callable[[float, bool], None]) -> None:
        """Copy a checkpoint that its script may overwrite at any moment, and call `then` with the time and whether the copy is good."""

        def copied() -> bool:
            with contextlib.suppress(OSError):
                return disk.keep_copy(
                    checkpoint,
                    self.kept_folder(checkpoint.number),
                    copies=True,
                    older=self._list_kept(checkpoint.number),
                )
            return False

        self._thread.submit(copied, then)

    def delete_kept(self, newest: Checkpoint) -> None:
        """Delete kept copies at the end of the job, if the newest checkpoint is in its place: a copy that stayed would come back
        after a person deletes the newest checkpoint to go back to an older one. The thread outlives the loop."""
        self._thread.submit(
            lambda: self._delete_before(newest.number if disk.compare(newest, deep=False).fault else None)
        )

    def _delete_before(self, before: int | None) -> None:
        """Delete kept copies of checkpoints before this one, all for None: a newer one may have been kept meanwhile."""
        for kept in self._list_kept(before):
            disk.remove_folder(kept)

    def _list_kept(self, before: int | None) -> list[Path]:
        """Return the folders of kept copies of checkpoints before this one, all for None."""
        with contextlib.suppress(OSError):
            numbers = [(path.name.partition(".")[0], path) for path in self._folder.iterdir()]
            return [path for name, path in numbers if before is None or (name.isdecimal() and int(name) < before)]
        return []


def find_movable(checkpoints: Iterable[Checkpoint], attempt: int, homes: LocalCheckpointFolders) -> list[Checkpoint]:
    """Return the torn checkpoints of an attempt that may be moved away. Those that a person has adopted since stay; so do those
    outside of the job's folder, unless their names are new since that attempt, and no other job saves there."""
    known = list(checkpoints)
    proved = {
        piece.stamp for checkpoint in known if checkpoint.state is CheckpointState.WHOLE for piece in checkpoint.files
    }
    torn = [
        checkpoint for checkpoint in known if checkpoint.state is CheckpointState.TORN and checkpoint.attempt == attempt
    ]
    return [
        checkpoint
        for checkpoint in torn
        if homes.is_in_place(checkpoint)
        and checkpoint.is_damaged
        and not proved.issuperset(piece.stamp for piece in checkpoint.files)
        and (
            homes.is_in_job_folder(checkpoint)
            or (not checkpoint.is_named and checkpoint.is_new and not find_sharing_jobs(homes, checkpoint))
        )
    ]


def find_torn_on_host(
    checkpoints: Collection[Checkpoint], node: str, attempt: int, homes: LocalCheckpointFolders, hosts: int
) -> tuple[Checkpoint, ...]:
    """Return the torn checkpoints of an attempt that are to be moved away on a host: hosts with disks of their own must all find
    the same."""
    torn = [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.state is CheckpointState.TORN and checkpoint.attempt == attempt
    ]
    on_node = [restrict_to_host(checkpoint, node) for checkpoint in torn if checkpoint.is_damaged or hosts > 1]
    return (*filter(None, on_node), *filter(homes.is_on_host_disk, find_movable(checkpoints, attempt, homes)))


def distrust_invisible(checkpoints: Iterable[Checkpoint], lost: Checkpoint, node: str) -> list[Checkpoint]:
    """Return, as distrusted, the complete checkpoints that a node does not see, as it lacks `lost`: another host wrote all of
    them, where its script chose."""
    is_host_only, why = (
        not lost.is_named and lost.host not in ("", node),
        f"it is on {lost.host}, and {node} cannot see it",
    )
    like = lost.host, lost.base_folder, CheckpointState.WHOLE
    return [
        dataclasses.replace(checkpoint, state=CheckpointState.DISTRUSTED, why=why)
        for checkpoint in checkpoints
        if is_host_only and (checkpoint.host, checkpoint.base_folder, checkpoint.state) == like
    ]


def find_sharing_jobs(homes: LocalCheckpointFolders, checkpoint: Checkpoint) -> list[str]:
    """Return the running jobs of this job home that save in the folder of a checkpoint, too."""
    folder, jobs = os.path.realpath((homes.folder(checkpoint) / checkpoint.main).parent), []
    for root in sorted(homes.job.root.parent.glob("[!.]*")):
        other = JobDir(root)
        if root == homes.job.root or other.ended.exists():
            continue
        with contextlib.suppress(OSError):
            checkpoints, _ = ledger.read(root, other.ledger)
            if any(one.locations and os.path.realpath(Path(one.path).parent) == folder for one in checkpoints.values()):
                jobs.append(other.id)
    return jobs
