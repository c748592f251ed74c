"""Live view of a job until it ends: its log lines as they come, and on a terminal its state below them.

On a pipe each change of state is a line among the log lines. For programs each change is a line of JSON. Ctrl-C ends
the view; the job keeps running.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from orchestrator.cli import terminal
from orchestrator.client.job import Job
from orchestrator.client.logs.reader import Follower, LogQuery
from orchestrator.core.errors import OrchError
from orchestrator.core.jobdir import home, status_file
from orchestrator.core.jobdir.status_file import Status
from orchestrator.views import cells, post_mortem
from orchestrator.views import status as status_view
from orchestrator.views.logs import FAR_WINDOW_NS, FOLD_WINDOW_NS, LogStyle, LogView

Print: TypeAlias = Callable[[str], None]
Refresh: TypeAlias = Callable[[Status], None]

POLL_S = 0.15
STATUS_S = 0.5
"""How often the status is read while following; a dead supervisor is restarted then."""

REASON_LINES_MAX = 2
"""Limit on the lines that a state's reason takes below the logs."""


def follow_all(job: Job, style: LogStyle, tail: int | None = None) -> Status:
    """Print log lines and the job's state until it has ended; return its last status. `tail`: of past lines only so many."""
    if terminal.has_colour():
        with _live_display(job.reference) as (out, refresh):
            return follow_logs(job, LogQuery(tail=tail), style, out, refresh)
    shown = _ChangePrinter(job.reference, with_end=False)
    return follow_logs(job, LogQuery(tail=tail), style, print_text, shown, lambda: shown.told)


def watch(job: Job) -> Status:
    """Show the job's status repeatedly until it has ended; return the last one."""
    if not terminal.has_colour():
        return _until_ended(job, _ChangePrinter(job.reference, with_end=True))
    from rich.live import Live
    from rich.text import Text

    screen, reference = terminal.console(), job.reference
    with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:

        def refresh(status: Status) -> None:
            status_lines = status_view.job(status, reference=reference, chars_max=screen.width)
            lines = [terminal.rich_text(one) for one in cells.wrap(status_lines, screen.width)]
            live.update(Text("\n").join(lines), refresh=True)

        return _until_ended(job, refresh)


def print_changes(job: Job) -> Status:
    """Print the status, a JSON object in a line, whenever state, attempt, reason or suspicion change; return the
    last one."""
    last: list[object] = []

    def refresh(status: Status) -> None:
        current = [status.state, status.attempt, status.reason, _suspicion_key(status)]
        if current != last:
            last[:] = current
            print_text(f"{json.dumps(status_file.to_json(status))}\n")

    return _until_ended(job, refresh)


def _suspicion_key(status: Status) -> object:
    """Return the subject of the job's suspicion: one that only grows older is not a change."""
    if (suspected := status.suspected) is None:
        return bool(status.suspicion)
    return [suspected.follows, suspected.ranks, suspected.node, suspected.spare]


def _settled_status(job: Job) -> Status:
    """Return a job's status. Raises UserError for the copy of a running job, which would be followed for ever."""
    status = job.source.settled_status()
    if status.state not in status_file.ENDED:
        home.require_original(job.folder)
    return status


def _until_ended(job: Job, refresh: Refresh) -> Status:
    while True:
        status = _settled_status(job)
        refresh(status)
        if status.state in status_file.ENDED:
            return status
        time.sleep(STATUS_S)


