"""Cleanup of jobs: processes that are left, files on hosts, drafts and whole job folders."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.agent import keeper
from orchestrator.backends.api import LaunchError
from orchestrator.client import remote_files
from orchestrator.client.job import Job
from orchestrator.core.errors import OrchError
from orchestrator.core.jobdir import home, locks
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.text import counted


def clean_local(jobs: Sequence[Job]) -> tuple[str, dict[str, remote_files.Account]]:
    """Kill what ended jobs left running here and remove their run files and the drafts of cut off submits.

    Returns what was done, nothing when there was nothing to do; and, by job, what could not be done and why.
    """
    left: dict[str, remote_files.Account] = {}
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


def _untidied(job_id: str, run: Path) -> remote_files.Account | None:
    """End what a job left running here and remove its run files; return what is left and why, None for nothing."""
    living = [pid for node in sorted(run.iterdir()) for pid in keeper.clean_up_processes(job_id, node.name)]
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


def _undeleted(folder: Path) -> remote_files.Account | None:
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


def _undeleted_job(job: JobDir) -> remote_files.Account | None:
    """Delete the folder of a job that is over, and is not resumed meanwhile. What makes it one goes last, so that a clean
    that failed can be repeated; return what is left and why, None when it is gone."""
    again = f"see to that, then orch clean again, or rm -r {job.root}"
    try:
        with locks.resuming(job, 0.0) as mine:
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


def _left(what: str, fix: str) -> remote_files.Account:
    return remote_files.Account({}, {"this machine": LaunchError("clean", what, fix)})


def cleaned_text(accounts: Sequence[remote_files.Account]) -> str:
    """Say how many hosts were cleaned, of how many jobs, and what came home before; nothing when there were none."""
    cleaned = [account for account in accounts if account.clean]
    if not cleaned:
        return ""
    hosts = sum(len(account.clean) for account in cleaned)
    text = f"cleaned {counted(hosts, 'host')} of {counted(len(cleaned), 'job')}"
    brought = remote_files.summary(cleaned)
    return f"{text}; {brought}" if brought else text


def clean_hosts(jobs: Sequence[Job]) -> dict[str, remote_files.Account]:
    """Clean the hosts of ended jobs; return how it went for each job that had anything there."""
    accounts: dict[str, remote_files.Account] = {}
    for job in jobs:
        if not job.folder.ended.exists() or not job.folder.archive.exists():
            continue
        try:
            account = remote_files.clean_hosts(job)
        except OrchError as err:  # one damaged folder must not keep the others' hosts dirty
            account = remote_files.Account({}, {"its hosts": LaunchError("folder", err.what, err.fix)})
        if account.brought or account.failed:
            accounts[job.id] = account
    return accounts


DRAFT_S_MAX = 3600.0
"""A submit takes seconds; a draft older than that belongs to one that was cut off."""


def older_than(jobs: Sequence[Job], age_s: float) -> list[Job]:
    """Return the ended jobs that ended longer ago than that."""
    limit_s = time.time() - age_s
    return [job for job in jobs if job.folder.ended.exists() and job.folder.ended.stat().st_mtime < limit_s]


def delete(jobs: Sequence[Job]) -> tuple[str, dict[str, remote_files.Account]]:
    """Delete ended jobs' folders; return what was done, and, by job, what could not be done and why."""
    left: dict[str, remote_files.Account] = {}
    for job in jobs:
        if why := _undeleted_job(job.folder):
            left[job.id] = why
    gone = [job for job in jobs if job.id not in left]
    names = sorted({home.name_of(job.id) for job in gone})
    return f"deleted {counted(len(gone), 'job')} ({', '.join(names)})" if gone else "", left
