"""The table of saves with what is to be said of each, what is offered beside them, and what a resume begins from. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from orchestrator.core.checkpoints.choice import Choice
from orchestrator.core.checkpoints.save import Content, Save, SaveState, StepSource
from orchestrator.core.codec import Json
from orchestrator.core.text import ranks_text
from orchestrator.views.cells import Cell, Line, columns, line, or_dash, size

PASSED_SHOWN = 5
"""How many saves that were passed over are named."""

OFFERS_SHOWN = 5
"""How many offers of one place are shown, the newest."""

_HEADS = ("", "NO", "STEP", "SIZE", "WRITTEN (UTC)", "STATE", "PATH")
_STYLES = {"open": "yellow", "torn": "red", "gone": "red", "distrusted": "red", "pruned": "dim"}
_PAD = "   "


def table(listed: Sequence[Json], job: str, folder: str) -> list[Line]:
    """Return a table of saves, each with what is to be said of it, and below what is offered. An arrow marks the one that the
    next attempt begins from. `folder`: the job's."""
    saves = [one for one in listed if one["save"] is not None]
    shown = [one for one in saves if not _is_noise(one, saves)]
    lines: list[Line] = []
    if shown:
        head, *rows = columns([_row(one, folder) for one in shown], _HEADS)
        lines.append(head)
        for one, row in zip(shown, rows, strict=True):
            lines += [row, *_notes(one)]
    if more := len(saves) - len(shown):
        text = f"{_PAD}not shown: {more} written over or deleted since; --json has all"
        lines.append(line(Cell(text, "dim")))
    lines += _verified(saves)
    may_count = (SaveState.WHOLE.value, SaveState.OPEN.value)
    if shown and not any(one["state"] in may_count for one in saves):
        lines.append(line(Cell(f"{_PAD}a restart begins at the beginning", "yellow")))
    offered = [one for one in listed if one["save"] is None]
    for at_own_place in (True, False):
        group = [one for one in offered if at_own_place != bool(one["checkpoint_path"])]
        if group:
            lines += [() for _ in lines[:1]]
            lines += _offers(group, job, folder)
    return lines or [line("no checkpoints yet")]


def _is_noise(one: Json, saves: Sequence[Json]) -> bool:
    """Tell whether the files of a save are those of a newer one by now, or were deleted when there were newer ones."""
    if one["state"] not in (SaveState.GONE.value, SaveState.PRUNED.value):
        return False
    newer = [other for other in saves if other["save"] > one["save"]]
    is_over = any(
        other["path"] == one["path"] and other["state"] != SaveState.PRUNED.value for other in newer
    )
    return is_over or (not one["exists"] and any(other["resume"] for other in newer))


def _row(one: Json, folder: str) -> list[Cell]:
    is_usual = one["content"] == Content.STATE.value or one["state"] == SaveState.OPEN.value
    content = "" if is_usual else f", {one['content']}"
    files = f" ({one['files']} files)" if one["files"] > 1 else ""
    return [
        Cell("→" if one["resume"] else " "),
        Cell(str(one["save"])),
        Cell(or_dash(one["step"])),
        Cell(size(one["bytes"])),
        Cell(one["written_at"][:19].replace("T", " ")),
        Cell(one["state"], _STYLES.get(one["state"], "")),
        Cell(f"{_where(one, folder)}{files}{content}"),
    ]


def _notes(one: Json) -> Iterator[Line]:
    """Yield what is to be said of a save, below its row."""
    if one["why"]:
        style = _STYLES.get(one["state"], "yellow")
        yield line(_PAD * 2, Cell(_without(one["main"], one["why"]), style))


def _verified(saves: Sequence[Json]) -> Iterator[Line]:
    """Yield what was read and compared now."""
    by: dict[str, list[int]] = {}
    for one in saves:
        if one["whole"]:
            by.setdefault(one["compared"], []).append(one["save"])
    for what, numbers in by.items():
        yield line(f"{_PAD}compared now by {what}: {ranks_text(numbers)}")


