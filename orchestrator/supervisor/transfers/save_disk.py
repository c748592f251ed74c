"""What is done with saves on this machine's disk, in a thread: compared, moved out of the way, kept."""

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
from orchestrator.core.checkpoints import disk, formats, ledger, names, tree
from orchestrator.core.checkpoints.save import START, Place, Save, SaveState
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.supervisor.transfers.save_copies import has_same, on_host

BEGUN = 0
"""Stands for the number of a checkpoint whose folder has no file yet."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What was found of a checkpoint before an attempt: its comparison, its places, and what was moved out of the way, by the number of
    its checkpoint or `BEGUN`."""

    comparison: disk.Comparison | None
    places: tuple[Place, ...]
    moved: dict[int, list[tuple[str, str]]]


class Homes:
    """The folders in which a job's checkpoints lie: where `checkpoint.path` says, where its ranks start, and elsewhere."""

    def __init__(self, job: JobDir, plan: Plan) -> None:
        self.job = job
        self.named = tree.place_of(*plan.checkpoint_place(job))[0]
        self._there, self._glob = job.checkpoint_place(plan.checkpoint_glob)
        self._is_ssh = plan.ssh is not None
        self._is_named_by_hosts = Path(plan.checkpoint_glob).is_absolute()

    def are_copied(self, save: Save) -> bool:
        """Tell whether saves like this one come home from hosts that do not see the job folder; what lies at an absolute path
        does not, since hosts are taken to share it."""
        return self._is_ssh and (not self._is_named_by_hosts if save.is_named else save.area == START)

    def is_unseen(self, save: Save) -> bool:
        """Tell whether a checkpoint lies on a disk that hosts see and this machine does not."""
        return self._is_ssh and not self.are_copied(save) and not os.path.lexists(self.of(save) / save.main)

    def of(self, save: Save) -> Path:
        """Return the folder that the names of a checkpoint are relative to."""
        if save.is_named:
            return self.named
        return self.job.code if save.area == START else Path(save.area)

    def stated_step(self, name: str) -> int:
        """Return the step that a file, or its name, or that of its folder, states; `name`: as an agent reports it; 0 for none."""
        if not name:
            return 0
        path = self.job.code / name if name.startswith(START) else Path(name)
        with contextlib.suppress(OSError):
            stated = formats.read(path.parent, path.name, path.stat().st_size).step
            return stated or names.stated_step(path.name) or names.stated_step(path.parent.name) or 0
        return 0

    def of_host(self, name: str) -> Path:
        """Return where a file of the job's folder on a host belongs at home: what fits `checkpoint.path` comes into one folder,
        wherever ranks have it."""
        path = self.job.root / name
        own = str(path.relative_to(self._there)) if path.is_relative_to(self._there) else None
        return path if own is None or not tree.fits(own, self._glob) else self.named / own

    def has(self, save: Save) -> bool:
        """Tell whether a checkpoint lies in its folder on this machine."""
        return bool(save.places) and not save.places[0].host and save.places[0].root == str(self.of(save))

    def owns(self, save: Save) -> bool:
        """Tell whether a checkpoint lies in the job's own folder, also if links are followed."""
        path = os.path.realpath(self.of(save) / save.main)
        return Path(path).is_relative_to(os.path.realpath(self.job.root))


