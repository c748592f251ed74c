"""The status file of a job folder: the status object of `orch status --json`, as its types, and how the file is read.

The supervisor replaces the file twice a second. Reading it needs nothing of the brain, so that `orch status` is quick.
"""

from __future__ import annotations

import datetime
import functools
import json
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NewType, TypedDict

from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir

if TYPE_CHECKING:
    from orchestrator.core.jobdir.plan import Plan

IsoTime = NewType("IsoTime", str)
"""A time of day as `iso` writes it."""


class CheckpointStatus(TypedDict):
    """The newest checkpoint that a job can resume from."""

    path: str
    step: int | None


class NodeStatus(TypedDict):
    """One node, or one host of a pool; `role` is `placed`, `spare` or `idle`."""

    name: str
    host: str
    state: str
    seen_s: float | None
    role: str
    ranks: list[int]
    note: str


class _LaterRankKeys(TypedDict, total=False):
    """The key that supervisors of earlier versions did not write: see `Status.progress`."""

    progress: str | None


class RankStatus(_LaterRankKeys):
    """One rank of the present attempt; `exit` is its exit code, or minus the signal that ended it."""

    rank: int
    local_rank: int
    node: str
    pid: int | None
    state: str
    step: int | None
    steps_per_s: float | None
    beat_s: float | None
    exit: int | None


class StragglerStatus(TypedDict):
    """A rank whose own work takes `factor` times as long as that of its peers: seconds a step, since a step."""

    rank: int
    node: str
    factor: float
    own_s: float
    peers_s: float
    since_step: int


class TransferStatus(TypedDict):
    """A checkpoint in transfer between a host and the job folder; `direction` is `fetch` or `send`."""

    name: str
    node: str
    direction: str
    bytes: int
    done_bytes: int | None


class QueueStatus(TypedDict):
    """What Slurm says of a job; `said` is that in words, `silent` why Slurm does not answer, `heard_s` its answer's age."""

    id: str
    state: str
    reason: str
    expected_start: str | None
    nodes: str
    by: str
    said: str
    silent: str
    heard_s: float


class _ReadersKeys(TypedDict, total=False):
    """The keys that readers of the file add, and a supervisor never writes."""

    dir: str
    queue: QueueStatus
    written_s: float
    # Only when the supervisor has not written for long: who that is, and the folder whose disk is full.
    supervisor: Json | None
    full_disk: str


class _LaterKeys(TypedDict, total=False):
    """The keys that supervisors of earlier versions did not write: a job keeps the version that it was submitted with."""

    # What a person should know of how the job is set up, and the progress of a job without steps, `37/1200 (tqdm)`.
    notices: list[str]
    progress: str | None


class _BatchKeys(TypedDict, total=False):
    """The keys of a job whose file has `batch`."""

    effective_batch: int


class Status(_BatchKeys, _ReadersKeys, _LaterKeys):
    """One object of `orch status --json`."""

    id: str
    name: str
    backend: str
    state: str
    attempt: int
    restarts: int
    step: int | None
    steps_per_s: float | None
    total_steps: int | None
    world_size: int
    reason: str
    suspicion: str | None
    stragglers: list[StragglerStatus]
    created_at: IsoTime
    started_at: IsoTime | None
    ended_at: IsoTime | None
    checkpoint: CheckpointStatus | None
    nodes: list[NodeStatus]
    ranks: list[RankStatus]
    travels: list[TransferStatus]
    written_at: IsoTime


ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
"""The states that a job ends in."""

_LAST_S = 253_402_300_799.0  # 9999-12-31T23:59:59Z, the last second that Python has a date for

NUMBER_MAX = 1e18
"""Larger numbers come from damage: no step, size or time is."""


def unknown(plan: Plan, state: str, reason: str, wall_s: float) -> Status:
    """Return the status of a job of which only the plan is known."""
    status: Status = {
        "id": plan.id,
        "name": plan.name,
        "backend": plan.backend,
        "state": state,
        "attempt": 1,
        "restarts": 0,
        "step": None,
        "steps_per_s": None,
        "total_steps": plan.total_steps,
        "world_size": plan.world_size,
        "reason": reason,
        "suspicion": None,
        "notices": [],
        "progress": None,
        "stragglers": [],
        "created_at": iso(plan.created_at),
        "started_at": None,
        "ended_at": None,
        "checkpoint": None,
        "nodes": [],
        "ranks": [],
        "travels": [],
        "written_at": iso(wall_s),
    }
    return sized(status, plan)


