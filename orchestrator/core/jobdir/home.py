"""Job home `$ORCH_HOME` (default `~/.orch`): its job folders, the ids of jobs, and how a job is found.

A job's id is its name, the time of its submit (UTC, to the millisecond) and two random letters, so names and ages are
known from one listing, without opening a job.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.durable import replace_bytes
from orchestrator.core.jobdir.layout import JobDir

_STAMP_CHARS = len("20261120-224605123-k3")
_LETTERS = "bcdfghjkmnpqrstvwxz23456789"
NEAR_MAX = 3
"""How many similar names an error lists."""


def job_home(environ: Mapping[str, str]) -> Path:
    """Return the job home. Raises UserError when `~` cannot be resolved."""
    named = environ.get("ORCH_HOME") or "~/.orch"
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError as err:
        raise UserError(str(err), f"ORCH_HOME={named}", "set ORCH_HOME to an absolute path") from err


def new_id(name: str, wall_s: float) -> str:
    """Return an id for a job with this name, submitted at `wall_s`, seconds since the epoch."""
    import random

    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(wall_s))
    letters = "".join(random.SystemRandom().choice(_LETTERS) for _ in range(2))
    return f"{name}-{stamp}{int(wall_s * 1000) % 1000:03d}-{letters}"


def name_of(job_id: str) -> str:
    """Return the name in an id."""
    return job_id[: -_STAMP_CHARS - 1]


def is_draft(name: str) -> bool:
    """Return whether a name in the home is that of a job that is being submitted."""
    return name.startswith(".") and _is_id(name[1:])


def _is_id(name: str) -> bool:
    """Return whether a name in the home is a job's id: a submit's draft starts with a dot, and other names are not orch's."""
    stamp = name[-_STAMP_CHARS:]
    dashes = stamp[8:9] + stamp[18:19] + name[-_STAMP_CHARS - 1 : -_STAMP_CHARS]
    digits = stamp[:8] + stamp[9:18]
    return dashes == "---" and digits.isdigit() and len(name) > _STAMP_CHARS + 1 and not name.startswith(".")


def list_ids(folder: Path) -> list[str]:
    """Return the ids of all jobs of a home, oldest first. Raises ClusterError when the home cannot be read."""
    return sorted(_names(folder), key=_age)


def list_jobs(folder: Path) -> list[JobDir]:
    """Return all jobs of a home, oldest first. Raises ClusterError when the home cannot be read."""
    return [JobDir(folder / "jobs" / job_id) for job_id in list_ids(folder)]


def latest_job(folder: Path) -> JobDir | None:
    """Return the job that was submitted last, None without jobs. Raises ClusterError when the home cannot be read."""
    newest = max(_names(folder), key=_age, default=None)
    return None if newest is None else JobDir(folder / "jobs" / newest)


def unfinished_jobs(folder: Path) -> list[JobDir]:
    """Return the jobs of a home that are not over, oldest first, at one stat for each job.

    Raises ClusterError when the home cannot be read.
    """
    root = f"{folder}/jobs"
    # 1,000 pathlib paths would cost more than the stats themselves.
    running = [job_id for job_id in _names(folder) if not os.path.lexists(f"{root}/{job_id}/ended")]
    return [JobDir(Path(root, job_id)) for job_id in sorted(running, key=_age)]


def is_own_job(job: JobDir) -> bool:
    """Return whether the job exists, belongs to this user, and is not a copy. `require_own_job` also checks that no other user
    can write to it."""
    return (
        ownership.belongs_to_caller(job.root) and ownership.belongs_to_caller(job.plan) and find_original(job) is None
    )


def require_own_job(job: JobDir) -> None:
    """Raise UserError unless a job's folder, and all in it that is executed, loaded or written, belongs to this user alone,
    and the folder is not a copy. Call it right before such an action."""
    if fault := ownership.find_fault_within(job.root):
        raise UserError.from_fault(fault)
    require_original(job)


def find_original(job: JobDir) -> Path | None:
    """Return the original of a copied job folder: a job still exists at the recorded path. A folder that was moved has left
    nothing there, or a link to itself."""
    try:
        before = _origin(job)
        is_there = before.is_absolute() and JobDir(before).plan.exists()
        return before if is_there and not before.samefile(job.root) else None
    except OSError:
        return None