def before_attempt(
    homes: Homes, save: Save | None, kept: Path, saves: Iterable[Save], order: d.CompareSave
) -> Ready:
    """Move torn checkpoints of `saves` out of the way, but for files of a checkpoint that is as it was, and compare that; if it is not in
    its place, take what was kept of it, and put that back where its place is free."""
    comparison = disk.compare(save, deep=order.deep) if save is not None else None
    is_whole = comparison is not None and (not comparison.fault or comparison.is_unsure)
    stays = save if save is not None and is_whole and homes.has(save) else None
    moved = {
        one.number: disk.set_aside(homes.of(one), one)
        for one in movable(saves, order.attempt, homes)
        if stays is None or not has_same(stays, one)
    }
    if stays is not None and homes.owns(stays):
        moved[BEGUN] = disk.set_aside_begun(homes.of(stays), stays, order.attempt)
    if save is None or comparison is None:
        return Ready(None, (), moved)
    if not comparison.fault or not kept.is_dir():
        return Ready(comparison, save.places, moved)
    place = Place("", str(kept))
    own = disk.compare(dataclasses.replace(save, places=(place,)), deep=order.deep)
    if own.fault:
        return Ready(comparison, save.places, moved)
    try:
        is_back = disk.put_back(save, kept, Path(save.places[0].root))
    except OSError:
        is_back = False
    return Ready(own, save.places if is_back else (place, *save.places), moved)


class DiskThread:
    """One thread for what takes time on a disk; what follows is done where `finish` is called."""

    def __init__(self, wake: Wake) -> None:
        """`wake` is called, from the thread, when `finish` has something to do."""
        self._wake = wake
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saves")
        self._tasks: list[tuple[Future[Any], Callable[[float, Any], None]]] = []

    def later(
        self, work: Callable[[], Any], then: Callable[[float, Any], None] = lambda _at, _: None
    ) -> None:
        """Do `work` in the thread, after all before it, and `then` with the time and its result."""
        future = self._pool.submit(work)
        self._tasks.append((future, then))
        future.add_done_callback(lambda _: self._wake())

    def finish(self, at: float) -> None:
        """Do what follows from work that is done."""
        for future, then in [pair for pair in self._tasks if pair[0].done()]:
            self._tasks.remove((future, then))
            then(at, future.result())

    def close(self) -> None:
        """End the thread, once what it has begun is done."""
        self._pool.shutdown(wait=False)


class Keeper:
    """Keeps the last complete checkpoint against its script, in `folder/NUMBER`."""

    def __init__(self, homes: Homes, folder: Path, thread: DiskThread, notes: list[str]) -> None:
        """`notes`: what people are to be told is appended there."""
        self._homes, self._folder, self._thread = homes, folder, thread
        self._notes, self._is_noted = notes, False
        # Of the files of the last checkpoint, by key and attempt
        self._inodes: dict[tuple[str, int], dict[str, int]] = {}

    def place(self, number: int) -> Path:
        """Return where a checkpoint is kept, if it is."""
        return self._folder / str(number)

    def keep(self, save: Save) -> None:
        """Keep a checkpoint; once it is kept, others are not any more. One that is written once and lies on another disk is not copied."""
        root = self._homes.of(save)
        try:
            found = {piece.name: (root / piece.name).stat() for piece in save.pieces}
            is_near = all(one.st_dev == self._folder.parent.stat().st_dev for one in found.values())
        except OSError:
            return
        if not save.is_named and not save.is_slot and not is_near:
            return
        inodes = {name: one.st_ino for name, one in found.items()}
        # A script that renames new files into place leaves the old ones to their links; in an earlier attempt it was us.
        before = self._inodes.get((save.key, save.attempt), {})
        copies = save.is_slot and any(before.get(name, inode) == inode for name, inode in inodes.items())
        self._inodes = {(save.key, save.attempt): inodes}

        def keep() -> bool:
            """Tell whether the disk has too little room."""
            try:
                older = self._kept(save.number)
                place = self.place(save.number)
                is_kept = all(disk.is_as_recorded(place, piece) for piece in save.pieces)
                if is_kept or disk.keep(save, place, copies=copies, older=older):
                    self._drop(save.number)
            except OSError as err:
                return full_disk.is_full(err)  # else it is written again
            return False

        def note(_: float, is_full: bool) -> None:
            if is_full and not self._is_noted:
                self._is_noted = True
                what = "is not kept: the disk is too full, and a script that dies while it overwrites it loses it"
                self._notes.append(f"{save.main} {what}")

        self._thread.later(keep, note)

    def copy(self, save: Save, then: Callable[[float, bool], None]) -> None:
        """Copy a checkpoint that its script will write over at any moment, and call `then` with the time and whether that was in time."""

        def copied() -> bool:
            with contextlib.suppress(OSError):
                return disk.keep(save, self.place(save.number), copies=True, older=self._kept(save.number))
            return False

        self._thread.later(copied, then)

    def end(self, newest: Save) -> None:
        """The job has ended: what is kept beside a checkpoint that is in its place goes. All of it is done in the thread, which
        outlives the loop: what stayed would undo that a person deletes the newest checkpoint to go back."""
        self._thread.later(
            lambda: self._drop(newest.number if disk.compare(newest, deep=False).fault else None)
        )

    def _drop(self, before: int | None) -> None:
        """Delete what is kept of checkpoints before this one, of all for None: a newer one may have been kept meanwhile."""
        for kept in self._kept(before):
            disk.remove(kept)

    def _kept(self, before: int | None) -> list[Path]:
        """Return the folders of what is kept of checkpoints before this one, of all for None."""
        with contextlib.suppress(OSError):
            numbers = [(path.name.partition(".")[0], path) for path in self._folder.iterdir()]
            return [
                path for name, path in numbers if before is None or (name.isdecimal() and int(name) < before)
            ]
        return []