def _where(one: Json, folder: str) -> str:
    """Return what a save is called, and the host that has it where only a host has."""
    hosts = [place["host"] for place in one["places"]]
    return f"{one['main']} on {hosts[0]}" if any(hosts[:1]) else _short(one["path"], folder)


def _short(path: str, folder: str) -> str:
    return path.removeprefix(f"{folder}/").removeprefix("checkpoints/")


def _without(main: str, why: str) -> str:
    """Return a reason without the name of the save, beside which it stands."""
    return why.removeprefix(f"{main} ")


def _offers(offered: Sequence[Json], job: str, folder: str) -> Iterator[Line]:
    """Yield what is offered of one place, the newest last, each with the line that adopts it."""
    glob = offered[-1]["checkpoint_path"]
    which = "it" if len(offered) == 1 else "one of them"
    where = (
        "saved where ranks start, where orch does not look"
        if glob
        else "not in the ledger, so nothing begins from it"
    )
    yield line(f"{where}; to adopt {which}:")
    if (more := len(offered) - OFFERS_SHOWN) > 0:
        yield line(Cell(f"{_PAD}{more} older ones: --json has all", "dim"))
    for one in offered[-OFFERS_SHOWN:]:
        path = _short(one["path"], folder)
        step = "" if one["step"] is None else f", step {one['step']:,}"
        yield line(f"{_PAD}{path} ({one['format']}, {size(one['bytes'])}{step})")
        if one["why"]:
            yield line(_PAD * 2, Cell(_without(one["main"], one["why"]), "red"))
        else:
            yield line(_PAD * 2, Cell(f"orch checkpoints {job} --adopt {shlex.quote(path)}", "cyan"))
    if glob:
        whole = [one for one in offered if not one["why"]]
        begin = f" --from {shlex.quote(_short(whole[-1]['path'], folder))}" if whole else ""
        yield line(f"{_PAD}to begin from it, and have orch find the next ones there by itself:")
        option = shlex.quote(f"checkpoint.path={glob}")
        yield line(_PAD * 2, Cell(f"orch resume {job}{begin} --set {option}", "cyan"))
        yield line(f"{_PAD}or, in the job file, checkpoint: {{path: {_quoted(glob)}}}")


def _quoted(text: str) -> str:
    """Return a text as YAML takes it."""
    return "'" + text.replace("'", "''") + "'"


# What a resume begins from


def start(choice: Choice, folder: str) -> list[Line]:
    """Return what a resumed job begins from, how that is proved, and which newer saves were passed over. `folder`: the job's."""
    save = choice.save
    if save is None:
        lines = [_labelled("from", "the beginning: there is no checkpoint to begin from")]
    else:
        known = step(save.step, save.step_source.value)
        lines = [
            _labelled("from", f"{_short(save.path, folder)}, {known}, save {save.number}"),
            _labelled("", f"{_whole(save)}; its bytes are compared first"),
        ]
        if save.why:
            lines.append(_labelled("", save.why))
    for one in choice.passed[:PASSED_SHOWN]:
        lines.append(_labelled("not", passed(one.main, one.step, one.why)))
    more = len(choice.passed) - PASSED_SHOWN
    return [*lines, _labelled("", f"and {more} more")] if more > 0 else lines


def _labelled(label: str, text: str) -> Line:
    return line(f"  {label:<8}{text}")


def _whole(save: Save) -> str:
    if save.state is SaveState.DISTRUSTED:
        return "named by you, though it was given up"
    return f"whole: {save.closed_by.value}"


def passed(main: str, number: int | None, why: str) -> str:
    """Say that a newer save is not begun from, and why."""
    at = "" if number is None else f" (step {number:,})"
    state, colon, reason = why.partition(": ")
    return f"{main}{at}, {state}{colon}{_without(main, reason)}"


def step(number: int | None, source: str) -> str:
    """Say of which step a save is, and how that is known."""
    if number is None:
        return "step unknown"
    how = {StepSource.STATED.value: " as it states", StepSource.COUNTED.value: " as counted"}
    return f"step {number:,}{how.get(source, '')}"
