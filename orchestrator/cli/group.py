"""The command group `orch`: options that several verbs share, exit codes, and functions to find, follow and print jobs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli import terminal
from orchestrator.cli.params import JobName, VerbGroup, complete_backend, complete_field
from orchestrator.client.job import Job
from orchestrator.core.errors import EXIT_INTERRUPTED, OrchError, UserError
from orchestrator.core.jobdir import home
from orchestrator.core.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestrator.client.remote_files import FetchReport
    from orchestrator.core.jobdir.status_file import Status
    from orchestrator.views.cells import Line

EXIT_JOB_FAILED = 1
EXIT_CLUSTER_FAULT = 3
EXIT_NEEDS_PERSON = 4
EXIT_TIMEOUT = 124

JOB = click.argument("job", required=False, type=JobName())
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
FOLLOW = click.option(
    "--follow",
    is_flag=True,
    help="Show logs and state until the job ends; the exit code says whether it succeeded.",
)
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a field of the job file, such as nodes=2 or restart.max=5; repeatable.",
    shell_complete=complete_field,
)
BACKEND = click.option(
    "--backend",
    metavar="BACKEND",
    help="Use this backend (local, ssh or slurm) instead of the job file's.",
    shell_complete=complete_backend,
)
OVERSUBSCRIBE = click.option("--oversubscribe", is_flag=True, help="Allow more than 8 ranks per core of this machine.")
KEY = click.option("--key", metavar="KEY", help="Submit only once: with the same key again, show the existing job.")
SPEC = click.argument("spec", type=click.Path(path_type=Path))


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="orch")
def cli() -> None:
    """Run one PyTorch training job on many machines, and keep it running.

    JOB is a job's id or name; by default the latest job.
    """


def find_job(reference: str | None, *, running: bool = False) -> Job:
    """Return the job of this id or name, the latest one for None. Raises UserError when there is none. `running`: for a verb
    that acts on a running job."""
    return Job(home.find_job(home.job_home(os.environ), reference, running=running))


def all_jobs() -> list[Job]:
    """Return the jobs in the job home, oldest first."""
    return [Job(folder) for folder in home.list_jobs(home.job_home(os.environ))]


def own_jobs() -> list[Job]:
    """Return this user's jobs; print an error for each whose folder is not safe to work in."""
    jobs = []
    for job in all_jobs():
        if home.is_own_job(job.folder):
            try:
                home.require_own_job(job.folder)
                jobs.append(job)
            except UserError as err:
                terminal.print_error(str(err))
    return jobs


def all_statuses() -> list[Status]:
    """Return the statuses of all jobs; print an error for each damaged folder."""
    queued = [folder for folder in home.unfinished_jobs(home.job_home(os.environ)) if home.is_slurm(folder)]
    if queued:
        from orchestrator.client import slurm_status

        slurm_status.prefetch(queued)
    statuses = []
    for job in all_jobs():
        try:
            statuses.append(status_now(job))
        except (OrchError, OSError) as err:
            terminal.print_error(str(err))
    return statuses


def status_now(job: Job) -> Status:
    """Return a job's status after a job that Slurm has ended was closed, even where closing it failed."""
    apply_slurm_end(job)
    return job.source.status()


def apply_slurm_end(job: Job) -> None:
    """Close a job that Slurm has ended; print an error if that fails."""
    try:
        if not job.folder.ended.exists() and home.is_slurm(job.folder):
            job.source.settle()
    except (OrchError, OSError) as err:
        terminal.print_error(str(err))


def report_leftovers(accounts: Mapping[str, FetchReport]) -> int:
    """Print by job what was left on hosts, and return the exit code: 0 for nothing."""
    from orchestrator.views import cells

    jobs_of: dict[str, list[str]] = {}
    for job_id, account in accounts.items():
        for text in account.lines():
            jobs_of.setdefault(text, []).append(job_id)
    for text, names in jobs_of.items():
        terminal.print_error(f"{cells.name_list(names)}: {text}")
    return 0 if all(account.is_complete for account in accounts.values()) else EXIT_CLUSTER_FAULT


def print_json(data: Any, in_one_line: bool = False) -> None:
    """Print JSON: indented on a terminal, in one line elsewhere or when asked for."""
    click.echo(json.dumps(data, indent=2 if sys.stdout.isatty() and not in_one_line else None))


def print_result(data: Any, as_json: bool, view: Callable[[Any], list[Line]]) -> None:
    """Print what a verb found: as JSON, or as the lines of a view."""
    if as_json:
        print_json(data)
    else:
        terminal.write(view(data))


def watch_job(job: Job, *, as_json: bool) -> int:
    """Show a job's status until it ends, and return the exit code."""
    from orchestrator.cli import live

    try:
        live.print_changes(job) if as_json else live.watch(job)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def follow_job(job: Job, *, as_json: bool = False, tail: int | None = None) -> int:
    """Show a job's logs and states until it ends, and return the exit code. `tail`: of past lines only so many."""
    from orchestrator.cli import live
    from orchestrator.client.logs import reader as log_reader
    from orchestrator.views import logs as log_view
    from orchestrator.views import status as status_view

    style = log_view.choose_style(log_reader.LogQuery(), terminal=terminal.is_terminal(), environ=os.environ)
    try:
        status = live.print_changes(job) if as_json else live.follow_all(job, style, tail)
    except KeyboardInterrupt:
        terminal.say(
            f"\ndetached: {job.id} keeps running\n  logs    orch logs -f {job.reference}\n  watch   orch status --watch {job.reference}"
            f"\n  cancel  orch cancel {job.reference}",
            err=True,
        )
        return EXIT_INTERRUPTED
    if not as_json:
        reason = status_view.reason_lines(status.reason, status.dir)
        head = [status_view.headline(status), *reason, *status_view.notices(status)]
        terminal.write([*head, *_end_lines(job)])
    if status.state == "SUCCEEDED":
        return 0
    terminal.say(f"see why: orch why {job.reference}", err=True)
    return EXIT_JOB_FAILED


def _end_lines(job: Job) -> list[Line]:
    """Return the lines on an ended job's files."""
    from orchestrator.client import job_folders
    from orchestrator.views import checkpoint_table as saves_view

    with contextlib.suppress(OrchError):  # the job has ended, whatever its folder is like
        return saves_view.end_lines(job_folders.job_folders(job.folder))
    return []
