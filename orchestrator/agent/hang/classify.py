"""Classification of a rank from two consecutive samples. Pure; `sample` does the reading.

Rules: any movement since the previous sample is work, and a rank that worked is not judged. For the other ranks the
result has the time without movement (`still_s`) and what they wait in. The text of a script is no evidence, and a long
computation cannot be distinguished from an endless one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.agent.hang import describe, kernel_wait, stack_frames
from orchestrator.agent.hang.kernel_wait import Wait
from orchestrator.agent.hang.sample import HangSample, SideThread
from orchestrator.agent.ranks import stack_dump
from orchestrator.core import observations

COMPUTES_SHARE_MIN = 0.5
"""A thread that was on a processor, or wanted one, for more of the time than this computes."""

CHILD_SHARE_MIN = 0.2
"""The same for a child process."""

IO_BYTES_MIN = 64 << 10
"""Reading and writing less than this between two samples is not a sign of life: loggers and monitors do that."""

WAKES_MIN = 2
"""A thread that reads or writes without a limit and woke this often between two samples moves data, if little by
little; once may have been the signal for the stacks."""

TIMEOUTS = 2
"""How many waits may have ended for each time limit that has passed: only the rest of a limit may be visible."""

LINE_CHARS_MAX = 100

_WAITS_FOR_GPU = "waits for its GPU, which has collectives to run"


@dataclass(frozen=True, slots=True)
class SampleContext:
    """What is known of a rank apart from its own stacks: exit flag of the hook, GIL state and collectives from
    torch's worker server, GPU use from nvidia-smi."""

    is_exiting: bool = False
    # C code holds the GIL; None: not known.
    gil_held: bool | None = None
    collectives: tuple[observations.Collective, ...] = ()
    # Collectives that it has entered are not done, by torch's flight recorder.
    has_pending_collectives: bool = False
    groups: tuple[str, ...] = ()
    collective_counts: tuple[observations.CollectiveCounts, ...] = ()
    groups_with_p2p: tuple[str, ...] = ()
    unavailable: tuple[str, ...] = ()
    # The exception that its main thread is handling.
    exception: observations.Failure | None = None
    # The share of time in which its GPU is busy, 0.0 to 1.0.
    gpu_use: float | None = None


@dataclass(frozen=True, slots=True)
class PreviousSample:
    """The previous sample, and since when the rank has not moved."""

    sample: HangSample
    context: SampleContext
    # Since when the rank has not moved (monotonic).
    still_since_s: float


@dataclass(frozen=True, slots=True)
class Classification:
    """What a rank does, with its description."""

    activity: observations.Activity
    why: str


def classify(
    sample: HangSample, context: SampleContext, previous: PreviousSample | None
) -> tuple[observations.RankInspection, PreviousSample]:
    """Return the inspection of a rank, and what the next sample is compared with."""
    now_s = sample.after.at_s
    moved = _movement(sample, context, previous) if previous is not None else ""
    since_s = now_s if previous is None or moved else previous.still_since_s
    finding = _classify(sample, context, previous, moved)
    stack, inside = stack_frames.format_frames(sample.stack)
    inspection = observations.RankInspection(
        rank=sample.rank,
        pid=sample.pid,
        state=sample.state,
        activity=finding.activity,
        still_s=round(now_s - since_s, 1),
        where=stack_frames.find_shown_frame(sample.stack),
        line=sample.users_line[:LINE_CHARS_MAX],
        why=context.exception.describe_with(finding.why) if context.exception else finding.why,
        phase="exit" if context.is_exiting else stack_frames.find_phase(sample.stack),
        stack=stack,
        inside=inside,
        collectives=context.collectives,
        groups=context.groups,
        collective_counts=context.collective_counts,
        mixed=context.groups_with_p2p,
        unavailable=(*sample.unavailable, *context.unavailable),
        others_act=not sample.has_all_threads or any(_may_enter_collectives(thread) for thread in sample.other_threads),
        gpu_use=context.gpu_use,
        raised=context.exception,
    )
    return inspection, PreviousSample(sample, context, since_s)


def _classify(
    sample: HangSample, context: SampleContext, previous: PreviousSample | None, moved: str
) -> Classification:
    if sample.state in "Tt":
        why = "stopped (state T)" if sample.state == "T" else "held by a debugger (state t)"
        return Classification(observations.Activity.STOPPED, why)
    if sample.state in "ZX":
        return Classification(observations.Activity.BLOCKED, f"ended (state {sample.state}), and not reaped")
    if context.is_exiting:
        why_exiting = f"has finished its script and has not exited, {describe.describe_rank(sample)}"
        return Classification(observations.Activity.EXITING, why_exiting)
    if previous is None:
        return Classification(observations.Activity.UNKNOWN, describe.describe_rank(sample))
    if moved:
        return Classification(observations.Activity.PROGRESSING, moved)
    return _classify_still(sample, context, previous)


# What moved


