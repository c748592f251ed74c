"""Classification of a rank: the comparison of two samples in a row, and what follows from it. Pure; `sample` does the
reading.

Rules: any movement since the previous sample is work, and a rank that worked is not judged. For the other ranks the
result says how long they have stood still (`still_s`) and what they wait in. `proven` marks a state that cannot
resolve by itself, whatever the other ranks do. Nothing is concluded from the text of a script, and a long computation
looks like an endless one.
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
"""Reading and writing less than this between two samples is not a sign of life: loggers and monitors do that."""

WAKES = 2
"""A thread that reads or writes without a limit and woke this often between two samples moves data, if little by
little; once may have been the signal for the stacks."""

TIMEOUTS = 2
"""How many waits may have ended for each time limit that has passed: only the rest of a limit may be visible."""

RENEWED_S = 0.5
"""A wait that goes on for longer than this beyond its end is another one: a loop that polls."""

STACK_FRAMES = 40

_AT_GPU = "waits for its GPU, which has collectives to run"


@dataclass(frozen=True, slots=True)
class SampleContext:
    """What is known of a rank from outside its own stacks: exit flag of the hook, GIL state and collectives from
    torch's worker server, GPU use from nvidia-smi."""

    is_exiting: bool = False
    # C code holds the GIL; None: not known.
    gil_held: bool | None = None
    collectives: tuple[observations.Collective, ...] = ()
    # Collectives that it has entered are not done, by torch's flight recorder.
    on_device: bool = False
    groups: tuple[str, ...] = ()
    collective_counts: tuple[observations.CollectiveCounts, ...] = ()
    mixed: tuple[str, ...] = ()
    unavailable: tuple[str, ...] = ()
    # The share of time in which its GPU is busy, 0.0 to 1.0.
    gpu_use: float | None = None


@dataclass(frozen=True, slots=True)
class PreviousSample:
    """The previous sample, and since when the rank has stood still."""

    sample: RankSample
    context: SampleContext
    # Since when the rank has stood still (monotonic).
    since_s: float
    # How long its thread had waited for a processor until then.
    since_queue_s: float
    # When its wait at that time ends: a rank that still waits after that begins a new wait again and again.
    ends_at_s: float | None


@dataclass(frozen=True, slots=True)
class Classification:
    """What a rank does, and the words for it; `proven`: see `observations.RankInspection`."""

    activity: observations.Activity
    why: str
    proven: bool = False


def classify(
    sample: RankSample, context: SampleContext, previous: PreviousSample | None
) -> tuple[observations.RankInspection, PreviousSample]:
    """Return the inspection of a rank, and what the next sample is compared with."""
    now_s = sample.after.at_s
    moved = _movement(sample, context, previous) if previous is not None else ""
    since_s, since_queue_s = now_s, sample.after.queue_s
    ends_at_s = now_s + sample.wait.ends_s if sample.wait.ends_s else None
    if previous is not None and not moved:
        since_s, since_queue_s, ends_at_s = previous.since_s, previous.since_queue_s, previous.ends_at_s
    finding = _classify(sample, context, previous, moved)
    has_end = finding.activity in (observations.Activity.SLEEPING, observations.Activity.BLOCKED)
    inspection = observations.RankInspection(
        rank=sample.rank,
        pid=sample.pid,
        state=sample.state,
        activity=finding.activity,
        still_s=round(now_s - since_s, 1),
        where=stack_frames.place(sample.stack),
        why=finding.why,
        proven=finding.proven,
        ends_s=sample.wait.ends_s if has_end else None,
        phase="exit" if context.is_exiting else stack_frames.phase(sample.stack),
        stack=texts(sample.stack),
        collectives=context.collectives,
        groups=context.groups,
        collective_counts=context.collective_counts,
        mixed=context.mixed,
        unavailable=(*sample.unavailable, *context.unavailable),
        others_act=not sample.knows_others or any(_may_enter_collectives(thread) for thread in sample.others),
        gpu_use=context.gpu_use,
        starved_s=round(max(sample.after.queue_s - since_queue_s, 0.0), 1),
    )
    return inspection, PreviousSample(sample, context, since_s, since_queue_s, ends_at_s)


def texts(stack: tuple[stack_frames.Frame, ...]) -> tuple[str, ...]:
    """Return the frames of a stack as an inspection lists them, `file:line function`."""
    return tuple(str(frame) for frame in stack_frames.without_imports(stack)[:STACK_FRAMES])


