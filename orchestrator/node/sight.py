"""What is there to see of a rank at one moment? Its stacks, its waits in the kernel, what it has spent, its children.

All reading is here and no judgement (see `examine`). It may take long on a sick host, so it runs in a thread of its own.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.node import frames, kernel, openfiles, procfs, source, traffic
from orchestrator.node.frames import Frame, Thread
from orchestrator.node.kernel import Wait
from orchestrator.node.lasting import LONG_S
from orchestrator.node.source import Line, Loop
from orchestrator.node.stacks import RankStack

TIMERS = frozenset({signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO})
"""Signals that come by themselves, and may end any wait."""

CHILDREN_MAX = 64
THREADS_MAX = 100
PTHREAD_BYTES = 1536
"""How far into glibc's `struct pthread` the thread's id is looked for: 720 on x86_64, less elsewhere."""

_SERVANTS = (
    b"multiprocessing.resource_tracker",
    b"torch/_inductor/compile_worker",
    b"multiprocessing.forkserver",
)
"""Children that wait for a rank and for which no rank ever waits."""

_LOADERS_NAME = "pt_data_worker"
"""What torch calls the process of a DataLoader's worker; one that is stopped shows no stack."""

_WATCHES = ("/tqdm/_monitor.py", "/torch/_inductor/", "/torch/utils/_cpp_extension_versioner.py")
"""Python threads that only watch, and let nobody go on."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What a rank has spent until `at_s` (monotonic). `main_s`: its main thread on a processor or waiting for one, and
    `queue_s`: the latter alone;
    `process_s`: all its threads on processors; `children_s`: the greater of both for each child; `io_bytes`: read and
    written; `wakes`: how often its main thread had to wait and went on."""

    at_s: float
    main_s: float
    queue_s: float
    process_s: float
    children_s: Mapping[int, float]
    io_bytes: int
    wakes: int


@dataclass(frozen=True, slots=True)
class Child:
    """A descendant of a rank's process, such as a DataLoader worker. `ppid`: its parent; `name`: of its program;
    `frames`: of its main thread; `alone`: it has no other thread that could do anything by itself; `writers`: see `Sight`, here
    for FIFOs only; `wait`: of a sleep it tells what is left at least."""

    pid: int
    ppid: int
    name: str
    state: str
    frames: tuple[Frame, ...]
    alone: bool
    wait: Wait
    writers: tuple[int, ...] | None

    @property
    def chain(self) -> tuple[tuple[str, int, str], ...]:
        """Where it is, lines included."""
        return tuple((frame.file, frame.line, frame.function) for frame in self.frames)

    @property
    def is_loaders(self) -> bool:
        """Tell whether it is a worker of a DataLoader."""
        return self.name == _LOADERS_NAME or frames.is_worker_of_loader(self.frames)


@dataclass(frozen=True, slots=True)
class Sight:
    """One rank at one moment. `pid`: of the process that trains; `why_no_stack`: empty when there is one.

    `line`: the source of the innermost frame, empty unless it is the user's; `loop`: one that does not end; `writers`: who could write into the pipe
    that the main thread reads, None when it reads none or nobody knows; `locked`: the main thread waits for a lock without
    a time limit, and no other thread lets it go on; `at_store`: it asks the rendezvous's store; `alone`: it has no other Python thread, but
    such as only watch; `caught`: the signals that it has handlers for; `holder`: the process that holds the lock on a file that the main thread waits for; `before` and `after`: measured before the signal for
    the stacks, and after the answer.
    """

    rank: int
    pid: int
    state: str
    main: Thread | None
    others: tuple[Thread, ...]
    why_no_stack: str
    line: Line
    loop: Loop | None
    wait: Wait
    children: tuple[Child, ...]
    writers: tuple[int, ...] | None
    locked: bool
    at_store: bool
    alone: bool
    holder: int | None
    gpu: bool
    caught: frozenset[int]
    before: Effort
    after: Effort
    lacks: tuple[str, ...]


def measure(pids: tuple[int, ...]) -> Effort:
    """Return what a rank's processes have spent so far, the first of them being the rank's own."""
    at_s, first = time.monotonic(), pids[0]
    others = {pid: stat.cpu_s for pid in pids[1:CHILDREN_MAX] if (stat := procfs.look(pid)) is not None}
    children_s = {pid: max(cpu_s, _main_s(pid, cpu_s)) for pid, cpu_s in others.items()}
    io_bytes = sum(traffic.io_bytes(pid) or 0 for pid in pids[:CHILDREN_MAX])
    stat = procfs.look(first)
    process_s = stat.cpu_s if stat is not None else 0.0
    run_s, queue_s = _scheduled_s(first)
    return Effort(at_s, run_s + queue_s or process_s, queue_s, process_s, children_s, io_bytes, _wakes(first))


