"""What does a rank do? Two looks in a row, compared: pure, what is read is in `sight`.

Rules: whatever moved since the look before is work, and whoever worked is not judged. Of the others is said how long
nothing of them has moved (`still_s`) and in what they are. `certain` is proof that a rank cannot go on by itself; where
proof is lacking it is not certain, however likely: a long computation and an endless one look the same for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from orchestrator.node import frames, kernel, relief, sight_words
from orchestrator.node.kernel import seconds_text
from orchestrator.node.lasting import LONG_S
from orchestrator.node.loops import Ending
from orchestrator.node.sight import TIMERS, Effort, Sight
from orchestrator.wire import messages as m

BURNS_SHARE = 0.5
"""A thread that was on a processor, or wanted one, for more of the time than this computes."""

OTHERS_SHARE = 0.2
"""The same for threads and children beside the main thread: less than this do threads that only wait and look."""

IO_BYTES = 64 << 10
"""Reading and writing less than this between two looks is no sign of life: loggers and monitors do that."""

WAKES = 10
"""A thread that reads for ever and has gone on so often between two looks gets something, if little by little."""

TIMEOUTS = 2
"""So many waits for each time limit that has passed may have ended by that: of a limit only the rest may be seen."""

RENEWED_S = 0.5
"""A wait that goes on for so long beyond its end is another one: a loop that polls."""

STACK_FRAMES = 40

ENDLESS = "in a loop that nothing in it can leave"
LASTS = "in a loop that takes"
"""Behind it stands how long, as far as that is written in it."""

TRAPPED = "in a loop of machine code that nothing in it can leave"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, in words. `rank`: the one that lets go of it only when it goes on itself: no process below it,
    and no thread beside its main one."""

    words: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Word:
    """What others know of a rank: it has said its last word, C code holds the GIL, and torch's flight recorder.

    `on_device`: collectives that it has entered are not done, as far as torch knows; `holder`: who holds the lock on a
    file that it waits for; `gpu_use`: the share of time in which its GPU is busy; `trapped`: the machine code that its main
    thread is in is proved to be a loop that is never left.
    """

    left: bool = False
    gil_held: bool | None = None
    collectives: tuple[m.Collective, ...] = ()
    on_device: bool = False
    groups: tuple[str, ...] = ()
    marks: tuple[m.Mark, ...] = ()
    mixed: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    holder: Holder | None = None
    gpu_use: float | None = None
    trapped: bool = False


@dataclass(frozen=True, slots=True)
class Earlier:
    """The look before. `since_s`: nothing of the rank has moved since then (monotonic); `since_queue_s`: how long until
    then its main thread had waited for a processor; `ends_at_s`: what it waited in when that began has ended by then, so
    one that still waits begins anew again and again."""

    sight: Sight
    word: Word
    since_s: float
    since_queue_s: float
    ends_at_s: float | None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rank does, and the words for it. `goes_on`: it may do something else once its present wait has ended;
    `lasts_s`: so many seconds that takes in all, 0 where it is not known."""

    doing: m.Doing
    why: str
    certain: bool = False
    goes_on: bool = True
    lasts_s: float = 0.0


def examine(sight: Sight, word: Word, earlier: Earlier | None) -> tuple[m.RankLook, Earlier]:
    """Return what a look has found of a rank, and what the next look will compare with."""
    now_s = sight.after.at_s
    moved = _movement(sight, word, earlier) if earlier is not None else ""
    since_s, since_queue_s = now_s, sight.after.queue_s
    if earlier is not None and not moved:
        since_s, since_queue_s = earlier.since_s, earlier.since_queue_s
    found = _found(sight, word, earlier, moved, now_s - since_s)
    stack = sight.main.frames if sight.main is not None else ()
    ends_s = sight.wait.ends_s
    ends_at_s = None if ends_s is None else now_s + ends_s
    if earlier is not None and not moved:
        ends_at_s = earlier.ends_at_s
    look = m.RankLook(
        rank=sight.rank,
        pid=sight.pid,
        state=sight.state,
        doing=found.doing,
        still_s=round(now_s - since_s, 1),
        where=frames.place(stack[_loops_at(sight, found) :]),
        why=found.why,
        certain=found.certain,
        ends_s=found.lasts_s or (ends_s if _has_end(found, ends_at_s, now_s) else None),
        phase="exit" if word.left else _phase(sight, found),
        stack=texts(stack),
        collectives=word.collectives,
        groups=word.groups,
        marks=word.marks,
        mixed=word.mixed,
        lacks=(*sight.lacks, *word.lacks),
        holder=word.holder.rank if word.holder is not None else None,
        gpu_use=word.gpu_use,
        starved_s=round(max(sight.after.queue_s - since_queue_s, 0.0), 1),
    )
    return look, Earlier(sight, word, since_s, since_queue_s, ends_at_s)


def texts(stack: tuple[frames.Frame, ...]) -> tuple[str, ...]:
    """Return the frames that are told of a stack, in words."""
    return tuple(str(frame) for frame in frames.without_imports(stack)[:STACK_FRAMES])


def _phase(sight: Sight, found: Finding) -> str:
    """Say what part of its life a rank is in; one that sleeps in a loop which has an end tries something again."""
    phase = frames.phase(sight.main.frames if sight.main is not None else ())
    tries = found.doing is m.Doing.SLEEPS and sight.line.ending is Ending.SURE
    return "retry" if tries and phase in ("", "train") else phase


def _has_end(found: Finding, ends_at_s: float | None, now_s: float) -> bool:
    """Tell whether what a rank is in ends by itself and lets it go on, as far as that is known."""
    if not found.goes_on:
        return False
    waits = found.doing is m.Doing.SLEEPS or (found.doing is m.Doing.BLOCKED and not found.certain)
    begins_anew = ends_at_s is None or now_s > ends_at_s + RENEWED_S
    return (waits and not begins_anew) or found.doing is m.Doing.UNSEEN


def burns(now: Effort, then: Effort) -> bool:
    """Tell whether a rank's main thread has computed all the time between two looks."""
    return (now.main_s - then.main_s) / max(now.at_s - then.at_s, 1e-3) > BURNS_SHARE


