"""Adoption of checkpoints that are not in the ledger: lists files that look like checkpoints, and enters one that the user names.

No attempt resumes from files that are only found. `adopt` reads all of their bytes, and records their sha256.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.checkpoints import disk, formats, ledger, names, reading, tree
from orchestrator.core.checkpoints.save import (
    Closing,
    Content,
    GroupReading,
    Piece,
    Place,
    Save,
    SaveState,
    StepSource,
)
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import home, locks, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan

LIST = "orch checkpoints lists the checkpoints"


@dataclass(frozen=True, slots=True)
class Offer:
    """A group of files that looks like a checkpoint and is not in the ledger. `root`: what the names of its files are relative
    to."""

    root: Path
    group: names.Group
    pieces: tuple[Piece, ...]
    reading: GroupReading

    @property
    def path(self) -> Path:
        """The path for ORCH_RESUME_FROM."""
        return self.root / self.group.main

    @property
    def written_ns(self) -> int:
        return max(piece.mtime_ns for piece in self.pieces)

    @property
    def fault(self) -> str:
        """Why it is not complete; empty if no fault was found."""
        return reading.fault(self.reading, {piece.name: piece.size_bytes for piece in self.pieces})


def offers(job: JobDir, plan: Plan, saves: Mapping[int, Save]) -> list[Offer]:
    """Return the files at `checkpoint.path` that look like checkpoints and are not in the ledger, the newest last; none while the job runs,
    because its supervisor enters what its ranks save."""
    if not _is_over(job):
        return []
    root, glob = tree.place_of(*plan.checkpoint_place(job))
    if root.is_relative_to(job.code):
        return []  # checkpoints from the snapshot look the same
    known = {
        f"{folder}/{piece.name}": piece.size_bytes
        for save in saves.values()
        for folder in [*(place.root for place in save.places), *(part.root for part in save.parts)]
        for piece in save.pieces
    }
    told = {piece.name for save in saves.values() for piece in save.pieces}
    found, offered = tree.look(root, glob), []
    for group in names.group(found.files).values():
        own = {f"{root}/{name}": found.files[name].size_bytes for name in group.names}
        if own.items() <= known.items() or not any(map(names.is_save_file, group.names)):
            continue
        offer = _offer(root, group, found.files, found.pointed)
        is_told = bool(offer.fault) and not told.isdisjoint(
            group.names
        )  # it lies beside the checkpoint that it belongs to
        if offer.reading.content not in (Content.PART, Content.OTHER) and not is_told:
            offered.append(offer)
    return sorted(offered, key=lambda offer: offer.written_ns)


def _is_over(job: JobDir) -> bool:
    """Tell whether a job has ended; its supervisor may still be running."""
    if job.ended.exists():
        return True
    with contextlib.suppress(OSError, OrchError):
        return status_file.read(job, time.time()).state in status_file.ENDED
    return False


def _offer(root: Path, group: names.Group, files: Mapping[str, Piece], pointed: Collection[str]) -> Offer:
    pieces = tuple(files[name] for name in sorted(group.names))
    return Offer(root, group, pieces, reading.read(root, group, files, pointed, trusts_times=True))


# Adoption


def adopt(job: JobDir, plan: Plan, path: Path) -> Save:
    """Enter files as a complete checkpoint in the ledger. Raises UserError for files that are not one, or while
    a supervisor is running; ClusterError."""
    home.require_ours(job)
    with contextlib.suppress(OSError):  # a disk without locks
        if not _is_over(job) and locks.is_held(job.lock):
            raise _at_work(job)  # before hours of reading
    offer = _offer_at(job, plan, path)
    fault = offer.fault or next(filter(None, (_damage(offer.root, piece) for piece in offer.pieces)), "")
    if fault:
        raise unfit(str(path), fault)
    try:
        pieces = disk.hashed(offer.root, offer.pieces)
    except OSError as err:
        raise UserError(f"cannot be read: {err.strerror}", str(path), "make it readable") from err
    if pieces is None:
        raise UserError("is still being written", str(path), "try again when it is written")
    with locks.locked(job) as is_mine:  # the supervisor is the writer of the ledger
        if not is_mine:
            raise _at_work(job)
        try:
            book = ledger.Ledger(job.root, job.ledger)
            save = _adopted(offer, pieces, book.next_number, plan)
            book.put(save)
            book.flush()
        except OSError as err:
            raise ClusterError(
                f"cannot be written: {err.strerror}", str(job.ledger), "free some space there"
            ) from err
    return save


def unfit(where: str, why: str) -> UserError:
    """Return the error for something that is not a usable checkpoint."""
    return UserError(f"is not a checkpoint to resume from: {why}", where, LIST)


def _at_work(job: JobDir) -> UserError:
    return UserError("its supervisor is still running", job.id, "resume from it after the job has ended")


def _damage(root: Path, piece: Piece) -> str:
    fault, _ = formats.damage(root, piece.name, piece.size_bytes)
    return f"{piece.name} {fault}" if fault else ""


def _adopted(offer: Offer, pieces: Sequence[Piece], number: int, plan: Plan) -> Save:
    state = offer.reading
    ranks = max((len(own) for own in names.ranks_in(offer.group.names).values()), default=0)
    content = Content.STATE if state.content in (Content.PART, Content.OTHER) else state.content
    return Save(
        number=number, key=offer.group.key, series=offer.group.series, main=offer.group.main, attempt=0,
        world_size=0 if state.fits_any_size else ranks or plan.world_size, steps=0, format=state.format, content=content,
        fits_any_size=state.fits_any_size, state=SaveState.WHOLE, closed_by=Closing.ADOPTED, step=state.step,
        step_source=StepSource.UNKNOWN if state.step is None else StepSource.STATED, stated=state.step,
        written_ns=offer.written_ns, pieces=tuple(pieces), places=(Place("", str(offer.root)),),
        compared="sha256", cites=state.cites,
    )  # fmt: skip


def _offer_at(job: JobDir, plan: Plan, path: Path) -> Offer:
    """Return the group of files at a path. Raises UserError."""
    place, _ = tree.place_of(*plan.checkpoint_place(job))
    if any(own.resolve().is_relative_to(path.resolve()) for own in (job.checkpoints, place)):
        raise unfit(str(path), "it is the folder of the job's checkpoints")
    root = next((own for own in (place, job.checkpoints) if path.is_relative_to(own)), None)
    if root is None and plan.ssh is not None and path.is_relative_to(job.root):
        raise UserError(
            "it is not copied to the hosts from there", str(path), f"copy it into {job.checkpoints}"
        )
    if root is not None:
        found = tree.look(root)
        return _offer_of(path, root, found.files, found.pointed)
    folder = path if path.is_dir() else path.parent
    found, top = tree.look(folder), f"{folder.name}/"
    files = {top + name: dataclasses.replace(piece, name=top + name) for name, piece in found.files.items()}
    offer = _offer_of(path, folder.parent, files, {top + name for name in found.pointed})
    if offer.group.is_folder:
        return offer
    return _offer_of(path, folder, found.files, found.pointed)


def _offer_of(path: Path, root: Path, files: Mapping[str, Piece], pointed: Collection[str]) -> Offer:
    """Return the group of files at a path, out of all below a folder. Raises UserError."""
    group = _group_at(str(path.relative_to(root)), files)
    if group is None or not any(map(names.is_save_file, group.names)):
        raise unfit(str(path), "it has no file with an extension of checkpoints, such as .pt or .safetensors")
    return _offer(root, group, files, pointed)


def _group_at(wanted: str, files: Mapping[str, Piece]) -> names.Group | None:
    """Return the group of a name; of another folder all files below it. Raises UserError if these are
    several checkpoints."""
    groups = names.group(files).values()
    found = next((group for group in groups if wanted in (group.main, *group.names)), None)
    own = sorted(name for name in files if name.startswith(f"{wanted}/"))
    if found is not None or not own:
        return found
    inner = [group.main for group in groups if group.main.startswith(f"{wanted}/") and not group.is_slot]
    if len(inner) > 1:
        raise UserError(f"contains {len(inner)} checkpoints, such as {inner[-1]}", wanted, "name one of them")
    return names.Group(wanted, wanted, wanted, True, (), "", own)