def _classify(
    sample: RankSample, context: SampleContext, previous: PreviousSample | None, moved: str
) -> Classification:
    if sample.state in "Tt":
        why = "stopped (state T)" if sample.state == "T" else "held by a debugger (state t)"
        return Classification(observations.Activity.STOPPED, why)
    if sample.state in "ZX":
        why = f"ended (state {sample.state}), and not gone"
        return Classification(observations.Activity.BLOCKED, why, proven=True)
    if context.is_exiting:
        words = f"has said its last word, and is still there, {describe.in_words(sample)}"
        stands = previous is not None and not moved and previous.context.is_exiting
        wait = sample.wait
        is_stuck = wait.call in ("futex", "pause") and wait.for_ever and not wait.is_shared
        return Classification(observations.Activity.EXITING, words, proven=stands and is_stuck)
    if previous is None:
        return Classification(observations.Activity.UNKNOWN, describe.in_words(sample))
    if moved:
        return Classification(observations.Activity.PROGRESSING, moved)
    return _still(sample, context, previous)


# What moved


def _movement(sample: RankSample, context: SampleContext, previous: PreviousSample) -> str:
    """Return in words what of a rank has moved since the previous sample; empty when all stands still."""
    then = previous.sample
    if sample.pid != then.pid or sample.state in "TtZX" or then.state in "TtZX":
        is_same = (sample.pid, sample.state) == (then.pid, then.state)
        return "" if is_same and not resource_use.woke(sample, previous.sample, sample.tid) else "it goes on"
    if sample.tid != then.tid:
        return "another thread of it trains"
    if sample.main is not None and then.main is not None:
        if (sample.main.chain, sample.main.callers) != (then.main.chain, then.main.callers):
            return "its stack moves"
    elif (sample.wait.call, sample.wait.target) != (then.wait.call, then.wait.target):
        return "it goes from one system call to another"
    io_bytes = sample.before.io_bytes - then.after.io_bytes
    if io_bytes > IO_BYTES:
        return f"it reads and writes ({io_bytes >> 10:,} KiB since the sample before)"
    if _entered(context) != _entered(previous.context):
        return "it enters collectives"
    if _awaited(sample) and not any(_may_enter_collectives(thread) for thread in sample.others):
        return ""  # it waits for other ranks, whatever its monitors and loaders do
    if _trickles(sample, previous, sample.tid, sample.wait, then.wait):
        return f"it moves data little by little, {describe.in_words(sample)}"
    return _movement_of_children(sample, previous) or _movement_of_threads(sample, previous)


def _trickles(sample: RankSample, previous: PreviousSample, tid: int, now: Wait, then: Wait) -> bool:
    """Tell whether data passes through what a thread reads, writes, or polls before it does so (a socket with a time
    limit). The kernel has no counter for what is sent; but it counts how often the thread woke."""
    before = previous.sample.after.wakes.get(tid)
    wakes = 0 if before is None else sample.before.wakes.get(tid, before) - before
    if wakes < WAKES:
        return False
    if all(wait.call in kernel_wait.READS | kernel_wait.WRITES and wait.for_ever for wait in (now, then)):
        return True
    is_same = (now.call, now.target, now.fds) == (then.call, then.target, then.fds)
    if now.call not in kernel_wait.POLLS or not is_same or not now.fds or now.asleep:
        return False
    limit_s = min(math.inf if wait.ends_s is None else wait.ends_s for wait in (now, then))
    return limit_s > 0 and wakes >= WAKES + TIMEOUTS * resource_use.span_s(sample, previous.sample) / limit_s


def _movement_of_children(sample: RankSample, previous: PreviousSample) -> str:
    before = {child.pid: child for child in previous.sample.children}
    for child in sample.children:
        then = before.get(child.pid)
        if then is None:
            continue
        computes = resource_use.child_share(sample, previous.sample, child.pid) > CHILD_SHARE
        goes_on = child.chain != then.chain
        if computes and (goes_on or not child.frames):
            return f"its child {child.pid} computes"
        if goes_on and stack_frames.users_frame(child.frames) is not None:
            return f"its child {child.pid} goes on"
        idle = stack_frames.awaits_task(child.frames)
        if not idle and _trickles(sample, previous, child.pid, child.wait, then.wait):
            return f"its child {child.pid} moves data little by little"
    return ""


def _movement_of_threads(sample: RankSample, previous: PreviousSample) -> str:
    """Say which thread other than the judged one has moved, whatever the judged one waits for."""
    if not (sample.knows_others and previous.sample.knows_others):
        return ""
    before = {thread.stack.ident: thread for thread in previous.sample.others if not thread.watches}
    now = {thread.stack.ident: thread for thread in sample.others if not thread.watches}
    if before.keys() != now.keys():
        return "its threads come and go"
    for ident, thread in now.items():
        then = before[ident]
        if (thread.stack.chain, thread.stack.callers) != (then.stack.chain, then.stack.callers):
            return f"another thread of it moves, {stack_frames.place(thread.stack.frames)}"
        at_ranks = stack_frames.awaits_ranks(thread.stack.frames, thread.line)
        if not at_ranks and _trickles(sample, previous, thread.tid, thread.wait, then.wait):
            return f"another thread of it moves data, {stack_frames.place(thread.stack.frames)}"
    return ""


