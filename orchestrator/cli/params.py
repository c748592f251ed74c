"""Types of verbs and values of the command line, in addition to click's own."""

from __future__ import annotations

import importlib
import os
import re
from collections import UserDict
from typing import TYPE_CHECKING, Any

import click

from orchestrator.core.errors import OrchError
from orchestrator.core.jobdir import home

if TYPE_CHECKING:
    from collections.abc import Iterable

    from click.shell_completion import CompletionItem

COUNT_MAX = 10_000_000
"""The largest number that an option takes: more ranks, attempts or lines are a typing error."""

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


GROUPS = {
    "Start": {"run": "run_line", "submit": "lifecycle"},
    "Watch": {
        **dict.fromkeys(("status", "logs", "why", "stacks", "goodput"), "observe"),
        "report": "page",
        "wait": "programs",
        "metrics": "programs",
        "mcp": "programs",
    },
    "Stop and resume": dict.fromkeys(("cancel", "restart", "resume"), "lifecycle"),
    "Files": {"folder": "observe", "checkpoints": "observe", "collect": "housekeeping", "clean": "housekeeping"},
    "Prepare": {**dict.fromkeys(("check", "plan", "render", "init", "schema"), "job_file"), "nodes": "housekeeping"},
}  # fmt: skip
"""The verbs as `orch --help` lists them, each with its module."""

VERBS = {name: module for verbs in GROUPS.values() for name, module in verbs.items()}

VERB_HINTS = {
    **dict.fromkeys(("ps", "ls", "list", "jobs", "queue", "top"), "orch status --all lists all jobs, orch status --watch shows one"),
    **dict.fromkeys(("kill", "stop"), "orch cancel stops a job, orch restart starts its next attempt"),
    **dict.fromkeys(("rm", "delete"), "orch clean JOB removes an ended job's leftovers, with --older-than the whole job"),
    "attach": "orch logs -f shows a job's output as it comes",
    "help": "orch --help lists the verbs, orch VERB --help explains one",
}  # fmt: skip
"""Verbs of docker, Slurm and other launchers, with the same verb of orch."""

REMOVED_OPTIONS = {
    ("checkpoints", "--adopt"): "orch resume --from PATH resumes from a file that no rank of the job wrote",
    ("goodput", "--by job"): "orch goodput --all --json has each job",
    ("init", "--skill"): "docs/agents.md explains orch to an AI agent, and orch mcp serves it",
    ("nodes", "--forget"): "a passed check clears a failure: orch check JOB.YAML --set nodes=1 --set ssh.hosts=HOST",
    ("resume", "--as-new"): "a copy is an archive: submit its job.yaml as a new job, and start that one with orch resume --from PATH",
}  # fmt: skip
"""Options of earlier versions, with their replacement."""


SENTENCE_CHARS_MAX = 200


class LazyVerbs(UserDict[str, Any]):
    """The verbs by name: a verb's module is loaded when the verb is asked for."""

    def __getitem__(self, name: str) -> click.Command:
        """Return a verb."""
        command: click.Command = getattr(importlib.import_module(f"orchestrator.cli.{self.data[name]}"), name)
        return command


class VerbGroup(click.Group):
    """The group of `VERBS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyVerbs(VERBS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb of a line. Raises UsageError for another, with the one that is meant where that is known."""
        if args[0] in VERB_HINTS:
            ctx.fail(f"No such command {args[0]!r}: {VERB_HINTS[args[0]]}.")
        line = f" {' '.join(args[1:]).replace('=', ' ')} "
        for (verb, option), instead in REMOVED_OPTIONS.items():
            if verb == args[0] and f" {option} " in line:
                ctx.fail(f"orch {verb} has no {option} any more: {instead}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs by group, each with the first sentence of its help."""
        for group, verbs in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(SENTENCE_CHARS_MAX)) for name in verbs]
                )

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the verbs, in the order of `VERBS`."""
        return list(self.commands)


class JobName(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A job's id or name, completed from what is in the job home."""

    name = "job"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names and ids that begin like this, the latest first."""
        from click.shell_completion import CompletionItem

        try:
            ids = home.list_ids(home.job_home(os.environ))[::-1]
        except OrchError:
            return []  # an error must not show in a shell's completion line
        names = dict.fromkeys(home.name_of(job_id) for job_id in ids)
        return [CompletionItem(text) for text in (*names, *ids) if text.startswith(incomplete)]


def _starting_with(texts: Iterable[str], incomplete: str) -> list[str]:
    return [text for text in texts if text.startswith(incomplete)]


def complete_backend(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the backends that begin like this."""
    return _starting_with(("local", "ssh", "slurm"), incomplete)


def complete_field(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the fields of a job file that begin like this, as `--set` takes them."""
    from orchestrator.spec.load import field_names

    return _starting_with((f"{name}=" for name in field_names()), incomplete)


def complete_checkpoint(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the checkpoints of the line's job that begin like this, the newest first, by name and by number."""
    from orchestrator.client import job_checkpoints

    try:
        checkpoints = job_checkpoints.load_checkpoints(home.find_job(home.job_home(os.environ), ctx.params.get("job")))
    except OrchError:
        return []
    names = [checkpoint.main for checkpoint in checkpoints.values()][::-1]
    return _starting_with(dict.fromkeys((*names, *map(str, checkpoints))), incomplete)


class CountParam(click.IntRange):
    """A whole number from `least` to `COUNT_MAX`."""

    def __init__(self, least: int) -> None:
        super().__init__(least, COUNT_MAX)


class AgoParam(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A time back from now, such as 90s, 10m or 2h; without a unit seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d)?", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is not a time; write 90s, 10m or 2h", param, ctx)
        return float(found.group(1)) * _SECONDS[found.group(2) or "s"]


class PatternParam(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A regular expression."""

    name = "regex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> re.Pattern[str]:
        """Return it compiled."""
        if isinstance(value, re.Pattern):
            return value
        try:
            return re.compile(str(value))
        except (re.error, OverflowError, RecursionError) as err:
            self.fail(f"{value!r} is not a regular expression: {err}", param, ctx)
