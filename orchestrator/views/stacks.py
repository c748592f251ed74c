"""Stacks view: ranks with equal frames grouped, the user's frames first.

Pure: the object of `orch stacks --json` in, lines out. The largest group comes first and the odd ones last, since a
terminal still shows the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.core.codec import Json
from orchestrator.core.text import format_count, split_stack
from orchestrator.core.text import ranks_label as text_named
from orchestrator.views.cells import STYLES, Cell, Line, cut, line, name_list, span

FRAMES_MAX = 12
"""How many frames of the user's code, and how many of what it called, are shown."""

LINE_CHARS_MAX = 300
UNAVAILABLE_MAX = 8

_PAD = "  "
_ACTIVITY_TEXTS = {
    "waiting_for_ranks": "waiting for other ranks",
    "progressing": "working",
    "spinning": "spinning in one place",
    "sleeping": "sleeping",
    "blocked": "blocked",
    "stopped": "stopped",
    "exiting": "exiting",
    "unknown": "",
}
_STYLES = {"progressing": "green", "waiting_for_ranks": "", "unknown": ""}


def stacks(inspection: Json, only: Sequence[int] = ()) -> list[Line]:
    """Return what `orch stacks` shows, of the ranks in `only` where there are any."""
    ranks = [rank for rank in inspection["ranks"] if not only or rank["rank"] in only]
    state = Cell(inspection["state"], STYLES.get(inspection["state"], ""))
    step = f"  step {inspection['step']:,}" if inspection["step"] is not None else ""
    twice = f", twice, {span(inspection['apart_s'])} apart" if inspection["looks"] > 1 else ""
    lines = [
        line(Cell(inspection["id"], "bold"), _PAD, state, f"  attempt {inspection['attempt']}{step}"),
        line(f"{format_count(len(ranks), 'rank')} inspected{twice}; nothing was changed"),
    ]
    for group in group_ranks(ranks):
        lines += [(), *_group_lines(group)]
    tail = [*_unavailable_lines(ranks), *_unanswered_lines(inspection["unanswered"])]
    return [*lines, *([(), *tail] if tail else []), (), line(f"pages  {inspection['pages']}")]


def group_ranks(ranks: Sequence[Json]) -> list[list[Json]]:
    """Return the ranks in groups that do the same in the same frames: large groups first, then by their first rank."""
    groups: dict[tuple[object, ...], list[Json]] = {}
    for rank in ranks:
        alike = (tuple(rank["stack"]), rank["activity"], rank["where"], rank["state"] in ("T", "t", "Z"))
        groups.setdefault(alike, []).append(rank)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0]["rank"]))


def _group_lines(group: Sequence[Json]) -> Iterator[Line]:
    first = group[0]
    name = text_named([rank["rank"] for rank in group])
    on = name_list(list(dict.fromkeys(rank["node"] for rank in group)))
    still_s = min(rank["still_s"] for rank in group)
    still = f" for {span(still_s)}" if still_s and first["activity"] != "progressing" else ""
    doing = f"{_ACTIVITY_TEXTS.get(first['activity'], first['activity'])}{still}"
    reasons = list(dict.fromkeys(rank["why"] for rank in group if rank["why"]))
    more = f", and {format_count(len(reasons) - 1, 'more reason')}" if len(reasons) > 1 else ""
    why = f"{': ' if doing else ''}{cut(reasons[0], LINE_CHARS_MAX)}{more}" if reasons else ""
    colon = ": " if doing or why else ""
    style = _STYLES.get(first["activity"], "yellow")
    yield line(Cell(name, "bold"), f" on {on}{colon}", Cell(f"{doing}{why}", style), _gpu_use(group))
    yield from _frame_lines(first)
    yield from _collective_lines(group)


def _gpu_use(group: Sequence[Json]) -> str:
    """Return how busy the group's GPUs are, as far as that is known."""
    shares = sorted(rank["gpu_use"] for rank in group if rank["gpu_use"] is not None)
    if not shares:
        return ""
    least, most = f"{shares[0]:.0%}", f"{shares[-1]:.0%}"
    return f", GPU {most} busy" if least == most else f", GPUs {least} to {most} busy"


def _frame_lines(rank: Json) -> Iterator[Line]:
    """Yield the user's frames as a traceback has them, outermost first, then the frames inside their innermost call."""
    where = rank["where"]
    inside, users = split_stack(where, rank["stack"], rank["inside"])
    if len(users) > FRAMES_MAX:
        yield line(Cell(f"{_PAD}… {len(users) - FRAMES_MAX} more: --json shows all", "dim"))
    for frame in users[1:FRAMES_MAX][::-1]:
        yield line(f"{_PAD}{cut(frame, LINE_CHARS_MAX)}")
    for frame in users[:1]:
        yield line(Cell(f"{_PAD}{cut(frame, LINE_CHARS_MAX)}", "bold" if where else ""))
    if rank.get("line"):
        yield line(f"{_PAD}{_PAD}{cut(rank['line'], LINE_CHARS_MAX)}")
    if inside:
        shown = ("… > " if len(inside) > FRAMES_MAX else "") + " > ".join(inside[:FRAMES_MAX][::-1])
        yield line(Cell(cut(f"{_PAD}inside: {shown}", LINE_CHARS_MAX), "dim"))


def _collective_lines(group: Sequence[Json]) -> Iterator[Line]:
    """Yield the last collective of each process group, ranks in the same one together."""
    ranks_of: dict[str, list[int]] = {}
    for rank in group:
        for collective in rank["collectives"]:
            label = f" ({collective['label']})" if collective["label"] else ""
            shape = f" of {collective['shape']}" if collective["shape"] else ""
            ranks_of.setdefault(f"{collective['what']} #{collective['number']:,}{label}{shape}", []).append(
                rank["rank"]
            )
    for text, ranks in ranks_of.items():
        whose = "" if len(ranks) == len(group) else f", {text_named(ranks)}"
        yield line(Cell(f"{_PAD}last collective entered: {text}{whose}", "dim"))


def _unavailable_lines(ranks: Sequence[Json]) -> Iterator[Line]:
    """Yield what could not be inspected, and why."""
    ranks_of: dict[str, list[int]] = {}
    for rank in ranks:
        for lack in rank["unavailable"]:
            ranks_of.setdefault(lack, []).append(rank["rank"])
    for lack, ranks_lacking in list(ranks_of.items())[:UNAVAILABLE_MAX]:
        whose = "" if len(ranks_lacking) == len(ranks) else f" ({text_named(ranks_lacking)})"
        yield line(Cell(f"not available: {cut(lack, LINE_CHARS_MAX)}{whose}", "dim"))


def _unanswered_lines(nodes: Sequence[str]) -> list[Line]:
    return [line(Cell(f"no answer from {name_list(nodes)}", "bold red"))] if nodes else []
