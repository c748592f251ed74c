"""Summary of the hosts and ranks of a large job: those in the same state in one line, the fewest first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from orchestrator.core.jobdir.status_file import NodeStatus, RankStatus
from orchestrator.core.text import format_count, ranks_text
from orchestrator.views.cells import Cell, Line, columns, cut, duration, line, name_list, or_dash

Key = TypeVar("Key")
Member = TypeVar("Member")

BAD_STATES = ("stopped", "zombie", "dead", "silent", "absent", "failed", "excluded", "lost")
"""States that are shown in red."""

LINES_MAX = 16
"""How many groups are shown."""

RANKS_CHARS_MAX = 32


def hosts(states: Iterable[tuple[str, NodeStatus]], head: str) -> list[Line]:
    """Return the hosts of each state: how many, the first of them, their ranks, and how long ago the last was seen."""
    groups: dict[str, list[NodeStatus]] = {}
    for state, node in states:
        groups.setdefault(state, []).append(node)
    rows = [
        [
            Cell(f"{len(nodes):,}"),
            Cell(state, "red" if state in BAD_STATES else ""),
            Cell(_ranks([rank for node in nodes for rank in node.ranks])),
            Cell(_age_text([node.seen_s for node in nodes])),
            Cell(name_list([node.name for node in nodes])),
        ]
        for state, nodes in _fewest_first(groups)
    ]
    return _group_table(rows, (head, "STATE", "RANKS", "SEEN", "NAMES"))


def ranks(ranks: Sequence[RankStatus]) -> list[Line]:
    """Return the ranks of each state and exit code: how many and which, and their least and greatest step, speed and age."""
    groups: dict[tuple[str, int | None], list[RankStatus]] = {}
    for rank in ranks:
        groups.setdefault((rank.state, rank.exit), []).append(rank)
    rows = []
    for (state, code), members in _fewest_first(groups):
        style = "red" if state in BAD_STATES or code not in (None, 0) else ""
        rows.append(
            [
                Cell(f"{len(members):,}"),
                Cell(_ranks([rank.rank for rank in members])),
                Cell(state, style),
                Cell(_value_range([rank.step for rank in members], "{:,}")),
                Cell(_value_range([rank.steps_per_s for rank in members], "{:.2f}")),
                Cell(_age_text([rank.beat_s for rank in members])),
                Cell(or_dash(code), style if code else ""),
            ]
        )
    return [
        *_group_table(rows, ("RANKS", "WHICH", "STATE", "STEP", "STEPS/S", "BEAT", "EXIT")),
        line(Cell(f"orch status --ranks shows {format_count(len(ranks), 'rank')} one by one", "dim")),
    ]


def _fewest_first(groups: dict[Key, list[Member]]) -> list[tuple[Key, list[Member]]]:
    return sorted(groups.items(), key=lambda group: len(group[1]))


def _group_table(rows: Sequence[Sequence[Cell]], heads: Sequence[str]) -> list[Line]:
    more = len(rows) - LINES_MAX
    return [
        *columns(rows[:LINES_MAX], heads),
        *([line(f"and {format_count(more, 'group')} more: --ranks shows all")] if more > 0 else []),
    ]


def _ranks(numbers: Sequence[int]) -> str:
    return cut(ranks_text(numbers), RANKS_CHARS_MAX) or "-"


def _value_range(values: Iterable[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    least, greatest = form.format(min(known)), form.format(max(known))
    return least if least == greatest else f"{least}-{greatest}"


def _age_text(ages_s: Iterable[float | None]) -> str:
    known = [age for age in ages_s if age is not None]
    return f"{duration(max(known))} ago" if known else "-"
