"""What did people ask of a job after its submit? One numbered file each in the job folder, written once, never changed.

A request outlives everybody: whoever supervises the job, now or after a crash, learns each request once, by number.
Whoever deletes the folder of a job that runs asks for its end, too.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, TypeAlias

from orchestrator.brain import events as e
from orchestrator.errors import ClusterError, OrchError, UserError
from orchestrator.wire import codec
from orchestrator.wire.durable import replace_text, sync_folder

Request: TypeAlias = e.CancelAsked | e.ResumeAsked | e.LookAsked | e.AllocationEnded

NUMBER_MAX = 1_000_000

LOOKS_MAX = 3
"""How often the folder is listed again after its last change."""

DELETED_S_MIN = 3.0
"""How far apart two looks must be that both do not find the plan: a file server may lose sight of it for a moment."""


class Requests:
    """The requests folder as the supervisor reads it. Without the `plan` the job has been deleted."""

    def __init__(self, folder: Path, plan: Path | None = None) -> None:
        self._folder = folder
        self._plan = plan
        self._missing_at: float | None = None
        self._mtime_ns = -1
        self._looks = 0

    def since(self, number: int, at: float) -> list[Request]:
        """Return the requests after `number`, in order; one stat when nothing has changed for `LOOKS_MAX` calls.

        A folder's mtime ticks every 4-10 ms: what is written in the tick of the look before leaves it as it was.
        """
        if self._is_deleted(at):
            self._plan = None  # asked for once
            return [e.CancelAsked(at, number + 1)]
        try:
            mtime_ns = self._folder.stat().st_mtime_ns
        except OSError:
            return []
        self._looks = self._looks + 1 if mtime_ns == self._mtime_ns else 0
        self._mtime_ns = mtime_ns
        if self._looks > LOOKS_MAX:
            return []
        paths = sorted(path for path in self._folder.glob("*.json") if _number(path) > number)
        return [request for path in paths if (request := _read(path, at)) is not None]

    def _is_deleted(self, at: float) -> bool:
        """Tell whether nobody has seen the plan for so long that it is no more."""
        if self._plan is None or _may_be_there(self._plan):
            self._missing_at = None
            return False
        self._missing_at = at if self._missing_at is None else self._missing_at
        return at >= self._missing_at + DELETED_S_MIN


def _may_be_there(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        pass  # the disk does not answer, which says nothing
    return True


def is_resumed(folder: Path, number: int) -> bool:
    """Tell whether one of the requests after `number` is that the job goes on."""
    return any(isinstance(request, e.ResumeAsked) for request in Requests(folder).since(number, 0.0))


def _read(path: Path, at: float) -> Request | None:
    """Return one request, or None for a file that is none: it must not keep the job from going on."""
    try:
        data = codec.loads_plain(path.read_bytes())
    except (OSError, codec.CodecError):
        return None
    match data.get("ask"):
        case "cancel":
            return e.CancelAsked(at, _number(path))
        case "look":
            return e.LookAsked(at, _number(path))
        case "resume":
            return e.ResumeAsked(at, _number(path), str(data.get("path", "")))
        case "allocation_ended":
            return _allocation_ended(data, at, _number(path))
        case _:
            return None


def _allocation_ended(data: dict[str, Any], at: float, number: int) -> e.AllocationEnded:
    """Return what the submit side heard of the queue; a cause that nobody knows is a failure."""
    try:
        cause = e.Cause(data.get("cause"))
    except ValueError:
        cause = e.Cause.FAILED
    return e.AllocationEnded(at, number, str(data.get("allocation", "")), cause, str(data.get("why", "")))


def ask(folder: Path, what: str, **more: str) -> int:
    """Write a request and return its number; two people asking at once get two numbers.

    `what`: cancel; resume, with `path`; or allocation_ended, with `allocation`, `cause` (a value of `Cause`) and `why`.
    Raises UserError for another user's job, and ClusterError when the disk refuses.
    """
    try:
        return _ask(folder, what, more)
    except OSError as err:
        raise refused(err, folder.parent) from err


def refused(err: OSError, root: Path) -> OrchError:
    """Return for people why something could not be written into the job folder `root`."""
    owner = _owner(root)
    if isinstance(err, PermissionError) and owner:
        return UserError(f"it is the job of {owner}, and not yours to change", str(root), f"ask {owner}")
    is_full = err.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = f"make room in {root}, then try again" if is_full else "see to that file or folder, then try again"
    return ClusterError(f"cannot be written: {err.strerror}", str(err.filename or root), fix)


def _owner(root: Path) -> str:
    """Return the user whose folder this is; empty for our own, and when that cannot be seen."""
    try:
        return root.owner() if root.stat().st_uid != os.geteuid() else ""
    except KeyError:
        return f"user {root.stat().st_uid}"
    except OSError:
        return ""


def _ask(folder: Path, what: str, more: dict[str, str]) -> int:
    folder.mkdir(exist_ok=True)
    part = folder / f".{os.getpid()}.part"
    replace_text(part, codec.dumps_plain({"ask": what, **more}))
    try:
        for number in range(
            max([_number(path) for path in folder.glob("*.json")], default=0) + 1, NUMBER_MAX
        ):
            try:
                os.link(part, folder / f"{number:06d}.json")
            except FileExistsError:
                continue
            sync_folder(folder)
            return number
    finally:
        part.unlink()
    raise AssertionError("a job has fewer requests than that")


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else 0
