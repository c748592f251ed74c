"""What did the supervisor last say of its job? The status file of a job folder: its words, and how old they are by now.

It is the same object as one of `orch status --json`. Nothing of the brain is needed to read it, so that `orch status`
is quick.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, TypeAlias

from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir

Json: TypeAlias = dict[str, Any]

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
"""The states that a job ends in."""

OF_SILENCE = ("supervisor", "full_disk", "written_s")
"""The keys that tell how long nothing was heard of the supervisor, and why."""

_LAST_S = 253_402_300_799.0  # 9999-12-31T23:59:59Z, the last second that Python has a date for

_OF_READERS = ("queue", "dir", *OF_SILENCE)
"""The keys that a supervisor never writes: who reads the file adds them."""

NUMBER_MAX = 1e18
"""Larger numbers come from damage: no step, size or time is."""


def iso(wall_s: float) -> str:
    """Return seconds since 1970 as UTC in ISO 8601, to the millisecond; a time beyond the calendar as its end."""
    moment = datetime.datetime.fromtimestamp(min(max(0.0, wall_s), _LAST_S), datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def seconds(text: str) -> float:
    """Return what `iso` was given. Raises ValueError."""
    # Not strptime: it loads half a dozen modules.
    return datetime.datetime.fromisoformat(text.removesuffix("Z") + "+00:00").timestamp()


def read(job: JobDir, wall_s: float) -> Json:
    """Return the job's status with its ages as they are at `wall_s`.

    Raises FileNotFoundError when none was written yet, and ClusterError when the file cannot be read.
    """
    fix = "`orch why` reads the journal, and a running job's supervisor writes the file anew"
    try:
        known = json.loads(ownership.read_regular(job.state))
    except FileNotFoundError:
        raise
    except OSError as err:
        raise ClusterError(f"the status file cannot be read: {err.strerror}", str(job.state)) from err
    except (ValueError, RecursionError) as err:
        raise ClusterError("the status file is damaged", str(job.state), fix) from err
    if not _fits(known, _STATUS):
        raise ClusterError("the status file is damaged", str(job.state), fix)
    return refreshed({key: value for key, value in known.items() if key not in _OF_READERS}, wall_s)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -NUMBER_MAX < value < NUMBER_MAX


def _is_whole_number(value: Any) -> bool:
    return type(value) is int and _is_number(value)


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and seconds(value) >= 0
    except (ValueError, OverflowError):
        return False


_WHOLE, _NUMBER, _TIME = _is_whole_number, _is_number, _is_time
_NODE = {
    "name": str, "host": str, "state": str, "seen_s": (_NUMBER, None), "role": str, "ranks": [_WHOLE], "note": str,
}  # fmt: skip
_RANK = {
    "rank": _WHOLE, "local_rank": _WHOLE, "node": str, "pid": (_WHOLE, None), "state": str, "step": (_WHOLE, None),
    "steps_per_s": (_NUMBER, None), "beat_s": (_NUMBER, None), "exit": (_WHOLE, None),
}  # fmt: skip
_STRAGGLER = {"rank": _WHOLE, "node": str, "factor": _NUMBER, "since_step": _WHOLE}
_TRAVEL = {"name": str, "node": str, "direction": str, "done_bytes": (_NUMBER, None), "bytes": _NUMBER}
_STATUS = {
    "id": str, "name": str, "backend": str, "state": str, "attempt": _WHOLE, "restarts": _WHOLE, "step": (_WHOLE, None),
    "steps_per_s": (_NUMBER, None), "total_steps": (_WHOLE, None), "world_size": _WHOLE, "reason": str,
    "suspicion": (str, None), "stragglers": [_STRAGGLER], "created_at": _TIME, "started_at": (_TIME, None),
    "ended_at": (_TIME, None), "checkpoint": ({"path": str, "step": (_WHOLE, None)}, None), "nodes": [_NODE],
    "ranks": [_RANK], "travels": [_TRAVEL], "written_at": _TIME,
}  # fmt: skip
"""A status as a supervisor writes it: the kind of each value, a list of kinds of which it has one, or `[kind of each]`."""


def _fits(value: Any, shape: Any) -> bool:
    """Tell whether a value read from JSON is of a shape; keys that the shape does not name may be anything."""
    match shape:
        case dict():
            return isinstance(value, dict) and all(
                key in value and _fits(value[key], of) for key, of in shape.items()
            )
        case [each] if isinstance(shape, list):
            return isinstance(value, list) and all(_fits(one, each) for one in value)
        case tuple():
            return any(_fits(value, one) for one in shape)
        case None | type():
            return value is None if shape is None else isinstance(value, shape)
        case _:
            return bool(shape(value))


def refreshed(known: Json, wall_s: float) -> Json:
    """Return a status that was written a while ago with its ages as they are now; an ended job's do not grow."""
    if known["state"] in ENDED:
        return known
    late_s = max(0.0, wall_s - seconds(known["written_at"]))
    nodes = [{**node, "seen_s": _later(node["seen_s"], late_s)} for node in known["nodes"]]
    ranks = [{**rank, "beat_s": _later(rank["beat_s"], late_s)} for rank in known["ranks"]]
    return {**known, "nodes": nodes, "ranks": ranks, "written_s": round(late_s, 1)}


def _later(age_s: float | None, late_s: float) -> float | None:
    return None if age_s is None else round(age_s + late_s, 1)