def _entered(context: SampleContext) -> tuple[tuple[str, int], ...]:
    return tuple((collective.group, collective.number) for collective in context.collectives)


# What stands still


def _still(sample: RankSample, context: SampleContext, previous: PreviousSample) -> Classification:
    """Classify a rank of which nothing has moved."""
    if resource_use.main_share(sample, previous.sample) > BURNS_SHARE:
        return _burning(sample, context)
    proof = stuck_proof.proof(sample, previous.sample, context.on_device)
    if proof:
        activity = observations.Activity.SLEEPING if sample.wait.asleep else observations.Activity.BLOCKED
        return Classification(activity, proof, proven=True)
    awaited = _awaited(sample)
    in_collective = awaited and stack_frames.is_collective(sample.stack)
    if resource_use.other_threads_share(sample, previous.sample) > BURNS_SHARE and not in_collective:
        return Classification(observations.Activity.SPINNING, "its native threads compute")
    for child in sample.children:
        if resource_use.child_share(sample, previous.sample, child.pid) > BURNS_SHARE:
            why = f"its child {child.pid} computes at one place, {stack_frames.place(child.frames)}"
            return Classification(observations.Activity.SPINNING, why)
    if awaited:
        return Classification(observations.Activity.WAITING_FOR_RANKS, f"in {awaited}")
    if _awaits_device(sample, context):
        return Classification(observations.Activity.WAITING_FOR_RANKS, _AT_GPU)
    if sample.main is None and sample.wait.unavailable:
        return Classification(observations.Activity.UNKNOWN, sample.why_no_stack)
    return _idle(sample, previous)


def _idle(sample: RankSample, previous: PreviousSample) -> Classification:
    """Classify a rank that neither computes nor waits for other ranks."""
    again = previous.ends_at_s is not None and sample.after.at_s > previous.ends_at_s + RENEWED_S
    activity = observations.Activity.SLEEPING if sample.wait.asleep else observations.Activity.BLOCKED
    if again and sample.wait.asleep:
        sample = replace(sample, wait=replace(sample.wait, ends_s=None))
    words = f"{describe.in_words(sample)}{', again and again' if again else ''}"
    return Classification(activity, words)


def _awaited(sample: RankSample) -> str:
    """Return the call in which a rank waits for other ranks. C code has no frame, so the user's line alone names its
    call; it counts only where the kernel's wait fits it."""
    named = stack_frames.awaits_ranks(sample.stack, sample.line)
    if stack_frames.called(sample.stack) or not sample.wait.call:
        return named
    at_network = sample.wait.call in kernel_wait.NETWORK
    if named == stack_frames.STORE or sample.at_store:
        return stack_frames.STORE if at_network else ""
    return named if at_network or sample.wait.call == "futex" else ""


def _burning(sample: RankSample, context: SampleContext) -> Classification:
    """Classify a rank whose thread computes and does not move."""
    if sample.main is None:
        return Classification(observations.Activity.UNKNOWN, f"computes; {sample.why_no_stack}")
    awaited = stack_frames.awaits_ranks(sample.stack, "")
    if awaited and stack_frames.is_collective(sample.stack):
        return Classification(observations.Activity.WAITING_FOR_RANKS, f"in {awaited}")
    if _awaits_device(sample, context):
        return Classification(observations.Activity.WAITING_FOR_RANKS, _AT_GPU)
    if context.gil_held:
        return Classification(observations.Activity.SPINNING, "in C code that keeps Python's lock (the GIL)")
    if sample.gpu and stack_frames.awaits_device(sample.stack, sample.line):
        return Classification(observations.Activity.SPINNING, "waits for its GPU")
    return Classification(observations.Activity.SPINNING, "computes at one place")


def _awaits_device(sample: RankSample, context: SampleContext) -> bool:
    return sample.gpu and context.on_device and stack_frames.awaits_device(sample.stack, sample.line)


def _may_enter_collectives(thread: SideThread) -> bool:
    """Tell whether a thread other than the judged one may enter collectives by itself: it is in the script's own code
    or in torch.distributed, and does not wait for another thread without a limit."""
    stack = thread.stack.frames
    waits = thread.wait.call == "futex" and thread.wait.for_ever
    in_torch = any("/torch/distributed/" in frame.file for frame in stack)
    own = in_torch or stack_frames.users_frame(stack) is not None
    return own and not waits and not stack_frames.serves(stack)
