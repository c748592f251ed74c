"""What can one type? The verbs of `orch`, one function each; the only place that prints and picks exit codes.

0 done, 1 the job failed or was cancelled, 2 the user's mistake, 3 the cluster can't, 130 interrupted while the job
goes on. Every verb loads what it needs when it runs: `orch status` must not wait for what `orch submit` uses.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator import home, statefile, terminal
from orchestrator.characters import harmless
from orchestrator.errors import ClusterError, OrchError, UserError, with_fix
from orchestrator.job import Job
from orchestrator.params import Ago, Count, JobName, Pattern, Verbs
from orchestrator.revival import revive
from orchestrator.version import VERSION

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator, Mapping

    from orchestrator.leftovers import Account
    from orchestrator.logs import LogQuery

INTERRUPTED = 130
JOB_FAILED = 1
CLUSTER_CANNOT = 3
CANCEL_S_MAX = 120.0
"""How long `orch cancel` waits beside the grace that ranks have."""

JOB = click.argument("job", required=False, type=JobName())
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
FOLLOW = click.option(
    "--follow", is_flag=True, help="Show logs and state until the job ends; its success is the exit code."
)
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a field of the spec, such as nodes=2 or restart.max=5; repeatable.",
)
BACKEND = click.option(
    "--backend", metavar="BACKEND", help="Run on local, ssh or slurm, whatever the spec says."
)
SPEC = click.argument("spec", type=click.Path(path_type=Path))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="orch")
def cli() -> None:
    """Run one PyTorch training job on many machines, and keep it running.

    JOB is a job's id or name; left out, it is the latest job.
    """


@cli.command()
@SPEC
@BACKEND
@SET
@FOLLOW
@AS_JSON
def submit(spec: Path, backend: str | None, overrides: tuple[str, ...], follow: bool, as_json: bool) -> int:
    """Submit the job that a job file describes.

    Its code is copied: files can be edited as soon as this returns. With --json --follow every change of its status is one more line of JSON, and logs are not shown.
    """
    from orchestrator.job import submit as submit_job

    job = submit_job(spec, backend=backend, overrides=overrides)
    if as_json:
        state = job.status()["state"]
        _print_json({"id": job.id, "name": job.name, "dir": str(job.folder.root), "state": state}, follow)
    else:
        terminal.say(f"submitted {job.id}\n  runs    {job.plan().size}\n  folder  {job.folder.root}")
        if job.slurm_id:
            _print_queue(job)
    if follow:
        return _follow(job, as_json=as_json)
    if not as_json:
        terminal.say(f"  watch   orch logs -f {job.id}\n  stop    orch cancel {job.id}")
    return 0


def _print_queue(job: Job) -> None:
    """Print Slurm's id of a new job, and what would keep it from ever starting, where Slurm knows that at once."""
    told = job.last_status().get("queue") or {"said": ""}
    what, fix = with_fix(told["said"])
    terminal.say(f"  queue   {what if fix else f'Slurm job {job.slurm_id}'}")
    if fix:
        terminal.say(f"          fix: {fix}")


@cli.command()
@JOB
@click.option("--all", "show_all", is_flag=True, help="All jobs, a line each.")
@click.option("--watch", is_flag=True, help="Keep showing it until the job ends.")
@AS_JSON
def status(job: str | None, show_all: bool, watch: bool, as_json: bool) -> int:
    """Show how a job is doing, node by node and rank by rank."""
    from orchestrator import listview, show

    if show_all and (job is not None or watch):
        raise UserError("--all shows all jobs, once", "--all", "leave out JOB and --watch, or --all")
    place = home.home(os.environ)
    statuses = _all_statuses() if show_all else []
    folder = None if show_all else home.latest(place) if job is None else home.find(place, job)
    if folder is not None:
        if watch:
            return _watch(Job(folder), as_json=as_json)
        statuses = [_status_now(Job(folder))]
    if as_json:
        _print_json(statuses)
    elif not statuses:
        terminal.say(f"no jobs yet in {place}; submit one: orch submit job.yaml")
    else:
        terminal.write(listview.jobs(statuses, terminal.width()) if show_all else show.job(statuses[0]))
    return 0


