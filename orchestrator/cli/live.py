"""Live view of a job until it ends: its log lines as they come, and on a terminal its state below them.

On a pipe each change of state is a line among the log lines. For programs each change is a line of JSON. Ctrl-C ends
the view, and the job goes on.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from orchestrator.cli import terminal
from orchestrator.client.job import Job
from orchestrator.client.logs.reader import Follower, LogQuery
from orchestrator.core.errors import OrchError
from orchestrator.core.jobdir import status_file
from orchestrator.core.jobdir.status_file import Status
from orchestrator.views import cells, post_mortem
from orchestrator.views import status as status_view
from orchestrator.views.logs import FAR_WINDOW_NS, FOLD_WINDOW_NS, LogStyle, LogView

Print: TypeAlias = Callable[[str], None]
Refresh: TypeAlias = Callable[[Status], None]

POLL_S = 0.15
STATUS_S = 0.5
"""How often the status is read while following; a supervisor that died is started again then."""

REASON_LINES_MAX = 2
"""How many lines of the terminal the reason of a state may take below the logs."""


def logs(job: Job, query: LogQuery, style: LogStyle) -> Status:
    """Print log lines until the job has ended; return its last status."""
    return _follow(job, query, style, print_text, lambda status: None)


def everything(job: Job, style: LogStyle) -> Status:
    """Print log lines and the job's state until it has ended; return its last status."""
    if terminal.has_colour():
        with _live() as (out, refresh):
            return _follow(job, LogQuery(), style, out, refresh)
    shown = _Changes(with_end=False)
    return _follow(job, LogQuery(), style, print_text, shown, lambda: shown.told)


def watch(job: Job) -> Status:
    """Show the job's status repeatedly until it has ended; return the last one."""
    if not terminal.has_colour():
        return _until_ended(job, _Changes(with_end=True))
    from rich.live import Live
    from rich.text import Text

    with Live(console=terminal.console(), auto_refresh=False, vertical_overflow="crop") as live:

        def refresh(status: Status) -> None:
            lines = [terminal.rich_text(one) for one in status_view.job(status)]
            live.update(Text("\n").join(lines), refresh=True)

        return _until_ended(job, refresh)


def changes(job: Job) -> Status:
    """Print the status, a JSON object in a line, whenever state, attempt, reason or suspicion change; return the
    last one."""
    last: list[object] = []

    def refresh(status: Status) -> None:
        now = [status["state"], status["attempt"], status["reason"], _suspected(status)]
        if now != last:
            last[:] = now
            print_line(json.dumps(status))

    return _until_ended(job, refresh)


def _suspected(status: Status) -> str:
    """Return the job's suspicion without its ages: a suspicion that grows older is not a change."""
    return re.sub(r"[0-9]+[.0-9]* s\b", "", status["suspicion"] or "")


def _until_ended(job: Job, refresh: Refresh) -> Status:
    while True:
        status = job.status()
        refresh(status)
        if status["state"] in status_file.ENDED:
            return status
        time.sleep(STATUS_S)


def print_line(text: str) -> None:
    """Print one line at once."""
    print_text(f"{text}\n")


def print_text(text: str) -> None:
    """Print text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _follow(
    job: Job, query: LogQuery, style: LogStyle, out: Print, refresh: Refresh, told: Callable[[], str] = str
) -> Status:
    mask = job.mask()
    follower = Follower(job.folder, query, mask)
    status = job.status()
    window_ns = FAR_WINDOW_NS if status["backend"] != "local" else FOLD_WINDOW_NS
    view = LogView(style, mask, lambda attempt: _transition(job, attempt, told()), window_ns)
    refresh(status)
    due_s = time.monotonic() + STATUS_S
    while status["state"] not in status_file.ENDED:
        for text in view.add(follower.poll()):
            out(text)
        out(view.ready(time.time_ns()))
        if not follower.is_behind:
            time.sleep(POLL_S)
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + STATUS_S
            status = job.status()
            refresh(status)
    for text in view.add(follower.drain()):
        out(text)
    out(view.rest())
    refresh(status)
    return status


def _transition(job: Job, attempt: int, told: str) -> str:
    """Return from where an attempt begins, and why the previous one ended unless that was told."""
    try:
        text = post_mortem.transition(job.why(), attempt)
    except OrchError:
        return ""  # its logs are still worth reading
    source, _, end = text.partition(f"; attempt {attempt - 1} ended: ")
    return source if end and told.endswith(end) else text


class _Changes:
    """Lines on a pipe: one when the state, the attempt or a queued job's reason changes. What the line before has told is
    not told again, and why a job stops is left to the end, which follows within seconds.

    The end is left out unless `with_end`: the caller prints it in full.
    """

    def __init__(self, *, with_end: bool) -> None:
        self.told = ""
        self._with_end = with_end
        self._last: list[object] = []

    def __call__(self, status: Status) -> None:
        last, state = self._last, status["state"]
        queued = status["reason"] if state == "QUEUED" else ""
        now = [state, status["attempt"], queued, _suspected(status)]
        if now == last or (state in status_file.ENDED and not self._with_end):
            return
        goes_on = last[:2] == now[:2] and last[-1] and not now[-1]
        reason = status_view.reason(status) if state != "STOPPING" else ""
        news = "it goes on" if goes_on else status["suspicion"] or reason
        self._last = now
        why = f"  {news}" if news and not (self.told and news.endswith(self.told)) else ""
        self.told = news
        print_line(f"── {cells.plain([cells.line(*status_view.headline(status), why)]).strip()}")


@contextmanager
def _live() -> Iterator[tuple[Print, Refresh]]:
    """Yield the functions that print lines above and renew the job's state below."""
    from rich.live import Live
    from rich.text import Text

    screen = terminal.console()
    with Live(console=screen, auto_refresh=False, transient=True) as live:

        def out(text: str) -> None:
            if text:
                screen.print(Text.from_ansi(text.removesuffix("\n")), soft_wrap=True)

        def refresh(status: Status) -> None:
            last = cells.line(cells.Cell(f"{status['id']} · Ctrl-C leaves it running", "dim"))
            shown = ((), *state_lines(status, screen.width * REASON_LINES_MAX), last)
            lines = [terminal.rich_text(one) for one in shown]
            live.update(Text("\n").join(lines), refresh=True)

        yield out, refresh


def state_lines(status: Status, reason_chars: int) -> list[cells.Line]:
    """Return how a job is doing, in few lines; a reason is cut at `reason_chars`."""
    checkpoint = status["checkpoint"]
    step = checkpoint["step"] if checkpoint else None
    saved = f"  checkpoint at step {step:,}" if step is not None else ""
    lines = [cells.line(*status_view.headline(status), cells.Cell(saved, "dim"))]
    if status["reason"] and status["reason"] != status.get("queue", {}).get("said"):
        lines.append(cells.line(cells.Cell(cells.cut(status_view.reason(status), reason_chars), "dim")))
    if status["state"] not in ("STARTING", "RUNNING", "RESTARTING") or status.get("queue", {}).get("silent"):
        lines += status_view.queue(status)
    if suspicion := status["suspicion"]:
        lines.append(cells.line(cells.Cell(cells.cut(suspicion, reason_chars), "yellow")))
    if "supervisor" in status:
        lines.append(cells.line(cells.Cell(status_view.outdated(status), "bold red")))
    return lines