def may_be_trapped(sight: Sight, word: Word, earlier: Earlier | None) -> bool:
    """Tell whether nothing but its machine code may show that a rank, whose main thread computes, never goes on."""
    if earlier is None or not burns(sight.before, earlier.sight.after):
        return False
    if not sight.wait.runs or sight.caught & TIMERS:  # a timer's handler of C code may jump out of a loop
        return False
    found = _found(sight, word, earlier, _movement(sight, word, earlier), 0.0)
    return found.doing in (m.Doing.SPINS, m.Doing.BLOCKED) and not found.certain


def _found(sight: Sight, word: Word, earlier: Earlier | None, moved: str, still_s: float) -> Finding:
    if sight.state in "Tt":
        why = "stopped (state T)" if sight.state == "T" else "held by a debugger (state t)"
        return Finding(m.Doing.STOPPED, why)
    if sight.state in "ZX":
        return Finding(m.Doing.BLOCKED, f"ended (state {sight.state}), and not gone", certain=True)
    if word.left:
        return Finding(
            m.Doing.LEAVING, f"has said its last word, and is still there, {sight_words.in_words(sight)}"
        )
    if earlier is None:
        return Finding(m.Doing.UNSEEN, sight_words.in_words(sight))
    if moved:
        return Finding(m.Doing.WORKS, moved)
    return _still(sight, word, earlier, still_s)


# What moved


def _movement(sight: Sight, word: Word, earlier: Earlier) -> str:
    """Return in words what of a rank has moved since the look before; nothing when all stands still."""
    then = earlier.sight
    if sight.pid != then.pid or sight.state in "TtZX" or then.state in "TtZX":
        return "" if (sight.pid, sight.state) == (then.pid, then.state) else "it goes on"
    endless = _is_in_endless(sight, then)
    if endless:
        pass  # whatever it calls there comes back
    elif sight.main is not None and then.main is not None:
        if sight.main.chain != then.main.chain or sight.main.callers != then.main.callers:
            return "its stack moves"
    elif sight.wait != then.wait and (sight.wait.call, sight.wait.target) != (
        then.wait.call,
        then.wait.target,
    ):
        return "it goes from one system call to another"
    io_bytes = sight.before.io_bytes - then.after.io_bytes
    if io_bytes > IO_BYTES and not endless:
        return f"it reads and writes ({io_bytes >> 10:,} KiB since the look before)"
    if _reads_on(sight, earlier):
        return f"it reads little by little, {sight_words.in_words(sight)}"
    if _entered(word) != _entered(earlier.word):
        return "it enters collectives"
    return _movement_beside(sight, earlier)


