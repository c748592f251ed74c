"""Verbs that show a job: status, logs, why, stacks, goodput, checkpoints."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

import click

from orchestrator.cli import terminal
from orchestrator.cli.group import (
    AS_JSON,
    EXIT_CLUSTER_FAULT,
    JOB,
    all_jobs,
    all_statuses,
    apply_slurm_end,
    find_job,
    print_json,
    print_result,
    status_now,
    watch_job,
)
from orchestrator.cli.params import COUNT_MAX, AgoParam, PatternParam
from orchestrator.client.job import Job
from orchestrator.core.errors import OrchError, UserError
from orchestrator.core.jobdir import home, status_file

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator

    from orchestrator.client.logs.reader import LogQuery


@click.command()
@JOB
@click.option("--all", "show_all", is_flag=True, help="List all jobs, one a line.")
@click.option("--watch", is_flag=True, help="Update the view until the job ends.")
@click.option("--ranks", "every_rank", is_flag=True, help="Show each node and rank of a large job, too.")
@AS_JSON
def status(job: str | None, show_all: bool, watch: bool, every_rank: bool, as_json: bool) -> int:
    """Show the state of a job, its nodes and its ranks; with more than 64, a count by state."""
    from orchestrator.client.logs import trackers
    from orchestrator.views import status as status_view

    if show_all and (job is not None or watch):
        raise UserError("--all shows all jobs, once", "--all", "leave out JOB and --watch, or --all")
    place = home.job_home(os.environ)
    statuses = all_statuses() if show_all else []
    folder = None if show_all else home.latest_job(place) if job is None else home.find_job(place, job)
    reference = home.reference(folder) if folder is not None else ""
    if folder is not None:
        if watch:
            return watch_job(Job(folder), as_json=as_json)
        statuses = [trackers.add_runs(folder, status_now(Job(folder)))]
    if as_json:
        print_json([status_file.to_json(status) for status in statuses])
    elif not statuses:
        terminal.say(f"no jobs yet in {place}; submit one: orch submit job.yaml")
    elif show_all:
        from orchestrator.views import tables

        terminal.write(tables.jobs(statuses, terminal.width()))
    else:
        terminal.write(
            status_view.job(statuses[0], every_rank=every_rank, reference=reference, chars_max=terminal.width())
        )
    return 0


@click.command()
@JOB
@click.option(
    "--rank", "ranks", multiple=True, type=click.IntRange(0, COUNT_MAX), metavar="N", help="Only this rank; repeatable."
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME",
    help="Only the output of this node's ranks, agent and setup lines; repeatable.",
)
@click.option("--attempt", type=click.IntRange(1, COUNT_MAX), metavar="N", help="Only this attempt.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines, across restarts, until the job ends.")
@click.option("-n", "--tail", type=click.IntRange(0, COUNT_MAX), metavar="N", help="Only the last N lines.")
@click.option("--since", type=AgoParam(), help="Only lines of this last time, such as 90s, 10m, 2h.")
@click.option("--grep", type=PatternParam(), help="Only lines that match this regular expression.")
def logs(
    job: str | None,
    ranks: tuple[int, ...],
    nodes: tuple[str, ...],
    attempt: int | None,
    follow: bool,
    tail: int | None,
    since: float | None,
    grep: re.Pattern[str] | None,
) -> int:
    """Show the output of the ranks, merged by time.

    Shows the newest attempt with output; with --tail, --since or --grep also earlier ones.
    """
    from orchestrator.cli import live as following
    from orchestrator.client.logs import reader as reading
    from orchestrator.views import logs as log_view

    found = find_job(job)
    ranks = found.select_ranks(ranks, nodes, attempt)
    attempts = reading.attempts(found.folder)
    if attempt is not None and attempt not in attempts:
        fix = f"it has {attempts[0]} to {attempts[-1]}" if attempts else "it has none yet"
        raise UserError(f"{found.id} has no logs of attempt {attempt}", "--attempt", fix)
    query = reading.LogQuery(ranks, nodes, attempt, tail, since, grep)
    style = log_view.choose_style(query, terminal=terminal.is_terminal(), environ=os.environ)
    if follow:
        following.follow_logs(found, query, style)
    else:
        terminal.widen_pipe()
        texts = filter(None, _log_texts(found, query))
        first = next(texts, "")
        sys.stdout.write(first)
        sys.stdout.writelines(texts)
        if not first and tail != 0 and reading.has_rank_lines(found.folder):
            terminal.say(f"no line matches; orch logs {found.id} shows the whole newest attempt", err=True)
    if not ranks and not reading.has_rank_lines(found.folder):
        _print_nodes_logs(found, query)
    return 0


def _print_nodes_logs(job: Job, query: LogQuery) -> None:
    """Print the node logs of a job whose ranks have no output."""
    from dataclasses import replace

    texts = filter(None, _log_texts(job, replace(query, nodes=tuple(job.source.nodes()))))
    first = next(texts, None)
    if first is None:
        if _print_batch_log(job):
            return
        verb = f"orch {'why' if job.folder.ended.exists() else 'status'} {job.reference}"
        terminal.say(f"no rank has printed anything, and there are no node logs; see {verb}", err=True)
        return
    terminal.say("no rank has printed anything; the logs of the nodes:", err=True)
    sys.stdout.write(first)
    sys.stdout.writelines(texts)


def _print_batch_log(job: Job) -> bool:
    """Print the output of a job's batch script, if any: it explains why a supervisor never started."""
    lines = job.source.batch_lines()
    if lines:
        terminal.say(
            f"no rank has printed anything; the output of the batch script ({job.folder.batch_log}):",
            err=True,
        )
    for line in lines:
        terminal.say(line)
    return bool(lines)


