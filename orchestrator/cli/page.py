"""Verb that shows a job as a page: report."""

from __future__ import annotations

import os
from pathlib import Path

import click

from orchestrator.cli import terminal
from orchestrator.cli.group import JOB, apply_slurm_end, find_job
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.durable import replace_text


@click.command()
@JOB
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write the page; by default JOB.html here.",
)
@click.option("--serve", is_flag=True, help="Serve all jobs live to a browser on this machine, until Ctrl-C.")
@click.option("--port", type=click.IntRange(0, 65_535), metavar="N", help="Port of --serve; by default a free one.")
def report(job: str | None, output: Path | None, serve: bool, port: int | None) -> int:
    """Write a report of a job as one HTML page: what happened, timeline, curves, verdicts, logs and settings.

    The page needs only a browser, and no network.
    """
    if serve:
        if job is not None or output is not None:
            raise UserError("--serve shows all jobs, and writes no file", "--serve", "leave out JOB and -o, or --serve")
        return _serve(port or 0)
    if port is not None:
        raise UserError("--port needs --serve", "--port", "add --serve, or leave out --port")
    from orchestrator.report import page

    found = find_job(job)
    apply_slurm_end(found)
    place = output if output is not None else Path(f"{found.id}.html")
    text = page.page(found)
    try:
        if place.exists() and not place.is_file():  # renaming the page to a device would delete the device
            raise UserError(f"{place} is not a regular file", "-o", "name the file that the page goes to")
        replace_text(Path(os.path.realpath(place)), text, durable=False)
    except OSError as err:
        raise ClusterError(f"cannot be written: {err.strerror}", str(place), "name another folder") from err
    terminal.say(f"{found.id}: the page is {place.absolute()}")
    return 0


def _serve(port: int) -> int:
    try:
        from orchestrator.report import server
    except ImportError as err:
        fix = "pip install 'torch-orch[serve]', or in a clone pip install '.[serve]'; orch report -o FILE does not need it"
        raise UserError(f"{err.name or err} is not installed", "--serve", fix) from err
    server.serve(home.job_home(os.environ), port, lambda address: terminal.say(f"all jobs are at {address}"))
    return 0