def take(rank: int, found: list[RankStack], before: Effort, trainer_pid: int) -> Sight:
    """Look at one rank whose stacks have been taken. `trainer_pid`: the process that has made its steps, 0 before."""
    own = _trainer(found, trainer_pid)
    after = measure(tuple(dict.fromkeys((own.pid, *(one.pid for one in found)))))
    threads = frames.parse(own.text)
    main = frames.main_thread(own.text)
    others = tuple(thread for thread in threads if thread is not main and thread != main)
    wait = kernel.wait_of(own.pid, own.pid)
    started_s = _started_s(own.pid)
    innermost = _innermost(main)
    line = source.line_at(own.pid, innermost, started_s) if innermost is not None else source.NO_LINE
    loop = source.loop_at(own.pid, main.frames, started_s) if main is not None else None
    children = tuple(_child(one) for one in _children(found, own.pid))
    why = "" if main is not None else (own.text.strip().splitlines() or ["gone"])[0][:200]
    return Sight(
        rank, own.pid, own.state, main, others, why, line, loop, wait, children, _writers(own.pid, wait),
        main is not None and _is_locked(own.pid, main, others, wait, line, started_s) and not children, _is_at_store(own.pid, wait),
        all(_watches(thread) for thread in others),
        openfiles.lock_holder(own.pid) if wait.call in kernel.LOCKS else None, openfiles.uses_gpu(own.pid),
        procfs.caught(own.pid), before, after,
        (wait.lack,) if wait.lack else (),
    )  # fmt: skip


def may_act(thread: Thread) -> bool:
    """Tell whether a Python thread may do something by itself that lets others go on."""
    return not _watches(thread) and not frames.serves(thread.frames)


def _trainer(found: list[RankStack], trainer_pid: int) -> RankStack:
    """Choose the process that is the rank: the one that made steps, else the last one with a Python stack of those that
    wait for one another, from the first on.

    An entry point may be a shell script or a launcher: then the rank is the child that it waits for.
    """
    for one in found:
        if one.pid == trainer_pid:
            return one
    chosen, one, left = found[0], found[0], found[1:]
    while True:
        main = frames.main_thread(one.text)
        chosen = chosen if main is None else one
        if main is not None and not any(frame.file.endswith("/subprocess.py") for frame in main.frames[:3]):
            return chosen
        child = kernel.wait_of(one.pid, one.pid).child
        below = [other for other in left if _is_program_of(one.pid, other) and child in (other.pid, 0, None)]
        if not below:
            return chosen
        one, left = below[0], left[left.index(below[0]) + 1 :]


def _is_program_of(pid: int, one: RankStack) -> bool:
    """Tell whether a process is a child of `pid` that runs a program of its own, and not one of multiprocessing's."""
    stat, main = procfs.look(one.pid), frames.main_thread(one.text)
    forked = main is not None and any(
        frame.file.endswith("/multiprocessing/process.py") for frame in main.frames
    )
    return stat is not None and stat.ppid == pid and not forked


def _children(found: list[RankStack], own_pid: int) -> list[RankStack]:
    """Return the processes below the rank's own, without those that only serve it."""
    below = {own_pid}
    for one in found:  # parents come before their children
        stat = procfs.look(one.pid)
        if stat is not None and stat.ppid in below:
            below.add(one.pid)
    below.discard(own_pid)
    return [one for one in found if one.pid in below and not _is_servant(one.pid)][:CHILDREN_MAX]


def _is_servant(pid: int) -> bool:
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(word in argv for word in _SERVANTS)


def _child(one: RankStack) -> Child:
    main = frames.main_thread(one.text)
    others = (thread for thread in frames.parse(one.text) if thread != main)
    wait, stat = kernel.wait_of(one.pid, one.pid), procfs.look(one.pid)
    stack = main.frames if main else ()
    single = bool(stack) or _has_one_thread(one.pid)  # who shows no stack may have any threads
    if not stack and wait.asleep and wait.ends_s:
        # No signal has interrupted it, so that is all of a sleep that began with the process at the earliest.
        wait = replace(wait, ends_s=max(0.0, wait.ends_s - (time.time() - _started_s(one.pid))))
    # Not for pipes: idle workers all read one, and for each all of the host would be searched.
    is_pipe = any(openfiles.link_of(one.pid, fd).startswith("pipe:[") for fd in wait.fds)
    writers = None if is_pipe else _writers(one.pid, wait)
    return Child(
        one.pid, stat.ppid if stat is not None else 0, _name(one.pid), one.state, stack,
        single and not any(may_act(thread) for thread in others), wait, writers,
    )  # fmt: skip