@cli.command()
@JOB
@click.option(
    "--rank", "ranks", multiple=True, type=Count(0), metavar="N", help="Only this rank; repeatable."
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME",
    help="What this node's ranks, agent and setup lines printed; repeatable.",
)
@click.option("--attempt", type=Count(1), metavar="N", help="Only this attempt.")
@click.option(
    "-f", "--follow", is_flag=True, help="Go on with new lines, across restarts, until the job ends."
)
@click.option("--tail", type=Count(0), metavar="N", help="Only the last so many lines.")
@click.option("--since", type=Ago(), help="Only lines of the last 90s, 10m, 2h.")
@click.option("--grep", type=Pattern(), help="Only lines in which this regular expression is found.")
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
    """Show what ranks printed, merged by time.

    Of the newest attempt that printed anything; with --tail, --since or --grep of earlier ones too.
    """
    from orchestrator import follow as following
    from orchestrator import logs as reading
    from orchestrator import logview

    found = _find(job)
    ranks = _ranks_wanted(found, ranks, nodes, attempt)
    there = reading.attempts(found.folder)
    if attempt is not None and attempt not in there:
        fix = f"it has {there[0]} to {there[-1]}" if there else "it has none yet"
        raise UserError(f"{found.id} has no logs of attempt {attempt}", "--attempt", fix)
    query = reading.LogQuery(ranks, nodes, attempt, tail, since, grep)
    style = logview.style_of(query, terminal=terminal.is_terminal(), environ=os.environ)
    if follow:
        try:
            following.logs(found, query, style)
        except KeyboardInterrupt:
            return INTERRUPTED
    else:
        _print_logs(found, query)
    if not ranks and not reading.has_rank_lines(found.folder):
        _print_nodes_logs(found, query)
    return 0


def _print_nodes_logs(job: Job, query: LogQuery) -> None:
    """Print what the nodes did in a job whose ranks have not printed anything."""
    from dataclasses import replace

    there = iter(_printed(job, replace(query, nodes=tuple(job.node_names()))))
    first = next(there, None)
    if first is None:
        if job.is_slurm and _print_batch_log(job):
            return
        told = f"orch status {job.id}" if not job.folder.ended.exists() else f"orch why {job.id}"
        terminal.say(f"no rank has printed anything, and no node has said what it did; see {told}", err=True)
        return
    terminal.say("no rank has printed anything; this is what the nodes did:", err=True)
    click.echo(first)
    for text in there:
        click.echo(text)


def _print_batch_log(job: Job) -> bool:
    """Print what a job's batch script has said, if anything; a job whose supervisor never came up has told it there."""
    from orchestrator import queued

    lines = queued.batch_lines(job.folder)
    if lines:
        terminal.say(
            f"no rank has printed anything; this is what its batch script said ({job.folder.batch_log}):",
            err=True,
        )
    for line in lines:
        terminal.say(line)
    return bool(lines)


def _print_logs(job: Job, query: LogQuery) -> None:
    for text in _printed(job, query):
        click.echo(text)


def _printed(job: Job, query: LogQuery) -> Iterator[str]:
    from orchestrator import logview

    style = logview.style_of(query, terminal=terminal.is_terminal(), environ=os.environ)
    view = logview.LogView(style, job.mask())
    for folded in logview.fold(job.logs(query)):
        yield from view.lines(folded)


@cli.command()
@JOB
@AS_JSON
def why(job: str | None, as_json: bool) -> int:
    """Tell what went wrong, who is to blame, and what was lost.

    Each attempt has its verdict; the last one that failed is shown with all its evidence.
    """
    from orchestrator import whyview

    found = _find(job)
    _heed_slurm(found)
    told = found.why()
    if as_json:
        _print_json(told)
    else:
        terminal.write(whyview.post_mortem(told))
    return 0


