"""Status file of a job folder: the types of the status object of `orch status --json`, and the reader of the file.

The supervisor replaces the file twice a second. Reading it needs nothing of the brain, so that `orch status` is quick.
Ages and durations are seconds; times of day are written as `iso` does. The order of the fields is that of the keys.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.core import codec
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import home, ownership
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.locks import LockHolder
from orchestrator.core.status_types import NOT_MEASURED, NOT_REPORTED, Suspicion, Training, Usage

if TYPE_CHECKING:
    from orchestrator.core.jobdir.plan import Plan

LATE_S = 15.0
"""A living supervisor writes its status every half second; an older one names the supervisor that is late."""


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """Newest checkpoint that a job can resume from, and how much of it outlives the loss of any one host; not `safe`: not all."""

    path: str
    step: int | None
    safe: bool = True
    bytes: int = 0
    safe_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node, or one host of a pool; `role` is `placed`, `spare` or `idle`; `note`: why it is not used, `fix`: what to
    do about that."""

    name: str
    host: str
    state: str
    seen_s: float | None
    role: str
    ranks: list[int]  # the codec would write a long tuple as a series
    note: str
    fix: str


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank of the present attempt; `exit` is its exit code, or minus the signal that ended it; `progress` is that of a
    rank without steps: `37/1200 (tqdm)`."""

    rank: int
    local_rank: int
    node: str
    pid: int | None
    state: str
    step: int | None
    steps_per_s: float | None
    beat_s: float | None
    exit: int | None
    progress: str | None
    training: Training = NOT_REPORTED
    usage: Usage = NOT_MEASURED
    # How long ago it made its last step; None before the first
    step_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class StragglerStatus:
    """A rank whose own work takes `factor` times as long as that of its peers: seconds a step, since a step. `gpu_remarks`: what
    nvidia-smi says of the GPUs of its node."""

    rank: int
    node: str
    factor: float
    own_s: float
    peers_s: float
    since_step: int
    gpu_remarks: str = ""


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """A checkpoint in transfer between a host and the job folder; `direction` is `fetch` or `send`."""

    name: str
    node: str
    direction: str
    bytes: int
    done_bytes: int | None


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Slurm's description of a job; `said` is its text, `fix` what to do about it, `silent` why Slurm does not answer,
    `heard_s` the age of its answer, `is_stuck` whether it waits for a person to act."""

    id: str
    state: str
    reason: str
    expected_start: str | None
    nodes: str
    by: str
    said: str
    silent: str
    heard_s: float
    is_stuck: bool = False
    fix: str = ""


@dataclass(frozen=True, slots=True)
class TrackerRun:
    """A folder with what a tracker of experiments reads; `kind` is `tensorboard` or `wandb`."""

    kind: str
    path: str


@dataclass(frozen=True, slots=True)
class Status:
    """One object of `orch status --json`. What has a default is left out of the JSON where it has it, but for the
    keys of `training`."""

    id: str
    name: str
    backend: str
    state: str
    attempt: int
    restarts: int
    step: int | None
    steps_per_s: float | None
    world_size: int
    reason: str
    suspicion: str | None
    # What a person should know of how the job is set up, and the progress of a job without steps, `37/1200 (tqdm)`.
    notices: tuple[str, ...]
    progress: str | None
    stragglers: tuple[StragglerStatus, ...]
    created_at: str
    started_at: str | None
    ended_at: str | None
    checkpoint: CheckpointStatus | None
    nodes: tuple[NodeStatus, ...]
    ranks: tuple[RankStatus, ...]
    travels: tuple[TransferStatus, ...]
    written_at: str
    training: Training = NOT_REPORTED
    # What the suspicion is about, and what follows from it when.
    suspected: Suspicion | None = None
    # The launcher call of the nodes' scripts whose ranks run.
    launch_call: int = 1
    # Only of a job whose file has `batch`.
    effective_batch: int | None = None
    # What readers add. A late supervisor has its process, and the folder whose disk is full; a copy of a job's folder the
    # folder that it is a copy of.
    written_s: float | None = None
    supervisor: LockHolder | None = None
    full_disk: str = ""
    queue: QueueStatus | None = None
    dir: str = ""
    copy_of: str = ""
    # In its folder, as it is looked for when one job is shown.
    trackers: tuple[TrackerRun, ...] = ()
    # In the file only: the boot of the machine that has written it, and that machine's monotonic clock then, in seconds.
    boot: str = ""
    boot_s: float = 0.0

    def __post_init__(self) -> None:
        for at in (self.created_at, self.started_at, self.ended_at, self.written_at):
            if at is not None:
                parse_iso(at)

    @property
    def is_late(self) -> bool:
        """Whether the supervisor has not written for long."""
        return (self.written_s or 0.0) > LATE_S


FLATTENED_FIELDS: dict[str, type[Training | Usage]] = {"training": Training, "usage": Usage}
"""Fields of a status and of its ranks whose keys are flattened into JSON, always and in this order."""

_KEYS = {name: tuple(field.name for field in dataclasses.fields(part)) for name, part in FLATTENED_FIELDS.items()}

_DEFAULTS = {
    field.name: codec.pack(field.default)
    for field in dataclasses.fields(Status)
    if field.default is not dataclasses.MISSING
}


ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
"""The states that a job ends in."""

_LAST_S = 253_402_300_799.0  # 9999-12-31T23:59:59Z, the last second that Python has a date for


