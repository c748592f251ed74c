"""Types of verbs and values of the command line, in addition to click's own."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import click

from orchestrator.core.errors import OrchError
from orchestrator.core.jobdir import home

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COUNT_MAX = 10_000_000
"""The largest number that an option takes: more ranks, attempts or lines are a typing error."""

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Verbs(click.Group):
    """A group of verbs that lists them in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the verbs."""
        return list(self.commands)


class JobName(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A job's id or name, completed from what is in the job home."""

    name = "job"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names and ids that begin like this, the latest first."""
        from click.shell_completion import CompletionItem

        try:
            ids = home.ids(home.home(os.environ))[::-1]
        except OrchError:
            return []  # an error must not show in a shell's completion line
        names = dict.fromkeys(home.name_of(job_id) for job_id in ids)
        return [CompletionItem(text) for text in (*names, *ids) if text.startswith(incomplete)]


class Count(click.IntRange):
    """A whole number from `least` to `COUNT_MAX`."""

    def __init__(self, least: int) -> None:
        super().__init__(least, COUNT_MAX)


class Ago(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A time back from now, such as 90s, 10m or 2h; seconds when there is no unit."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d)?", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no time; write 90s, 10m or 2h", param, ctx)
        return float(found.group(1)) * _SECONDS[found.group(2) or "s"]


class Pattern(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A regular expression."""

    name = "regex"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> re.Pattern[str]:
        """Return it compiled."""
        if isinstance(value, re.Pattern):
            return value
        try:
            return re.compile(str(value))
        except (re.error, OverflowError, RecursionError) as err:
            self.fail(f"{value!r} is no regular expression: {err}", param, ctx)