@cli.command()
@JOB
@click.option(
    "--rank", "ranks", multiple=True, type=Count(0), metavar="N", help="Only this rank; repeatable."
)
@AS_JSON
def stacks(job: str | None, ranks: tuple[int, ...], as_json: bool) -> int:
    """Show what every rank of a running job is doing right now.

    Looks twice, and changes nothing: stacks by faulthandler's signal, the kernel's view, and the collectives that ranks are in. Ranks with equal frames stand together; the pages with all threads are in the job's evidence folder.
    """
    from orchestrator import stackview

    found = _find(job)
    _ranks_wanted(found, ranks, (), None)
    taken = found.stacks()
    if as_json:
        shown = [rank for rank in taken["ranks"] if not ranks or rank["rank"] in ranks]
        _print_json({**taken, "ranks": shown})
    else:
        terminal.write(stackview.stacks(taken, ranks))
    return CLUSTER_CANNOT if taken["unanswered"] else 0


@cli.command()
@JOB
@click.option("--wait/--no-wait", default=True, help="Wait until it has stopped (the default).")
def cancel(job: str | None, wait: bool) -> int:
    """Stop a job for good.

    Its ranks get TERM, and when monitor.stop_grace is over, KILL.
    """
    found = _find(job)
    found.cancel()
    if not wait:
        terminal.say(f"{found.id} is being stopped")
        return 0
    terminal.say(f"stopping {found.id} …", err=True)
    try:
        state = found.wait(CANCEL_S_MAX + found.plan().limits.stop_grace_s)["state"]
    except TimeoutError as err:
        fix = "`orch status` shows which node holds it up; what was asked stays asked"
        raise ClusterError(str(err), found.id, fix) from err
    except KeyboardInterrupt:
        terminal.say(f"\n{found.id} is still being stopped: that goes on without you", err=True)
        return INTERRUPTED
    late = "" if state == "CANCELLED" else ": it ended before it could be stopped"
    terminal.say(f"{found.id} {state}{late}")
    return 0


@cli.command()
@JOB
def restart(job: str | None) -> int:
    """End the present attempt of a running job, and begin the next one from the newest checkpoint.

    Ranks get TERM, and when monitor.stop_grace is over, KILL. It costs no restart budget.
    """
    found = _find(job)
    before = found.restart()
    newest = before["checkpoint"]
    source = newest["path"] if newest else "the beginning: there is no checkpoint yet"
    terminal.say(f"attempt {before['attempt']} of {found.id} ends; the next one begins from {source}")
    return 0


@cli.command()
@JOB
@click.option("--from", "checkpoint", metavar="CHECKPOINT", help="Start from this one, not the newest.")
@SET
@FOLLOW
def resume(job: str | None, checkpoint: str | None, overrides: tuple[str, ...], follow: bool) -> int:
    """Let an ended job go on from its newest checkpoint.

    It goes on in its own folder, with the code of its submit. A job that has succeeded goes on only with --set or --from: by itself it would find nothing left to do.
    """
    found = _find(job)
    if checkpoint == "":
        raise UserError(
            "names no checkpoint",
            "--from",
            "orch checkpoints lists what there is; without --from: the newest",
        )
    found.resume(checkpoint or "", overrides)
    terminal.say(f"resumed {found.id}{f' from {checkpoint}' if checkpoint else ''}")
    if found.slurm_id:
        _print_queue(found)
    return _follow(found) if follow else 0


@cli.command()
@JOB
@click.option("--verify", is_flag=True, help="Look into each file for what its format demands.")
@AS_JSON
def checkpoints(job: str | None, verify: bool, as_json: bool) -> int:
    """List a job's checkpoints, oldest first.

    The arrow marks the one that a restart would begin from.
    """
    from orchestrator import collect, listview

    listed = collect.checkpoints(_find(job), verify=verify)
    if as_json:
        _print_json(listed)
    else:
        terminal.write(listview.checkpoints(listed))
    return 0


