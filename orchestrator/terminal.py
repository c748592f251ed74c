"""Where does text go? To a terminal in colour, to a pipe plain; asked once, here.

`NO_COLOR` (no-color.org) and `TERM=dumb` mean no colours. `rich` takes longer to load than a status to write, so only
the live view, which needs it, loads it; `show` is loaded by what shows something.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from orchestrator import show

_SGR = {
    "bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "magenta": 35, "cyan": 36,
}  # fmt: skip
"""The styles of `show` as terminals know them (ECMA-48, Select Graphic Rendition)."""


def is_terminal(stream: TextIO | None = None) -> bool:
    """Tell whether standard output (or `stream`) is a terminal."""
    return (stream or sys.stdout).isatty()


def has_colour(stream: TextIO | None = None) -> bool:
    """Tell whether colours may be shown there."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int | None:
    """Return how many characters fit into a line of standard output, None where it is no terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def write(lines: Iterable[show.Line]) -> None:
    """Write lines to standard output."""
    from orchestrator import show

    sys.stdout.write(painted(lines) if has_colour() else show.plain(lines))
    sys.stdout.flush()


def painted(lines: Iterable[show.Line]) -> str:
    """Return lines as text with colours."""
    return "".join("".join(map(_paint, one)) + "\n" for one in lines)


def _paint(cell: show.Cell) -> str:
    if not cell.style or not cell.text:
        return cell.text
    codes = ";".join(str(_SGR[word]) for word in cell.style.split())
    return f"\x1b[{codes}m{cell.text}\x1b[0m"


def console() -> Console:
    """Return the terminal as rich sees it."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def rich_text(one: show.Line) -> Text:
    """Return a line as rich prints it."""
    from rich.text import Text

    return Text.assemble(*((cell.text, cell.style) for cell in one))


def complain(text: str) -> None:
    """Write an error to standard error, its first line red where there are colours."""
    from orchestrator import show

    head, _, rest = text.partition("\n")
    head, *more = show.harmless(head), *([show.harmless(rest)] if rest else [])
    if has_colour(sys.stderr):
        head = f"\x1b[31m{head}\x1b[0m"
    print(head, *more, sep="\n", file=sys.stderr)
