"""Verbs that start and stop a job: submit, cancel, restart, resume."""

from __future__ import annotations

import os
from pathlib import Path

import click

from orchestrator.cli import terminal
from orchestrator.cli.group import (
    AS_JSON,
    BACKEND,
    FOLLOW,
    JOB,
    KEY,
    OVERSUBSCRIBE,
    SET,
    SPEC,
    find_job,
    follow_job,
    print_json,
)
from orchestrator.cli.params import complete_checkpoint
from orchestrator.client.job import Job
from orchestrator.core.errors import EXIT_INTERRUPTED, ClusterError, UserError
from orchestrator.core.jobdir import start_folder
from orchestrator.core.jobdir.plan import Plan

CANCEL_S_MAX = 120.0
"""How long `orch cancel` waits in addition to the grace of the ranks."""


@click.command()
@SPEC
@BACKEND
@SET
@OVERSUBSCRIBE
@KEY
@FOLLOW
@AS_JSON
def submit(
    spec: Path,
    backend: str | None,
    overrides: tuple[str, ...],
    oversubscribe: bool,
    key: str | None,
    follow: bool,
    as_json: bool,
) -> int:
    """Submit the job that a job file describes.

    Its code is copied, so you can edit files as soon as this returns. With --json --follow each change of the status is printed as a line of JSON, and logs are not shown.
    """
    from orchestrator.client.job import submit_file

    job, is_new = submit_file(spec, backend, overrides, oversubscribe=oversubscribe, key=key)
    return report_submitted(job, follow=follow, as_json=as_json, is_new=is_new)


def report_submitted(job: Job, *, follow: bool, as_json: bool, is_new: bool = True) -> int:
    """Print a job that was submitted, now or with the same key before, follow it if asked to, and return the exit code."""
    from orchestrator.submission import submit_checks

    if as_json:
        state = job.status()["state"]
        print_json({"id": job.id, "name": job.name, "dir": str(job.folder.root), "state": state, "new": is_new}, follow)
    elif not is_new:
        terminal.say(f"{job.id} already exists for this key, state {job.status()['state']}")
    else:
        plan = job.plan()
        batch = f"\n  batch   {plan.batch_text}" if plan.batch_text else ""
        terminal.say(f"submitted {job.id}\n  runs    {plan.size_text}{batch}\n  folder  {job.folder.root}")
        for host, why in plan.avoided_hosts.items():
            terminal.say(f"  avoids  {host}, which failed {why}; a passed orch check clears that")
        if job.source.slurm_id():
            _print_queue(job)
    for name, to in start_folder.find_output_links(job.folder).items() if is_new and not as_json else ():
        terminal.say(
            f"  note    {name} is a link to {to}, because git ignores it: all jobs of this workdir share its files"
        )
    for warning in (
        (
            *submit_checks.submit_warnings(job.plan()),
            *submit_checks.uncopied_imports_warning(job.folder, job.plan(), os.environ),
        )
        if is_new
        else ()
    ):
        terminal.say(f"warning: {warning.what}\n  fix: {warning.fix}", err=True)
    if follow:
        return follow_job(job, as_json=as_json)
    if not as_json:
        terminal.say(f"  logs    orch logs -f {job.reference}\n  cancel  orch cancel {job.reference}")
    return 0


def _print_queue(job: Job) -> None:
    """Print Slurm's id of a new job, and what will keep it from starting, where Slurm knows that at once."""
    queued = job.source.status().queue
    if queued is None or not queued.fix:
        terminal.say(f"  queue   Slurm job {job.source.slurm_id()}")
    else:
        terminal.say(f"  queue   {queued.said}\n          fix: {queued.fix}")


@click.command()
@JOB
@click.option("--wait/--no-wait", default=True, help="Wait until it has stopped (the default).")
def cancel(job: str | None, wait: bool) -> int:
    """Stop a job. It can be resumed.

    Its ranks get TERM, and KILL after monitor.stop_grace.
    """
    found = find_job(job, running=True)
    found.cancel()
    if not wait:
        terminal.say(f"{found.id} is being stopped")
        return 0
    terminal.say(f"stopping {found.id} …", err=True)
    try:
        state = found.wait(CANCEL_S_MAX + found.plan().limits.stop_grace_s)["state"]
    except TimeoutError as err:
        fix = "`orch status` shows which node is still stopping; the cancel stays in effect"
        raise ClusterError(str(err), found.id, fix) from err
    except KeyboardInterrupt:
        terminal.say(f"\n{found.id} is still being stopped in the background", err=True)
        return EXIT_INTERRUPTED
    late = "" if state == "CANCELLED" else ": it ended before it could be stopped"
    terminal.say(f"{found.id} {state}{late}")
    return 0


@click.command()
@JOB
def restart(job: str | None) -> int:
    """Stop the current attempt of a running job, and start the next one from the newest checkpoint.

    Ranks get TERM, and KILL after monitor.stop_grace. It is not counted in restart.max.
    """
    from orchestrator.views.cells import shorten_paths

    found = find_job(job, running=True)
    status = found.restart()
    newest = status["checkpoint"]
    source = (
        shorten_paths(newest["path"], status["dir"]) if newest else "the beginning, since there is no checkpoint yet"
    )
    terminal.say(f"attempt {status['attempt']} of {found.id} is being stopped; the next one starts from {source}")
    return 0


@click.command()
@JOB
@click.option(
    "--from",
    "checkpoint",
    metavar="CHECKPOINT",
    help="Resume from this checkpoint instead of the newest.",
    shell_complete=complete_checkpoint,
)
@SET
@FOLLOW
def resume(job: str | None, checkpoint: str | None, overrides: tuple[str, ...], follow: bool) -> int:
    """Resume an ended job from its newest checkpoint.

    It keeps its folder and the code of its submit. A succeeded job is resumed only with --set or --from: otherwise nothing is left to do.
    """
    from orchestrator.views import checkpoint_table as saves_view

    found = find_job(job)
    if checkpoint == "":
        raise UserError("names no checkpoint", "--from", "orch checkpoints lists them; without --from it is the newest")
    old_plan = found.plan() if overrides else None
    choice = found.resume(checkpoint or "", overrides)
    terminal.say(f"resumed {found.id}")
    terminal.write(saves_view.resume_lines(choice, str(found.folder.root)))
    if old_plan is not None:
        _warn_about_batch(old_plan, found.plan())
        _warn_about_total(found.plan().total_steps, choice.checkpoint.step if choice.checkpoint is not None else None)
    if found.source.slurm_id():
        _print_queue(found)
    return follow_job(found, tail=0) if follow else 0


def _warn_about_total(total: int | None, step: int | None) -> None:
    """Warn when a resumed job starts at or after its last step."""
    if total is not None and step is not None and step >= total:
        terminal.say(f"warning: total_steps is {total:,}, and the job resumes at step {step:,}", err=True)


def _warn_about_batch(old_plan: Plan, new_plan: Plan) -> None:
    """Warn when a resumed job has another effective batch size: its steps are then not comparable."""
    old, new = old_plan.effective_batch, new_plan.effective_batch
    if new_plan.batch is None or old is None or old == new:
        return
    accumulation, rest = divmod(old, new_plan.batch.per_device * new_plan.world_size)
    keep = f"to keep {old}, let the script accumulate {accumulation} times, and --set batch.accumulation={accumulation}"
    text = f"warning: effective batch {old} → {new}: {new_plan.batch_text}"
    terminal.say(text if rest or not accumulation else f"{text}\n         {keep}", err=True)