@cli.command(name="collect")
@JOB
@click.option(
    "--to", "folder", type=click.Path(path_type=Path), help="Copy logs, checkpoints and evidence here."
)
def collect_verb(job: str | None, folder: Path | None) -> int:
    """Bring a job's logs, checkpoints and evidence together.

    Over SSH what an ended job's hosts still have comes home first; a job that runs brings it home by itself.
    """
    from orchestrator import collect, leftovers

    found = _find(job)
    _heed_slurm(found)
    if found.last_status()["state"] in statefile.ENDED and not found.folder.ended.exists():
        terminal.say("its last logs and checkpoints are still coming home …", err=True)
        collect.await_last(found)
    is_over = found.folder.ended.exists()
    comes_home = is_over and home.is_ours(found.folder)  # another user's job is copied as far as it is there
    account = leftovers.collect(found) if comes_home else leftovers.Account({}, {})
    place = collect.collect(found, folder)
    if brought := leftovers.summary([account]):
        terminal.say(brought)
    terminal.say(f"{found.id}: logs, checkpoints and evidence are in {place}")
    return _tell_left({found.id: account})


@cli.command()
@SPEC
@BACKEND
@SET
@AS_JSON
def check(spec: Path, backend: str | None, overrides: tuple[str, ...], as_json: bool) -> int:
    """Look whether a job could run, and start nothing.

    Looks at the spec, the code, the space, the interpreter with its torch, the script's syntax, and the network; over SSH at every host.
    """
    from orchestrator import listview, preflight

    findings = preflight.check(spec, backend, overrides, os.environ)
    if as_json:
        _print_json([finding.as_json() for finding in findings])
    else:
        terminal.write(listview.findings([finding.as_json() for finding in findings]))
    return max((finding.exit_code for finding in findings), default=0)


@cli.command()
@SPEC
@BACKEND
@SET
def render(spec: Path, backend: str | None, overrides: tuple[str, ...]) -> int:
    """Print the scripts that would run; touches nothing."""
    from orchestrator import submission

    for file in submission.rendered(spec, backend, overrides, os.environ):
        click.echo(f"# ─── {file.name}\n{harmless(file.text) if terminal.is_terminal() else file.text}")
    return 0


@cli.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("job.yaml"))
@click.option("--systemd", is_flag=True, help="Print a user unit that takes up your jobs after a boot.")
def init(file: Path, systemd: bool) -> int:
    """Write a job file to start from (job.yaml)."""
    from orchestrator import render
    from orchestrator.render import TEMPLATES

    if systemd:
        click.echo(render.systemd_unit(sys.executable, home.home(os.environ), os.environ.get("PATH", "")))
        return 0
    text = (TEMPLATES / "job.yaml.j2").read_text()
    try:
        with file.open("x") as out:
            out.write(text)
    except FileExistsError:
        raise UserError(
            "there is such a file already", str(file), "name another: orch init other.yaml"
        ) from None
    except OSError as err:
        raise UserError(
            f"cannot be written: {err.strerror}", str(file), "name a place you can write to"
        ) from err
    terminal.say(f"wrote {file}; edit it, then: orch submit {file} --follow")
    return 0


@cli.command()
def schema() -> int:
    """Print the JSON Schema of job files, for editors."""
    from orchestrator.spec import json_schema

    click.echo(json.dumps(json_schema(), indent=2))
    return 0


