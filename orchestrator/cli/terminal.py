"""Output of text: to a terminal in colour, to a pipe plain.

`NO_COLOR` (no-color.org) and `TERM=dumb` mean no colours. `rich` takes longer to load than a status to write, so only
the live view loads it; `views` are loaded by the verbs that need them.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from orchestrator.core.errors import ClusterError
from orchestrator.core.invisible_characters import escape_harmful

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from orchestrator.views import cells

_SGR = {
    "bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "magenta": 35, "cyan": 36,
}  # fmt: skip
"""The styles of `views` as terminals know them (ECMA-48, Select Graphic Rendition)."""


def is_terminal(stream: TextIO | None = None) -> bool:
    """Return whether standard output (or `stream`) is a terminal."""
    return (stream or sys.stdout).isatty()


def has_colour(stream: TextIO | None = None) -> bool:
    """Return whether colours may be shown there."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int | None:
    """Return how many characters fit into a line of standard output; None without a terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def write(lines: Iterable[cells.Line]) -> None:
    """Write lines to standard output."""
    from orchestrator.views import cells

    lines = cells.wrap(lines, width())
    sys.stdout.write(paint(lines) if has_colour() else cells.plain_text(lines))
    sys.stdout.flush()


def paint(lines: Iterable[cells.Line]) -> str:
    """Return lines as text with colours."""
    return "".join("".join(map(_paint_cell, line)) + "\n" for line in lines)


def _paint_cell(cell: cells.Cell) -> str:
    if not cell.style or not cell.text:
        return cell.text
    codes = ";".join(str(_SGR[word]) for word in cell.style.split())
    return f"\x1b[{codes}m{cell.text}\x1b[0m"


def console() -> Console:
    """Return the terminal as rich sees it."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def rich_text(line: cells.Line) -> Text:
    """Return a line as rich prints it."""
    from rich.text import Text

    return Text.assemble(*((cell.text, cell.style) for cell in line))


PIPE_BYTES = 1 << 20
"""What Linux lets a pipe of any user hold (fs.pipe-max-size)."""


class ReaderGone(Exception):
    """The reader of standard output has closed it, as `head` does."""


class _Output(io.FileIO):
    """Standard output that raises errors which click does not convert."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError as err:
            raise ReaderGone from err
        except OSError as err:
            fix = "send it elsewhere; orch status --all shows whether a job was started"
            raise ClusterError(f"cannot be written: {err.strerror}", "standard output", fix) from err


def open_streams() -> None:
    """Make the standard streams safe.

    A closed one becomes /dev/null, so that no file opened later gets its number; a character that the terminal's
    encoding lacks becomes a question mark.
    """
    for name, flag in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:  # read-only, so that a write fails with EBADF, as on a closed one
            setattr(sys, name, os.fdopen(os.open(os.devnull, flag), "r" if name == "stdin" else "w"))
    raw = _Output(sys.stdout.fileno(), "wb", closefd=False)
    encoding, lines = sys.stdout.encoding, sys.stdout.isatty()
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, "replace", line_buffering=lines)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="replace")


def widen_pipe() -> None:
    """Let a pipe at standard output hold more than 64 KiB, so that writer and reader take turns less often."""
    with contextlib.suppress(OSError):  # another kind of file, or more than this user may have
        fcntl.fcntl(sys.stdout.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def drop_unwritten() -> None:
    """Drop unwritten output: the interpreter would write it again, and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ReaderGone, ClusterError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


ERROR_LINE_CHARS_MAX = 1000
"""The length at which a line of an error is shortened: it may repeat what was typed."""


def shorten(text: str) -> str:
    """Return an error with the middle of its long lines left out: the end of a line says what is wrong."""
    half = ERROR_LINE_CHARS_MAX // 2
    lines = text.split("\n")
    return "\n".join(line if len(line) <= ERROR_LINE_CHARS_MAX else f"{line[:half]} … {line[-half:]}" for line in lines)


def say(text: str, *, err: bool = False) -> None:
    """Write text from any source, made harmless. An error of standard error ends no command."""
    with contextlib.suppress(*([OSError] if err else [])):
        print(escape_harmful(text), file=sys.stderr if err else sys.stdout, flush=True)


def print_error(text: str) -> None:
    """Write an error to standard error, its first line red where there are colours."""
    head, newline, rest = escape_harmful(shorten(text)).partition("\n")
    if has_colour(sys.stderr):
        head = f"\x1b[31m{head}\x1b[0m"
    with contextlib.suppress(OSError):
        print(f"{head}{newline}{rest}", file=sys.stderr)
