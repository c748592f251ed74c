"""What did people ask of a job after its submit? One numbered file each in the job folder, written once, never changed.

A request outlives everybody: whoever supervises the job, now or after a crash, learns each request once, by number.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

from orchestrator.brain import events as e
from orchestrator.wire import codec
from orchestrator.wire.durable import replace_text, sync_folder

Request: TypeAlias = e.CancelAsked | e.ResumeAsked | e.LookAsked | e.AllocationEnded

NUMBER_MAX = 1_000_000

LOOKS_MAX = 3
"""How often the folder is listed again after its last change."""


class Requests:
    """The requests folder as the supervisor reads it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mtime_ns = -1
        self._looks = 0

    def since(self, number: int, at: float) -> list[Request]:
        """Return the requests after `number`, in order; one stat when nothing has changed for `LOOKS_MAX` calls.

        A folder's mtime ticks every 4-10 ms: what is written in the tick of the look before leaves it as it was.
        """
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
    """
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