def _movement(sample: HangSample, context: SampleContext, previous: PreviousSample) -> str:
    """Describe what of a rank has moved since the previous sample; empty when nothing has."""
    then = previous.sample
    if sample.pid != then.pid or sample.state in "TtZX" or then.state in "TtZX":
        is_same = (sample.pid, sample.state) == (then.pid, then.state)
        return "" if is_same and not has_woken(sample, previous.sample, sample.tid) else "it runs again"
    if sample.tid != then.tid:
        return "another thread of it trains"
    if sample.main is not None and then.main is not None:
        if (sample.main.chain, sample.main.callers) != (then.main.chain, then.main.callers):
            return "its stack moves"
    elif (sample.wait.call, sample.wait.target) != (then.wait.call, then.wait.target):
        return "it moves from one system call to another"
    io_bytes = sample.before.io_bytes - then.after.io_bytes
    serves_others = _awaited_call(sample) == stack_frames.STORE or stack_frames.find_phase(sample.stack) == "rendezvous"
    if io_bytes > IO_BYTES_MIN and not serves_others:  # the first rank's process is the store of all
        return f"it reads and writes ({io_bytes >> 10:,} KiB since the previous sample)"
    if _entered_collectives(context) != _entered_collectives(previous.context):
        return "it enters collectives"
    if _awaited_call(sample) and not any(_may_enter_collectives(thread) for thread in sample.other_threads):
        return ""  # it waits for other ranks, whatever its monitors and loaders do
    if _moves_data_slowly(sample, previous, sample.tid, sample.wait, then.wait):
        return f"it moves data little by little, {describe.describe_rank(sample)}"
    return _movement_of_children(sample, previous) or _movement_of_threads(sample, previous)


def _moves_data_slowly(sample: HangSample, previous: PreviousSample, tid: int, now: Wait, then: Wait) -> bool:
    """Return whether data passes through what a thread reads, writes, or polls before it does so (a socket with a time
    limit). The kernel has no counter for what is sent; but it counts how often the thread woke."""
    previous_wakes = previous.sample.after.wakes.get(tid)
    wakes = 0 if previous_wakes is None else sample.before.wakes.get(tid, previous_wakes) - previous_wakes
    if wakes < WAKES_MIN:
        return False
    if all(wait.call in kernel_wait.READS | kernel_wait.WRITES and wait.is_unlimited for wait in (now, then)):
        return True
    is_same = (now.call, now.target, now.fds) == (then.call, then.target, then.fds)
    if now.call not in kernel_wait.POLLS or not is_same or not now.fds or now.is_sleeping:
        return False
    limit_s = min(math.inf if wait.limit_s is None else wait.limit_s for wait in (now, then))
    return limit_s > 0 and wakes >= WAKES_MIN + TIMEOUTS * span_s(sample, previous.sample) / limit_s


def _movement_of_children(sample: HangSample, previous: PreviousSample) -> str:
    previous_children = {child.pid: child for child in previous.sample.children}
    for child in sample.children:
        then = previous_children.get(child.pid)
        if then is None:
            continue
        computes = child_share(sample, previous.sample, child.pid) > CHILD_SHARE_MIN
        has_moved = child.chain != then.chain
        if computes and (has_moved or not child.frames):
            return f"its child {child.pid} computes"
        if has_moved and stack_dump.find_users_frame(child.frames) is not None:
            return f"its child {child.pid} makes progress"
        idle = stack_frames.awaits_task(child.frames)
        if not idle and _moves_data_slowly(sample, previous, child.pid, child.wait, then.wait):
            return f"its child {child.pid} moves data little by little"
    return ""


def _movement_of_threads(sample: HangSample, previous: PreviousSample) -> str:
    """Name a thread other than the judged one that has moved, whatever the judged one waits for."""
    if not (sample.has_all_threads and previous.sample.has_all_threads):
        return ""
    previous_threads = {thread.stack.ident: thread for thread in previous.sample.other_threads if not thread.is_monitor}
    now = {thread.stack.ident: thread for thread in sample.other_threads if not thread.is_monitor}
    if previous_threads.keys() != now.keys():
        return "its threads come and go"
    for ident, thread in now.items():
        then = previous_threads[ident]
        if (thread.stack.chain, thread.stack.callers) != (then.stack.chain, then.stack.callers):
            return f"another thread of it moves, {stack_frames.describe_shown_frame(thread.stack.frames)}"
        at_ranks = stack_frames.find_rank_wait(thread.stack.frames, thread.line)
        if not at_ranks and _moves_data_slowly(sample, previous, thread.tid, thread.wait, then.wait):
            return f"another thread of it moves data, {stack_frames.describe_shown_frame(thread.stack.frames)}"
    return ""


def _entered_collectives(context: SampleContext) -> tuple[tuple[str, int], ...]:
    return tuple((collective.group, collective.number) for collective in context.collectives)


# What has not moved