def movable(saves: Iterable[Save], attempt: int, homes: Homes) -> list[Save]:
    """Return the torn checkpoints of an attempt that may be moved out of the way. What a person has adopted since stays; so does what is
    outside of the job's folder, unless its names are new since that attempt, and no other job saves there."""
    known = list(saves)
    proved = {piece.stamp for save in known if save.state is SaveState.WHOLE for piece in save.pieces}
    torn = [save for save in known if save.state is SaveState.TORN and save.attempt == attempt]
    return [
        save
        for save in torn
        if homes.has(save)
        and save.is_damaged
        and not proved.issuperset(piece.stamp for piece in save.pieces)
        and (homes.owns(save) or (not save.is_named and save.is_new and not sharers(homes, save)))
    ]


def torn_on(saves: Collection[Save], node: str, attempt: int, homes: Homes, hosts: int) -> tuple[Save, ...]:
    """Return the torn checkpoints of an attempt that are to be moved out of the way on a host: several hosts that each have their own disk
    are to find the same there."""
    torn = [save for save in saves if save.state is SaveState.TORN and save.attempt == attempt]
    there = [on_host(save, node) for save in torn if save.is_damaged or hosts > 1]
    return (*filter(None, there), *filter(homes.is_unseen, movable(saves, attempt, homes)))


def out_of_sight(saves: Iterable[Save], lost: Save, node: str) -> list[Save]:
    """Return the complete checkpoints that a node does not see, as it lacks `lost`: another host wrote all of them, where its script chose.
    They are given up."""
    is_theirs, why = (
        not lost.is_named and lost.host not in ("", node),
        f"it is on {lost.host}, and {node} cannot see it",
    )
    like = lost.host, lost.area, SaveState.WHOLE
    return [
        dataclasses.replace(save, state=SaveState.DISTRUSTED, why=why)
        for save in saves
        if is_theirs and (save.host, save.area, save.state) == like
    ]


def sharers(homes: Homes, save: Save) -> list[str]:
    """Return the jobs of this job home that are not over and save in the folder of a checkpoint, too."""
    folder, found = os.path.realpath((homes.of(save) / save.main).parent), []
    for root in sorted(homes.job.root.parent.glob("[!.]*")):
        other = JobDir(root)
        if root == homes.job.root or other.ended.exists():
            continue
        with contextlib.suppress(OSError):
            saves, _ = ledger.read(root, other.ledger)
            if any(
                one.places and os.path.realpath(Path(one.path).parent) == folder for one in saves.values()
            ):
                found.append(other.id)
    return found
