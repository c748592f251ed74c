"""What has been asked of a job? Its numbered requests, as the supervisor reads them; `requests` writes them.

Whoever supervises the job, now or after a crash, learns each request once, by number. Whoever deletes the folder of a
job that runs asks for its end, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from orchestrator.brain.model import events as e
from orchestrator.core import codec
from orchestrator.core.end_cause import Cause
from orchestrator.core.jobdir import full_disk, ownership
from orchestrator.core.jobdir.requests import number_of

Request: TypeAlias = (
    e.CancelRequested | e.RestartRequested | e.ResumeRequested | e.InspectRequested | e.AllocationEnded
)

LOOKS_MAX = 3
"""How often the folder is listed again after its last change."""

DELETED_S_MIN = 3.0
"""How far apart two looks must be that both do not find the plan: a file server may lose sight of it for a moment."""


class RequestInbox:
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
            return [e.CancelRequested(at, number + 1)]
        try:
            mtime_ns = self._folder.stat().st_mtime_ns
        except OSError:
            return []
        self._looks = self._looks + 1 if mtime_ns == self._mtime_ns else 0
        self._mtime_ns = mtime_ns
        if self._looks > LOOKS_MAX:
            return []
        try:
            found = [path for path in self._folder.iterdir() if path.suffix == ".json"]
            paths = sorted(path for path in found if number_of(path) > number)
            return [request for path in paths if (request := _read(path, at)) is not None]
        except OSError:  # no descriptor is left: what is asked is read when there is one again
            self._looks = 0
            return []

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
    return any(isinstance(request, e.ResumeRequested) for request in RequestInbox(folder).since(number, 0.0))


def _read(path: Path, at: float) -> Request | None:
    """Return one request, or None for a file that is none: it must not keep the job from going on."""
    try:
        data = codec.loads_plain(ownership.read_regular(path))
    except codec.CodecError:
        return None
    except OSError as err:
        if full_disk.is_exhausted(err):
            raise
        return None
    match data.get("ask"):
        case "cancel":
            return e.CancelRequested(at, number_of(path))
        case "restart":
            return e.RestartRequested(at, number_of(path))
        case "look":
            return e.InspectRequested(at, number_of(path))
        case "resume":
            return e.ResumeRequested(at, number_of(path), str(data.get("path", "")))
        case "allocation_ended":
            return _allocation_ended(data, at, number_of(path))
        case _:
            return None


def _allocation_ended(data: dict[str, Any], at: float, number: int) -> e.AllocationEnded:
    """Return what the submit side heard of the queue; a cause that nobody knows is a failure."""
    try:
        cause = Cause(data.get("cause"))
    except ValueError:
        cause = Cause.FAILED
    return e.AllocationEnded(at, number, str(data.get("allocation", "")), cause, str(data.get("why", "")))