def sized(status: Status, plan: Plan) -> Status:
    """Return a status with the size of the job as a plan has it."""
    status = {**status, "world_size": plan.world_size, "total_steps": plan.total_steps}
    status.pop("effective_batch", None)
    if plan.effective_batch is not None:
        status["effective_batch"] = plan.effective_batch
    return status


def without_nodes(status: Status) -> Status:
    """Return a status as a supervisor writes it, of a job that has lost its nodes."""
    return {**as_written(status), "steps_per_s": None, "stragglers": [], "nodes": [], "ranks": []}


def iso(wall_s: float) -> IsoTime:
    """Return seconds since 1970 as UTC in ISO 8601, to the millisecond; a time beyond the calendar as its end."""
    moment = datetime.datetime.fromtimestamp(min(max(0.0, wall_s), _LAST_S), datetime.timezone.utc)
    return IsoTime(f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z")


def seconds(text: str) -> float:
    """Return what `iso` was given. Raises ValueError."""
    # Not strptime: it loads half a dozen modules.
    return datetime.datetime.fromisoformat(text.removesuffix("Z") + "+00:00").timestamp()


def read(job: JobDir, wall_s: float) -> Status:
    """Return the job's status with its ages as they are at `wall_s`.

    Raises FileNotFoundError when none was written yet, and ClusterError when the file cannot be read.
    """
    fix = "`orch why` reads the journal, and a running job's supervisor writes the file again"
    try:
        status = json.loads(ownership.read_regular(job.state))
    except FileNotFoundError:
        raise
    except OSError as err:
        raise ClusterError(f"the status file cannot be read: {err.strerror}", str(job.state)) from err
    except (ValueError, RecursionError) as err:
        raise ClusterError("the status file is damaged", str(job.state), fix) from err
    if not _check(Status)(status):
        raise ClusterError("the status file is damaged", str(job.state), fix)
    return refreshed(as_written(status), wall_s)


def as_written(status: Status) -> Status:
    """Return a status without the keys that readers add."""
    written = {key: value for key, value in status.items() if key not in _ReadersKeys.__optional_keys__}
    return typing.cast(Status, written)


def refreshed(status: Status, wall_s: float) -> Status:
    """Return a status that was written a while ago with its ages as they are now; an ended job's do not grow."""
    if status["state"] in ENDED:
        return status
    late_s = max(0.0, wall_s - seconds(status["written_at"]))
    nodes: list[NodeStatus] = [{**node, "seen_s": _later(node["seen_s"], late_s)} for node in status["nodes"]]
    ranks: list[RankStatus] = [{**rank, "beat_s": _later(rank["beat_s"], late_s)} for rank in status["ranks"]]
    return {**status, "nodes": nodes, "ranks": ranks, "written_s": round(late_s, 1)}


def _later(age_s: float | None, late_s: float) -> float | None:
    return None if age_s is None else round(age_s + late_s, 1)


# The shape of what is read


@functools.cache
def _check(kind: Any) -> Callable[[Any], bool]:
    """Return the function that tells whether a value read from JSON is of a type.

    Keys that a TypedDict does not require may be missing, and hold anything.
    """
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind)
        checks = [(key, _check(hints[key])) for key in sorted(kind.__required_keys__)]
        return lambda value: (
            isinstance(value, dict) and all(key in value and fits(value[key]) for key, fits in checks)
        )
    if typing.get_origin(kind) is list:
        (item,) = map(_check, typing.get_args(kind))
        return lambda value: isinstance(value, list) and all(map(item, value))
    if members := typing.get_args(kind):
        of_union = [_check(member) for member in members]
        return lambda value: any(fits(value) for fits in of_union)
    if kind in (str, type(None)):
        return lambda value: isinstance(value, kind)
    return {int: _is_whole_number, float: _is_number, IsoTime: _is_time}[kind]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -NUMBER_MAX < value < NUMBER_MAX


def _is_whole_number(value: Any) -> bool:
    return type(value) is int and _is_number(value)


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and seconds(value) >= 0
    except (ValueError, OverflowError):
        return False
