"""Description of what a rank does at one moment, in words, for verdicts and evidence files. Pure."""

from __future__ import annotations

from orchestrator.agent.evidence.sample import Child, RankSample
from orchestrator.agent.probes import kernel_wait, stack_frames


def in_words(sample: RankSample) -> str:
    """Say what a rank does, as far as one sample shows."""
    if sample.main is None and not sample.wait.call:
        return sample.why_no_stack
    stack = sample.stack
    if is_at_prompt(sample):
        asker = stack_frames.asks_a_person(stack, sample.line) or "a program"
        return f"at a prompt of {asker}{'' if sample.types else ', where no other process can type'}"
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
    if any("/asyncio/" in frame.file for frame in stack_frames.called(stack)) and sample.wait.fds:
        ends_s = sample.wait.ends_s
        timer = "" if ends_s is None else f", its next timer in {kernel_wait.seconds_text(ends_s)}"
        return f"waits in asyncio's loop{timer}"
    if sample.wait.call == "futex" and stack_frames.is_on_lock(stack, sample.line):
        ends_s = sample.wait.ends_s
        limit = "" if ends_s is None else f", for {kernel_wait.seconds_text(ends_s)} more"
        stacks = [thread.stack.frames for thread in sample.others]
        others = [frame for frame in stacks if stack_frames.users_frame(frame) is not None]
        whom = f"; the other thread is at {stack_frames.place(others[0])}" if len(others) == 1 else ""
        return f"{stack_frames.lock_text(stack)}{limit}{whom}"
    return kernel_wait.in_words(sample.wait)


def _busy_child(sample: RankSample) -> str:
    """Say which child is waited for, and where it is: one in a bad state, one in the user's code, else the youngest."""
    children = (loaders(sample) or _named(sample) or sample.children)[::-1]
    if not children:
        return ""
    odd = next((child for child in children if child.state in "TtZ"), None)
    working = next((child for child in children if stack_frames.is_in_users_code(child.frames)), None)
    child = odd or working or children[0]
    does = f"is in state {child.state}" if odd else wait_in_words(child)
    subject = "it is" if len(children) == 1 else f"one of {len(children)} is"
    return f": {subject} {called(child)}, which {does}"


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
    """Say what a child does, as a verb."""
    words = "is busy" if child.wait.runs else kernel_wait.in_words(child.wait)
    if child.wait.asleep and not child.frames:
        words = "in sleep()"  # no signal has interrupted it, so what is left is not known
    words = words if words.startswith(("is ", "waits ")) else f"is {words}"
    return f"{words}, {stack_frames.place(child.frames)}" if child.frames else words


def is_at_prompt(sample: RankSample) -> bool:
    """Tell whether a rank waits for a person to type: it reads from a terminal, or from standard input at a prompt."""
    reads = sample.wait.call in ("read", "pselect6", "select", "poll", "ppoll")
    if not reads or sample.wait.ends_s is not None:
        return False
    stack = sample.stack
    asks = bool(stack_frames.asks_a_person(stack, sample.line))
    terminal = sample.wait.target.startswith("/dev/")
    return (asks and 0 in sample.wait.fds) or (terminal and (asks or 0 in sample.wait.fds))
