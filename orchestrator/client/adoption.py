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

from orchestrator.core.checkpoints import disk, file_groups, formats, ledger, tree, validation
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointFile,
    CheckpointState,
    CompletionReason,
    Content,
    FileLocation,
    GroupReading,
    StepSource,
)
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import home, locks, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan

LIST_HINT = "orch checkpoints lists the checkpoints"


@dataclass(frozen=True, slots=True)
class AdoptableCheckpoint:
    """A group of files that looks like a checkpoint and is not in the ledger. `root`: what the names of its files are relative
    to."""

    root: Path
    group: file_groups.FileGroup
    pieces: tuple[CheckpointFile, ...]
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
        return validation.find_fault(self.reading, {piece.name: piece.size_bytes for piece in self.pieces})


def find_adoptable(job: JobDir, plan: Plan, checkpoints: Mapping[int, Checkpoint]) -> list[AdoptableCheckpoint]:
    """Return the files at `checkpoint.path` that look like checkpoints and are not in the ledger, the newest last; none while the job runs,
    because its supervisor enters what its ranks save."""
    if not _has_ended(job):
        return []
    root, glob = tree.split_glob(*plan.checkpoint_location(job))
    if root.is_relative_to(job.code):
        return []  # checkpoints from the snapshot look the same
    ledger_sizes = {
        f"{folder}/{piece.name}": piece.size_bytes
        for checkpoint in checkpoints.values()
        for folder in [*(place.root for place in checkpoint.locations), *(part.root for part in checkpoint.parts)]
        for piece in checkpoint.files
    }
    ledger_names = {piece.name for checkpoint in checkpoints.values() for piece in checkpoint.files}
    scan, adoptable = tree.scan(root, glob), []
    for group in file_groups.group_files(scan.files).values():
        sizes = {f"{root}/{name}": scan.files[name].size_bytes for name in group.names}
        if sizes.items() <= ledger_sizes.items() or not any(map(file_groups.is_checkpoint_file, group.names)):
            continue
        candidate = _make_adoptable(root, group, scan.files, scan.pointed)
        is_listed = bool(candidate.fault) and not ledger_names.isdisjoint(
            group.names
        )  # it lies beside the checkpoint that it belongs to
        if candidate.reading.content not in (Content.PART, Content.OTHER) and not is_listed:
            adoptable.append(candidate)
    return sorted(adoptable, key=lambda offer: offer.written_ns)


def _has_ended(job: JobDir) -> bool:
    """Return whether a job has ended; its supervisor may still be running."""
    if job.ended.exists():
        return True
    with contextlib.suppress(OSError, OrchError):
        return status_file.read(job, time.time()).state in status_file.ENDED
    return False


def _make_adoptable(
    root: Path, group: file_groups.FileGroup, files: Mapping[str, CheckpointFile], pointed: Collection[str]
) -> AdoptableCheckpoint:
    pieces = tuple(files[name] for name in sorted(group.names))
    return AdoptableCheckpoint(
        root, group, pieces, validation.read_group(root, group, files, pointed, trusts_times=True)
    )


# Adoption


def adopt(job: JobDir, plan: Plan, path: Path) -> Checkpoint:
    """Enter files as a complete checkpoint in the ledger. Raises UserError for files that are not one, or while
    a supervisor is running; ClusterError."""
    home.require_own_job(job)
    with contextlib.suppress(OSError):  # a disk without locks
        if not _has_ended(job) and locks.is_held(job.lock):
            raise _supervisor_running_error(job)  # before hours of reading
    candidate = _find_adoptable_at(job, plan, path)
    fault = candidate.fault or next(
        filter(None, (_find_damage(candidate.root, piece) for piece in candidate.pieces)), ""
    )
    if fault:
        raise unusable_error(str(path), fault)
    try:
        pieces = disk.hash_files(candidate.root, candidate.pieces)
    except OSError as err:
        raise UserError(f"cannot be read: {err.strerror}", str(path), "make it readable") from err
    if pieces is None:
        raise UserError("is still being written", str(path), "try again when it is written")
    with locks.hold(job.lock) as is_mine:  # the supervisor is the writer of the ledger
        if not is_mine:
            raise _supervisor_running_error(job)
        try:
            ledger_file = ledger.Ledger(job.root, job.ledger)
            checkpoint = _to_checkpoint(candidate, pieces, ledger_file.next_number, plan)
            ledger_file.put(checkpoint)
            ledger_file.flush()
        except OSError as err:
            raise ClusterError(f"cannot be written: {err.strerror}", str(job.ledger), "free some space there") from err
    return checkpoint


def unusable_error(where: str, why: str) -> UserError:
    """Return the error for something that is not a usable checkpoint."""
    return UserError(f"is not a checkpoint to resume from: {why}", where, LIST_HINT)


def _supervisor_running_error(job: JobDir) -> UserError:
    return UserError("its supervisor is still running", job.id, "resume from it after the job has ended")