def _reads_on(sight: Sight, earlier: Earlier) -> bool:
    """Tell whether something comes through what a thread reads, or polls before it reads (a socket with a time limit)."""
    now, then = sight.wait, earlier.sight.wait
    wakes = sight.before.wakes - earlier.sight.after.wakes
    if all(wait.call in kernel.READS and wait.for_ever for wait in (now, then)):
        return wakes >= WAKES
    polls = now.call in kernel.POLLS and (now.call, now.target, now.fds) == (then.call, then.target, then.fds)
    if not polls or not now.fds or now.asleep or _awaited(sight):
        return False
    limit_s = min(
        now.ends_s if now.ends_s is not None else math.inf,
        then.ends_s if then.ends_s is not None else math.inf,
    )
    return limit_s > 0 and wakes >= WAKES + TIMEOUTS * _span_s(sight, earlier) / limit_s


def _movement_beside(sight: Sight, earlier: Earlier) -> str:
    """The same of its children and its threads beside the main one."""
    before = {child.pid: child for child in earlier.sight.children}
    for child in sight.children:
        then = before.get(child.pid)
        burns = _child_share(sight, earlier, child.pid) > OTHERS_SHARE
        goes_on = then is not None and child.chain != then.chain
        if burns and (goes_on or not child.frames):
            return f"its child {child.pid} computes"
        if goes_on and frames.users_frame(child.frames) is not None:
            return f"its child {child.pid} goes on"
    chains = {thread.ident: (thread.chain, thread.callers) for thread in earlier.sight.others}
    others = any(
        chains.get(thread.ident) != (thread.chain, thread.callers) for thread in sight.others
    ) or len(chains) != len(sight.others)
    if others and _beside_share(sight, earlier) > OTHERS_SHARE:
        return "another thread of it computes"
    return ""


def _entered(word: Word) -> tuple[tuple[str, int], ...]:
    return tuple((one.group, one.number) for one in word.collectives)


def _span_s(sight: Sight, earlier: Earlier) -> float:
    return max(sight.before.at_s - earlier.sight.after.at_s, 1e-3)


def _main_share(sight: Sight, earlier: Earlier) -> float:
    return (sight.before.main_s - earlier.sight.after.main_s) / _span_s(sight, earlier)


def _beside_share(sight: Sight, earlier: Earlier) -> float:
    """Return which share of the time the threads beside the main one were on a processor; 1.0 is one of them always."""
    all_s = sight.before.process_s - earlier.sight.after.process_s
    return max(0.0, all_s / _span_s(sight, earlier) - _main_share(sight, earlier))


def _child_share(sight: Sight, earlier: Earlier, pid: int) -> float:
    now_s, then_s = sight.before.children_s.get(pid), earlier.sight.after.children_s.get(pid)
    if now_s is None or then_s is None:
        return 0.0
    return (now_s - then_s) / _span_s(sight, earlier)


# What stands still


def _still(sight: Sight, word: Word, earlier: Earlier, still_s: float) -> Finding:
    """Say what a rank is in of which nothing has moved."""
    if burns(sight.before, earlier.sight.after):
        return _burning(sight, word, earlier)
    if _is_in_endless(sight, earlier.sight) and sight.alone and not sight.children:
        doing = m.Doing.SLEEPS if sight.wait.asleep else m.Doing.SPINS
        return _in_loop(sight, doing)
    proof = _proof(sight, word, earlier, still_s)
    if proof:
        doing = m.Doing.SLEEPS if sight.wait.asleep else m.Doing.BLOCKED
        return Finding(doing, proof, certain=True)
    stack = sight.main.frames if sight.main is not None else ()
    awaited = _awaited(sight)
    if _beside_share(sight, earlier) > BURNS_SHARE and not (awaited and frames.is_collective(stack)):
        return Finding(m.Doing.SPINS, "its native threads compute")
    burning = [c for c in sight.children if _child_share(sight, earlier, c.pid) > BURNS_SHARE]
    if burning:
        where = frames.place(burning[0].frames)
        return Finding(m.Doing.SPINS, f"its child {burning[0].pid} computes at one place, {where}")
    if awaited:
        return Finding(m.Doing.WAITS, f"in {awaited}")
    if _awaits_device(sight, word):
        return Finding(m.Doing.WAITS, "waits for its GPU, which has collectives to run")
    if sight.main is None and sight.wait.lack:
        return Finding(m.Doing.UNSEEN, sight.why_no_stack)
    if not sight.wait.asleep:
        held = f", which {word.holder.words}" if word.holder is not None else ""
        return Finding(m.Doing.BLOCKED, f"{sight_words.in_words(sight)}{held}")
    again = earlier.ends_at_s is not None and sight.after.at_s > earlier.ends_at_s + RENEWED_S
    if again:
        restless = replace(sight, wait=replace(sight.wait, ends_s=None))
        return Finding(m.Doing.SLEEPS, f"{sight_words.in_words(restless)}, again and again")
    return Finding(m.Doing.SLEEPS, sight_words.in_words(sight))


