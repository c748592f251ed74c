"""What came of a job? Its checkpoints, logs and evidence: listed, brought together, and cleared away."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from orchestrator import home, joblock, leftovers, statefile
from orchestrator.backends import LaunchError
from orchestrator.brain.facts import Facts
from orchestrator.errors import ClusterError, OrchError, UserError, counted
from orchestrator.job import POLL_S, Job
from orchestrator.node import keeper
from orchestrator.node.checkpoints import CheckpointWatch
from orchestrator.node.formats import Wholeness, look, wholeness
from orchestrator.wire.paths import JobDir

Json: TypeAlias = dict[str, Any]


def checkpoints(job: Job, *, verify: bool) -> list[Json]:
    """Return what matches the job's glob, oldest first: path, step (None: not known), bytes, written_at, complete.

    `complete`: the supervisor knows that it is. `whole`: what the files' formats tell, None when they tell nothing or
    `verify` did not ask for it. `resume`: the next attempt starts from it. Raises ClusterError for a damaged job.
    """
    from orchestrator import factsfile
    from orchestrator.journal import JournalError

    try:
        facts = factsfile.read(job.folder).facts
    except JournalError:
        facts = Facts()  # a checkpoint is the way on, so what lies there is listed
    chosen = facts.checkpoint.path if facts.checkpoint else None
    watch = CheckpointWatch(job.folder.checkpoints, job.plan().checkpoint_glob)
    listed = []
    for path, shape in sorted(watch.listed().items(), key=lambda item: item[1].mtime_ns):
        listed.append(
            {
                "path": str(path),
                "step": facts.known_steps.get(str(path)),
                "bytes": shape.size_bytes,
                "written_at": statefile.iso(shape.mtime_ns / 1e9),
                "complete": str(path) in facts.known_steps,
                "whole": _whole(path) if verify else None,
                "resume": str(path) == chosen,
            }
        )
    return listed


def _whole(path: Path) -> bool | None:
    known = wholeness(path, look(path))
    return None if known is Wholeness.UNKNOWN else known is Wholeness.WHOLE


def collect(job: Job, to: Path | None) -> Path:
    """Bring a job's results together and return where they are. Raises OrchError, UserError for an unfit `to`.

    Everything is in the job folder: from the start, or since it came from the hosts (`leftovers`). `to` gets a copy of
    logs, checkpoints, evidence and the post-mortem (`why.json`).
    """
    if to is None:
        return job.folder.root
    _refuse_unfit(job, to)
    why = json.dumps(_why(job), indent=2)
    made = [path for path in (to, *to.parents) if not path.exists()]
    parts = (job.folder.logs, job.folder.checkpoints, job.folder.root / "evidence")
    files = (job.folder.spec, job.folder.provenance, job.folder.journal)
    try:
        to.mkdir(parents=True, exist_ok=True)
        (to / "why.json").write_text(why)
        for part in parts:
            if part.exists() and (not part.is_symlink() or home.is_ours(job.folder)):
                shutil.copytree(part, to / part.name, symlinks=True)
        for file in files:
            if file.exists():
                shutil.copy2(file, to, follow_symlinks=False)
    except BaseException as err:
        _take_back([to / "why.json", *(to / path.name for path in (*parts, *files))], made)
        if isinstance(err, OSError):
            fix = "mend that, or free some space there, then collect again; nothing was left there"
            raise ClusterError(f"cannot be copied: {_reason(err)}", str(to), fix) from err
        raise
    return to


def _why(job: Job) -> Json:
    """Return the post-mortem, or why there is none: the rest is worth a copy all the same."""
    try:
        return job.why()
    except OrchError as err:
        return {"id": job.id, "unknown": str(err)}


def _refuse_unfit(job: Job, to: Path) -> None:
    """Raise UserError for a folder that no copy of the job can be made in."""
    try:
        if to.resolve().is_relative_to(job.folder.root.resolve()):
            raise UserError("a copy of the job inside its own folder", str(to), "name a folder elsewhere")
        if (to.exists() or to.is_symlink()) and (not to.is_dir() or any(to.iterdir())):
            raise UserError("is no empty folder", str(to), "name a new one")
    except (
        OSError,
        RuntimeError,
    ) as err:  # too long a name, a folder that may not be entered, a circle of links
        what = f"cannot be looked at: {_reason(err)}"
        raise UserError(what, str(to), "name a folder that you can write to") from err


def _reason(err: BaseException) -> str:
    """Return why something failed; of many files that could not be copied the first, and how many more there are."""
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
        with contextlib.suppress(OSError):  # it was not made, or somebody else uses it by now
            path.rmdir()


LAST_S_MAX = 360.0
"""How long to wait for what an ended job's supervisor still brings home."""


def await_last(job: Job) -> None:
    """Wait until an ended job's supervisor has brought home what it can; revive it if it died over that."""
    deadline_s = time.monotonic() + LAST_S_MAX
    while not job.folder.ended.exists() and time.monotonic() < deadline_s:
        job.look_after()
        time.sleep(POLL_S)


