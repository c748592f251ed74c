"""Description of what a rank does at one moment, for verdicts and evidence files. Pure."""

from __future__ import annotations

from orchestrator.agent.hang import kernel_wait, stack_frames
from orchestrator.agent.hang.sample import Child, HangSample
from orchestrator.agent.ranks import stack_dump


def describe_rank(sample: HangSample) -> str:
    """Describe what a rank does, as far as one sample shows."""
    if sample.main is None and not sample.wait.call:
        return sample.why_no_stack
    stack = sample.stack
    if is_at_prompt(sample):
        return f"at a prompt of {stack_frames.find_prompt(stack, sample.line)}"
    if stack_frames.awaits_debugger(stack):
        return "waits for a debugger to attach"
    if sample.wait.is_running:
        return "computes"
    awaited = stack_frames.find_rank_wait(stack, sample.line)
    if awaited:
        return f"in {awaited}"
    if stack_frames.awaits_threads(stack):
        where = "".join(
            f", one of them at {stack_frames.describe_shown_frame(thread.stack.frames)}"
            for thread in sample.other_threads[:1]
        )
        return f"waits for its other threads to end{where}"
    if stack_frames.awaits_loader(stack):
        return f"waits for its DataLoader's workers{_describe_busy_child(sample)}"
    if sample.wait.call in ("wait4", "waitid"):
        return f"waits for a child to end{_describe_busy_child(sample)}"
    if sample.wait.call in ("vfork", "clone", "clone3"):
        return f"waits for a child to begin its program{_describe_busy_child(sample)}"
    in_asyncio = any("/asyncio/" in frame.file for frame in stack_frames.inner_frames(stack))
    if in_asyncio and sample.wait.call in kernel_wait.POLLS:
        return "waits in asyncio's loop"
    if sample.wait.call == "futex" and stack_frames.awaits_lock(stack, sample.line):
        limit = "" if sample.wait.is_unlimited else ", with a time limit"
        stacks = [thread.stack.frames for thread in sample.other_threads]
        others = [frame for frame in stacks if stack_dump.find_users_frame(frame) is not None]
        whom = f"; the other thread is at {stack_frames.describe_shown_frame(others[0])}" if len(others) == 1 else ""
        text = f"{stack_frames.describe_lock(stack)}{limit}{whom}"
    else:
        text = kernel_wait.describe_wait(sample.wait)
    if sample.children and stack_frames.uses_child_processes(stack):
        return f"{text}, and a child does not answer{_describe_busy_child(sample)}"
    return text


def _describe_busy_child(sample: HangSample) -> str:
    """Describe the child that is waited for: one in a bad state, one in the user's code, else the youngest."""
    children = (loader_workers(sample) or _awaited_children(sample) or sample.children)[::-1]
    if not children:
        return ""
    stopped = next((child for child in children if child.state in "TtZ"), None)
    working = next((child for child in children if stack_frames.runs_users_code(child.frames)), None)
    child = stopped or working or children[0]
    does = f"is in state {child.state}" if stopped else _describe_wait_chain(child, sample.children)
    subject = "it is" if len(children) == 1 else f"one of {len(children)} is"
    return f": {subject} {process_label(child)}, which {does}"


def _describe_wait_chain(child: Child, children: tuple[Child, ...]) -> str:
    """Describe what a child does, or the child that it waits for in turn."""
    below = next((one for one in children[::-1] if one.ppid == child.pid), None)
    if child.wait.child is None or below is None:
        return describe_child(child)
    return f"waits for {process_label(below)}, which {_describe_wait_chain(below, children)}"


def loader_workers(sample: HangSample) -> tuple[Child, ...]:
    """Return the workers of the DataLoader that a rank waits for; none where it does not wait for one."""
    if sample.main is None or not stack_frames.awaits_loader(sample.main.frames):
        return ()
    return tuple(child for child in sample.children if child.is_loader_worker and child.ppid == sample.pid)


def _awaited_children(sample: HangSample) -> tuple[Child, ...]:
    return tuple(child for child in sample.children if child.pid == sample.wait.child)


def process_label(child: Child) -> str:
    """Return the name of a child's program, if known, and its process id."""
    return f"{child.name} ({child.pid})" if child.name else f"{child.pid}"


def describe_child(child: Child) -> str:
    """Describe what a child does, as a verb."""
    text = "busy" if child.wait.is_running else kernel_wait.describe_wait(child.wait)
    text = text if child.wait.call == "futex" else f"is {text}"
    return f"{text}, {stack_frames.describe_shown_frame(child.frames)}" if child.frames else text


def is_at_prompt(sample: HangSample) -> bool:
    """Return whether a rank waits for a person to type, by its stack and its line."""
    reads = sample.wait.call in ("read", "pselect6", "select", "poll", "ppoll") and sample.wait.is_unlimited
    return reads and bool(stack_frames.find_prompt(sample.stack, sample.line))
