"""Is nobody left who could let a rank go on that waits: no child, no thread beside the main one, no signal? Pure.

Rules: of its children only those count for which it waits: the one whose end it waits for, the workers of a DataLoader,
who can write its pipe; where it is not known which, all that live. A child that is not known to be unable to go on by
itself may let the rank go on, and then there is no proof.
"""

from __future__ import annotations

import signal

from orchestrator.node import frames, sight_words
from orchestrator.node.lasting import LONG_S
from orchestrator.node.sight import CHILDREN_MAX, TIMERS, Child, Sight, may_act

LOADER_S = 10.0
"""torch looks every 5 s whether its DataLoader's workers live; one that is dead for longer goes unnoticed."""

_GONE = ("Z", "X")
_EVERYBODYS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGFPE,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGINT,
        signal.SIGCHLD,
    }
)
"""Signals that Python, torch and the hook catch in every process, and such as come from children alone."""


def none_left(sight: Sight, still_s: float) -> str:
    """Return in words why nobody can let an idle rank go on; nothing where that is not proved."""
    if _nobody_writes(sight):
        return f"{sight_words.in_words(sight)}, and nobody has its other end open"
    awaited = _awaited(sight)
    keepers = _keepers(awaited, sight)
    if keepers is None:
        return ""
    if not keepers and still_s > LOADER_S:
        keepers = [child for child in awaited if child.is_loaders and child.state == "Z"]
    keepers = [child for child in keepers if _has_a_part(child, sight)]
    return _proof_of(keepers[0], sight) if keepers else ""


def _nobody_writes(sight: Sight) -> bool:
    """Tell whether a pipe or FIFO is read that only the reader itself could write, and nothing can bring it to do so."""
    if sight.main is None or sight.writers is None or _may_be_roused(sight):
        return False
    if len(sight.children) >= CHILDREN_MAX or _keepers(sight.children, sight) is None:
        return False  # a child may open it yet
    is_own = sight.writers == (sight.pid,) and not sight.others and not _is_signalled(sight)
    return sight.writers == () or is_own


def _awaited(sight: Sight) -> tuple[Child, ...]:
    """Return the children without one of which a rank cannot go on; none where that is not known."""
    if sight.main is None or len(sight.children) >= CHILDREN_MAX:
        return ()
    if frames.awaits_loader(sight.main.frames):
        return sight_words.loaders(sight) or sight.children
    if _may_be_roused(sight) or not sight.wait.for_ever:
        return ()
    if sight.wait.child:
        return tuple(child for child in sight.children if child.pid == sight.wait.child)
    writers = set(sight.writers or ()) - set(() if _is_signalled(sight) else (sight.pid,))
    reads = bool(writers) and writers <= {child.pid for child in sight.children}
    pool = sight.wait.call == "futex" and frames.awaits_pool(sight.main.frames)
    return sight.children if reads or pool or sight.wait.child == 0 else ()


def _has_a_part(child: Child, sight: Sight) -> bool:
    """Tell whether what a child does may be what is waited for: others that live are only not known to have none."""
    if sight.main is not None and frames.awaits_pool(sight.main.frames):
        return child.state == "T" or frames.is_worker_of_pool(child.frames)
    return not sight.writers or child.pid in sight.writers


def _may_be_roused(sight: Sight) -> bool:
    """Tell whether another thread, or a timer, may end what the main thread waits in."""
    return bool(sight.caught & TIMERS) or any(may_act(thread) for thread in sight.others)


def _is_signalled(sight: Sight) -> bool:
    """Tell whether a handler of its own may write into a pipe that the rank reads itself."""
    return bool(sight.caught - _EVERYBODYS)


def _keepers(awaited: tuple[Child, ...], sight: Sight) -> list[Child] | None:
    """Return which processes keep these children, and so whoever waits for them; None if one may go on by itself."""
    found: list[Child] = []
    for one in awaited:
        if _why_stuck(one, sight):
            found.append(one)
        elif one.state not in _GONE and not frames.awaits_task(one.frames):
            behind = _keepers(_awaited_by(one, sight), sight)
            if not behind:
                return None
            found += behind
    return found


def _awaited_by(child: Child, sight: Sight) -> tuple[Child, ...]:
    """Return those for whose end a child waits: a shell for its program."""
    if child.wait.child is None:
        return ()
    below = (one for one in sight.children if one.ppid == child.pid)
    return tuple(one for one in below if child.wait.child in (0, one.pid))


def _why_stuck(child: Child, sight: Sight) -> str:
    """Return in words why a child cannot go on by itself."""
    if child.state == "T":
        return "is stopped (state T)"
    if child.writers == () and child.alone and _nobody_opens(sight):
        return f"{sight_words.wait_in_words(child)}: nobody has its other end open"
    if _sleeps_long(child):
        return sight_words.wait_in_words(child)
    return ""


def _sleeps_long(child: Child) -> bool:
    return child.wait.asleep and child.alone and (child.wait.ends_s or 0.0) > LONG_S


def _nobody_opens(sight: Sight) -> bool:
    """Tell whether nobody of a rank is there to open a FIFO that one of its children reads."""
    idle = all(
        child.state in ("T", *_GONE)
        or child.writers == ()
        or child.wait.child is not None
        or _sleeps_long(child)
        or frames.awaits_task(child.frames)
        for child in sight.children
    )
    return idle and not any(may_act(thread) for thread in sight.others)


def _proof_of(child: Child, sight: Sight) -> str:
    why = "is dead (state Z)" if child.state == "Z" else _why_stuck(child, sight)
    if child in sight_words.loaders(sight):
        return f"waits for its DataLoader's worker {child.pid}, which {why}"
    return f"waits for its child {sight_words.called(child)}, which {why}"
