"""Verbs for what a job leaves behind: collect, clean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli import terminal
from orchestrator.cli.group import JOB, apply_slurm_end, find_job, own_jobs, report_leftovers
from orchestrator.cli.params import Ago
from orchestrator.core.errors import UserError
from orchestrator.core.invisible_characters import harmless
from orchestrator.core.jobdir import home, status_file

if TYPE_CHECKING:
    pass


@click.command(name="collect")
@JOB
@click.option(
    "--to", "folder", type=click.Path(path_type=Path), help="Copy logs, checkpoints and evidence here."
)
def collect_verb(job: str | None, folder: Path | None) -> int:
    """Bring a job's logs, checkpoints and evidence together.

    Over SSH what an ended job's hosts still have comes home first; a job that runs brings it home by itself.
    """
    from orchestrator.client import collect, remote_files

    found = find_job(job)
    apply_slurm_end(found)
    if found.last_status()["state"] in status_file.ENDED and not found.folder.ended.exists():
        terminal.say("its last logs and checkpoints are still coming home …", err=True)
        collect.await_last(found)
    is_over = found.folder.ended.exists()
    comes_home = is_over and home.is_ours(found.folder)  # another user's job is copied as far as it is there
    account = remote_files.collect(found) if comes_home else remote_files.Account({}, {})
    place = collect.collect(found, folder)
    if brought := remote_files.summary([account]):
        terminal.say(brought)
    terminal.say(f"{found.id}: logs, checkpoints and evidence are in {place}")
    return report_leftovers({found.id: account})


@click.command()
@JOB
@click.option(
    "--older-than", type=Ago(), help="Delete jobs that ended longer ago than 12h or 30d, folder and all."
)
@click.option("--yes", is_flag=True, help="Do not ask before deleting.")
def clean(job: str | None, older_than: float | None, yes: bool) -> int:
    """Remove what ended jobs, or JOB, left behind.

    That is stray processes and run files, over SSH the job's folders on its hosts, once all that they hold is home; with --older-than whole jobs are deleted.
    """
    from orchestrator.client import cleanup
    from orchestrator.views import cells

    jobs = own_jobs() if job is None else [find_job(job)]
    if job is not None:
        home.require_ours(jobs[0].folder)
    if job is not None and not jobs[0].folder.ended.exists():
        raise UserError("the job is not over yet", jobs[0].id, "wait for its end, or orch cancel it")
    tidied, untidied = cleanup.clean_local(jobs)
    accounts = cleanup.clean_hosts(jobs)
    left = {**untidied, **{job_id: one for job_id, one in accounts.items() if not one.is_whole}}
    done = [text for text in (tidied, cleanup.cleaned_text(list(accounts.values()))) if text]
    if done or not left:
        terminal.say("\n".join(done) or "ended jobs have left nothing behind")
    old = cleanup.older_than(jobs, older_than) if older_than is not None else []
    if older_than is not None and not old:
        terminal.say("no job ended that long ago")
    kept = [one for one in old if one.id in left]
    if kept:
        named = cells.named([one.id for one in kept])
        terminal.say(f"kept, since not all that they left could be cleaned away: {named}", err=True)
        folders = " ".join(str(one.folder.root) for one in kept[:5])
        terminal.say(f"  fix: see below; or, should hosts be gone for good: rm -r {folders}", err=True)
    old = [one for one in old if one.id not in left]
    named = ", ".join(one.id for one in old[:5]) + (", …" if len(old) > 5 else "")
    question = harmless(f"delete {named} ({len(old)}) with logs and checkpoints?")
    if old and (yes or click.confirm(question)):
        deleted, undeleted = cleanup.delete(old)
        if deleted:
            terminal.say(deleted)
        left.update(undeleted)
    return report_leftovers(left)