def _awaited(sight: Sight) -> str:
    """Return what other ranks are waited for in. What C code does is told by the user's line alone, and so only where it
    can be that by the kernel's word, too."""
    stack = sight.main.frames if sight.main is not None else ()
    named = frames.awaits_ranks(stack, sight.line.text)
    if frames.called(stack) or not sight.wait.call:
        return named
    at_network = sight.wait.call in kernel.NETWORK
    if named == frames.STORE or sight.at_store:
        return frames.STORE if at_network else ""
    return named if at_network or sight.wait.call == "futex" else ""


def _burning(sight: Sight, word: Word, earlier: Earlier) -> Finding:
    """Say what a rank is in whose main thread computes and moves nowhere."""
    if sight.main is None:
        return Finding(m.Doing.UNSEEN, f"computes; {sight.why_no_stack}")
    awaited = frames.awaits_ranks(sight.main.frames, "")
    if awaited and frames.is_collective(sight.main.frames):
        return Finding(m.Doing.WAITS, f"in {awaited}")
    if _awaits_device(sight, word):
        return Finding(m.Doing.WAITS, "waits for its GPU, which has collectives to run")
    if _is_in_endless(sight, earlier.sight):
        return _in_loop(sight, m.Doing.SPINS)
    if word.trapped:
        return Finding(m.Doing.SPINS, TRAPPED, certain=True)
    if word.gil_held:
        # No proof, however long: a sort, a parser or the garbage collector ends, and on a busy machine late. But no
        # long computation either: those give the lock back, so this has no more patience than what is blocked.
        return Finding(m.Doing.BLOCKED, "in C code that keeps Python's lock (the GIL)")
    if sight.gpu and frames.awaits_device(sight.main.frames, sight.line.text):
        return Finding(m.Doing.SPINS, "waits for its GPU")
    return Finding(m.Doing.SPINS, "computes at one place")


def _is_in_endless(*sights: Sight) -> bool:
    """Tell whether the main thread is each time in a loop that neither itself nor another Python thread can end."""
    loops = [sight.loop for sight in sights if sight.loop is not None]
    alone = all(sight.alone for sight in sights)
    return len(loops) == len(sights) and (alone or all(loop.ending is Ending.NEVER for loop in loops))


def _in_loop(sight: Sight, doing: m.Doing) -> Finding:
    """Say that a rank is in its loop without an end, or with one that is far off."""
    assert sight.loop is not None
    lasts_s = sight.loop.lasts_s
    why = f"{LASTS} {seconds_text(lasts_s)} or more" if lasts_s else ENDLESS
    return Finding(doing, why, certain=True, goes_on=False, lasts_s=lasts_s)


def _loops_at(sight: Sight, found: Finding) -> int:
    """Return the index of the frame whose loop has no end, where that is what was found."""
    if not found.why.startswith((ENDLESS, LASTS)) or sight.loop is None or sight.main is None:
        return 0
    return sight.main.frames.index(sight.loop.frame)


def _awaits_device(sight: Sight, word: Word) -> bool:
    stack = sight.main.frames if sight.main is not None else ()
    return sight.gpu and word.on_device and frames.awaits_device(stack, sight.line.text)


def _proof(sight: Sight, word: Word, earlier: Earlier, still_s: float) -> str:
    """Return in words why an idle rank cannot go on by itself; nothing where that is not proved."""
    wait, stack = sight.wait, sight.main.frames if sight.main is not None else ()
    if sight_words.is_at_prompt(sight):
        return sight_words.in_words(sight)
    if wait.asleep and stack and wait.ends_s is not None and wait.ends_s > LONG_S:
        return sight_words.in_words(sight)
    if sight.locked and earlier.sight.locked and not word.on_device:
        others = {0: "", 1: ", and does not go on either"}.get(
            len(sight.others), ", and no other thread goes on either"
        )
        return f"{sight_words.in_words(sight)}{others}"
    return relief.none_left(sight, still_s)
