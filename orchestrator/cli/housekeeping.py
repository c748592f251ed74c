"""Verbs for a job's results, for what it leaves behind, and for the hosts that jobs have seen: collect, clean, nodes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from orchestrator.cli import terminal
from orchestrator.cli.group import (
    AS_JSON,
    EXIT_CLUSTER_FAULT,
    JOB,
    all_statuses,
    apply_slurm_end,
    find_job,
    own_jobs,
    print_result,
    report_leftovers,
)
from orchestrator.cli.params import AgoParam
from orchestrator.core.errors import UserError
from orchestrator.core.invisible_characters import escape_harmful
from orchestrator.core.jobdir import home, status_file
from orchestrator.core.text import format_count


@click.command()
@JOB
@click.option("--to", "folder", type=click.Path(path_type=Path), help="Copy logs, checkpoints and evidence here.")
@click.option("--no-checkpoints", is_flag=True, help="Do not copy checkpoints (with --to).")
@click.option("--all", "everything", is_flag=True, help="Also copy more than 2 GB of files that are not checkpoints.")
def collect(job: str | None, folder: Path | None, no_checkpoints: bool, everything: bool) -> int:
    """Collect a job's logs, checkpoints, evidence and other files that its ranks wrote.

    Over SSH it first fetches what an ended job's hosts still have; a running job fetches its logs and checkpoints by itself.
    """
    from orchestrator.client import collect as collecting
    from orchestrator.client import remote_files

    if no_checkpoints and folder is None:
        raise UserError("--no-checkpoints needs --to", "--no-checkpoints", "name a folder: --to FOLDER")
    handle = find_job(job)
    apply_slurm_end(handle)
    if handle.source.status().state in status_file.ENDED and not handle.folder.ended.exists():
        terminal.say("its last logs and checkpoints are still being fetched …", err=True)
        collecting.await_final_fetch(handle)
    elif not handle.folder.ended.exists() and handle.plan().ssh is not None:
        terminal.say(
            "the job is still running: only logs and checkpoints are here; other files are fetched from its hosts after its end",
            err=True,
        )
    # Of another user's job, only what its folder has is copied.
    may_fetch = handle.folder.ended.exists() and home.is_own_job(handle.folder)
    account = remote_files.collect(handle, everything=everything) if may_fetch else remote_files.FetchReport({}, {})
    done = collecting.collect(handle, folder, checkpoints=not no_checkpoints, everything=everything)
    if fetched := remote_files.summarize([account]):
        terminal.say(fetched)
    saved = [] if no_checkpoints else [format_count(done.checkpoints, "checkpoint")]
    others = [f"{format_count(done.others, 'other file')} written by ranks"] if done.others else []
    terminal.say(f"{handle.id}: logs, evidence, {' and '.join([*saved, *others])} are in {done.folder}")
    if done.outside:
        where = f"{done.outside[-1]}{' and others' if len(done.outside) > 1 else ''}"
        terminal.say(f"  not copied: {format_count(len(done.outside), 'checkpoint')} outside of its folder: {where}")
    for text in (*done.left_out, *done.skipped):
        terminal.print_error(text)
    return report_leftovers({handle.id: account}) or (EXIT_CLUSTER_FAULT if done.left_out else 0)


@click.command()
@click.option("--free", is_flag=True, help="Ask the hosts over SSH what is free now, and who uses the rest.")
@AS_JSON
def nodes(free: bool, as_json: bool) -> int:
    """List the hosts that jobs and checks have used, with their last failures.

    A host counts as failed for a day after a job lost it or its check failed. Over SSH new jobs avoid it if there are enough other hosts. A passed check clears the failure; what a burn-in found wrong is cleared by a burn-in.
    """
    from orchestrator.client.checks import seen_hosts
    from orchestrator.views import tables

    folder, wall_s = home.job_home(os.environ), time.time()
    seen = seen_hosts.list_hosts(folder, wall_s)
    listed = [one.as_json() for one in seen]
    if free:
        from orchestrator.client.outline.host_survey import ask_capacities

        stocks, asked_s = ask_capacities(folder, os.environ), time.time()
        listed = [
            {**one, "free": stocks[one["host"]].as_json(asked_s) if one["host"] in stocks else None} for one in listed
        ]
    print_result(listed, as_json, tables.hosts)
    if not as_json:
        waiting = [status for status in all_statuses() if status.state == "QUEUED"]
        terminal.write(tables.waiting_lines(waiting))
    return 0


@click.command()
@JOB
@click.option(
    "--older-than",
    type=AgoParam(),
    help="Delete whole jobs that ended longer ago than this, such as 12h or 30d.",
)
@click.option("--yes", is_flag=True, help="Do not ask before deleting.")
@click.option("--discard", is_flag=True, help="Also delete files on hosts that could not be fetched.")
def clean(job: str | None, older_than: float | None, yes: bool, discard: bool) -> int:
    """Remove leftovers of ended jobs, or of JOB.

    These are stray processes, run files, and over SSH the job's folder on each host, after its logs, checkpoints and other files were fetched; with --older-than whole jobs.
    """
    from orchestrator.client import cleanup
    from orchestrator.views import cells

    jobs = own_jobs() if job is None else [find_job(job)]
    if job is not None:
        home.require_own_job(jobs[0].folder)
        apply_slurm_end(jobs[0])
    if job is not None and not jobs[0].folder.ended.exists():
        raise UserError("the job has not ended", jobs[0].id, "wait for its end, or orch cancel it")
    cleaned, unclean = cleanup.clean_local(jobs)
    accounts = cleanup.clean_hosts(jobs, discard=discard)
    unclean |= {job_id: account for job_id, account in accounts.items() if account.lines()}
    if any(fetched.missing for account in accounts.values() for fetched in account.fetched.values()):
        fix = "copy the files named below, then run orch clean again; --discard deletes them"
        terminal.say(f"some hosts were not cleaned: they have files that exist nowhere else\n  fix: {fix}", err=True)
    done = [text for text in (cleaned, cleanup.summarize_cleaned(accounts)) if text]
    if done or not unclean:
        terminal.say("\n".join(done) or "nothing to clean up")
    old = cleanup.older_than(jobs, older_than) if older_than is not None else []
    if older_than is not None and not old:
        terminal.say("no job ended that long ago")
    kept = [ended for ended in old if ended.id in unclean]
    if kept:
        named = cells.name_list([ended.id for ended in kept])
        terminal.say(f"not deleted, because their leftovers could not be removed: {named}", err=True)
        folders = " ".join(str(ended.folder.root) for ended in kept[:5])
        terminal.say(f"  fix: see below; or, if hosts are gone for good: rm -r {folders}", err=True)
    old = [ended for ended in old if ended.id not in unclean]
    named = ", ".join(ended.id for ended in old[:5]) + (", …" if len(old) > 5 else "")
    question = escape_harmful(f"delete {named} ({len(old)}) with logs and checkpoints?")
    if old and (yes or click.confirm(question)):
        deleted, undeleted = cleanup.delete_jobs(old)
        if deleted:
            terminal.say(deleted)
        unclean.update(undeleted)
    return report_leftovers(unclean)
