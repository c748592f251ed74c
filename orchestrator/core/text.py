"""Words for people: counted things, lists of ranks, and a message apart from its fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, what: str) -> str:
    """Return `1 host`, or `3 hosts`."""
    return f"{number} {what}{'s' if number != 1 else ''}"


def with_fix(text: str) -> tuple[str, str]:
    """Split a message into what is wrong and its fix, so that a command to copy ends where its line ends."""
    what, _, fix = text.partition("; fix: ")
    return what, fix


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks, or other whole numbers, with those in a row as `0-1,3-7`; an empty text for none."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def named(ranks: Sequence[int]) -> str:
    """Return `rank 2`, or `ranks 0-1,3-7`."""
    return f"rank{'s' if len(ranks) != 1 else ''} {ranks_text(ranks)}"