def status_from_plan(plan: Plan, state: str, reason: str, wall_s: float) -> Status:
    """Return the status of a job of which only the plan is known."""
    return Status(
        id=plan.id,
        name=plan.name,
        backend=plan.backend,
        state=state,
        attempt=1,
        restarts=0,
        step=None,
        steps_per_s=None,
        world_size=plan.world_size,
        reason=reason,
        suspicion=None,
        notices=(),
        progress=None,
        stragglers=(),
        created_at=iso(plan.created_at),
        started_at=None,
        ended_at=None,
        checkpoint=None,
        nodes=(),
        ranks=(),
        travels=(),
        written_at=iso(wall_s),
        training=Training(total_steps=plan.total_steps),
        effective_batch=plan.effective_batch,
    )


def clear_nodes(status: Status) -> Status:
    """Return a status as a supervisor writes it, of a job that has lost its nodes."""
    return dataclasses.replace(
        status,
        steps_per_s=None,
        suspicion=None,
        suspected=None,
        stragglers=(),
        nodes=(),
        ranks=(),
        training=dataclasses.replace(status.training, eta_s=None),
        written_s=None,
        supervisor=None,
        full_disk="",
        queue=None,
        dir="",
        copy_of="",
    )


def iso(wall_s: float) -> str:
    """Return seconds since 1970 as UTC in ISO 8601, to the millisecond; a time beyond the calendar as its end."""
    moment = datetime.datetime.fromtimestamp(min(max(0.0, wall_s), _LAST_S), datetime.timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def time_of_day(at: str) -> str:
    """Return the time of day of what `iso` has written, for people."""
    return f"{at[11:19]} UTC"


def parse_iso(text: str) -> float:
    """Return what `iso` was given. Raises ValueError."""
    # Not strptime: it loads half a dozen modules.
    return datetime.datetime.fromisoformat(text.removesuffix("Z") + "+00:00").timestamp()


def to_json(status: Status) -> Json:
    """Return one object of `orch status --json`."""
    kept = {"supervisor"} if status.is_late else set()  # its process may not be known
    packed = _flat(codec.pack(status))
    packed["ranks"] = [_flat(rank) for rank in packed["ranks"]]
    return {key: item for key, item in packed.items() if key in kept or key not in _DEFAULTS or item != _DEFAULTS[key]}


def loads(text: str | bytes) -> Status:
    """Return the status of one object of `orch status --json`. Raises CodecError."""
    data = codec.loads_plain(text)
    ranks = data.get("ranks")
    if isinstance(ranks, list):
        data["ranks"] = [_nested(rank) for rank in ranks]
    return codec.unpack(Status, _nested(data))


def _flat(packed: Json) -> Json:
    flat: Json = {}
    for key, item in packed.items():
        if key in FLATTENED_FIELDS:
            flat |= item
        else:
            flat[key] = item
    return flat


def _nested(data: Any) -> Any:
    if not isinstance(data, dict):
        return data  # the codec refuses it
    for name, keys in _KEYS.items():
        if own := {key: data.pop(key) for key in keys if key in data}:
            data[name] = own
    return data


def write(job: JobDir, status: Status, *, durable: bool) -> None:
    """Replace the status file. Raises OSError."""
    replace_text(job.state, codec.dumps_plain(to_json(status)), durable=durable)


def stamp(status: Status, boot: str) -> Status:
    """Return a status with this moment of a boot of this machine."""
    return dataclasses.replace(status, boot=boot, boot_s=time.monotonic())


OTHER_VERSION_FIX = "use the version of orch that submitted the job, or submit the job again with this one"
"""Fix for a job that another version of orch may have started."""


def read(job: JobDir, wall_s: float, boot: str = "") -> Status:
    """Return the job's status with its folder, and its ages as they are at `wall_s`, now, in a boot of this machine.

    Raises FileNotFoundError when none was written yet, and ClusterError when the file cannot be read.
    """
    try:
        status = loads(ownership.read_regular(job.state))
    except FileNotFoundError:
        raise
    except OSError as err:
        raise ClusterError(f"the status file cannot be read: {err.strerror}", str(job.state)) from err
    except codec.KeysError as err:
        what = "the status file is damaged, or another version of orch wrote it"
        raise ClusterError(what, str(job.state), OTHER_VERSION_FIX) from err
    except ValueError as err:
        fix = "`orch why` reads the journal, and a running job's supervisor writes the file again"
        raise ClusterError("the status file is damaged", str(job.state), fix) from err
    original = str(home.find_original(job) or "")
    shown = refresh_ages(status, wall_s, boot)
    return dataclasses.replace(shown, dir=str(job.root), copy_of=original, boot="", boot_s=0.0)


def refresh_ages(status: Status, wall_s: float, boot: str = "") -> Status:
    """Return a status with its ages updated to now; those of an ended job do not grow. A wall clock that was set meanwhile
    does not matter on the same boot of a machine, where the monotonic clock is used."""
    if status.state in ENDED:
        return status
    is_same_boot = status.boot == boot != ""
    late_s = time.monotonic() - status.boot_s if is_same_boot else wall_s - parse_iso(status.written_at)
    late_s = max(0.0, late_s)
    return dataclasses.replace(
        status,
        nodes=tuple(dataclasses.replace(node, seen_s=_add_age(node.seen_s, late_s)) for node in status.nodes),
        ranks=tuple(
            dataclasses.replace(
                rank, beat_s=_add_age(rank.beat_s, late_s), step_age_s=_add_age(rank.step_age_s, late_s)
            )
            for rank in status.ranks
        ),
        written_s=round(late_s, 1),
    )


def _add_age(age_s: float | None, late_s: float) -> float | None:
    return None if age_s is None else round(age_s + late_s, 1)
