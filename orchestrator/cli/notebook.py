"""Run of a script from Python: `orchestrator.run(...)`, for notebooks and programs, with its progress shown.

>>> import orchestrator
>>> job = orchestrator.run("train.py", "--lr", 0.1, procs=2)

In a notebook a panel shows state, step and pace of the job, and the last lines of rank 0. Elsewhere lines are printed,
as `orch run` prints them.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.client.job import Job, submit_once
from orchestrator.core.errors import UserError
from orchestrator.core.jobdir import status_file

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchestrator.client.logs.reader import LogBlock
    from orchestrator.core.jobdir.status_file import Status

LOG_LINES = 10
"""How many lines of rank 0 the panel shows."""

LINE_CHARS_MAX = 200
REASON_CHARS_MAX = 400

POLL_S = 0.5


def run(
    script: str | os.PathLike[str],
    *args: object,
    nodes: int | None = None,
    gpus: int | str | None = None,
    procs: int | None = None,
    backend: str | None = None,
    hosts: str | Sequence[str] | None = None,
    name: str | None = None,
    env: Mapping[str, object] | None = None,
    python: str | None = None,
    set: Mapping[str, object] | None = None,
    follow: bool = True,
    oversubscribe: bool = False,
) -> Job:
    """Run a script as a job without a job file, show its progress until it ends, and return the job.

    `script` is `train.py`, a module as `"-m", "pkg.train"`, or a launch line such as `torchrun`, each with `args`; without
    `args` one text may hold it all, as `entrypoint` does. The current folder is the code. `gpus` is a number of each node,
    or `auto`; `procs` are CPU ranks. `python` is by default the one that runs this. `set` gives other fields of a job file,
    such as `{"time_limit": "8h", "checkpoint.path": "*.pt"}`.

    With `follow=False` it returns at once. An interrupt (the stop button of a notebook) ends the watching, not the job;
    the call returns then, too. Raises OrchError, leaving nothing behind, when the job cannot be submitted; a job that
    fails raises nothing.
    """
    from orchestrator.spec import run_line

    argv = (os.fspath(script), *map(str, args)) if args else _split_command(os.fspath(script))
    interpreter, command = run_line.split_python(argv)
    if python is None and os.sep in interpreter:
        python = interpreter  # a bare `python` in a notebook is the notebook's own
    line = run_line.RunLine(command, nodes, gpus, procs, backend, hosts, name, dict(env or {}), python, dict(set or {}))
    notes = [f"Written by orchestrator.run, to run: {shlex.join(argv)}"]
    file = run_line.make_job_file(
        line,
        Path.cwd() / "job.yaml",
        notes,
        lambda name, value: f"{name}[{value!r}]" if name in ("set", "env") else f"{name}={value}",
    )
    job, _ = submit_once(file, oversubscribe=oversubscribe)
    if follow:
        _follow(job, is_new=True)
    return job


def _split_command(script: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(script))
    except ValueError as err:
        raise UserError(f"cannot be read: {err}", f"script {script!r}", "pass its arguments separately") from err


def follow(job: Job) -> Job:
    """Show a job's progress until it ends, and return the job. An interrupt ends the watching, not the job."""
    _follow(job, is_new=False)
    return job


def _follow(job: Job, *, is_new: bool) -> None:
    display = _notebook_display()
    if display is not None:
        follow_in_notebook(job, display)
    elif is_new:
        from orchestrator.cli.lifecycle import report_submitted

        report_submitted(job, follow=True, as_json=False)
    else:
        from orchestrator.cli.group import follow_job

        follow_job(job)


def _notebook_display() -> Callable[[RenderableType], None] | None:
    """Return the function that shows something in the present cell, in place of what it has shown before; None outside of
    notebooks. Unlike rich's own live display it needs no ipywidgets, and what it shows stays in a saved notebook."""
    from rich.console import Console

    if not Console().is_jupyter:
        return None
    import importlib

    display: Any = importlib.import_module("IPython.display").display

    shown: list[Any] = []

    def show(panel: RenderableType) -> None:
        if shown:
            shown[0].update(panel)
        else:
            shown.append(display(panel, display_id=True))

    return show


def follow_in_notebook(job: Job, display: Callable[[RenderableType], None]) -> None:
    """Show a job by `display` until it ends or an interrupt comes, after which the last panel says how to watch it again."""
    from orchestrator.client.logs import reader as log_reader
    from orchestrator.views.logs import LogStyle, LogView, ShownLine

    mask = job.mask()
    follower = log_reader.Follower(job.folder, log_reader.LogQuery(ranks=(0,), tail=LOG_LINES), mask)
    view = LogView(LogStyle(prefix=False, colour=True, terminal=True), mask)
    lines: deque[str] = deque(maxlen=LOG_LINES)

    def read(news: Iterable[LogBlock]) -> None:
        for line in log_reader.lines(news):
            lines.extend(view.lines(ShownLine(line, (0,))))

    status = job.source.status()
    try:
        while status.state not in status_file.ENDED:
            read(follower.poll())
            display(panel(status, lines, "the stop button leaves it running"))
            time.sleep(POLL_S)
            status = job.source.settled_status()
    except KeyboardInterrupt:
        how = "it keeps running; watch it: orchestrator.follow(job), cancel it: job.cancel()"
        display(panel(status, lines, how))
        return
    read(follower.drain())
    display(panel(status, lines, "" if status.state == "SUCCEEDED" else f"see why: !orch why {job.reference}"))


def panel(status: Status, lines: Sequence[str] | deque[str], hint: str) -> RenderableType:
    """Return a job's state, and below it the last lines of its rank 0, as one panel."""
    from rich.panel import Panel
    from rich.text import Text

    from orchestrator.cli import live, terminal
    from orchestrator.views import status as status_view

    shown = [terminal.rich_text(state_line) for state_line in live.state_lines(status, REASON_CHARS_MAX)]
    if status.state in status_file.ENDED:
        reasons = status_view.reason_lines(status.reason, status.dir)
        shown = [
            terminal.rich_text(one) for one in (status_view.headline(status), *reasons, *status_view.notices(status))
        ]
    for line in lines:
        text = Text.from_ansi(line)
        text.truncate(LINE_CHARS_MAX, overflow="ellipsis")
        shown.append(text)
    return Panel(
        Text("\n").join(shown),
        title=status.id,
        title_align="left",
        subtitle=hint or None,
        subtitle_align="left",
    )
