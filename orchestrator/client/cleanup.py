"""Cleanup after jobs: stray processes, files on hosts, drafts of submits, and whole job folders."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.agent.process import keeper
from orchestrator.backends.api import LaunchError
from orchestrator.client import remote_files
from orchestrator.client.job import Job
from orchestrator.core.errors import OrchError
from orchestrator.core.host import file_age, process_tags
from orchestrator.core.jobdir import home, locks
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.text import counted

NAMED_MAX = 5
"""How many jobs a line names."""


def clean_local(jobs: Sequence[Job]) -> tuple[str, dict[str, remote_files.Account]]:
    """Kill what ended jobs left running here and remove their run files and the drafts of interrupted submits.

    Return what was done, empty for nothing; and, by job, what could not be done and why.
    """
    left: dict[str, remote_files.Account] = {}
    cleaned: list[str] = []
    removed: list[str] = []
    for job in jobs:
        run = job.folder.root / "nodes"
        if not job.folder.ended.exists() or not run.exists() or job.folder.archive.exists():
            continue  # over SSH it holds the agents' reports, and nothing of the job runs here
        try:
            why = _clean_run_files(job.folder, run)
        except OSError as err:
            why = _left(
                f"cannot be deleted: {run}: {err.strerror or err}", "see to that, then orch clean again"
            )
        if why:
            left[job.id] = why
        else:
            cleaned.append(job.id)
    for draft in sorted(
        path for place in {job.folder.root.parent for job in jobs} for path in _drafts(place)
    ):
        if why := _delete_folder(draft):
            left[draft.name] = why
        else:
            removed.append(draft.name)
    parts = [f"cleaned up {counted(len(cleaned), 'ended job')}{_named(cleaned)}"] if cleaned else []
    parts += [f"removed {counted(len(removed), 'cut off submit')}{_named(removed)}"] if removed else []
    return ", ".join(parts), left


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(names[:NAMED_MAX])}{', …' if len(names) > NAMED_MAX else ''})"


def _clean_run_files(job: JobDir, run: Path) -> remote_files.Account | None:
    """End what a job left running here and remove its run files, unless it is resumed at that moment; return what is
    left and why, None for nothing."""
    with locks.resuming(job, 0.0) as is_mine:
        if not is_mine or not job.ended.exists():
            return _resumed(job)
        tags = [process_tags.of(job.root, node.name) for node in sorted(run.iterdir())]
        living = [pid for tag in tags for pid in keeper.clean_up_processes(tag)]
        if living:
            what = f"cannot be ended: process {', '.join(map(str, living))}"
            return _left(what, "see with ps what holds it up")
        return _delete_folder(run)


def _drafts(place: Path) -> list[Path]:
    old = []
    for path in filter(lambda path: home.is_draft(path.name), place.glob(".*")):
        about = path.lstat()
        is_own_folder = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
        if is_own_folder and file_age.age_s(path) > DRAFT_S_MAX:
            old.append(path)
    return old


def _delete_folder(folder: Path) -> remote_files.Account | None:
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


def _delete_job(job: JobDir) -> remote_files.Account | None:
    """Delete the folder of a job that is over, unless it is resumed at that moment.

    Plan and end mark go last, so that a cleanup that failed can be repeated. Return what is left and why, None when the
    folder is gone.
    """
    again = f"see to that, then orch clean again, or rm -r {job.root}"
    try:
        with locks.resuming(job, 0.0) as is_mine:
            if not is_mine or not job.ended.exists():
                return _resumed(job)
            for path in sorted({*job.root.iterdir()} - {job.plan, job.ended}):
                if not path.is_dir() or path.is_symlink():
                    path.unlink()
                elif why := _delete_folder(path):
                    return why
            return _delete_folder(job.root)
    except OSError as err:
        return _left(f"cannot be deleted: {err.filename or job.root}: {err.strerror or err}", again)


def _resumed(job: JobDir) -> remote_files.Account:
    return _left("was resumed, so it is not over", f"orch status {job.id} shows how it is")


def _left(what: str, fix: str) -> remote_files.Account:
    return remote_files.Account({}, {"this machine": LaunchError("clean", what, fix)})


def cleaned_text(accounts: Mapping[str, remote_files.Account]) -> str:
    """Return how many hosts of which jobs were cleaned up, and what was fetched before; empty for none. `accounts`: by job."""
    cleaned = {job_id: account for job_id, account in accounts.items() if account.clean}
    if not cleaned:
        return ""
    hosts = sum(len(account.clean) for account in cleaned.values())
    text = f"cleaned up {counted(hosts, 'host')} of {counted(len(cleaned), 'job')}{_named(list(cleaned))}"
    fetched = remote_files.summary(list(cleaned.values()))
    return f"{text}; {fetched}" if fetched else text


def clean_hosts(jobs: Sequence[Job], *, discard: bool = False) -> dict[str, remote_files.Account]:
    """Clean up the hosts of ended jobs; return the outcome for each job that had anything there. `discard`: also of files that
    exist nowhere else."""
    accounts: dict[str, remote_files.Account] = {}
    for job in jobs:
        if not job.folder.ended.exists() or not job.folder.archive.exists():
            continue
        try:
            account = remote_files.clean_hosts(job, discard=discard)
        except OrchError as err:  # a damaged folder must not keep other jobs' hosts from their cleanup
            account = remote_files.Account({}, {"its hosts": LaunchError("folder", err.what, err.fix)})
        if account.fetched or account.failed:
            accounts[job.id] = account
    return accounts


DRAFT_S_MAX = 3600.0
"""A submit takes seconds; an older draft belongs to one that was cut off."""


def older_than(jobs: Sequence[Job], age_s: float) -> list[Job]:
    """Return the jobs that ended more than `age_s` ago."""
    ended = [job for job in jobs if job.folder.ended.exists()]
    return [job for job in ended if file_age.age_s(job.folder.ended) > age_s]


def delete(jobs: Sequence[Job]) -> tuple[str, dict[str, remote_files.Account]]:
    """Delete ended jobs' folders; return what was done, and, by job, what could not be done and why."""
    left: dict[str, remote_files.Account] = {}
    for job in jobs:
        if why := _delete_job(job.folder):
            left[job.id] = why
    gone = [job for job in jobs if job.id not in left]
    names = sorted({home.name_of(job.id) for job in gone})
    return f"deleted {counted(len(gone), 'job')} ({', '.join(names)})" if gone else "", left