def _has_one_thread(pid: int) -> bool:
    try:
        return len(list((procfs.PROC / str(pid) / "task").iterdir())) == 1
    except OSError:
        return False


def _innermost(thread: Thread | None) -> Frame | None:
    """Return the innermost frame of a thread, if it is the user's."""
    return thread.frames[0] if thread is not None and thread.frames and thread.frames[0].is_users else None


def _writers(pid: int, wait: Wait) -> tuple[int, ...] | None:
    """Return who could write into the pipe or FIFO that a thread reads, or waits to open for reading."""
    if wait.call in kernel.OPENS:
        path = Path(openfiles.absolute(pid, wait.target))
        # Not in state D: a file system that does not answer would hold us as well.
        waits_for_partner = wait.wchan in ("wait_for_partner", "fifo_open") or (
            not wait.wchan and path.is_fifo()
        )
        return openfiles.writers(str(path)) if waits_for_partner else None
    if wait.for_ever and len(wait.fds) == 1 and wait.call not in kernel.WRITES:
        target = openfiles.link_of(pid, wait.fds[0])
        if target.startswith("pipe:[") or ("pipe" in wait.wchan and target):
            return openfiles.writers(target)
    return None


def _is_locked(
    pid: int, main: Thread, others: tuple[Thread, ...], wait: Wait, line: Line, started_s: float
) -> bool:
    """Tell whether the main thread waits, without a limit, for another one, none of them lets it go on, and no timer does."""
    if not (wait.call == "futex" and wait.for_ever and frames.is_on_lock(main.frames, line.text)):
        return False
    if procfs.caught(pid) & TIMERS:
        return False
    return all(_watches(thread) or _stands(pid, thread, started_s) for thread in others[:THREADS_MAX])


def _stands(pid: int, thread: Thread, started_s: float) -> bool:
    """Tell whether a thread beside the main one lets nobody go on: it waits for another thread without a limit, sleeps
    for long, or is in a loop that never ends."""
    tid = _tid(pid, thread.ident)
    if tid is None:
        return False
    wait, innermost = kernel.wait_of(pid, tid), _innermost(thread)
    if wait.asleep and wait.ends_s is not None and wait.ends_s > LONG_S:
        return True
    text = source.text_at(pid, innermost, started_s) if innermost is not None else ""
    if wait.call == "futex" and wait.for_ever and frames.is_on_lock(thread.frames, text):
        return True
    return source.loop_at(pid, thread.frames, started_s) is not None  # last: it reads all of a script


def _is_at_store(pid: int, wait: Wait) -> bool:
    """Tell whether the main thread waits for an answer of the rendezvous's store, by the address that the rank was given."""
    if not wait.target.startswith("the connection to "):
        return False
    environ = procfs.text(Path(f"/proc/{pid}/environ")).split("\0")
    port = next((one.partition("=")[2] for one in environ if one.startswith("MASTER_PORT=")), "")
    return bool(port) and wait.target.endswith(f":{port}")


def _watches(thread: Thread) -> bool:
    return any(watch in frame.file for frame in thread.frames for watch in _WATCHES)


def _tid(pid: int, ident: int) -> int | None:
    """Return the kernel's id of the thread with this pthread: the first number in it that is one of the process's."""
    try:
        tids = {int(name) for name in os.listdir(f"/proc/{pid}/task")}  # noqa: PTH208
    except OSError:
        return None
    raw = kernel.Memory(pid).read(ident, PTHREAD_BYTES)
    numbers = struct.unpack(f"<{len(raw) // 4}i", raw[: len(raw) // 4 * 4])
    return next((number for number in numbers if number in tids), None)


def _main_s(pid: int, process_s: float) -> float:
    """Return how long the main thread was on a processor or in the queue for one; all threads' time where that is
    not told (a kernel without schedstats)."""
    return sum(_scheduled_s(pid)) or process_s


def _scheduled_s(pid: int) -> tuple[float, float]:
    """Return how long the main thread was on a processor, and how long in the queue for one; 0 where it is not told."""
    try:
        run_ns, queue_ns = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[:2]
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(run_ns) / 1e9, int(queue_ns) / 1e9


def _wakes(pid: int) -> int:
    """Return the voluntary context switches of the main thread; what comes through recv() is in no other counter."""
    lines = procfs.text(Path(f"/proc/{pid}/task/{pid}/status")).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:")), 0)


def _name(pid: int) -> str:
    """Return the name of a process's program; not its arguments, which may hold secrets."""
    return procfs.text(Path(f"/proc/{pid}/comm")).strip()


def _started_s(pid: int) -> float:
    """Return when a process began, as Unix time."""
    stat = procfs.look(pid)
    if stat is None:
        return 0.0
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + stat.start_ticks / ticks_per_s
