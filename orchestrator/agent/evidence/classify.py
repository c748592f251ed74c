"""Examination of a rank: two looks in a row compared, and what follows from them. Pure; what is read is in `sight`.

Rules: whatever moved since the look before is work, and a rank that worked is not judged. Of the others is said how long
nothing of them has moved (`still_s`) and in what they are. `certain` is a state that cannot mend itself, whatever the
other ranks do; nothing is concluded from the text of a script, and a long computation looks like an endless one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from orchestrator.agent.evidence import describe, resource_use, stuck_proof
from orchestrator.agent.evidence.sample import RankSample, SideThread
from orchestrator.agent.probes import kernel_wait, stack_frames
from orchestrator.agent.probes.kernel_wait import Wait
from orchestrator.core import observations

BURNS_SHARE = 0.5
"""A thread that was on a processor, or wanted one, for more of the time than this computes."""

CHILD_SHARE = 0.2
"""The same for a child process."""

IO_BYTES = 64 << 10
"""Reading and writing less than this between two looks is no sign of life: loggers and monitors do that."""

WAKES = 2
"""A thread that reads or writes for ever and has gone on so often between two looks moves something, if little by little;
once it may have been our own signal."""

TIMEOUTS = 2
"""So many waits for each time limit that has passed may have ended by that: of a limit only the rest may be seen."""

RENEWED_S = 0.5
"""A wait that goes on for so long beyond its end is another one: a loop that polls."""

STACK_FRAMES = 40


@dataclass(frozen=True, slots=True)
class SampleContext:
    """What others know of a rank: it has said its last word, C code holds the GIL, and torch's flight recorder.

    `on_device`: collectives that it has entered are not done, as far as torch knows; `gpu_use`: the share of time in which
    its GPU is busy.
    """

    left: bool = False
    gil_held: bool | None = None
    collectives: tuple[observations.Collective, ...] = ()
    on_device: bool = False
    groups: tuple[str, ...] = ()
    marks: tuple[observations.CollectiveCounts, ...] = ()
    mixed: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    gpu_use: float | None = None


@dataclass(frozen=True, slots=True)
class PreviousSample:
    """The look before. `since_s`: nothing of the rank has moved since then (monotonic); `since_queue_s`: how long until
    then its thread had waited for a processor; `ends_at_s`: what it waited in when that began has ended by then, so
    one that still waits begins again and again."""

    sight: RankSample
    word: SampleContext
    since_s: float
    since_queue_s: float
    ends_at_s: float | None


@dataclass(frozen=True, slots=True)
class Classification:
    """What a rank does, and the words for it; `certain`: see `messages.RankInspection`."""

    doing: observations.Activity
    why: str
    certain: bool = False


def classify(
    sight: RankSample, word: SampleContext, earlier: PreviousSample | None
) -> tuple[observations.RankInspection, PreviousSample]:
    """Return what a look has found of a rank, and what the next look will compare with."""
    now_s = sight.after.at_s
    moved = _movement(sight, word, earlier) if earlier is not None else ""
    since_s, since_queue_s = now_s, sight.after.queue_s
    ends_at_s = now_s + sight.wait.ends_s if sight.wait.ends_s else None
    if earlier is not None and not moved:
        since_s, since_queue_s, ends_at_s = earlier.since_s, earlier.since_queue_s, earlier.ends_at_s
    found = _found(sight, word, earlier, moved)
    look = observations.RankInspection(
        rank=sight.rank,
        pid=sight.pid,
        state=sight.state,
        activity=found.doing,
        still_s=round(now_s - since_s, 1),
        where=stack_frames.place(sight.stack),
        why=found.why,
        proven=found.certain,
        ends_s=sight.wait.ends_s
        if found.doing in (observations.Activity.SLEEPING, observations.Activity.BLOCKED)
        else None,
        phase="exit" if word.left else stack_frames.phase(sight.stack),
        stack=texts(sight.stack),
        collectives=word.collectives,
        groups=word.groups,
        collective_counts=word.marks,
        mixed=word.mixed,
        unavailable=(*sight.lacks, *word.lacks),
        others_act=not sight.knows_others or any(_may_enter_collectives(thread) for thread in sight.others),
        gpu_use=word.gpu_use,
        starved_s=round(max(sight.after.queue_s - since_queue_s, 0.0), 1),
    )
    return look, PreviousSample(sight, word, since_s, since_queue_s, ends_at_s)


def texts(stack: tuple[stack_frames.Frame, ...]) -> tuple[str, ...]:
    """Return the frames that are told of a stack, in words."""
    return tuple(str(frame) for frame in stack_frames.without_imports(stack)[:STACK_FRAMES])


def _found(
    sight: RankSample, word: SampleContext, earlier: PreviousSample | None, moved: str
) -> Classification:
    if sight.state in "Tt":
        why = "stopped (state T)" if sight.state == "T" else "held by a debugger (state t)"
        return Classification(observations.Activity.STOPPED, why)
    if sight.state in "ZX":
        return Classification(
            observations.Activity.BLOCKED, f"ended (state {sight.state}), and not gone", certain=True
        )
    if word.left:
        words = f"has said its last word, and is still there, {describe.in_words(sight)}"
        stands = earlier is not None and not moved and earlier.word.left
        is_stuck = sight.wait.call in ("futex", "pause") and sight.wait.for_ever and not sight.wait.is_shared
        return Classification(observations.Activity.EXITING, words, certain=stands and is_stuck)
    if earlier is None:
        return Classification(observations.Activity.UNKNOWN, describe.in_words(sight))
    if moved:
        return Classification(observations.Activity.PROGRESSING, moved)
    return _still(sight, word, earlier)


# What moved


def _movement(sight: RankSample, word: SampleContext, earlier: PreviousSample) -> str:
    """Return in words what of a rank has moved since the look before; nothing when all stands still."""
    then = earlier.sight
    if sight.pid != then.pid or sight.state in "TtZX" or then.state in "TtZX":
        is_same = (sight.pid, sight.state) == (then.pid, then.state)
        return "" if is_same and not resource_use.woke(sight, earlier.sight, sight.tid) else "it goes on"
    if sight.tid != then.tid:
        return "another thread of it trains"
    if sight.main is not None and then.main is not None:
        if (sight.main.chain, sight.main.callers) != (then.main.chain, then.main.callers):
            return "its stack moves"
    elif (sight.wait.call, sight.wait.target) != (then.wait.call, then.wait.target):
        return "it goes from one system call to another"
    io_bytes = sight.before.io_bytes - then.after.io_bytes
    if io_bytes > IO_BYTES:
        return f"it reads and writes ({io_bytes >> 10:,} KiB since the look before)"
    if _entered(word) != _entered(earlier.word):
        return "it enters collectives"
    if _awaited(sight) and not any(_may_enter_collectives(thread) for thread in sight.others):
        return ""  # it waits for other ranks, whatever its monitors and loaders do meanwhile
    if _trickles(sight, earlier, sight.tid, sight.wait, then.wait):
        return f"it moves data little by little, {describe.in_words(sight)}"
    return _movement_of_children(sight, earlier) or _movement_of_threads(sight, earlier)


def _trickles(sight: RankSample, earlier: PreviousSample, tid: int, now: Wait, then: Wait) -> bool:
    """Tell whether something comes or goes through what a thread reads, writes, or polls before it does so (a socket with
    a time limit). What is sent is in no counter of the kernel's; that the thread has gone on is."""
    before = earlier.sight.after.wakes.get(tid)
    wakes = 0 if before is None else sight.before.wakes.get(tid, before) - before
    if wakes < WAKES:
        return False
    if all(wait.call in kernel_wait.READS | kernel_wait.WRITES and wait.for_ever for wait in (now, then)):
        return True
    polls = now.call in kernel_wait.POLLS and (now.call, now.target, now.fds) == (
        then.call,
        then.target,
        then.fds,
    )
    if not polls or not now.fds or now.asleep:
        return False
    limit_s = min(
        now.ends_s if now.ends_s is not None else math.inf,
        then.ends_s if then.ends_s is not None else math.inf,
    )
    return limit_s > 0 and wakes >= WAKES + TIMEOUTS * resource_use.span_s(sight, earlier.sight) / limit_s


