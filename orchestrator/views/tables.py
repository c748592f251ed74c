"""Tables of jobs, of checkpoints, and of the findings of a preflight.

Pure: JSON objects of the contract in, lines out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.core.codec import Json
from orchestrator.core.jobdir.status_file import Status
from orchestrator.views.cells import STYLES, Cell, Line, columns, cut, line, named, or_dash
from orchestrator.views.status import reason, without_notes

REASON_CHARS_MIN = 20


def jobs(statuses: Sequence[Status], chars_max: int | None = None) -> list[Line]:
    """Return a table of jobs, a line each, cut to `chars_max` at the reasons.

    Where little space remains the time of the submit has no column; the id has it as well.
    """
    left = chars_max and chars_max - sum(_JOB_CHARS) - max([len(one["id"]) + 2 for one in statuses])
    has_time = left is None or left >= REASON_CHARS_MIN
    if left is not None:
        left = max(REASON_CHARS_MIN, left if has_time else left + _JOB_CHARS[-1])
    heads = ("JOB", "STATE", "ATTEMPT", "STEP", "SUBMITTED (UTC)", "REASON")
    keep = [head for head in heads if has_time or not head.startswith("SUBMITTED")]
    rows = [dict(zip(heads, _job_row(one, left), strict=True)) for one in statuses]
    return columns([[row[head] for head in keep] for row in rows], keep)


def _job_row(one: Status, reason_chars: int | None) -> list[Cell]:
    return [
        Cell(one["id"]),
        Cell(one["state"], STYLES.get(one["state"], "")),
        Cell(str(one["attempt"])),
        Cell(or_dash(one["step"])),
        Cell((one["created_at"] or "-")[:19].replace("T", " ")),
        Cell(cut(without_notes(reason(one), one["nodes"]), reason_chars)),
    ]


_JOB_CHARS = (12, 9, 8, 21)
"""The widths of the columns between a job's id and its reason."""


def hosts(listed: Sequence[Json]) -> list[Line]:
    """Return a table of hosts that jobs and checks have seen, with the failures that still count."""
    if not listed:
        return [line("no job and no check has seen a host yet")]
    heads = ("HOST", "STATE", "SEEN (UTC)", "JOB", "LAST FAILURE (UTC)")
    return columns([_host_row(one) for one in listed], heads)


def _host_row(one: Json) -> list[Cell]:
    failed = "-"
    if one["failed_at"] is not None:
        where = one["failed_job"] or "a check"
        failed = f"{one['failed_at'][:16].replace('T', ' ')} in {where}: {one['why']}"
    return [
        Cell(one["host"]),
        Cell(one["state"]),
        Cell(one["seen_at"][:16].replace("T", " ")),
        Cell(or_dash(one["job"])),
        Cell(failed, "yellow" if one["failed_at"] is not None else ""),
    ]


def findings(found: Sequence[Json]) -> list[Line]:
    """Return the findings of a preflight, a line each, with their fixes; a fault that several hosts share, once."""
    lines: list[Line] = []
    for one, text in _folded(found):
        mark = _MARKS[one["severity"]]
        lines.append(line(mark, f"{one['what']:<8} {text}"))
        if one["fix"]:
            lines.append(line(f"               fix: {one['fix']}"))
    return lines


_MARKS = {
    "ok": Cell("ok    ", "green"),
    "note": Cell("note  "),
    "warning": Cell("warn  ", "yellow"),
    "error": Cell("fault ", "bold red"),
}


def _folded(found: Sequence[Json]) -> Iterator[tuple[Json, str]]:
    """Yield findings with their texts; a fault that several hosts share is one that names them all."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    firsts: list[tuple[Json, str, list[str]]] = []
    for one in found:
        host, _, said = one["found"].partition(": ")
        if one["severity"] in ("ok", "note") or not said or " " in host:
            firsts.append((one, one["found"], []))
            continue
        names = alike.setdefault((one["what"], said, one["fix"]), [])
        names.append(host)
        if len(names) == 1:
            firsts.append((one, said, names))
    for one, said, names in firsts:
        yield one, f"{named(names)}: {said}" if names else said
