"""Description of what a rank does at one moment, for verdicts and evidence files. Pure."""

from __future__ import annotations

from orchestrator.agent.hang import kernel_wait, stack_frames
from orchestrator.agent.hang.sample import Child, RankSample
from orchestrator.agent.ranks import stack_dump


def in_words(sample: RankSample) -> str:
    """Describe what a rank does, as far as one sample shows."""
    if sample.main is None and not sample.wait.call:
        return sample.why_no_stack
    stack = sample.stack
    if is_at_prompt(sample):
        return f"at a prompt of {stack_frames.asks_a_person(stack, sample.line)}"
    if stack_frames.awaits_debugger(stack):
        return "waits for a debugger to attach"
    if sample.wait.runs:
        return "computes"
    awaited = stack_frames.awaits_ranks(stack, sample.line)
    if awaited:
        return f"in {awaited}"
    if stack_frames.awaits_threads(stack):
        where = "".join(
            f", one of them at {stack_frames.place(thread.stack.frames)}" for thread in sample.others[:1]
        )
        return f"waits for its other threads to end{where}"
    if stack_frames.awaits_loader(stack):
        return f"waits for its DataLoader's workers{_busy_child(sample)}"
    if sample.wait.call in ("wait4", "waitid"):
        return f"waits for a child to end{_busy_child(sample)}"
    if sample.wait.call in ("vfork", "clone", "clone3"):
        return f"waits for a child to begin its program{_busy_child(sample)}"
    in_asyncio = any("/asyncio/" in frame.file for frame in stack_frames.called(stack))
    if in_asyncio and sample.wait.call in kernel_wait.POLLS:
        return "waits in asyncio's loop"
    if sample.wait.call == "futex" and stack_frames.is_on_lock(stack, sample.line):
        limit = "" if sample.wait.for_ever else ", with a time limit"
        stacks = [thread.stack.frames for thread in sample.others]
        others = [frame for frame in stacks if stack_dump.users_frame(frame) is not None]
        whom = f"; the other thread is at {stack_frames.place(others[0])}" if len(others) == 1 else ""
        words = f"{stack_frames.lock_text(stack)}{limit}{whom}"
    else:
        words = kernel_wait.in_words(sample.wait)
    if sample.children and stack_frames.is_with_child(stack):
        return f"{words}, and a child does not answer{_busy_child(sample)}"
    return words


def _busy_child(sample: RankSample) -> str:
    """Describe the child that is waited for: one in a bad state, one in the user's code, else the youngest."""
    children = (loaders(sample) or _named(sample) or sample.children)[::-1]
    if not children:
        return ""
    odd = next((child for child in children if child.state in "TtZ"), None)
    working = next((child for child in children if stack_frames.is_in_users_code(child.frames)), None)
    child = odd or working or children[0]
    does = f"is in state {child.state}" if odd else _down_to_the_last(child, sample.children)
    subject = "it is" if len(children) == 1 else f"one of {len(children)} is"
    return f": {subject} {called(child)}, which {does}"


def _down_to_the_last(child: Child, children: tuple[Child, ...]) -> str:
    """Describe what a child does, or the child that it waits for in turn."""
    below = next((one for one in children[::-1] if one.ppid == child.pid), None)
    if child.wait.child is None or below is None:
        return wait_in_words(child)
    return f"waits for {called(below)}, which {_down_to_the_last(below, children)}"


def loaders(sample: RankSample) -> tuple[Child, ...]:
    """Return the workers of the DataLoader that a rank waits for; none where it does not wait for one."""
    if sample.main is None or not stack_frames.awaits_loader(sample.main.frames):
        return ()
    return tuple(child for child in sample.children if child.is_loaders and child.ppid == sample.pid)


def _named(sample: RankSample) -> tuple[Child, ...]:
    return tuple(child for child in sample.children if child.pid == sample.wait.child)


def called(child: Child) -> str:
    """Return the name of a child's program, if known, and its process id."""
    return f"{child.name} ({child.pid})" if child.name else f"{child.pid}"


def wait_in_words(child: Child) -> str:
    """Describe what a child does, as a verb."""
    words = "busy" if child.wait.runs else kernel_wait.in_words(child.wait)
    words = words if child.wait.call == "futex" else f"is {words}"
    return f"{words}, {stack_frames.place(child.frames)}" if child.frames else words


def is_at_prompt(sample: RankSample) -> bool:
    """Return whether a rank waits for a person to type, by its stack and its line."""
    reads = sample.wait.call in ("read", "pselect6", "select", "poll", "ppoll") and sample.wait.for_ever
    return reads and bool(stack_frames.asks_a_person(sample.stack, sample.line))