def _movement_of_children(sight: RankSample, earlier: PreviousSample) -> str:
    before = {child.pid: child for child in earlier.sight.children}
    for child in sight.children:
        then = before.get(child.pid)
        if then is None:
            continue
        computes = resource_use.child_share(sight, earlier.sight, child.pid) > CHILD_SHARE
        goes_on = child.chain != then.chain
        if computes and (goes_on or not child.frames):
            return f"its child {child.pid} computes"
        if goes_on and stack_frames.users_frame(child.frames) is not None:
            return f"its child {child.pid} goes on"
        idle = stack_frames.awaits_task(child.frames)
        if not idle and _trickles(sight, earlier, child.pid, child.wait, then.wait):
            return f"its child {child.pid} moves data little by little"
    return ""


def _movement_of_threads(sight: RankSample, earlier: PreviousSample) -> str:
    """Say which thread beside the one that is judged has moved, whatever that one waits for."""
    if not (sight.knows_others and earlier.sight.knows_others):
        return ""
    before = {thread.stack.ident: thread for thread in earlier.sight.others if not thread.watches}
    now = {thread.stack.ident: thread for thread in sight.others if not thread.watches}
    if before.keys() != now.keys():
        return "its threads come and go"
    for ident, thread in now.items():
        then = before[ident]
        if (thread.stack.chain, thread.stack.callers) != (then.stack.chain, then.stack.callers):
            return f"another thread of it moves, {stack_frames.place(thread.stack.frames)}"
        at_ranks = stack_frames.awaits_ranks(thread.stack.frames, thread.line)
        if not at_ranks and _trickles(sight, earlier, thread.tid, thread.wait, then.wait):
            return f"another thread of it moves data, {stack_frames.place(thread.stack.frames)}"
    return ""


