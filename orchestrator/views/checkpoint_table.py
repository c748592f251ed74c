"""Table of checkpoints with a note on each, files that could be adopted, and what a resume starts from. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState, Content, StepSource
from orchestrator.core.checkpoints.resume_choice import ResumeChoice
from orchestrator.core.codec import Json
from orchestrator.core.text import format_count, ranks_text
from orchestrator.views.cells import Cell, Line, columns, line, name_list, or_dash, size

PASSED_SHOWN = 5
"""How many skipped checkpoints are named."""

ADOPTABLE_SHOWN = 5
"""How many adoptable files are shown, the newest."""

_HEADS = ("", "NO", "STEP", "SIZE", "WRITTEN (UTC)", "STALL", "STATE", "PATH")
_STYLES = {"open": "yellow", "torn": "red", "gone": "red", "distrusted": "red", "pruned": "dim"}
_PAD = "   "


def table(listed: Sequence[Json], job: str, folder: str) -> list[Line]:
    """Return a table of checkpoints, each with its note, and below it adoptable files. An arrow marks the one that the
    next attempt resumes from. `folder`: the job's."""
    checkpoints = [entry for entry in listed if entry["save"] is not None]
    shown = [checkpoint for checkpoint in checkpoints if not _is_hidden(checkpoint, checkpoints)]
    lines: list[Line] = []
    if shown:
        head, *rows = columns([_row(one, folder) for one in shown], _HEADS)
        lines.append(head)
        for one, row in zip(shown, rows, strict=True):
            lines += [row, *_note_lines(one)]
    if more := len(checkpoints) - len(shown):
        text = f"{_PAD}not shown: {more} overwritten or deleted since; --json shows all"
        lines.append(line(Cell(text, "dim")))
    lines += _verified_lines(checkpoints)
    may_count = (CheckpointState.WHOLE.value, CheckpointState.OPEN.value)
    if shown and not any(checkpoint["state"] in may_count for checkpoint in checkpoints):
        lines.append(line(Cell(f"{_PAD}a restart starts from the beginning", "yellow")))
    adoptable = [entry for entry in listed if entry["save"] is None]
    if adoptable:
        lines += [() for _ in lines[:1]]
        lines += _adoptable_lines(adoptable, job, folder)
    return lines or [line("no checkpoints yet")]


def _is_hidden(entry: Json, checkpoints: Sequence[Json]) -> bool:
    if entry["state"] not in (CheckpointState.GONE.value, CheckpointState.PRUNED.value):
        return False
    newer = [other for other in checkpoints if other["save"] > entry["save"]]
    is_superseded = any(
        other["path"] == entry["path"] and other["state"] != CheckpointState.PRUNED.value for other in newer
    )
    return is_superseded or (not entry["exists"] and any(other["resume"] for other in newer))


def _row(entry: Json, folder: str) -> list[Cell]:
    is_usual = entry["content"] == Content.STATE.value or entry["state"] == CheckpointState.OPEN.value
    content = "" if is_usual else f", {entry['content']}"
    files = f" ({entry['files']} files)" if entry["files"] > 1 else ""
    return [
        Cell("→" if entry["resume"] else " "),
        Cell(str(entry["save"])),
        Cell(or_dash(entry["step"])),
        Cell(size(entry["bytes"])),
        Cell(entry["written_at"][5:16].replace("T", " ")),
        Cell("-" if entry.get("stall_s") is None else f"{entry['stall_s']:,.1f} s"),
        Cell(
            "complete" if entry["state"] == CheckpointState.WHOLE.value else entry["state"],
            _STYLES.get(entry["state"], ""),
        ),
        Cell(f"{_location(entry, folder)}{files}{content}"),
    ]


def _note_lines(entry: Json) -> Iterator[Line]:
    """Yield where a checkpoint is that is in memory, and the note on it, below its row."""
    if _is_in_memory(entry):
        places = [
            f"{'memory' if place['memory'] else 'disk'}@{place['host']}" if place["host"] else "home"
            for place in sorted(entry["places"], key=lambda place: bool(place["memory"]))
        ]
        yield line(_PAD * 2, Cell(name_list(list(dict.fromkeys(places))), "dim"))
        if entry["complete"] and not entry["safe"]:
            yield line(
                _PAD * 2, Cell(f"not safe yet: {size(entry['safe_bytes'])} of {size(entry['bytes'])} copied", "yellow")
            )
    if entry["why"]:
        style = _STYLES.get(entry["state"], "yellow")
        yield line(_PAD * 2, Cell(_strip_name(entry["main"], entry["why"]), style))


def _is_in_memory(entry: Json) -> bool:
    return any(place.get("memory") for place in entry["places"])


def _verified_lines(checkpoints: Sequence[Json]) -> Iterator[Line]:
    """Yield what was read and verified now."""
    numbers_by_method: dict[str, list[int]] = {}
    for checkpoint in checkpoints:
        if checkpoint["whole"]:
            numbers_by_method.setdefault(checkpoint["compared"], []).append(checkpoint["save"])
    for what, numbers in numbers_by_method.items():
        yield line(f"{_PAD}verified now by {what}: {ranks_text(numbers)}")