def _find_damage(root: Path, piece: CheckpointFile) -> str:
    fault, _ = formats.find_damage(root, piece.name, piece.size_bytes)
    return f"{piece.name} {fault}" if fault else ""


def _to_checkpoint(offer: AdoptableCheckpoint, pieces: Sequence[CheckpointFile], number: int, plan: Plan) -> Checkpoint:
    state = offer.reading
    ranks = max((len(own) for own in file_groups.find_ranks(offer.group.names).values()), default=0)
    content = Content.STATE if state.content in (Content.PART, Content.OTHER) else state.content
    return Checkpoint(
        number=number, key=offer.group.key, series=offer.group.series, main=offer.group.main, attempt=0,
        world_size=0 if state.fits_any_size else ranks or plan.world_size, steps=0, format=state.format, content=content,
        fits_any_size=state.fits_any_size, state=CheckpointState.WHOLE, closed_by=CompletionReason.ADOPTED, step=state.step,
        step_source=StepSource.UNKNOWN if state.step is None else StepSource.STATED, stated=state.step,
        written_ns=offer.written_ns, files=tuple(pieces), locations=(FileLocation("", str(offer.root)),),
        compared="sha256", cites=state.cites,
    )  # fmt: skip


def _find_adoptable_at(job: JobDir, plan: Plan, path: Path) -> AdoptableCheckpoint:
    """Return the group of files at a path. Raises UserError."""
    place, _ = tree.split_glob(*plan.checkpoint_location(job))
    if any(own.resolve().is_relative_to(path.resolve()) for own in (job.checkpoints, place)):
        raise unusable_error(str(path), "it is the folder of the job's checkpoints")
    root = next((own for own in (place, job.checkpoints) if path.is_relative_to(own)), None)
    if root is None and plan.ssh is not None and path.is_relative_to(job.root):
        raise UserError("it is not copied to the hosts from there", str(path), f"copy it into {job.checkpoints}")
    if root is not None:
        scan = tree.scan(root)
        return _find_adoptable_in(path, root, scan.files, scan.pointed)
    folder = path if path.is_dir() else path.parent
    scan, prefix = tree.scan(folder), f"{folder.name}/"
    files = {prefix + name: dataclasses.replace(piece, name=prefix + name) for name, piece in scan.files.items()}
    offer = _find_adoptable_in(path, folder.parent, files, {prefix + name for name in scan.pointed})
    return offer if offer.group.is_folder else _find_adoptable_in(path, folder, scan.files, scan.pointed)


def _find_adoptable_in(
    path: Path, root: Path, files: Mapping[str, CheckpointFile], pointed: Collection[str]
) -> AdoptableCheckpoint:
    """Return the group of files at a path, out of all below a folder. Raises UserError."""
    group = _find_group(str(path.relative_to(root)), files)
    if group is None or not any(map(file_groups.is_checkpoint_file, group.names)):
        raise unusable_error(str(path), "it has no file with an extension of checkpoints, such as .pt or .safetensors")
    return _make_adoptable(root, group, files, pointed)


def _find_group(relative_path: str, files: Mapping[str, CheckpointFile]) -> file_groups.FileGroup | None:
    """Return the group of a name; of another folder all files below it. Raises UserError if these are
    several checkpoints."""
    groups = file_groups.group_files(files).values()
    exact = next((group for group in groups if relative_path in (group.main, *group.names)), None)
    files_below = sorted(name for name in files if name.startswith(f"{relative_path}/"))
    if exact is not None or not files_below:
        return exact
    inner = [group.main for group in groups if group.main.startswith(f"{relative_path}/") and not group.is_overwritten]
    if len(inner) > 1:
        raise UserError(f"contains {len(inner)} checkpoints, such as {inner[-1]}", relative_path, "name one of them")
    return file_groups.FileGroup(relative_path, relative_path, relative_path, True, (), "", files_below)


def row(offer: AdoptableCheckpoint) -> Json:
    """Return an adoptable checkpoint as `orch checkpoints --json` prints it."""
    return {
        "save": None,
        "path": str(offer.path),
        "main": offer.group.main,
        "attempt": None,
        "world_size": None,
        "step": offer.reading.step,
        "step_source": (StepSource.UNKNOWN if offer.reading.step is None else StepSource.STATED).value,
        "format": offer.reading.format.value,
        "content": offer.reading.content.value,
        "state": "offered",
        "why": offer.fault,
        "closed_by": "",
        "compared": "",
        "files": len(offer.pieces),
        "bytes": sum(piece.size_bytes for piece in offer.pieces),
        "written_at": status_file.iso(offer.written_ns / 1e9),
        "stall_s": None,
        "places": [],
        "exists": True,
        "complete": False,
        "safe": False,
        "safe_bytes": 0,
        "whole": None,
        "resume": False,
        "checkpoint_path": "",
    }