def _log_texts(job: Job, query: LogQuery) -> Iterator[str]:
    from orchestrator.client.logs import reader as reading
    from orchestrator.views import logs as log_view

    style = log_view.choose_style(query, terminal=terminal.is_terminal(), environ=os.environ)
    mask = job.mask()
    view = log_view.LogView(style, mask)
    # One rank's bare text is in the order of its file, whatever the times.
    yield from view.add(reading.blocks(job.folder, query, time.time_ns(), mask, is_timed=style.prefix))
    yield view.flush()


@click.command()
@JOB
@AS_JSON
def why(job: str | None, as_json: bool) -> int:
    """Explain what went wrong, which rank caused it, and what was lost.

    It shows the verdict of each attempt, and all evidence of the last one that failed.
    """
    from orchestrator.views import post_mortem

    found = find_job(job)
    apply_slurm_end(found)
    print_result(found.why(), as_json, lambda report: post_mortem.post_mortem(report, found.reference))
    return 0


@click.command()
@JOB
@click.option(
    "--rank", "ranks", multiple=True, type=click.IntRange(0, COUNT_MAX), metavar="N", help="Only this rank; repeatable."
)
@AS_JSON
def stacks(job: str | None, ranks: tuple[int, ...], as_json: bool) -> int:
    """Show what each rank of a running job is doing now.

    It inspects the ranks twice and changes nothing: Python stacks, the kernel's view, and the collectives that ranks are in. Ranks with equal frames are grouped; stacks of all threads are in the job's evidence folder.
    """
    from orchestrator.views import stacks as stack_view

    found = find_job(job, running=True)
    found.select_ranks(ranks, (), None)
    taken = found.stacks()
    if as_json:
        shown = [rank for rank in taken["ranks"] if not ranks or rank["rank"] in ranks]
        print_json({**taken, "ranks": shown})
    else:
        terminal.write(stack_view.stacks(taken, ranks))
    return EXIT_CLUSTER_FAULT if taken["unanswered"] else 0


@click.command()
@JOB
@click.option("--all", "of_all", is_flag=True, help="All jobs together.")
@click.option("--since", type=AgoParam(), help="Only this last time, such as 90m, 12h, 30d.")
@click.option(
    "--by",
    type=click.Choice(("cause", "host")),
    help="Show the cost of failures by cause or by host.",
)
@AS_JSON
def goodput(job: str | None, of_all: bool, since: float | None, by: str | None, as_json: bool) -> int:
    """Show how the ranks' time was spent, and how much of it advanced the training.

    It counts the time of each rank from the job's submission to its end, by kind: steps that were kept, repeated steps, failures until detection, restarts, queues.
    """
    from orchestrator.client import job_checkpoints, post_mortem
    from orchestrator.journal.checkpoint_interval import STALLS_MIN
    from orchestrator.views import goodput as goodput_view

    if of_all and job is not None:
        raise UserError("--all shows all jobs", "--all", "leave out JOB, or --all")
    usage_by_job = {}
    for one in all_jobs() if of_all else [find_job(job)]:
        try:
            usage_by_job[one.id] = one.goodput()
        except (OrchError, OSError) as err:
            if not of_all:
                raise
            terminal.print_error(str(err))
    lab = []
    has_advice = not of_all and any(len(one.stalls_s) >= STALLS_MIN for one in usage_by_job.values())
    for other in all_jobs() if has_advice else ():
        if other.id not in usage_by_job:
            with contextlib.suppress(OrchError, OSError):  # its failures are not known
                lab.append(other.goodput())
    memory_stall_s = job_checkpoints.memory_stall_s(one.folder, one.plan()) if has_advice else None
    if since is not None:
        usage_by_job = {job_id: one.since(time.time() - since) for job_id, one in usage_by_job.items()}
        usage_by_job = {job_id: one for job_id, one in usage_by_job.items() if one.spans}
    uses = post_mortem.time_uses(usage_by_job, lab, memory_stall_s)
    print_result(uses, as_json, lambda usage: goodput_view.table(usage, by))
    return 0


@click.command()
@JOB
@AS_JSON
def folder(job: str | None, as_json: bool) -> int:
    """Print where a job's files are: its folder, its ranks' working directory, files that they wrote there, and checkpoints."""
    from orchestrator.client import job_folders
    from orchestrator.views import checkpoint_table as saves_view

    print_result(job_folders.job_folders(find_job(job).folder), as_json, saves_view.folder_lines)
    return 0


@click.command()
@JOB
@click.option("--verify", is_flag=True, help="Verify the checksum of every file.")
@AS_JSON
def checkpoints(job: str | None, verify: bool, as_json: bool) -> int:
    """List a job's checkpoints, wherever its script saves them, oldest first.

    The arrow marks the one that a restart would resume from. Below it are files that no rank of this job wrote:
    `orch resume --from PATH` resumes from one.
    """
    from orchestrator.client import job_checkpoints
    from orchestrator.views import checkpoint_table as saves_view

    found = find_job(job)
    listed = job_checkpoints.list_checkpoints(found.folder, found.plan(), verify=verify)
    for text in job_checkpoints.ledger_damage(found.folder):
        terminal.print_error(text)
    print_result(listed, as_json, lambda rows: saves_view.table(rows, found.reference, str(found.folder.root)))
    return 0
