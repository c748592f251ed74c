"""Tables of jobs, of checkpoints, and of the findings of a preflight.

Pure: statuses and JSON objects of the contract in, lines out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.core.codec import Json
from orchestrator.core.jobdir.status_file import Status
from orchestrator.core.text import format_count
from orchestrator.views.cells import STYLES, Cell, Line, columns, cut, line, name_list, or_dash
from orchestrator.views.status import reason, strip_notes

REASON_CHARS_MIN = 20


def jobs(statuses: Sequence[Status], chars_max: int | None = None) -> list[Line]:
    """Return a table of jobs, a line each, cut to `chars_max` at the reasons.

    Where little space remains the time of the submit has no column; the id has it as well.
    """
    left = chars_max and chars_max - sum(_JOB_CHARS) - max([len(status.id) + 2 for status in statuses])
    has_time = left is None or left >= REASON_CHARS_MIN
    if left is not None:
        left = max(REASON_CHARS_MIN, left if has_time else left + _JOB_CHARS[-1])
    heads = ("JOB", "STATE", "ATTEMPT", "STEP", "SUBMITTED (UTC)", "REASON")
    keep = [head for head in heads if has_time or not head.startswith("SUBMITTED")]
    rows = [dict(zip(heads, _job_row(status, left), strict=True)) for status in statuses]
    return columns([[row[head] for head in keep] for row in rows], keep)


def _job_row(status: Status, reason_chars: int | None) -> list[Cell]:
    why = f"a copy of {status.copy_of}" if status.copy_of else strip_notes(reason(status), status.nodes)
    return [
        Cell(status.id),
        Cell(status.state, STYLES.get(status.state, "")),
        Cell(str(status.attempt)),
        Cell(or_dash(status.step)),
        Cell(status.created_at[:19].replace("T", " ")),
        Cell(cut(why, reason_chars)),
    ]


_JOB_CHARS = (12, 9, 8, 21)
"""The widths of the columns between a job's id and its reason."""


def hosts(listed: Sequence[Json]) -> list[Line]:
    """Return a table of hosts that jobs and checks have seen, with the failures that still count."""
    if not listed:
        return [line("no job or check has used a host yet")]
    heads = ("HOST", "STATE", "SEEN (UTC)", "JOB", "LAST FAILURE (UTC)")
    if "free" in listed[0]:
        rows = [[Cell(entry["host"]), *_capacity_cells(entry["free"])] for entry in listed]
        return columns(rows, ("HOST", "FREE NOW", "HELD (UTC)"))
    return columns([_host_row(entry) for entry in listed], heads)


def _capacity_cells(capacity: Json | None) -> tuple[Cell, Cell]:
    if capacity is None or capacity["fault"]:
        return Cell("-"), Cell(capacity["fault"] if capacity else "not reached over SSH", "yellow")
    free = []
    for kind, total in (("GPU", capacity["gpus"]), ("slot", capacity["slots"])):
        taken = sum(one["count"] for one in capacity["held"] if one["things"].startswith(kind))
        free += [f"{max(0, total - taken)} of {format_count(total, kind)}"] if total else []
    held = "; ".join(f"{one['things']} by {one['holder']}{_since_text(one)}" for one in capacity["held"])
    return Cell(", ".join(free)), Cell(held or "-")


def _since_text(held: Json) -> str:
    return f", since {held['since'][:16].replace('T', ' ')}" if held["since"] else ""


def waiting_lines(statuses: Sequence[Status]) -> list[Line]:
    """Return the jobs that wait for hosts, one a line, in the order of submission."""
    return [line("waiting  ", ": ".join(filter(None, (status.id, reason(status))))) for status in statuses]


def _host_row(entry: Json) -> list[Cell]:
    failed = "-"
    if entry["failed_at"] is not None:
        at = entry["failed_at"][:16].replace("T", " ")
        failed = f"{at} in {entry['failed_job'] or 'a check'}: {entry['why']}"
    return [
        Cell(entry["host"]),
        Cell("unused" if entry["state"] == "absent" and failed == "-" else entry["state"]),
        Cell(entry["seen_at"][:16].replace("T", " ")),
        Cell(or_dash(entry["job"])),
        Cell(failed, "yellow" if entry["failed_at"] is not None else ""),
    ]


def findings(found: Sequence[Json]) -> list[Line]:
    """Return the findings of a preflight, a line each, with their fixes; a fault that several hosts share, once."""
    lines: list[Line] = []
    for one, text in _group_findings(found):
        mark = _SEVERITY_CELLS[one["severity"]]
        lines.append(line(mark, f"{one['what']:<8} {text}"))
        if one["fix"]:
            lines.append(line(f"               fix: {one['fix']}"))
    return lines


_SEVERITY_CELLS = {
    "ok": Cell("ok    ", "green"),
    "note": Cell("note  "),
    "warning": Cell("warn  ", "yellow"),
    "error": Cell("fault ", "bold red"),
}


def _group_findings(found: Sequence[Json]) -> Iterator[tuple[Json, str]]:
    """Yield findings with their texts; a fault that several hosts share is one that names them all."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    firsts: list[tuple[Json, str, list[str]]] = []
    for finding in found:
        host, _, fault_text = finding["found"].partition(": ")
        if finding["severity"] in ("ok", "note") or not fault_text or " " in host:
            firsts.append((finding, finding["found"], []))
            continue
        names = alike.setdefault((finding["what"], fault_text, finding["fix"]), [])
        names.append(host)
        if len(names) == 1:
            firsts.append((finding, fault_text, names))
    for first, fault_text, names in firsts:
        yield first, f"{name_list(names)}: {fault_text}" if names else fault_text