@cli.command()
@JOB
@click.option(
    "--older-than", type=Ago(), help="Delete jobs that ended longer ago than 12h or 30d, folder and all."
)
@click.option("--yes", is_flag=True, help="Do not ask before deleting.")
def clean(job: str | None, older_than: float | None, yes: bool) -> int:
    """Remove what ended jobs, or JOB, left behind.

    That is stray processes and run files, over SSH the job's folders on its hosts, once all that they hold is home; with --older-than whole jobs are deleted.
    """
    from orchestrator import collect, show

    jobs = _own_jobs() if job is None else [_find(job)]
    if job is not None:
        home.require_ours(jobs[0].folder)
    if job is not None and not jobs[0].folder.ended.exists():
        raise UserError("the job is not over yet", jobs[0].id, "wait for its end, or orch cancel it")
    tidied, untidied = collect.tidy(jobs)
    accounts = collect.sweep_hosts(jobs)
    left = {**untidied, **{job_id: one for job_id, one in accounts.items() if not one.is_whole}}
    done = [text for text in (tidied, collect.swept(list(accounts.values()))) if text]
    if done or not left:
        terminal.say("\n".join(done) or "ended jobs have left nothing behind")
    old = collect.older_than(jobs, older_than) if older_than is not None else []
    if older_than is not None and not old:
        terminal.say("no job ended that long ago")
    kept = [one for one in old if one.id in left]
    if kept:
        named = show.named([one.id for one in kept])
        terminal.say(f"kept, since not all that they left could be cleaned away: {named}", err=True)
        folders = " ".join(str(one.folder.root) for one in kept[:5])
        terminal.say(f"  fix: see below; or, should hosts be gone for good: rm -r {folders}", err=True)
    old = [one for one in old if one.id not in left]
    named = ", ".join(one.id for one in old[:5]) + (", …" if len(old) > 5 else "")
    question = harmless(f"delete {named} ({len(old)}) with logs and checkpoints?")
    if old and (yes or click.confirm(question)):
        deleted, undeleted = collect.delete(old)
        if deleted:
            terminal.say(deleted)
        left.update(undeleted)
    return _tell_left(left)


# What several verbs need


def _find(wanted: str | None) -> Job:
    return Job(home.find(home.home(os.environ), wanted))


def _jobs() -> list[Job]:
    return [Job(folder) for folder in home.jobs(home.home(os.environ))]


def _own_jobs() -> list[Job]:
    """Return this user's jobs, and tell of each of them whose folder is not safe to work in."""
    found = []
    for job in _jobs():
        if home.is_ours(job.folder):
            try:
                home.require_ours(job.folder)
                found.append(job)
            except UserError as err:
                terminal.complain(str(err))
    return found


def _all_statuses() -> list[dict[str, Any]]:
    """Return the statuses of all jobs, and tell of each whose folder is damaged."""
    left = [folder for folder in home.unended(home.home(os.environ)) if home.is_slurm(folder)]
    if left:
        from orchestrator import queued

        queued.look_ahead(left)
    statuses = []
    for job in _jobs():
        try:
            statuses.append(_status_now(job))
        except OrchError as err:
            terminal.complain(str(err))
    return statuses


def _status_now(job: Job) -> dict[str, Any]:
    """Return a job's status after Slurm's word on it was heeded; what fails of that is told, and is no reason for none."""
    _heed_slurm(job)
    return job.last_status()


def _heed_slurm(job: Job) -> None:
    """Close a job that Slurm has ended: what asks for what came of a job must not find it half open."""
    if job.folder.ended.exists() or not job.is_slurm:
        return
    try:
        job.look_after()
    except (OrchError, OSError) as err:
        terminal.complain(str(err))


def _tell_left(left: Mapping[str, Account]) -> int:
    """Tell what was left, and return the exit code that goes with it."""
    from orchestrator import show

    jobs_of: dict[str, list[str]] = {}
    for job_id, account in left.items():
        for text in account.lines():
            jobs_of.setdefault(text, []).append(job_id)
    for text, names in jobs_of.items():
        terminal.complain(f"{show.named(names)}: {text}")
    return 0 if all(account.is_whole for account in left.values()) else CLUSTER_CANNOT


def _print_json(data: Any, in_one_line: bool = False) -> None:
    click.echo(json.dumps(data, indent=2 if sys.stdout.isatty() and not in_one_line else None))


