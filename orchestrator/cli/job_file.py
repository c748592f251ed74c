"""Verbs for a job file: init, schema, check, plan, render."""

from __future__ import annotations

import functools
import json
import os
import shlex
from pathlib import Path

import click

from orchestrator.cli import terminal
from orchestrator.cli.group import AS_JSON, BACKEND, SET, SPEC, print_result
from orchestrator.cli.params import AgoParam
from orchestrator.core.errors import UserError
from orchestrator.core.invisible_characters import escape_harmful

BURN_S_MIN, BURN_S_MAX = 10.0, 24 * 3600.0


@click.command()
@SPEC
@BACKEND
@SET
@click.option(
    "--burn-in",
    "burn_s",
    type=AgoParam(),
    metavar="TIME",
    help="Also compute on all devices of each host for this long, 10s to 24h, and name a host that is slow or wrong.",
)
@AS_JSON
def check(spec: Path, backend: str | None, overrides: tuple[str, ...], burn_s: float | None, as_json: bool) -> int:
    """Check whether a job could run, without starting it.

    It checks the job file, the code, disk space, the interpreter with its torch, the script's syntax, and the network; over SSH on every host, on Slurm on nodes that it gets from the queue as the job would.
    """
    from orchestrator.client import preflight
    from orchestrator.views import tables

    if burn_s is not None and not BURN_S_MIN <= burn_s <= BURN_S_MAX:
        raise UserError("is not between 10s and 24h", "--burn-in", "write --burn-in 5m")
    say = functools.partial(terminal.say, err=True)
    findings = preflight.check(spec, backend, overrides, os.environ, say, burn_s or 0.0)
    print_result([finding.as_json() for finding in findings], as_json, tables.findings)
    return max((finding.exit_code for finding in findings), default=0)


@click.command()
@SPEC
@BACKEND
@SET
@AS_JSON
def plan(spec: Path, backend: str | None, overrides: tuple[str, ...], as_json: bool) -> int:
    """Show where a job would run, and each environment variable of its ranks with its origin and reason; start nothing.

    Over SSH it asks the hosts for their hardware. On Slurm some values are known only in the allocation.
    """
    from orchestrator.client.outline.outline import make_outline
    from orchestrator.spec.load import load
    from orchestrator.views import outline as outline_view

    seen = make_outline(load(spec, overrides=overrides, backend=backend), os.environ)
    print_result(seen.as_json(), as_json, outline_view.outline)
    return seen.exit_code


@click.command()
@SPEC
@BACKEND
@SET
def render(spec: Path, backend: str | None, overrides: tuple[str, ...]) -> int:
    """Print the scripts that a job would run; change nothing."""
    from orchestrator.submission import submit as submission

    for file in submission.render_scripts(spec, backend, overrides, os.environ):
        click.echo(f"# ─── {file.name}\n{escape_harmful(file.text) if terminal.is_terminal() else file.text}")
    return 0


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), default=Path("job.yaml"))
@click.option(
    "--from-command",
    "command",
    help="Convert a launch line ('torchrun --nnodes 2 …'), a shell script, or an sbatch script.",
)
def init(file: Path, command: str | None) -> int:
    """Write a template of a job file (job.yaml), or print it (-)."""
    from orchestrator.submission.render import TEMPLATES

    if command is not None:
        return _from_command(file, command)
    _write_with_schema(file, (TEMPLATES / "job.yaml.j2").read_text(), "edit it, then")
    return 0


def _from_command(file: Path, command: str) -> int:
    """Write the job file of a launch line, and say how each option was converted."""
    from orchestrator.spec import from_command

    made = from_command.convert_command(command, Path.cwd(), require_folder(file))
    to_stdout = str(file) == "-"
    for change in made.conversions:
        became = f"→ {change.field}: {change.text}" if change.field else f"dropped: {change.text}"
        terminal.say(f"  {change.option}  {became}", err=to_stdout)
    for note in made.notes:
        terminal.say(f"note: {note}", err=to_stdout)
    _write_with_schema(file, made.text, "review it, then")
    return 0


SCHEMA_FILE = "orch.schema.json"


def _write_with_schema(file: Path, text: str, next_step: str) -> None:
    """Write a job file and, beside it, its JSON Schema for editors; to standard output only the job file."""
    if str(file) == "-":
        write_new(file, text, next_step)
        return
    from orchestrator.spec.load import json_schema

    write_new(file, f"# yaml-language-server: $schema=./{SCHEMA_FILE}\n{text}", next_step)
    schema = file.with_name(SCHEMA_FILE)
    try:
        schema.write_text(json.dumps(json_schema(), indent=1) + "\n")
    except OSError as err:
        terminal.print_error(f"{schema}: cannot be written: {err.strerror}; so editors cannot check the job file")


def require_folder(file: Path) -> Path:
    """Return the folder of a job file that is to be written. Raises UserError where there is none."""
    folder = file.absolute().parent
    if not folder.is_dir():
        fix = f"create it: mkdir -p {shlex.quote(str(folder))}, or name another folder"
        raise UserError(f"there is no folder {folder}", str(file), fix)
    return folder


def write_new(file: Path, text: str, next_step: str) -> None:
    """Write a job file that does not exist yet, or to standard output where it is named `-`, and say how to start it.

    Raises UserError for a file that exists, and where none can be written.
    """
    if str(file) == "-":
        click.echo(escape_harmful(text) if terminal.is_terminal() else text, nl=False)
        return
    require_folder(file)
    try:
        with file.open("x") as out:
            out.write(text)
    except FileExistsError:
        raise UserError("the file exists already", str(file), "name another file, such as other.yaml") from None
    except OSError as err:
        raise UserError(f"cannot be written: {err.strerror}", str(file), "name a folder that you can write to") from err
    terminal.say(f"wrote {file}; {next_step}: orch submit {shlex.quote(str(file))} --follow")


@click.command()
@click.argument("verb", required=False)
def schema(verb: str | None) -> int:
    """Print the JSON Schema of job files, or of the --json output of VERB."""
    from orchestrator.programs.json_schemas import make_schema

    click.echo(json.dumps(make_schema(verb), indent=2))
    return 0