def require_original(job: JobDir) -> None:
    """Raise UserError for a copy of a job's folder."""
    if (original := find_original(job)) is not None:
        fix = f"use the job itself (ORCH_HOME={original.parent.parent}); for a new job, {resubmit_hint(job.root)}"
        raise UserError(f"it is a copy of {original}, and copies are read only", str(job.root), fix)


def record_origin(job: JobDir, place: Path) -> None:
    """Record the path of a job's folder, now or after its move, unless it is recorded already. Raises OSError."""
    with contextlib.suppress(OSError):
        if _origin(job) == place:
            return
    replace_bytes(job.origin, os.fsencode(place), durable=False)


def _origin(job: JobDir) -> Path:
    return Path(os.fsdecode(ownership.read_regular(job.origin)))


def resubmit_hint(root: Path) -> str:
    """Return how to continue a job in a new folder, if it cannot run in its own."""
    return f"submit {root / 'job.yaml'}, cancel the new job (orch cancel), then orch resume it --from a checkpoint in {root / 'checkpoints'}"


def is_slurm(job: JobDir) -> bool:
    """Return whether a job's nodes come from Slurm; False for what cannot be read, which its readers report."""
    try:
        if job.slurm.exists() or job.state.exists():
            return job.slurm.exists()
        # Its submit is at work, or was cut off
        return bool(codec.loads_plain(ownership.read_regular(job.plan))["backend"] == "slurm")
    except (OSError, codec.CodecError, KeyError):
        return False


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder / "jobs") as entries:
            return [entry.name for entry in entries if _is_id(entry.name) and entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as err:
        fix = "set ORCH_HOME to a folder of your own"
        raise ClusterError(f"the job home cannot be read: {err.strerror}", str(folder), fix) from err


def _age(job_id: str) -> tuple[str, str]:
    return job_id[-_STAMP_CHARS:], job_id


def find_job(folder: Path, job_ref: str | None, *, running: bool = False) -> JobDir:
    """Return the job with this id, or the latest with this name, or the latest of all when `job_ref` is None.

    A part of an id is enough, see `_is_part`. `running`: the latest job with this name that has not ended is preferred.
    Raises UserError, with the nearest names, when there is no such job.
    """
    newest = latest_job(folder)
    if newest is None:
        raise UserError("there are no jobs yet", str(folder), "submit one: orch submit job.yaml")
    if job_ref is None:
        return newest
    named = [job for job in unfinished_jobs(folder) if name_of(job.id) == job_ref] if running else []
    return named[-1] if named else JobDir(folder / "jobs" / _match_id(list_ids(folder), job_ref, folder))


def _match_id(job_ids: list[str], job_ref: str, folder: Path) -> str:
    if job_ref in job_ids:
        return job_ref
    named = [job_id for job_id in job_ids if name_of(job_id) == job_ref]
    if named:
        return named[-1]
    partly = [job_id for job_id in job_ids if _is_part(job_ref, job_id)]
    if len(partly) == 1:
        return partly[0]
    if partly:
        fix = f"name one of them: {', '.join(partly[-NEAR_MAX:])}"
        raise UserError(f"{len(partly)} job ids begin or end with {job_ref!r}", str(folder), fix)
    fix = f"closest: {', '.join(_nearest_names(job_ids, job_ref))}; `orch status --all` lists all"
    raise UserError(f"no job has the id or name {job_ref!r}", str(folder), fix)


def _is_part(job_ref: str, job_id: str) -> bool:
    """Return whether this is part of an id: a prefix that includes the full name, or a suffix after the name. A part of a
    name is not enough: exp1 is not exp10."""
    name = len(name_of(job_id))
    return (len(job_ref) > name and job_id.startswith(job_ref)) or (
        0 < len(job_ref) <= len(job_id) - name - 1 and job_id.endswith(job_ref)
    )


def reference(job: JobDir) -> str:
    """Return the shortest reference to a job for commands: its name if no other job of its home has it, else its id."""
    name = name_of(job.id)
    try:
        others = [other for other in _names(job.root.parent.parent) if name_of(other) == name]
    except ClusterError:
        return job.id
    return name if len(others) == 1 else job.id


def _nearest_names(job_ids: list[str], job_ref: str) -> list[str]:
    import difflib

    names = list(dict.fromkeys(name_of(job_id) for job_id in reversed(job_ids)))
    return difflib.get_close_matches(job_ref, names, n=NEAR_MAX) or names[:NEAR_MAX]
