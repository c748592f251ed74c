"""States of a rank that cannot mend themselves, whatever the other ranks do. Pure.

Each stands in two looks with nothing moved in between. Nothing is concluded from the text of a script but what a lock is
called, and nothing is proved where not all Python threads of the rank are known.
"""

from __future__ import annotations

from orchestrator.agent.evidence import describe, resource_use
from orchestrator.agent.evidence.sample import CHILDREN_MAX, TIMERS, Child, RankSample, SideThread
from orchestrator.agent.probes import stack_frames
from orchestrator.agent.probes.kernel_wait import Wait

LONG_SLEEP_S = 60.0
"""What is left of a sleep that may be too long."""

IDLE_SHARE = 0.2
"""Threads of C code that compute for more of the time than this may do the rank's work while Python sleeps."""

DEPTH_MAX = 8
"""So many generations of children are followed: a shell that waits for its program, and so on."""


def proof(sight: RankSample, then: RankSample, on_device: bool) -> str:
    """Return in words why an idle rank cannot go on by itself, by two looks in a row; nothing where its state does not say
    so. `on_device`: its GPU has collectives to run."""
    if stack_frames.awaits_debugger(sight.stack):
        return describe.in_words(sight)
    is_alone = sight.knows_others and not sight.others and not sight.children
    if describe.is_at_prompt(sight) and is_alone and not sight.types:
        return describe.in_words(sight)
    is_idle = (
        resource_use.beside_share(sight, then) < IDLE_SHARE
    )  # else C code's threads work while this one sleeps
    if sight.wait.asleep and (sight.wait.ends_s or 0.0) > LONG_SLEEP_S and is_alone and is_idle:
        # Whether it is longer than patience is the brain's affair.
        return "" if sight.signals else describe.in_words(sight)
    if _is_locked(sight) and _is_locked(then) and not on_device:
        others = {0: "", 1: ", and does not go on either"}.get(
            len(sight.others), ", and no other thread goes on either"
        )
        return f"{describe.in_words(sight)}{others}"
    return _stopped_child(sight, then)


def _is_locked(sight: RankSample) -> bool:
    """Tell whether a rank waits for a lock, or for a thread's end, without a limit, and so does every thread of it that
    may hold that lock."""
    if sight.main is None or sight.children or sight.signals or not sight.knows_others:
        return False
    if sight.wait.call != "futex" or not sight.wait.for_ever or sight.wait.is_shared:
        return False
    joins = bool(sight.others) and stack_frames.is_joining(sight.stack)
    at_lock = joins or stack_frames.is_acquiring(sight.stack, sight.line)
    return at_lock and all(thread.watches or _is_at_lock(thread) for thread in sight.others)


def _is_at_lock(thread: SideThread) -> bool:
    """Tell whether a thread waits, without a limit, for a lock, for another thread's end, or for a task."""
    if thread.wait.call != "futex" or not thread.wait.for_ever or thread.wait.is_shared:
        return False
    stack = thread.stack.frames
    return (
        stack_frames.is_acquiring(stack, thread.line)
        or stack_frames.is_joining(stack)
        or stack_frames.serves(stack)
    )


def _stopped_child(sight: RankSample, then: RankSample) -> str:
    """Say which stopped (state T) child a rank waits for; nothing where another one, or a timer, may let it go on."""
    if sight.main is None or len(sight.children) >= CHILDREN_MAX:
        return ""
    if stack_frames.awaits_loader(sight.stack):
        workers = describe.loaders(sight)
        stopped = [
            child for child in workers if child.state == "T" and not resource_use.woke(sight, then, child.pid)
        ]
        if stopped and all(child.state == "T" or stack_frames.awaits_task(child.frames) for child in workers):
            return f"waits for its DataLoader's worker {stopped[0].pid}, which is stopped (state T)"
        return ""
    if sight.caught & TIMERS or not sight.wait.for_ever or sight.wait.child is None:
        return ""
    keeper = _keeper(sight.pid, sight.wait, sight.children)
    if keeper is None or resource_use.woke(sight, then, keeper.pid):
        return ""
    return f"waits for its child {describe.called(keeper)}, which is stopped (state T)"


def _keeper(pid: int, wait: Wait, children: tuple[Child, ...]) -> Child | None:
    """Return the stopped child whose end is waited for, or that of a child that waits likewise, as a shell does."""
    for _ in range(DEPTH_MAX):
        below = [one for one in children if one.ppid == pid and wait.child in (0, one.pid)]
        if not below:
            return None
        if all(one.state == "T" for one in below):
            return below[0]
        if len(below) > 1 or below[0].wait.child is None or not below[0].wait.for_ever:
            return None
        pid, wait = below[0].pid, below[0].wait
    return None
