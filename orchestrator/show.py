"""How does a job look? Statuses, checkpoints and findings as lines of text, for a terminal, a pipe or a log.

Pure: JSON objects of the contract in, lines out. A style is a word or two, such as `bold red`, which `terminal` knows
and `rich` knows too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from orchestrator.statefile import seconds

Json: TypeAlias = Mapping[str, Any]

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
"""The colour of each job state."""

_WORRYING = ("stopped", "zombie", "dead", "silent", "absent")
RANKS_SHOWN_MAX = 64
REASON_CHARS_MIN = 20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text and the style it has on a terminal."""

    text: str
    style: str = ""


Line: TypeAlias = tuple[Cell, ...]


def line(*parts: str | Cell) -> Line:
    """Return a line of pieces, made harmless for a terminal."""
    cells = (part if isinstance(part, Cell) else Cell(part) for part in parts)
    return tuple(Cell(harmless(cell.text), cell.style) for cell in cells)


def harmless(text: str) -> str:
    """Return text without what would make a terminal do something; it may come from another machine."""
    return _CONTROL.sub("?", text)


def plain(lines: Iterable[Line]) -> str:
    """Return lines as plain text."""
    return "".join("".join(cell.text for cell in one).rstrip() + "\n" for one in lines)


def duration(seconds: float | None) -> str:
    """Return seconds as people say them: 0.4s, 12s, 3m20s, 2h05m, 3d04h."""
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


def columns(rows: Sequence[Sequence[Cell]], heads: Sequence[str]) -> list[Line]:
    """Return a table: columns as wide as their widest cell, two spaces between."""
    widths = [max([len(head), *(len(row[i].text) for row in rows)]) + 2 for i, head in enumerate(heads)]
    widths[-1] = 0  # nothing stands behind the last, and blanks there could wrap a terminal's line
    table = [[Cell(head, "bold") for head in heads], *rows]
    return [
        line(*(Cell(cell.text.ljust(width), cell.style) for cell, width in zip(row, widths, strict=True)))
        for row in table
    ]


# One job


def headline(status: Json) -> Line:
    """Return a job in one line: what it is, how far, how fast, and how long it still takes."""
    state = status["state"]
    parts = [Cell(state, STYLES.get(state, "")), Cell(f"  attempt {status['attempt']}")]
    if status["step"] is not None:
        total = f"/{status['total_steps']:,}" if status.get("total_steps") else ""
        parts.append(Cell(f"  step {status['step']:,}{total}"))
    if status["steps_per_s"]:
        parts.append(Cell(f"  {status['steps_per_s']:.2f} steps/s"))
    left = eta_s(status)
    if left is not None:
        parts.append(Cell(f"  {duration(left)} left"))
    spent_s = elapsed_s(status)
    if spent_s is not None:
        over = status["ended_at"] is not None
        parts.append(Cell(f"  in {duration(spent_s)}" if over else f"  {duration(spent_s)} so far"))
    if status["restarts"]:
        parts.append(Cell(f"  {status['restarts']} restart{'s' if status['restarts'] > 1 else ''}", "yellow"))
    return line(*parts)


def elapsed_s(status: Json) -> float | None:
    """Return for how many seconds the job has run, or ran; None when it has not begun."""
    began, end = status["started_at"], status["ended_at"] or status.get("written_at")
    if not began or not end:
        return None
    return max(
        0.0, seconds(end) - seconds(began) + (0.0 if status["ended_at"] else status.get("written_s", 0.0))
    )


def eta_s(status: Json) -> float | None:
    """Return the seconds that are left, where the job's total of steps and its pace are known."""
    total, step, pace = status.get("total_steps"), status["step"], status["steps_per_s"]
    if not total or not pace or step is None or status["state"] != "RUNNING":
        return None
    return max(0.0, float(total - step) / float(pace))


def job(status: Json) -> list[Line]:
    """Return one job in full: its head, its nodes and its ranks."""
    nodes, ranks = status["nodes"], status["ranks"]
    size = f"{status['world_size']} ranks on {len(nodes)} node{'s' if len(nodes) != 1 else ''}, {status['backend']}"
    lines = [line(Cell(status["id"], "bold"), f"  {size}"), headline(status)]
    if status["reason"]:
        lines.append(line(Cell(reason(status), "dim" if status["state"] == "SUCCEEDED" else "")))
    if "supervisor" in status:
        lines.append(line(Cell(unheard(status), "bold red")))
    if status["checkpoint"]:
        step = status["checkpoint"]["step"]
        at = f" (step {step:,})" if step is not None else ""
        lines.append(line(f"checkpoint  {status['checkpoint']['path']}{at}"))
    lines += [(), *columns([_node_row(node) for node in nodes], ("NODE", "HOST", "AGENT", "SEEN"))]
    lines += [(), *columns([_rank_row(rank) for rank in ranks[:RANKS_SHOWN_MAX]], _RANK_HEADS)]
    if len(ranks) > RANKS_SHOWN_MAX:
        lines.append(line(f"and {len(ranks) - RANKS_SHOWN_MAX} more ranks: --json shows all"))
    return lines