def _watch(job: Job, *, as_json: bool) -> int:
    from orchestrator import follow

    try:
        follow.changes(job) if as_json else follow.watch(job)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _follow(job: Job, *, as_json: bool = False) -> int:
    from orchestrator import follow, logs, logview, show

    style = logview.style_of(logs.LogQuery(), terminal=terminal.is_terminal(), environ=os.environ)
    try:
        status = follow.changes(job) if as_json else follow.everything(job, style)
    except KeyboardInterrupt:
        terminal.say(
            f"\ndetached: {job.id} goes on\n  back    orch logs -f {job.id}\n          orch status --watch {job.id}"
            f"\n  stop    orch cancel {job.id}",
            err=True,
        )
        return INTERRUPTED
    if not as_json:
        terminal.write([show.headline(status), *show.reason_lines(status)])
    if status["state"] == "SUCCEEDED":
        return 0
    terminal.say(f"see why: orch why {job.id}", err=True)
    return JOB_FAILED


def _ranks_wanted(
    job: Job, ranks: tuple[int, ...], nodes: tuple[str, ...], attempt: int | None
) -> tuple[int, ...]:
    """Return the ranks that `--rank` and `--node` mean. Raises UserError for one that the job does not have."""
    if not ranks and not nodes:
        return ()
    plan = job.plan()
    names = job.node_names()
    for name in nodes:
        if name not in names:
            raise UserError(f"{job.id} has no node {name!r}", "--node", f"it has: {', '.join(names[:20])}")
    for rank in ranks:
        if rank >= plan.world_size:
            raise UserError(
                f"{job.id} has no rank {rank}", "--rank", f"its ranks are 0 to {plan.world_size - 1}"
            )
    return tuple(ranks) or tuple(
        rank for name, there in job.ranks_of(attempt).items() if name in nodes for rank in there
    )


def _revive_all() -> None:
    """Start the supervisors that died, and let stopped ones go on: whoever types anything finds his jobs looked after."""
    for folder in home.unended(home.home(os.environ)):
        try:
            if done := revive(folder):
                terminal.say(f"the supervisor of {folder.id} {done}", err=True)
        except OrchError as err:
            terminal.complain(f"{folder.id}: its supervisor is dead and cannot be started: {err}")
        except OSError as err:  # such as a disk without locks: whether it is dead cannot be seen
            why = f"{err.filename or folder.root}: {err.strerror or err}"
            terminal.complain(f"{folder.id}: its supervisor cannot be looked after: {why}")


_NO_JOBS_NEEDED = frozenset({"init", "schema", "render", "check", "submit"})


def main() -> None:
    """Run the command line and end the process with its exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    terminal.open_streams()
    code = run(sys.argv[1:])
    terminal.drop_rest()
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run one command and return its exit code; nothing that a user or a cluster can cause escapes it."""
    try:
        if argv and argv[0] in cli.commands and argv[0] not in _NO_JOBS_NEEDED:
            _revive_all()
        code = cli.main(argv, prog_name="orch", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except OrchError as err:
        terminal.complain(str(err))
        return err.exit_code
    except click.ClickException as err:
        words = io.StringIO()
        err.show(words)
        terminal.say(terminal.shortened(words.getvalue().rstrip("\n")), err=True)
        return err.exit_code if err.exit_code != 1 else 2
    except (KeyboardInterrupt, click.Abort) as err:
        new_line = "" if isinstance(err, click.Abort) else "\n"  # click has begun one
        terminal.say(f"{new_line}interrupted", err=True)
        return INTERRUPTED
    except terminal.ReaderGone:
        is_awaited = argv[0] in ("submit", "resume") and "--follow" in argv
        return INTERRUPTED if is_awaited else 0  # 0 would say that the job has succeeded
    except OSError as err:
        terminal.complain(f"{err.filename or 'orch'}: {err.strerror or err}")
        return CLUSTER_CANNOT


if __name__ == "__main__":
    main()
