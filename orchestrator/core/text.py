"""Texts for people: counts, lists of ranks, a message with its fix, and the parts of a stack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.core.errors import Fault
from orchestrator.core.status_types import NextAction, Suspicion


def format_count(number: int, what: str) -> str:
    """Return `1 host`, or `3 hosts`."""
    return f"{number} {what}{'s' if number != 1 else ''}"


def shorten_list(texts: Sequence[str], limit: int, which: str) -> list[str]:
    """Return the first texts, and how many more there are, `which` says of what kind."""
    left = len(texts) - limit
    return [*texts[:limit], *([f"{left:,} more {which}"] if left > 0 else [])]


def one_line_fault(what: str, where: str = "", fix: str = "") -> str:
    """Return a fault in one line: where it is, what it is, and its fix."""
    head = f"{where}: {what}" if where else what
    return f"{head}; fix: {fix}" if fix else head


def what_and_fix(fault: Fault) -> str:
    """Return a fault in one line, for a reader who knows where it is."""
    return one_line_fault(fault.what, fix=fault.fix)


def split_fix(text: str) -> tuple[str, str]:
    """Split a message into what is wrong and its fix, so that a command to copy ends where its line ends."""
    what, _, fix = text.partition("; fix: ")
    return what, fix


def next_action_text(suspicion: Suspicion, at: str, job: str) -> str:
    """Return the next action on a suspicion, its time (`at`), and the command that does it now; empty if that is not known
    yet. `job`: the reference to the job in commands."""
    match suspicion.follows:
        case NextAction.UNKNOWN:
            return ""
        case NextAction.MOVES:
            return f"left alone while it keeps running; to end it now: orch restart {job}"
        case NextAction.NOTHING:
            return f"no action is taken; to end it now: orch restart {job}"
        case NextAction.ENDS:
            return f"the attempt ends at {at} unless a rank moves; to end it now: orch restart {job}"
        case NextAction.LOST:
            then = f"{suspicion.spare} takes over" if suspicion.spare else "the next attempt begins"
            return f"will count as lost at {at}; then {then}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks, or other whole numbers, with those in a row as `0-1,3-7`; an empty text for none."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def ranks_label(ranks: Sequence[int]) -> str:
    """Return `rank 2`, or `ranks 0-1,3-7`."""
    return f"rank{'s' if len(ranks) != 1 else ''} {ranks_text(ranks)}"


def split_stack(where: str, stack: Sequence[str], inside: int) -> tuple[Sequence[str], Sequence[str]]:
    """Return what the user's innermost frame has called, and that frame with its callers; innermost first.

    Of a deep stack only the innermost frames are reported, and the user's may be beyond them.
    """
    return (stack[:inside], (where, *stack[inside + 1 :])) if where else ((), stack)