def reason(status: Json) -> str:
    """Return why the job is in its state, with paths in the job's own folder made short."""
    return short(status["reason"], status.get("dir", ""))


def short(text: str, folder: str) -> str:
    """Return a text in which the code and the checkpoints of a job's folder are named without the folder."""
    return text.replace(f"{folder}/code/", "").replace(f"{folder}/checkpoints/", "") if folder else text


def unheard(status: Json) -> str:
    """Say that nobody keeps this status up to date, and who last did."""
    holder = status["supervisor"]
    who = f"its supervisor (pid {holder['pid']} on {holder['host']})" if holder else "its supervisor"
    return f"this is {duration(status['written_s'])} old: no word from {who}; orch status there tells more"


_RANK_HEADS = ("RANK", "NODE", "PID", "STATE", "STEP", "STEPS/S", "BEAT", "EXIT")


def _node_row(node: Json) -> list[Cell]:
    seen = f"{duration(node['seen_s'])} ago" if node["seen_s"] is not None else "-"
    style = "red" if node["state"] in _WORRYING else ""
    return [Cell(node["name"]), Cell(node["host"]), Cell(node["state"], style), Cell(seen)]


def _rank_row(rank: Json) -> list[Cell]:
    bad = rank["state"] in _WORRYING or rank["exit"] not in (None, 0)
    pace = rank.get("steps_per_s")
    return [
        Cell(str(rank["rank"])),
        Cell(rank["node"]),
        Cell(_or_dash(rank["pid"])),
        Cell(rank["state"], "red" if bad else ""),
        Cell(_or_dash(rank["step"])),
        Cell(f"{pace:.2f}" if pace else "-"),
        Cell(duration(rank["beat_s"])),
        Cell(_or_dash(rank["exit"]), "red" if bad else ""),
    ]


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


# Many jobs


def jobs(statuses: Sequence[Json], chars_max: int | None = None) -> list[Line]:
    """Return a table of jobs, a line each; in lines of `chars_max` the reasons get what is left, else all they need."""
    left = chars_max and chars_max - sum(_JOB_CHARS) - max([len(one["id"]) + 2 for one in statuses])
    reason_chars = None if left is None else max(REASON_CHARS_MIN, left)
    rows = [
        [
            Cell(one["id"]),
            Cell(one["state"], STYLES.get(one["state"], "")),
            Cell(str(one["attempt"])),
            Cell(_or_dash(one["step"])),
            Cell((one["created_at"] or "-")[:19].replace("T", " ")),
            Cell(cut(reason(one), reason_chars)),
        ]
        for one in statuses
    ]
    return columns(rows, ("JOB", "STATE", "ATTEMPT", "STEP", "SUBMITTED (UTC)", "REASON"))


_JOB_CHARS = (12, 9, 8, 21)
"""How wide the columns between a job's id and its reason are."""


def cut(text: str, chars_max: int | None) -> str:
    """Return at most so many characters of a text, the last an ellipsis when there are more."""
    return text if chars_max is None or len(text) <= chars_max else f"{text[: chars_max - 1]}…"


# Checkpoints and preflight


def checkpoints(listed: Sequence[Json]) -> list[Line]:
    """Return a table of checkpoints, the one a restart would start from marked."""
    if not listed:
        return [line("no checkpoints yet")]
    return columns(
        [_checkpoint_row(one) for one in listed], ("", "STEP", "SIZE", "WRITTEN (UTC)", "STATE", "PATH")
    )


def _checkpoint_row(one: Json) -> list[Cell]:
    state = "complete" if one["complete"] else "not proven complete"
    if one["whole"] is not None:
        state = f"{state}, {'whole' if one['whole'] else 'torn'}"
    style = "red" if one["whole"] is False else ("" if one["complete"] else "yellow")
    return [
        Cell("→" if one["resume"] else ""),
        Cell(_or_dash(one["step"])),
        Cell(size(one["bytes"])),
        Cell(one["written_at"][:19].replace("T", " ")),
        Cell(state, style),
        Cell(one["path"]),
    ]


def size(size_bytes: float) -> str:
    """Return bytes as people say them, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def findings(found: Sequence[Json]) -> list[Line]:
    """Return what a preflight found, a line each, faults with their fix."""
    lines: list[Line] = []
    for one in found:
        mark = Cell("ok    ", "green") if one["ok"] else Cell("fault ", "bold red")
        lines.append(line(mark, f"{one['what']:<8} {one['found']}"))
        if one["fix"]:
            lines.append(line(f"               fix: {one['fix']}"))
    return lines
