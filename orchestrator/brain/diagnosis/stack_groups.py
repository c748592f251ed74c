"""How do stacks of many ranks read in a few lines? Ranks that stand alike are one line, the user's frame first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.core.observations import RankInspection
from orchestrator.core.text import named

LINES_MAX = 12
"""So many groups of ranks are shown; of what stands in ever so many places the rest is only counted."""

FRAMES_MAX = 6
"""Frames shown of each, beside the user's own."""


def function(look: RankInspection) -> str:
    """Return where a rank is without the line, `train.py step`: in a loop that changes all the time."""
    file, _, place = look.where.partition(":")
    return f"{file} {place.partition(' ')[2]}"


def alike(looks: Iterable[RankInspection]) -> list[tuple[tuple[int, ...], RankInspection]]:
    """Return the ranks that stand alike, with the look of the first of them: smallest groups first, as it is the odd
    one that one looks for."""
    groups: dict[tuple[object, ...], list[RankInspection]] = {}
    for look in looks:
        groups.setdefault((look.activity, look.where, look.why, look.stack), []).append(look)
    folded = [(tuple(sorted(one.rank for one in group)), group[0]) for group in groups.values()]
    return sorted(folded, key=lambda one: (len(one[0]), one[0]))


def frames(look: RankInspection) -> tuple[str, ...]:
    """Return the frames of a rank's main thread: the user's innermost one, then all others from the innermost on."""
    inside, users = split(look.where, look.stack)
    return (*users[:1], *inside, *users[1:])


def split(where: str, stack: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return what the user's innermost frame has called, and that frame with its callers; innermost first.

    Of a deep stack only the innermost frames were told, and the user's may be beyond them.
    """
    if not where:
        return (), stack
    told = (n for n, frame in enumerate(stack) if where == frame or where.startswith(f"{frame} ("))
    at = next(told, len(stack))
    return stack[:at], (where, *stack[at + 1 :])


def lines(looks: Iterable[RankInspection]) -> tuple[str, ...]:
    """Return one line for each group of ranks that stand alike: `ranks 0-5,7 wait, in all_reduce: frame < frame`."""
    groups = alike(looks)
    shown = tuple(_line(ranks, look) for ranks, look in groups[:LINES_MAX])
    rest = sum(len(ranks) for ranks, _ in groups[LINES_MAX:])
    return (*shown, f"{rest} more ranks, each elsewhere") if rest else shown


def _line(ranks: tuple[int, ...], look: RankInspection) -> str:
    said = ", ".join(text for text in (look.activity.text, look.why) if text)
    chosen = frames(look)
    cut = " < …" if len(chosen) > FRAMES_MAX else ""
    stack = " < ".join(chosen[:FRAMES_MAX]) + cut if chosen else "no stack"
    return f"{named(ranks)} (state {look.state or '?'}; {said}): {stack}"
