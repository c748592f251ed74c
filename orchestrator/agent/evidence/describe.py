"""Words for what a rank is in at one moment, for verdicts and pages. Pure."""

from __future__ import annotations

from orchestrator.agent.evidence.sample import Child, RankSample
from orchestrator.agent.probes import kernel_wait, stack_frames


def in_words(sight: RankSample) -> str:
    """Say what a rank is in, as far as it can be known from one moment."""
    if sight.main is None and not sight.wait.call:
        return sight.why_no_stack
    stack = sight.stack
    if is_at_prompt(sight):
        asker = stack_frames.asks_a_person(stack, sight.line) or "a program"
        return f"at a prompt of {asker}{'' if sight.types else ', where nobody can type'}"
    if stack_frames.awaits_debugger(stack):
        return "waits for a debugger to attach"
    if sight.wait.runs:
        return "computes"
    awaited = stack_frames.awaits_ranks(stack, sight.line)
    if awaited:
        return f"in {awaited}"
    if stack_frames.awaits_threads(stack):
        where = "".join(
            f", one of them at {stack_frames.place(thread.stack.frames)}" for thread in sight.others[:1]
        )
        return f"waits for its other threads to end{where}"
    if stack_frames.awaits_loader(stack):
        return f"waits for its DataLoader's workers{_busy_child(sight)}"
    if sight.wait.call in ("wait4", "waitid"):
        return f"waits for a child to end{_busy_child(sight)}"
    if any("/asyncio/" in frame.file for frame in stack_frames.called(stack)) and sight.wait.fds:
        timer = (
            ""
            if sight.wait.ends_s is None
            else f", its next timer in {kernel_wait.seconds_text(sight.wait.ends_s)}"
        )
        return f"waits in asyncio's loop{timer}"
    if sight.wait.call == "futex" and stack_frames.is_on_lock(stack, sight.line):
        limit = (
            "" if sight.wait.ends_s is None else f", for {kernel_wait.seconds_text(sight.wait.ends_s)} more"
        )
        stacks = [thread.stack.frames for thread in sight.others]
        others = [frame for frame in stacks if stack_frames.users_frame(frame) is not None]
        whom = f"; the other thread is at {stack_frames.place(others[0])}" if len(others) == 1 else ""
        return f"{stack_frames.lock_text(stack)}{limit}{whom}"
    return kernel_wait.in_words(sight.wait)


def _busy_child(sight: RankSample) -> str:
    """Say which child is waited for and where it is: one in a bad state, one in the user's code, else the youngest."""
    children = (loaders(sight) or _named(sight) or sight.children)[::-1]
    if not children:
        return ""
    odd = next((child for child in children if child.state in "TtZ"), None)
    mine = next((child for child in children if stack_frames.is_in_users_code(child.frames)), None)
    child = odd or mine or children[0]
    does = f"is in state {child.state}" if odd else wait_in_words(child)
    one = "it is" if len(children) == 1 else f"one of {len(children)} is"
    return f": {one} {called(child)}, which {does}"


def loaders(sight: RankSample) -> tuple[Child, ...]:
    """Return the workers of the DataLoader that a rank waits for; none where it waits for none."""
    if sight.main is None or not stack_frames.awaits_loader(sight.main.frames):
        return ()
    return tuple(child for child in sight.children if child.is_loaders and child.ppid == sight.pid)


def _named(sight: RankSample) -> tuple[Child, ...]:
    return tuple(child for child in sight.children if child.pid == sight.wait.child)


def called(child: Child) -> str:
    """Return the name of a child's program and its process id, as far as they are known."""
    return f"{child.name} ({child.pid})" if child.name else f"{child.pid}"


def wait_in_words(child: Child) -> str:
    """Say what a child does, as a verb."""
    words = "is busy" if child.wait.runs else kernel_wait.in_words(child.wait)
    if child.wait.asleep and not child.frames:
        words = "in sleep()"  # no signal has interrupted it, so what is left is not known
    words = words if words.startswith(("is ", "waits ")) else f"is {words}"
    return f"{words}, {stack_frames.place(child.frames)}" if child.frames else words


def is_at_prompt(sight: RankSample) -> bool:
    """Tell whether a person is asked: it reads a terminal, or standard input in a place where one types."""
    if (
        sight.wait.call not in ("read", "pselect6", "select", "poll", "ppoll")
        or sight.wait.ends_s is not None
    ):
        return False
    stack = sight.stack
    asks = bool(stack_frames.asks_a_person(stack, sight.line))
    terminal = sight.wait.target.startswith("/dev/")
    return (asks and 0 in sight.wait.fds) or (terminal and (asks or 0 in sight.wait.fds))
