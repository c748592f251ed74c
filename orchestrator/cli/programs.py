"""Verbs for programs: wait, metrics, mcp."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

import click

from orchestrator.cli import terminal
from orchestrator.cli.group import (
    AS_JSON,
    EXIT_JOB_FAILED,
    EXIT_NEEDS_PERSON,
    EXIT_TIMEOUT,
    JOB,
    find_job,
    print_result,
)
from orchestrator.cli.params import AgoParam
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir import home
from orchestrator.programs import outcome

PORT = 9806
TEXTFILE = "orch.prom"


@click.command()
@JOB
@click.option(
    "--timeout",
    type=AgoParam(),
    help="Return after this time at the latest, such as 90s, 10m, 2h; by default there is no limit.",
)
@AS_JSON
def wait(job: str | None, timeout: float | None, as_json: bool) -> int:
    """Wait until a job has ended or needs a person, and say what to do then.

    A person is needed for a hang that orch will not end soon, a queue that can never start the job, a full disk, and a supervisor that died with its machine. The exit code is 0 if the job succeeded, 1 if it failed or was cancelled, 4 if it needs a person, and 124 after the timeout.
    """
    result = outcome.wait_for_outcome(find_job(job), timeout)
    print_result(result, as_json, outcome.lines)
    if result["ended"]:
        return 0 if result["state"] == "SUCCEEDED" else EXIT_JOB_FAILED
    return EXIT_NEEDS_PERSON if result["needs"] else EXIT_TIMEOUT


@click.command()
@click.option(
    "--listen",
    metavar="ADDR",
    help=f"Serve them over HTTP until Ctrl-C, at PORT (only this machine) or HOST:PORT, such as {PORT}.",
)
@click.option(
    "--textfile",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help=f"Write them to DIR/{TEXTFILE} for node-exporter's textfile collector.",
)
def metrics(listen: str | None, textfile: Path | None) -> int:
    """Print the metrics of all jobs for Prometheus.

    They come from the job folders of this machine; hosts are not asked. Jobs that ended more than a day ago are left out.
    """
    import prometheus_client

    from orchestrator.programs.prometheus import make_registry

    if listen is not None and textfile is not None:
        raise UserError("--listen and --textfile exclude each other", "--listen", "leave out one of them")
    jobs = make_registry(home.job_home(os.environ))
    if textfile is not None:
        path = textfile / TEXTFILE
        try:
            prometheus_client.write_to_textfile(str(path), jobs)
            path.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IROTH)  # node-exporter is another user
        except OSError as err:
            raise ClusterError(
                f"cannot be written: {err.strerror}", str(path), "name a folder you can write to"
            ) from err
        return 0
    if listen is None:
        click.echo(prometheus_client.generate_latest(jobs).decode(), nl=False)
        return 0
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UserError(
            f"{listen!r} is not an address", "--listen", f"write {PORT}, or 0.0.0.0:{PORT} for all interfaces"
        )
    try:
        prometheus_client.start_http_server(int(port), host or "127.0.0.1", jobs)
    except OSError as err:
        raise ClusterError(
            f"nothing can listen there: {err.strerror}", f"--listen {listen}", "choose another port"
        ) from err
    terminal.say(f"metrics are at http://{host or '127.0.0.1'}:{port}/metrics")
    while True:
        time.sleep(3600.0)


@click.command()
def mcp() -> int:
    """Serve orch's verbs to an AI agent by the Model Context Protocol, over standard input and output.

    The agent's program starts it: configure `orch mcp` as the command there.
    """
    try:
        from orchestrator.programs import mcp_server
    except ImportError as err:
        fix = "pip install 'torch-orch[mcp]', or in a clone pip install '.[mcp]'; the verbs with --json need no extra package"
        raise UserError(f"{err.name or err} is not installed", "orch mcp", fix) from err
    if sys.stdin.isatty():
        terminal.say("waiting for an MCP client on standard input; Ctrl-C stops it", err=True)
    mcp_server.serve()
    return 0
