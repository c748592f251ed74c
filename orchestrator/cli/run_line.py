"""Verb that runs a script without a job file: run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.group import AS_JSON, KEY, OVERSUBSCRIBE, SET
from orchestrator.cli.job_file import require_folder, write_new
from orchestrator.cli.lifecycle import report_submitted
from orchestrator.cli.params import complete_backend
from orchestrator.core.errors import UserError

if TYPE_CHECKING:
    from orchestrator.spec.load import SpecFile


_TYPED_ARGS = "orch.run"
_TORCHRUN_OPTION = re.compile(
    r"--(nnodes|nproc|rdzv|node[-_]rank|master[-_]|standalone|max[-_]restarts|no[-_]python|module)"
)


class _ScriptCommand(click.Command):
    """A verb that ends with a command: everything after its first word belongs to it, options too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the verb's options; `-m` starts a command as a script does."""
        ctx.meta[_TYPED_ARGS] = tuple(args)
        ctx.allow_interspersed_args = False
        ctx.ignore_unknown_options = True
        rest = super().parse_args(ctx, args)
        first = next(iter(ctx.params.get("words") or ()), "")
        if first.startswith("-") and first != "-m":
            import difflib

            options = [name for param in self.params for name in param.opts if name.startswith("--")]
            name = first.partition("=")[0]
            near = difflib.get_close_matches(name, options, n=1) or None
            hint = None if near else f"No such option {name!r}. {_option_hint(name)}"
            raise click.NoSuchOption(name, hint, possibilities=near, ctx=ctx)
        return rest


def _option_hint(name: str) -> str:
    """Say where an option belongs that the verb does not have."""
    if _TORCHRUN_OPTION.match(name):
        return f"It is torchrun's: orch run torchrun {name} … train.py"
    return f"Options of your script come after it: orch run train.py {name}"


@click.command(cls=_ScriptCommand)
@click.option("--nodes", type=int, metavar="N", help="Machines to run on; by default 1, or all of --hosts.")
@click.option("--gpus", metavar="N|auto", help="GPUs per machine, one rank each; by default all.")
@click.option("--procs", type=int, metavar="N", help="CPU ranks per machine.")
@click.option(
    "--backend",
    metavar="BACKEND",
    help="Run on local (the default), ssh or slurm.",
    shell_complete=complete_backend,
)
@click.option("--hosts", metavar="HOSTS", help="Hosts over SSH, such as gpu[01-04].")
@click.option("--name", metavar="NAME", help="The job's name; by default the script's.")
@click.option("--env", "env", multiple=True, metavar="K=V", help="An environment variable of the ranks; repeatable.")
@click.option("--python", metavar="PYTHON", help="Python of the ranks; by default the one that runs orch.")
@SET
@OVERSUBSCRIBE
@KEY
@click.option(
    "--follow/--detach", default=True, help="Show logs and state until the job ends (the default), or return."
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Write the job file (-: to standard output) and do not run it.",
)
@AS_JSON
@click.argument("words", nargs=-1, type=click.UNPROCESSED, required=True, metavar="SCRIPT ARGS...")
def run(
    words: tuple[str, ...],
    env: tuple[str, ...],
    overrides: tuple[str, ...],
    oversubscribe: bool,
    key: str | None,
    follow: bool,
    save: Path | None,
    as_json: bool,
    **options: str | int | None,
) -> int:
    """Run a script without a job file.

    SCRIPT is train.py, -m pkg.train, a launch line such as torchrun --nproc-per-node 2 train.py, or a shell script with one, such as bash dist_train.sh; everything after it belongs to it. Ctrl-C detaches; the job keeps running. The equivalent job file is written to the job's folder.
    """
    file = _job_file(words, env, overrides, options, save)
    if save is not None:
        write_new(save, file.text, "start it with")
        return 0
    from orchestrator.client.job import submit_once

    job, is_new = submit_once(file, oversubscribe=oversubscribe, key=key)
    return report_submitted(job, follow=follow, as_json=as_json, is_new=is_new)


def _job_file(
    command_line: tuple[str, ...],
    env: tuple[str, ...],
    overrides: tuple[str, ...],
    options: dict[str, str | int | None],
    save: Path | None,
) -> SpecFile:
    """Return the job file that is equivalent to the line. Raises UserError, naming the wrong options."""
    from orchestrator.spec import run_line
    from orchestrator.spec.yaml_document import escape

    cwd = Path.cwd()
    path = cwd / "job.yaml" if save is None else require_folder(save) / save.name
    python, command = run_line.split_python(command_line)
    if python and options["python"] is None:
        options = {
            **options,
            "python": _find_python(python, over_ssh=bool(options["hosts"] or options["backend"] == "ssh")),
        }
    settings = {} if path.parent.resolve() == cwd else {"workdir": os.path.relpath(cwd, path.parent)}
    line = run_line.RunLine(command, env=_parse_env(env), overrides=overrides, settings=settings, **options)  # type: ignore[arg-type]
    notes = [f"Written by: orch run {escape(shlex.join(click.get_current_context().meta[_TYPED_ARGS]))}"]
    return run_line.make_job_file(line, path, notes, lambda name, value: f"--{name} {value}")


def _parse_env(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of `--env`. Raises UserError for one without a value."""
    for text in texts:
        if "=" not in text:
            fix = f"write --env {text}=VALUE; variables of this environment are inherited anyway; over SSH use "
            raise UserError("has no value", f"--env {text}", f"{fix}--set secrets=[{text}]")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _find_python(word: str, *, over_ssh: bool) -> str | None:
    """Return the interpreter that starts a command, as ranks find it; None for the one that runs orch."""
    if over_ssh or os.sep in word:
        return word
    found = shutil.which(word)
    is_ours = found is not None and Path(found).parent == Path(sys.executable).parent
    return None if is_ours else found or word