def _entered(word: SampleContext) -> tuple[tuple[str, int], ...]:
    return tuple((one.group, one.number) for one in word.collectives)


# What stands still


def _still(sight: RankSample, word: SampleContext, earlier: PreviousSample) -> Classification:
    """Say what a rank is in of which nothing has moved."""
    if resource_use.main_share(sight, earlier.sight) > BURNS_SHARE:
        return _burning(sight, word)
    found = stuck_proof.proof(sight, earlier.sight, word.on_device)
    if found:
        doing = observations.Activity.SLEEPING if sight.wait.asleep else observations.Activity.BLOCKED
        return Classification(doing, found, certain=True)
    awaited = _awaited(sight)
    if resource_use.beside_share(sight, earlier.sight) > BURNS_SHARE and not (
        awaited and stack_frames.is_collective(sight.stack)
    ):
        return Classification(observations.Activity.SPINNING, "its native threads compute")
    burning = [
        c for c in sight.children if resource_use.child_share(sight, earlier.sight, c.pid) > BURNS_SHARE
    ]
    if burning:
        where = stack_frames.place(burning[0].frames)
        return Classification(
            observations.Activity.SPINNING, f"its child {burning[0].pid} computes at one place, {where}"
        )
    if awaited:
        return Classification(observations.Activity.WAITING_FOR_RANKS, f"in {awaited}")
    if _awaits_device(sight, word):
        return Classification(
            observations.Activity.WAITING_FOR_RANKS, "waits for its GPU, which has collectives to run"
        )
    if sight.main is None and sight.wait.lack:
        return Classification(observations.Activity.UNKNOWN, sight.why_no_stack)
    return _idle(sight, earlier)


def _idle(sight: RankSample, earlier: PreviousSample) -> Classification:
    """Say in what a rank is that neither computes nor waits for other ranks."""
    again = earlier.ends_at_s is not None and sight.after.at_s > earlier.ends_at_s + RENEWED_S
    shown = replace(sight, wait=replace(sight.wait, ends_s=None)) if again and sight.wait.asleep else sight
    words = f"{describe.in_words(shown)}{', again and again' if again else ''}"
    return Classification(
        observations.Activity.SLEEPING if sight.wait.asleep else observations.Activity.BLOCKED, words
    )


def _awaited(sight: RankSample) -> str:
    """Return what other ranks are waited for in. What C code does is told by the user's line alone, and so only where it
    can be that by the kernel's word, too."""
    named = stack_frames.awaits_ranks(sight.stack, sight.line)
    if stack_frames.called(sight.stack) or not sight.wait.call:
        return named
    at_network = sight.wait.call in kernel_wait.NETWORK
    if named == stack_frames.STORE or sight.at_store:
        return stack_frames.STORE if at_network else ""
    return named if at_network or sight.wait.call == "futex" else ""


def _burning(sight: RankSample, word: SampleContext) -> Classification:
    """Say what a rank is in whose thread computes and moves nowhere."""
    if sight.main is None:
        return Classification(observations.Activity.UNKNOWN, f"computes; {sight.why_no_stack}")
    awaited = stack_frames.awaits_ranks(sight.stack, "")
    if awaited and stack_frames.is_collective(sight.stack):
        return Classification(observations.Activity.WAITING_FOR_RANKS, f"in {awaited}")
    if _awaits_device(sight, word):
        return Classification(
            observations.Activity.WAITING_FOR_RANKS, "waits for its GPU, which has collectives to run"
        )
    if word.gil_held:
        return Classification(observations.Activity.SPINNING, "in C code that keeps Python's lock (the GIL)")
    if sight.gpu and stack_frames.awaits_device(sight.stack, sight.line):
        return Classification(observations.Activity.SPINNING, "waits for its GPU")
    return Classification(observations.Activity.SPINNING, "computes at one place")


def _awaits_device(sight: RankSample, word: SampleContext) -> bool:
    return sight.gpu and word.on_device and stack_frames.awaits_device(sight.stack, sight.line)


def _may_enter_collectives(thread: SideThread) -> bool:
    """Tell whether a thread beside the one that is judged may enter collectives by itself: it is in the script's own code
    or in torch.distributed, and does not wait for another thread without a limit."""
    stack = thread.stack.frames
    waits = thread.wait.call == "futex" and thread.wait.for_ever
    own = stack_frames.users_frame(stack) is not None or any(
        "/torch/distributed/" in one.file for one in stack
    )
    return own and not waits and not stack_frames.serves(stack)
