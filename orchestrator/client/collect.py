"""Results of a job: its checkpoints listed, and its logs, checkpoints and evidence copied to one place."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.agent.outputs.checkpoint_formats import Wholeness, inspect_shape, wholeness
from orchestrator.agent.outputs.checkpoint_watch import CheckpointWatch
from orchestrator.brain.model.facts import Facts
from orchestrator.client.job import POLL_S, Job
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import home, ownership, status_file


def checkpoints(job: Job, *, verify: bool) -> list[Json]:
    """Return the checkpoints that match the job's glob, oldest first, as `orch checkpoints --json` prints them.

    `step`: None where it is unknown. `complete`: the supervisor knows that the checkpoint is. `whole`: what the file
    format tells, None when it tells nothing, or without `verify`. `resume`: the next attempt starts from it. Raises
    ClusterError for a damaged job.
    """
    from orchestrator.supervisor.journal import facts_file
    from orchestrator.supervisor.journal.journal_file import JournalError

    try:
        facts = facts_file.read(job.folder).facts
    except JournalError:
        facts = Facts()  # a resume needs a checkpoint, so the files are listed all the same
    chosen = facts.checkpoint.path if facts.checkpoint else None
    watch = CheckpointWatch(*job.plan().checkpoint_place(job.folder))
    listed = []
    for path, shape in sorted(watch.listed().items(), key=lambda item: item[1].mtime_ns):
        listed.append(
            {
                "path": str(path),
                "step": facts.known_steps.get(str(path)),
                "bytes": shape.size_bytes,
                "written_at": status_file.iso(shape.mtime_ns / 1e9),
                "complete": str(path) in facts.known_steps,
                "whole": _whole(path) if verify else None,
                "resume": str(path) == chosen,
            }
        )
    return listed


def _whole(path: Path) -> bool | None:
    state = wholeness(path, inspect_shape(path))
    return None if state is Wholeness.UNKNOWN else state is Wholeness.WHOLE


def collect(job: Job, to: Path | None) -> Path:
    """Copy a job's logs, checkpoints, evidence and post-mortem (`why.json`) to a folder; return where they are.

    Without `to` that is the job folder, into which `remote_files` has fetched what hosts had. Raises OrchError, and
    UserError for an unfit `to`.
    """
    if to is None:
        return job.folder.root
    _refuse_unfit(job, to)
    why = json.dumps(_why(job), indent=2)
    made = [path for path in (to, *to.parents) if not path.exists()]
    parts = (job.folder.logs, job.folder.checkpoints, job.folder.root / "evidence", job.folder.from_hosts)
    files = (job.folder.spec, job.folder.provenance, job.folder.journal)
    try:
        to.mkdir(parents=True, exist_ok=True)
        (to / "why.json").write_text(why)
        for part in parts:
            if part.exists() and (not part.is_symlink() or home.is_ours(job.folder)):
                _copy_folder(part, to / part.name)
        _copy_saved_elsewhere(job, to / job.folder.checkpoints.name)
        for file in files:
            if file.exists():
                _copy(file, to / file.name)
    except BaseException as err:
        _take_back([to / "why.json", *(to / path.name for path in (*parts, *files))], made)
        if isinstance(err, OSError):
            fix = "mend that, or free some space there, then collect again; nothing was left there"
            raise ClusterError(f"cannot be copied: {_reason(err)}", str(to), fix) from err
        raise
    return to


def _copy_saved_elsewhere(job: Job, to: Path) -> None:
    """Copy the checkpoints of a job that are in its working folder; those at an absolute path stay where they are."""
    try:
        place, glob = job.plan().checkpoint_place(job.folder)
    except OrchError:
        return
    if place == job.folder.checkpoints or Path(glob).is_absolute() or not home.is_ours(job.folder):
        return
    for path in CheckpointWatch(place, glob).listed():
        target = to / path.relative_to(place)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            _copy_folder(path, target)
        else:
            _copy(path, target)


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder, see `_copy`."""
    shutil.copytree(source, target, symlinks=True, copy_function=_copy)
    _close_folders(target)


def _copy(source: str | Path, target: str | Path) -> None:
    """Copy a file with its times.

    Its mode loses set-user-ID and others' right to write: a file of another user's job must not run as the collector.
    """
    try:
        shutil.copyfile(source, target, follow_symlinks=False)
    except FileNotFoundError:
        if os.path.lexists(source):
            raise
        return  # a running job has deleted or renamed it meanwhile
    if not Path(target).is_symlink():
        about = Path(source).lstat()
        os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))
        Path(target).chmod(ownership.mode_of_copy(about.st_mode))


def _close_folders(root: Path) -> None:
    """Take others' right to write from the copies of folders, which have the modes of their sources."""
    for folder, _, _ in os.walk(root):
        Path(folder).chmod(ownership.mode_of_copy(Path(folder).stat().st_mode))


def _why(job: Job) -> Json:
    """Return the post-mortem, or why there is none: the rest is copied all the same."""
    try:
        return job.why()
    except OrchError as err:
        return {"id": job.id, "unknown": str(err)}


def _refuse_unfit(job: Job, to: Path) -> None:
    """Raise UserError for a folder that cannot take a copy of the job."""
    try:
        if to.resolve().is_relative_to(job.folder.root.resolve()):
            raise UserError("a copy of the job inside its own folder", str(to), "name a folder elsewhere")
        if (to.exists() or to.is_symlink()) and (not to.is_dir() or any(to.iterdir())):
            raise UserError("is not an empty folder", str(to), "name a new one")
    except (OSError, RuntimeError) as err:
        # A name is too long, a folder may not be entered, or links form a circle.
        what = f"cannot be read: {_reason(err)}"
        raise UserError(what, str(to), "name a folder that you can write to") from err


def _reason(err: BaseException) -> str:
    """Return why a copy failed; of many files that could not be copied the first, and how many more."""
    if not isinstance(err, shutil.Error):
        return (err.strerror if isinstance(err, OSError) else None) or str(err)
    failed = err.args[0]
    source, _, why = failed[0]
    return f"{source}: {why}" + (f", and {len(failed) - 1} more" if len(failed) > 1 else "")


def _take_back(copies: Sequence[Path], made: Sequence[Path]) -> None:
    """Remove the copies of a collect that failed, and the folders that were `made` for it, the innermost first."""
    for path in copies:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()
    for path in made:
        with contextlib.suppress(OSError):  # it was not made, or another process uses it by now
            path.rmdir()


LAST_S_MAX = 360.0
"""How long to wait for what an ended job's supervisor still fetches."""


def await_last(job: Job) -> None:
    """Wait until an ended job's supervisor has fetched what it can; revive it if it died in the meantime."""
    deadline_s = time.monotonic() + LAST_S_MAX
    while not job.folder.ended.exists() and time.monotonic() < deadline_s:
        job.look_after()
        time.sleep(POLL_S)
