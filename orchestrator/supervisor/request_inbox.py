"""Inbox of the supervisor, the requests folder: each new request once, by number, as an event of the brain.

Deleting the folder of a running job counts as a request for its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from orchestrator.brain.model import events as e
from orchestrator.core.jobdir import requests

RequestEvent: TypeAlias = (
    e.CancelRequested | e.RestartRequested | e.ResumeRequested | e.InspectRequested | e.AllocationEnded
)

_EVENTS: dict[str, type[e.CancelRequested | e.RestartRequested | e.InspectRequested]] = {
    "cancel": e.CancelRequested, "restart": e.RestartRequested, "look": e.InspectRequested,
}  # fmt: skip

DELETED_S_MIN = 3.0
"""How far apart two checks must be that both miss the plan: a file server may not show it for a moment."""


class RequestInbox:
    """The requests folder as the supervisor reads it. Without the `plan` the job has been deleted."""

    def __init__(self, folder: Path, plan: Path | None = None) -> None:
        self._folder = folder
        self._plan = plan
        self._missing_at: float | None = None

    def read_after(self, number: int, at: float) -> list[RequestEvent]:
        """Return the requests after `number`, in order."""
        if self._is_deleted(at):
            self._plan = None  # asked for once
            return [e.CancelRequested(at, number + 1)]
        try:
            new = requests.read_after(self._folder, number)
            return [event for request in new if (event := _to_event(request, at)) is not None]
        except OSError:  # out of descriptors: the requests are read once there is one again
            return []

    def _is_deleted(self, at: float) -> bool:
        if self._plan is None or _may_exist(self._plan):
            self._missing_at = None
            return False
        self._missing_at = at if self._missing_at is None else self._missing_at
        return at >= self._missing_at + DELETED_S_MIN


def _may_exist(path: Path) -> bool:
    try:
        path.stat()
    except OSError as err:
        return not isinstance(err, FileNotFoundError)  # a disk that does not answer proves nothing
    return True


def is_resumed(folder: Path, number: int) -> bool:
    """Return whether one of the requests after `number` resumes the job."""
    return any(isinstance(request, e.ResumeRequested) for request in RequestInbox(folder).read_after(number, 0.0))


def _to_event(request: requests.JobRequest, at: float) -> RequestEvent | None:
    """Return a request as an event; None for one that this version does not know."""
    if request.action in _EVENTS:
        return _EVENTS[request.action](at, request.number)
    match request.action:
        case "resume":
            return e.ResumeRequested(at, request.number, request.save)
        case "allocation_ended":
            return e.AllocationEnded(at, request.number, request.allocation, request.cause, request.why)
        case _:
            return None