def _location(entry: Json, folder: str) -> str:
    """Return the path of a checkpoint, and its host where it is on a host only."""
    hosts = [place["host"] for place in entry["places"]]
    if any(hosts[:1]):
        return str(entry["main"]) if _is_in_memory(entry) else f"{entry['main']} on {hosts[0]}"
    is_theirs = not entry["exists"] and len({place["path"] for place in entry["places"]}) < len(hosts)
    return f"{_short_path(entry['path'], folder)}{f' on {hosts[-1]}' if is_theirs else ''}"


def _short_path(path: str, folder: str) -> str:
    return path.removeprefix(f"{folder}/").removeprefix("checkpoints/")


def _strip_name(main: str, why: str) -> str:
    """Return a reason with `it` for the name of the checkpoint, which is shown beside it."""
    return f"it {why.removeprefix(name)}" if why.startswith(name := f"{main} ") else why


def _adoptable_lines(adoptable: Sequence[Json], job: str, folder: str) -> Iterator[Line]:
    """Yield adoptable files, the newest last, each with the command that resumes from it."""
    which = "it" if len(adoptable) == 1 else "one of them"
    yield line(f"not written by this job; to resume from {which}:")
    if (more := len(adoptable) - ADOPTABLE_SHOWN) > 0:
        yield line(Cell(f"{_PAD}{more} older ones: --json shows all", "dim"))
    for offer in adoptable[-ADOPTABLE_SHOWN:]:
        path = _short_path(offer["path"], folder)
        step = "" if offer["step"] is None else f", step {offer['step']:,}"
        yield line(f"{_PAD}{path} ({offer['format']}, {size(offer['bytes'])}{step})")
        if offer["why"]:
            yield line(_PAD * 2, Cell(_strip_name(offer["main"], offer["why"]), "red"))
        else:
            yield line(_PAD * 2, Cell(f"orch resume {job} --from {shlex.quote(path)}", "cyan"))


# Where files are


def folder_lines(where: Json) -> list[Line]:
    """Return where a job's files are, a line for each place."""
    start, folder = where["start"], where["dir"]
    written = f"  {format_count(where['written'], 'file')} written by ranks" if where["written"] else ""
    lines = [_folder_line("folder", folder), _folder_line("code", f"{start}{written}")]
    for link in where["links"]:
        lines.append(_folder_line("", f"{link['name']} -> {link['to']}, which jobs of this workdir share"))
    for place in where["checkpoints"]:
        lines.append(
            _folder_line("checkpoints", f"{place['dir']}  {format_count(place['whole'], 'complete checkpoint')}")
        )
    return [*lines, _folder_line("logs", where["logs"])]


def _folder_line(label: str, text: str) -> Line:
    return line(f"  {label:<13}{text}")


def end_lines(where: Json) -> list[Line]:
    """Return where a job's files are, how many there are, and the `checkpoint.path` for a job file."""
    saved = [
        f"{format_count(one['whole'], 'checkpoint')} in {_short_path(one['dir'], where['dir'])}"
        for one in where["checkpoints"]
    ]
    written = [f"{format_count(where['written'], 'file')} written in code"] if where["written"] else []
    many = f": {', '.join([*saved, *written])}" if saved or written else ""
    lines = [line("folder      ", where["dir"], many)]
    if path := where["checkpoint_path"]:
        lines.append(
            line(
                "job file    ",
                f'checkpoint: {{path: "{path}"}} names them, if your script gets its checkpoint by resume_args',
            )
        )
    return lines


# What a resume starts from


def resume_lines(choice: ResumeChoice, folder: str) -> list[Line]:
    """Return what a resumed job starts from, why that is complete, and which newer checkpoints were skipped. `folder`: the job's."""
    checkpoint = choice.checkpoint
    if checkpoint is None:
        lines = [_labelled("from", "the beginning: there is no checkpoint to resume from")]
    else:
        known = step_text(checkpoint.step, checkpoint.step_source.value)
        lines = [
            _labelled("from", f"{_short_path(checkpoint.path, folder)}, {known}, checkpoint {checkpoint.number}"),
            _labelled("", f"{_complete_text(checkpoint)}; its files are verified first"),
        ]
        if checkpoint.why:
            lines.append(_labelled("", checkpoint.why))
    for loser in choice.skipped[:PASSED_SHOWN]:
        lines.append(_labelled("skipped", passed_text(loser.main, loser.step, loser.why)))
    more = len(choice.skipped) - PASSED_SHOWN
    return [*lines, _labelled("", f"and {more} more")] if more > 0 else lines


def _labelled(label: str, text: str) -> Line:
    return line(f"  {label:<8}{text}")


def _complete_text(checkpoint: Checkpoint) -> str:
    if checkpoint.state is CheckpointState.DISTRUSTED:
        return "chosen by you, although it is distrusted"
    return f"complete: {checkpoint.closed_by.value}"


def passed_text(main: str, number: int | None, why: str) -> str:
    """Say why a newer checkpoint was skipped."""
    at = "" if number is None else f" (step {number:,})"
    state, colon, reason = why.partition(": ")
    return f"{main}{at}, {state}{colon}{_strip_name(main, reason)}"


def step_text(number: int | None, source: str) -> str:
    """Return the step of a checkpoint, and how it is known."""
    if number is None:
        return "step unknown"
    source_texts = {
        StepSource.STATED.value: " (from its name or content)",
        StepSource.COUNTED.value: " (counted)",
    }
    return f"step {number:,}{source_texts.get(source, '')}"