def tidy(jobs: Sequence[Job]) -> tuple[str, dict[str, leftovers.Account]]:
    """Kill what ended jobs left running here and remove their run files and the drafts of cut off submits.

    Returns what was done, nothing when there was nothing to do; and, by job, what could not be done and why.
    """
    left: dict[str, leftovers.Account] = {}
    tidied = removed = 0
    for job in jobs:
        run = job.folder.root / "nodes"
        if not job.folder.ended.exists() or not run.exists() or job.folder.archive.exists():
            continue  # over SSH it holds what agents said, and nothing of it runs here
        if why := _untidied(job.id, run):
            left[job.id] = why
        else:
            tidied += 1
    for draft in sorted(
        path for place in {job.folder.root.parent for job in jobs} for path in _drafts(place)
    ):
        if why := _undeleted(draft):
            left[draft.name] = why
        else:
            removed += 1
    parts = [f"tidied {counted(tidied, 'ended job')}"] if tidied else []
    parts += [f"removed {counted(removed, 'cut off submit')}"] if removed else []
    return ", ".join(parts), left


def _untidied(job_id: str, run: Path) -> leftovers.Account | None:
    """End what a job left running here and remove its run files; return what is left and why, None for nothing."""
    living = [pid for node in sorted(run.iterdir()) for pid in keeper.sweep(job_id, node.name)]
    if living:
        return _left(
            f"cannot be ended: process {', '.join(map(str, living))}", "see with ps what holds it up"
        )
    return _undeleted(run)


def _drafts(place: Path) -> list[Path]:
    """Return the folders of submits that were cut off, ours and long ago."""
    old = []
    for path in place.glob(".*"):
        about = path.lstat()
        if (
            stat.S_ISDIR(about.st_mode)
            and about.st_uid == os.geteuid()
            and time.time() - about.st_mtime > DRAFT_S_MAX
        ):
            old.append(path)
    return old


def _undeleted(folder: Path) -> leftovers.Account | None:
    """Delete a folder with all that can be deleted in it; return what is left and why, None when it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return None
    except OSError as err:
        what = f"cannot be deleted: {err.filename or folder}: {err.strerror or err}"
        return _left(what, f"see to that, then orch clean again, or rm -r {folder}")
    return None


def _undeleted_job(job: JobDir) -> leftovers.Account | None:
    """Delete the folder of a job that is over, and is not resumed meanwhile. What makes it one goes last, so that a clean
    that failed can be repeated; return what is left and why, None when it is gone."""
    again = f"see to that, then orch clean again, or rm -r {job.root}"
    try:
        with joblock.resuming(job, 0.0) as mine:
            if not mine or not job.ended.exists():
                return _left("is not over any more: it was resumed", f"orch status {job.id} shows how it is")
            for path in sorted({*job.root.iterdir()} - {job.plan, job.ended}):
                if not path.is_dir() or path.is_symlink():
                    path.unlink()
                elif why := _undeleted(path):
                    return why
            return _undeleted(job.root)
    except OSError as err:
        return _left(f"cannot be deleted: {err.filename or job.root}: {err.strerror or err}", again)


def _left(what: str, fix: str) -> leftovers.Account:
    return leftovers.Account({}, {"this machine": LaunchError("clean", what, fix)})


def swept(accounts: Sequence[leftovers.Account]) -> str:
    """Say how many hosts were cleaned, of how many jobs, and what came home before; nothing when there were none."""
    cleaned = [account for account in accounts if account.clean]
    if not cleaned:
        return ""
    hosts = sum(len(account.clean) for account in cleaned)
    text = f"cleaned {counted(hosts, 'host')} of {counted(len(cleaned), 'job')}"
    brought = leftovers.summary(cleaned)
    return f"{text}; {brought}" if brought else text


def sweep_hosts(jobs: Sequence[Job]) -> dict[str, leftovers.Account]:
    """Clean the hosts of ended jobs; return how it went for each job that had anything there."""
    accounts: dict[str, leftovers.Account] = {}
    for job in jobs:
        if not job.folder.ended.exists() or not job.folder.archive.exists():
            continue
        try:
            account = leftovers.sweep(job)
        except OrchError as err:  # one damaged folder must not keep the others' hosts dirty
            account = leftovers.Account({}, {"its hosts": LaunchError("folder", err.what, err.fix)})
        if account.brought or account.failed:
            accounts[job.id] = account
    return accounts


DRAFT_S_MAX = 3600.0
"""A submit takes seconds; a draft older than that belongs to one that was cut off."""


def older_than(jobs: Sequence[Job], age_s: float) -> list[Job]:
    """Return the ended jobs that ended longer ago than that."""
    limit_s = time.time() - age_s
    return [job for job in jobs if job.folder.ended.exists() and job.folder.ended.stat().st_mtime < limit_s]


def delete(jobs: Sequence[Job]) -> tuple[str, dict[str, leftovers.Account]]:
    """Delete ended jobs' folders; return what was done, and, by job, what could not be done and why."""
    left: dict[str, leftovers.Account] = {}
    for job in jobs:
        if why := _undeleted_job(job.folder):
            left[job.id] = why
    gone = [job for job in jobs if job.id not in left]
    names = sorted({home.name_of(job.id) for job in gone})
    return f"deleted {counted(len(gone), 'job')} ({', '.join(names)})" if gone else "", left
