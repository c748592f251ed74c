"""Lines and columns of a terminal: cells with styles, durations, sizes, lists of numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.core.invisible_characters import escape_harmful

STYLES = {
    "QUEUED": "yellow",
    "STARTING": "cyan",
    "RUNNING": "green",
    "RESTARTING": "yellow",
    "STOPPING": "yellow",
    "SUCCEEDED": "bold green",
    "FAILED": "bold red",
    "CANCELLED": "magenta",
}
"""The style of each job state."""

NAMES_SHOWN_MAX = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text and its style on a terminal."""

    text: str
    style: str = ""


Line: TypeAlias = tuple[Cell, ...]


def line(*parts: str | Cell) -> Line:
    """Return a line of pieces, made harmless for a terminal: one line, also where a name has a line break."""
    cells = (part if isinstance(part, Cell) else Cell(part) for part in parts)
    return tuple(Cell(escape_harmful(cell.text).replace("\n", "\\n"), cell.style) for cell in cells)


def plain_text(lines: Iterable[Line]) -> str:
    """Return lines as plain text."""
    return "".join("".join(cell.text for cell in cells).rstrip() + "\n" for cells in lines)


def duration(seconds: float | None) -> str:
    """Return a duration as text: 0.4s, 12s, 3m20s, 2h05m, 3d04h."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def span(seconds: float) -> str:
    """Return a short time in a sentence: 3.1 s, 9 s, 42 s; longer ones as `duration` has them."""
    if seconds >= 59.5:
        return duration(seconds)
    return f"{seconds:.1f}".removesuffix(".0") + " s" if seconds < 9.95 else f"{seconds:.0f} s"


def columns(rows: Sequence[Sequence[Cell]], heads: Sequence[str]) -> list[Line]:
    """Return a table: columns as wide as their widest cell, two spaces between."""
    widths = [max([len(head), *(len(row[i].text) for row in rows)]) + 2 for i, head in enumerate(heads)]
    widths[-1] = 0  # nothing follows the last, and spaces there could wrap a terminal's line
    table = [[Cell(head, "bold") for head in heads], *rows]
    return [
        line(*(Cell(cell.text.ljust(width), cell.style) for cell, width in zip(row, widths, strict=True)))
        for row in table
    ]


WRAP_INDENT_MAX = 14
"""The longest label after which the rest of a long line is indented."""

_LABEL = re.compile(r" *(?:\S+(?: \S+)*  +)?")


def wrap(lines: Iterable[Line], chars_max: int | None) -> list[Line]:
    """Return lines that fit into `chars_max`, broken at words, or between the items of a row, which are two spaces apart.
    A command stays in one line, so that it can be copied."""
    return [part for one in lines for part in (_wrap_line(one, chars_max) if chars_max else [one])]


def _wrap_line(one: Line, chars_max: int) -> list[Line]:
    text = "".join(cell.text for cell in one).rstrip()
    if len(text) <= chars_max or any(cell.style == "cyan" for cell in one):
        return [one]
    label = _LABEL.match(text)
    leading = len(text) - len(text.lstrip())
    indent = label.end() if label and label.end() <= WRAP_INDENT_MAX else leading
    indent = min(indent, chars_max // 2)  # the text may itself begin far to the right
    parts: list[tuple[int, int]] = []
    begin, room = max(leading - indent, 0), chars_max
    while len(text) - begin > room:
        end = _break_at(text, begin + (indent if not parts else 0), begin + room)
        parts.append((begin, end))
        begin = end + len(text[end:]) - len(text[end:].lstrip(" "))
        room = chars_max - indent
    parts += [(begin, len(text))] if begin < len(text) else []
    pad = (Cell(" " * indent),)
    return [(*(pad if number else ()), *_slice_line(one, *part)) for number, part in enumerate(parts)]


def _break_at(text: str, begin: int, limit: int) -> int:
    """Return where a line is broken: in its second half between two items or clauses, else between two words, else after one."""
    items = len(text[: text.rfind("  ", begin, limit + 2) + 1].rstrip())
    between = max(items, text.rfind("; ", begin, limit) + 1)
    at = between if between > (begin + limit) / 2 else text.rfind(" ", begin, limit + 1)
    if at > begin:
        return at
    after = text.find(" ", limit)
    return after if after > 0 else len(text)


def _slice_line(one: Line, begin: int, end: int) -> Line:
    cells, at = [], 0
    for cell in one:
        text = cell.text[max(0, begin - at) : max(0, end - at)]
        at += len(cell.text)
        cells += [Cell(text, cell.style)] if text else []
    return tuple(cells)


def shorten_paths(text: str, folder: str) -> str:
    """Return a text with the paths of a job's code and checkpoints shortened by the folder."""
    return text.replace(f"{folder}/code/", "").replace(f"{folder}/checkpoints/", "") if folder else text


def name_list(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def or_dash(value: object) -> str:
    """Return a value as a table shows it."""
    return "-" if value is None else str(value)


def cut(text: str, chars_max: int | None) -> str:
    """Return at most `chars_max` characters of a text, the last an ellipsis when there are more."""
    return text if chars_max is None or len(text) <= chars_max else f"{text[: chars_max - 1]}…"


def size(size_bytes: float) -> str:
    """Return a size in bytes as text, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def disk_full(folder: str) -> str:
    """Return the text for a job that waits because its folder's disk is full."""
    return f"the disk of {folder} is full: the job continues once there is space"
