"""Proofs that a rank is stuck: states that cannot resolve by themselves, whatever the other ranks do. Pure.

Each state holds in two samples with no movement in between. From the text of a script only the name of a lock is used,
and nothing is proved where not all Python threads of the rank are known.
"""

from __future__ import annotations

from orchestrator.agent.evidence import describe, resource_use
from orchestrator.agent.evidence.sample import CHILDREN_MAX, TIMERS, Child, RankSample, SideThread
from orchestrator.agent.probes import stack_frames
from orchestrator.agent.probes.kernel_wait import Wait

LONG_SLEEP_S = 60.0
"""The remaining time of a sleep that may be too long."""

IDLE_SHARE = 0.2
"""Threads of C code that compute for a larger share than this may do the rank's work while Python sleeps."""

DEPTH_MAX = 8
"""How many generations of children are followed: a shell that waits for its program, and so on."""


def proof(sample: RankSample, then: RankSample, on_device: bool) -> str:
    """Return in words why an idle rank cannot go on by itself, from two samples in a row; an empty text if it can.

    `on_device`: its GPU has collectives to run.
    """
    if stack_frames.awaits_debugger(sample.stack):
        return describe.in_words(sample)
    is_alone = sample.knows_others and not sample.others and not sample.children
    if describe.is_at_prompt(sample) and is_alone and not sample.types:
        return describe.in_words(sample)
    # Else C code's threads work while this one sleeps.
    is_idle = resource_use.other_threads_share(sample, then) < IDLE_SHARE
    if sample.wait.asleep and (sample.wait.ends_s or 0.0) > LONG_SLEEP_S and is_alone and is_idle:
        # The brain decides whether that is too long.
        return "" if sample.signals else describe.in_words(sample)
    if _is_locked(sample) and _is_locked(then) and not on_device:
        count = len(sample.others)
        others = ("", ", and does not go on either", ", and no other thread goes on either")[min(count, 2)]
        return f"{describe.in_words(sample)}{others}"
    return _stopped_child(sample, then)


def _is_locked(sample: RankSample) -> bool:
    """Tell whether a rank waits for a lock, or for a thread's end, without a limit, and so does every thread of it that
    may hold that lock."""
    if sample.main is None or sample.children or sample.signals or not sample.knows_others:
        return False
    if sample.wait.call != "futex" or not sample.wait.for_ever or sample.wait.is_shared:
        return False
    joins = bool(sample.others) and stack_frames.is_joining(sample.stack)
    at_lock = joins or stack_frames.is_acquiring(sample.stack, sample.line)
    return at_lock and all(thread.watches or _is_at_lock(thread) for thread in sample.others)


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


def _stopped_child(sample: RankSample, then: RankSample) -> str:
    """Say which stopped (state T) child a rank waits for; empty where another child, or a timer, may let it go on."""
    if sample.main is None or len(sample.children) >= CHILDREN_MAX:
        return ""
    if stack_frames.awaits_loader(sample.stack):
        workers = describe.loaders(sample)
        stopped = [w for w in workers if w.state == "T" and not resource_use.woke(sample, then, w.pid)]
        if stopped and all(child.state == "T" or stack_frames.awaits_task(child.frames) for child in workers):
            return f"waits for its DataLoader's worker {stopped[0].pid}, which is stopped (state T)"
        return ""
    if sample.caught & TIMERS or not sample.wait.for_ever or sample.wait.child is None:
        return ""
    child = _stopped_descendant(sample.pid, sample.wait, sample.children)
    if child is None or resource_use.woke(sample, then, child.pid):
        return ""
    return f"waits for its child {describe.called(child)}, which is stopped (state T)"


def _stopped_descendant(pid: int, wait: Wait, children: tuple[Child, ...]) -> Child | None:
    """Return the stopped child that a process waits for, or that such a child waits for in turn, as a shell does."""
    for _ in range(DEPTH_MAX):
        below = [child for child in children if child.ppid == pid and wait.child in (0, child.pid)]
        if not below:
            return None
        if all(child.state == "T" for child in below):
            return below[0]
        if len(below) > 1 or below[0].wait.child is None or not below[0].wait.for_ever:
            return None
        pid, wait = below[0].pid, below[0].wait
    return None