def _classify_still(sample: HangSample, context: SampleContext, previous: PreviousSample) -> Classification:
    """Classify a rank of which nothing has moved."""
    if main_share(sample, previous.sample) > COMPUTES_SHARE_MIN:
        return _classify_computing(sample, context)
    awaited = _awaited_call(sample)
    in_collective = awaited and stack_frames.is_collective(sample.stack)
    if other_threads_share(sample, previous.sample) > COMPUTES_SHARE_MIN and not in_collective:
        return Classification(observations.Activity.SPINNING, "its native threads compute")
    for child in sample.children:
        if child_share(sample, previous.sample, child.pid) > COMPUTES_SHARE_MIN:
            why = f"its child {child.pid} computes at one place, {stack_frames.describe_shown_frame(child.frames)}"
            return Classification(observations.Activity.SPINNING, why)
    if awaited:
        return Classification(observations.Activity.WAITING_FOR_RANKS, f"in {awaited}")
    if _awaits_device(sample, context):
        return Classification(observations.Activity.WAITING_FOR_RANKS, _WAITS_FOR_GPU)
    if sample.main is None and sample.wait.unavailable:
        return Classification(observations.Activity.UNKNOWN, sample.why_no_stack)
    return _classify_idle(sample, previous)


def _classify_idle(sample: HangSample, previous: PreviousSample) -> Classification:
    """Classify a rank that neither computes nor waits for other ranks."""
    again = ", in a loop" if has_woken(sample, previous.sample, sample.tid) else ""
    activity = observations.Activity.SLEEPING if sample.wait.is_sleeping else observations.Activity.BLOCKED
    return Classification(activity, describe.describe_rank(sample) + again)


def _awaited_call(sample: HangSample) -> str:
    """Return the call in which a rank waits for other ranks. C code has no frame, so the user's line alone names its
    call; it counts only where the kernel's wait fits it."""
    named = stack_frames.find_rank_wait(sample.stack, sample.line)
    if stack_frames.inner_frames(sample.stack) or not sample.wait.call:
        return named
    at_network = sample.wait.call in kernel_wait.NETWORK
    if named == stack_frames.STORE or sample.awaits_store:
        return stack_frames.STORE if at_network else ""
    return named if at_network or sample.wait.call == "futex" else ""


def _classify_computing(sample: HangSample, context: SampleContext) -> Classification:
    """Classify a rank whose thread computes and does not move."""
    if sample.main is None:
        return Classification(observations.Activity.UNKNOWN, f"computes; {sample.why_no_stack}")
    awaited = stack_frames.find_rank_wait(sample.stack, "")
    if awaited and stack_frames.is_collective(sample.stack):
        return Classification(observations.Activity.WAITING_FOR_RANKS, f"in {awaited}")
    if _awaits_device(sample, context):
        return Classification(observations.Activity.WAITING_FOR_RANKS, _WAITS_FOR_GPU)
    if context.gil_held:
        return Classification(observations.Activity.SPINNING, "in C code that keeps Python's lock (the GIL)")
    if sample.uses_gpu and stack_frames.awaits_device(sample.stack, sample.line):
        return Classification(observations.Activity.SPINNING, "waits for its GPU")
    return Classification(observations.Activity.SPINNING, "computes at one place")


def _awaits_device(sample: HangSample, context: SampleContext) -> bool:
    return sample.uses_gpu and context.has_pending_collectives and stack_frames.awaits_device(sample.stack, sample.line)


def _may_enter_collectives(thread: SideThread) -> bool:
    """Return whether a thread other than the judged one may enter collectives by itself: it is in the script's own code
    or in torch.distributed, and does not wait for another thread without a limit."""
    stack = thread.stack.frames
    waits = thread.wait.call == "futex" and thread.wait.is_unlimited
    in_torch = any("/torch/distributed/" in frame.file for frame in stack)
    is_own_code = in_torch or stack_dump.find_users_frame(stack) is not None
    return is_own_code and not waits and not stack_frames.is_service_thread(stack)


def has_woken(now: HangSample, then: HangSample, tid: int) -> bool:
    """Return whether a thread, or a child's main thread, has run since the previous sample, even if it was
    stopped in both samples."""
    return now.before.wakes.get(tid) != then.after.wakes.get(tid)


def span_s(now: HangSample, then: HangSample) -> float:
    """Return the time between two samples."""
    return max(now.before.at_s - then.after.at_s, 1e-3)


def main_share(now: HangSample, then: HangSample) -> float:
    """Return the share of the time in which the judged thread was on a processor, or waited for one."""
    return (now.before.main_s - then.after.main_s) / span_s(now, then)


def other_threads_share(now: HangSample, then: HangSample) -> float:
    """Return the share of the time in which the threads other than the judged one were on a processor; 1.0 is one
    thread all the time."""
    spent_s = now.before.process_s - then.after.process_s
    return max(0.0, spent_s / span_s(now, then) - main_share(now, then))


def child_share(now: HangSample, then: HangSample, pid: int) -> float:
    """Return the share of the time in which a child was on a processor, or waited for one."""
    now_s, then_s = now.before.children_s.get(pid), then.after.children_s.get(pid)
    if now_s is None or then_s is None:
        return 0.0
    return (now_s - then_s) / span_s(now, then)
