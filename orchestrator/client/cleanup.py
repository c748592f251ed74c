"""Cleanup after jobs: stray processes, files on hosts, drafts of submits, and whole job folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from orchestrator.agent.process import agent_monitor
from orchestrator.backends.api import LaunchError
from orchestrator.client import remote_files
from orchestrator.client.job import Job
from orchestrator.core.errors import ClusterError, OrchError
from orchestrator.core.host import file_age
from orchestrator.core.jobdir import home, locks
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.text import format_count

JOBS_NAMED_MAX = 5
"""The number of jobs that a line names."""


def clean_local(jobs: Sequence[Job]) -> tuple[str, dict[str, remote_files.FetchReport]]:
    """Kill what ended jobs left running here and remove their run files and the drafts of interrupted submits.

    Return what was done, empty for nothing; and, by job, what could not be done and why.
    """
    # Over SSH the run files are reports of agents, and no process of the job runs here
    local_jobs = [job.folder for job in jobs if job.folder.ended.exists() and not job.folder.archive.exists()]
    job_homes = sorted({job.folder.root.parent for job in jobs})
    drafts = sorted(draft for place in job_homes for draft in _old_drafts(place))
    cleaned, failures = _clean_each({job.id: job for job in local_jobs if _run_folder(job).exists()}, _clean_run_files)
    removed, undeleted = _clean_each({draft.name: draft for draft in drafts}, _delete_folder)
    parts = [f"cleaned up {format_count(len(cleaned), 'ended job')}{_names_suffix(cleaned)}"] if cleaned else []
    parts += [f"removed {format_count(len(removed), 'interrupted submit')}{_names_suffix(removed)}"] if removed else []
    return ", ".join(parts), failures | undeleted


T = TypeVar("T")


def _clean_each(
    things: Mapping[str, T], clean: Callable[[T], None]
) -> tuple[list[str], dict[str, remote_files.FetchReport]]:
    """Clean up each of these; return the names of the clean ones, and the reasons for the others."""
    done: list[str] = []
    failures: dict[str, remote_files.FetchReport] = {}
    for name, thing in things.items():
        try:
            clean(thing)
            done.append(name)
        except ClusterError as err:
            failures[name] = remote_files.FetchReport({}, {"this machine": LaunchError("clean", err.what, err.fix)})
    return done, failures


def _names_suffix(names: Sequence[str]) -> str:
    return f" ({', '.join(names[:JOBS_NAMED_MAX])}{', …' if len(names) > JOBS_NAMED_MAX else ''})"


def _run_folder(job: JobDir) -> Path:
    return job.root / "nodes"


def _clean_run_files(job: JobDir) -> None:
    """End what a job left running here and remove its run files. Raises ClusterError, also if it is resumed at that moment."""
    run = _run_folder(job)
    with _deletion_errors(run), locks.hold_ended_job(job):
        living = [pid for node in sorted(run.iterdir()) for pid in agent_monitor.clean_up_node(job, node.name)]
        if living:
            what = f"cannot be ended: process {', '.join(map(str, living))}"
            raise ClusterError(what, fix="see with ps what the process is waiting for")
        _delete_folder(run)


def _old_drafts(place: Path) -> list[Path]:
    old = []
    for path in filter(lambda path: home.is_draft(path.name), place.glob(".*")):
        about = path.lstat()
        is_own_folder = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
        if is_own_folder and file_age.age_s(path) > DRAFT_S_MAX:
            old.append(path)
    return old


@contextlib.contextmanager
def _deletion_errors(folder: Path) -> Iterator[None]:
    """Raise a ClusterError that names what cannot be deleted, for OSError."""
    try:
        yield
    except OSError as err:
        is_inside = Path(err.filename or "/").is_relative_to(folder)
        what = f"cannot be deleted: {err.filename if is_inside else folder}: {err.strerror or err}"
        fix = f"fix that and run orch clean again, or rm -r {folder}"
        raise ClusterError(what, fix=fix) from err


def _delete_folder(folder: Path) -> None:
    """Delete a folder with all that can be deleted in it. Raises ClusterError for what cannot."""
    shutil.rmtree(folder, ignore_errors=True)
    with _deletion_errors(folder), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _delete_job(job: JobDir) -> None:
    """Delete the folder of an ended job. Raises ClusterError, also if it is resumed at that moment.

    Plan and end mark go last, so that a cleanup that failed can be repeated.
    """
    with _deletion_errors(job.root), locks.hold_ended_job(job):
        for path in sorted({*job.root.iterdir()} - {job.plan, job.ended}):
            if path.is_dir() and not path.is_symlink():
                _delete_folder(path)
            else:
                path.unlink()
        _delete_folder(job.root)


def summarize_cleaned(accounts: Mapping[str, remote_files.FetchReport]) -> str:
    """Return how many hosts of which jobs were cleaned up, and what was fetched before; empty for none. `accounts`: by job."""
    cleaned = {job_id: account for job_id, account in accounts.items() if account.clean_hosts}
    if not cleaned:
        return ""
    hosts = sum(len(account.clean_hosts) for account in cleaned.values())
    text = (
        f"cleaned up {format_count(hosts, 'host')} of {format_count(len(cleaned), 'job')}{_names_suffix(list(cleaned))}"
    )
    fetched = remote_files.summarize(list(cleaned.values()))
    return f"{text}; {fetched}" if fetched else text


def clean_hosts(jobs: Sequence[Job], *, discard: bool = False) -> dict[str, remote_files.FetchReport]:
    """Clean up the hosts of ended jobs; return the outcome for each job that had anything there. `discard`: also of files that
    exist nowhere else."""
    accounts: dict[str, remote_files.FetchReport] = {}
    for job in jobs:
        if not job.folder.ended.exists() or not job.folder.archive.exists():
            continue
        try:
            account = remote_files.clean_hosts(job, discard=discard)
        except OrchError as err:  # a damaged folder must not prevent the cleanup of other jobs' hosts
            account = remote_files.FetchReport({}, {"its hosts": LaunchError("folder", err.what, err.fix)})
        if account.fetched or account.failed:
            accounts[job.id] = account
    return accounts


DRAFT_S_MAX = 3600.0
"""A submit takes seconds; an older draft is left from an interrupted one."""


def older_than(jobs: Sequence[Job], age_s: float) -> list[Job]:
    """Return the jobs that ended more than `age_s` ago."""
    ended = [job for job in jobs if job.folder.ended.exists()]
    return [job for job in ended if file_age.age_s(job.folder.ended) > age_s]


def delete_jobs(jobs: Sequence[Job]) -> tuple[str, dict[str, remote_files.FetchReport]]:
    """Delete ended jobs' folders; return what was done, and, by job, what could not be done and why."""
    deleted, failures = _clean_each({job.id: job.folder for job in jobs}, _delete_job)
    names = sorted(map(home.name_of, deleted))
    return f"deleted {format_count(len(deleted), 'job')} ({', '.join(names)})" if deleted else "", failures