def print_text(text: str) -> None:
    """Print text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def follow_logs(
    job: Job,
    query: LogQuery,
    style: LogStyle,
    out: Print = print_text,
    refresh: Refresh = lambda status: None,
    last_text: Callable[[], str] = str,
) -> Status:
    """Print log lines by `out` until the job has ended; return its last status. `refresh` gets each status."""
    mask = job.mask()
    follower = Follower(job.folder, query, mask)
    status = _settled_status(job)
    window_ns = FAR_WINDOW_NS if status.backend != "local" else FOLD_WINDOW_NS
    view = LogView(style, mask, lambda attempt: _transition_text(job, attempt, last_text()), window_ns)
    refresh(status)
    due_s = time.monotonic() + STATUS_S
    while status.state not in status_file.ENDED:
        for text in view.add(follower.poll()):
            out(text)
        out(view.ready(time.time_ns()))
        if not follower.is_behind:
            time.sleep(POLL_S)
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + STATUS_S
            status = _settled_status(job)
            refresh(status)
    for text in view.add(follower.drain()):
        out(text)
    out(view.flush())
    refresh(status)
    return status


def _transition_text(job: Job, attempt: int, last_text: str) -> str:
    """Return where an attempt resumed from, and why the previous one ended unless that was printed."""
    try:
        return post_mortem.transition(job.why(), attempt, last_text)
    except OrchError:
        return ""  # its logs are still worth reading


class _ChangePrinter:
    """Lines on a pipe: one when the state, the attempt or a queued job's reason changes, or its supervisor falls silent.
    A line does not repeat the text of the line before, and the reason of a stop is left to the end, which follows within seconds.

    The end is left out unless `with_end`: the caller prints it in full. `called`: the job in commands.
    """

    def __init__(self, reference: str, *, with_end: bool) -> None:
        self.told = ""
        self._called, self._with_end = reference, with_end
        self._last: list[object] = []
        self._notices = _NewNotices()

    def __call__(self, status: Status) -> None:
        last, state = self._last, status.state
        print_text(cells.plain_text(self._notices.take_new(status)))
        queued = status.reason if state == "QUEUED" else ""
        late = status_view.outdated_text(status) if status.is_late else ""
        current = [state, status.attempt, queued, bool(late), _suspicion_key(status)]
        if current == last or (state in status_file.ENDED and not self._with_end):
            return
        has_recovered = last[:2] == current[:2] and last[-1] and not current[-1]
        reason = status_view.reason(status) if state != "STOPPING" else ""
        next_action = status_view.next_action_line(status.suspected, status.written_at, self._called)
        suspicion = "; ".join(filter(None, (status.suspicion, next_action)))
        news = late or ("running again" if has_recovered else suspicion or reason)
        self._last = current
        why = f"  {news}" if news and not (self.told and news.endswith(self.told)) else ""
        self.told = news
        print_text(f"── {cells.plain_text([cells.line(*status_view.headline(status), why)]).strip()}\n")


class _NewNotices:
    """Filter for notices: each is shown once."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def take_new(self, status: Status) -> list[cells.Line]:
        """Return the lines of those that are new."""
        new = [notice for notice in status.notices if notice not in self._shown]
        self._shown.update(new)
        return [one for notice in new for one in status_view.notice_lines(notice, status.dir)]


@contextmanager
def _live_display(reference: str) -> Iterator[tuple[Print, Refresh]]:
    """Yield the functions that print lines above and renew the job's state below. `reference`: the job in commands."""
    from rich.live import Live
    from rich.text import Text

    screen, notices = terminal.console(), _NewNotices()
    with Live(console=screen, auto_refresh=False, transient=True) as live:

        def out(text: str) -> None:
            if text:
                screen.print(Text.from_ansi(text.removesuffix("\n")), soft_wrap=True)

        def refresh(status: Status) -> None:
            last = cells.line(cells.Cell(f"{status.id} · Ctrl-C detaches, the job keeps running", "dim"))
            for one in cells.wrap(notices.take_new(status), screen.width):
                screen.print(terminal.rich_text(one))
            shown = ((), *state_lines(status, screen.width * REASON_LINES_MAX, reference), last)
            lines = [terminal.rich_text(line) for line in cells.wrap(shown, screen.width)]
            live.update(Text("\n").join(lines), refresh=True)

        yield out, refresh


def state_lines(status: Status, reason_chars: int, reference: str = "") -> list[cells.Line]:
    """Return the state of a job in few lines; a reason is cut at `reason_chars`. `reference`: the job in commands."""
    checkpoint = status.checkpoint
    step = checkpoint.step if checkpoint else None
    saved = f"  checkpoint at step {step:,}" if step is not None else ""
    lines = [cells.line(*status_view.headline(status), cells.Cell(saved, "dim"))]
    if status.reason and not status_view.is_queue_reason(status):
        lines.append(cells.line(cells.Cell(cells.cut(status_view.reason(status), reason_chars), "dim")))
    is_unheard = status.queue is not None and status.queue.silent
    if status.state not in ("STARTING", "RUNNING", "RESTARTING") or is_unheard:
        lines += status_view.queue(status)
    lines += status_view.suspicion(status, reference, reason_chars)
    if status.is_late or status.copy_of:
        lines.append(cells.line(cells.Cell(status_view.outdated_text(status), "bold red")))
    return lines
