"""Requests to a running job: cancel, restart, resume, inspect, a lost allocation. One numbered file each in the job folder.

A file is written once and never changed. It outlives every process, so the next supervisor reads it if the last one
died. The number is the order; a file that is not a request is skipped.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import full_disk, home, ownership
from orchestrator.core.jobdir.durable import replace_text, sync_folder
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.status_types import AllocationEndCause

NUMBER_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class JobRequest:
    """One request, as its file holds it."""

    number: int
    # cancel, restart, resume, look or allocation_ended
    action: str
    # When it was written, in seconds since the epoch, by the clock of the disk.
    written_s: float
    # Of a resume: the number of the checkpoint to resume from, 0 for the newest.
    save: int
    # Of an allocation that has ended: Slurm's id (and restart count), and how it ended. An unknown cause is a failure.
    allocation: str
    cause: AllocationEndCause
    why: str


def send(folder: Path, action: str, **more: str) -> int:
    """Write a request and return its number; two at once get two numbers.

    `action`: cancel; restart; look, for an inspection; resume, with `save`, its number or 0; or allocation_ended, with
    `allocation`, `cause` (a value of `Cause`) and `why`. Raises UserError for another user's job and for a copy, and
    ClusterError when the disk refuses.
    """
    try:
        return _send(folder, action, more)
    except OSError as err:
        raise make_write_error(err, folder.parent) from err


def make_write_error(err: OSError, root: Path) -> OrchError:
    """Return the error for a file that could not be written into the job folder `root`."""
    fault = ownership.find_fault(root)
    if isinstance(err, PermissionError) and fault:
        return UserError.from_fault(fault)
    fix = "fix that file or folder, then try again"
    fix = f"make room in {root}, then try again" if full_disk.is_full(err) else fix
    return ClusterError(f"cannot be written: {err.strerror}", str(err.filename or root), fix)


def _send(folder: Path, what: str, fields: dict[str, str]) -> int:
    if fault := ownership.find_fault(folder.parent):
        raise UserError.from_fault(fault)
    home.require_original(JobDir(folder.parent))
    folder.mkdir(mode=0o755, exist_ok=True)
    if not ownership.is_own(folder):
        raise PermissionError(errno.EACCES, "other users can write to it", str(folder))
    part = folder / f".{os.urandom(6).hex()}.part"
    replace_text(part, codec.dumps_plain({"ask": what, **fields}))
    try:
        for number in range(max([number_of(path) for path in folder.glob("*.json")], default=0) + 1, NUMBER_MAX):
            try:
                os.link(part, folder / f"{number:06d}.json")
            except FileExistsError:
                continue
            sync_folder(folder)
            return number
    finally:
        part.unlink(missing_ok=True)
    what = f"no number is left for a request: the last is {NUMBER_MAX - 1}"
    raise ClusterError(what, str(folder), "delete the highest-numbered files there that orch did not write")


def withdraw(folder: Path, number: int) -> None:
    """Withdraw a request that was not met; its number stays used, since a supervisor may have read it."""
    replace_text(folder / f"{number:06d}.json", "withdrawn")


def number_of(path: Path) -> int:
    """Return the number in a request's file name; 0 for another file."""
    return int(path.stem) if re.fullmatch(r"[0-9]{1,6}", path.stem) else 0


def read_after(folder: Path, number: int) -> Iterator[JobRequest]:
    """Yield the requests after `number`, in order. Raises OSError when the folder cannot be listed or descriptors are out."""
    for path in _files(folder):
        if number_of(path) > number and (request := _read(path)) is not None:
            yield request


def read_latest(folder: Path) -> JobRequest | None:
    """Return the latest request; None when there is none or it cannot be read."""
    try:
        path = max(_files(folder), default=None)
        return _read(path) if path is not None else None
    except OSError:
        return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".json" and number_of(path))


def _read(path: Path) -> JobRequest | None:
    """Return one request, or None for any other file, which must not stop the job."""
    try:
        data = codec.loads_plain(ownership.read_regular(path))
        written_s = path.stat().st_mtime
    except codec.CodecError:
        return None
    except OSError as err:
        if full_disk.is_exhausted(err):
            raise
        return None
    try:
        cause = AllocationEndCause(data.get("cause"))
    except ValueError:
        cause = AllocationEndCause.FAILED
    action, checkpoint, allocation, why = (str(data.get(key, "")) for key in ("ask", "save", "allocation", "why"))
    number = int(checkpoint) if checkpoint.isascii() and checkpoint.isdecimal() and len(checkpoint) < 10 else 0
    return JobRequest(number_of(path), action, written_s, number, allocation, cause, why)
