"""Sight of a rank at one moment: its stacks, its waits in the kernel, what it has spent, its children.

All reading is here and no judgement (see `examine`). It may take long on a sick host, so it runs in a thread of its own.
What is judged is the thread that makes the optimizer steps; before the first step, and in a rank without steps, the main
thread.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.agent.probes import kernel_wait, open_files, source_line, stack_frames
from orchestrator.agent.probes.kernel_wait import NO_WAIT, Wait
from orchestrator.agent.probes.python_stacks import RankStack
from orchestrator.agent.probes.stack_frames import Frame, Thread
from orchestrator.agent.rank import io_counter, processes
from orchestrator.core.host import procfs

TIMERS = frozenset({signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO})
"""Signals that come by themselves, and may end any wait."""

EVERYBODYS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGFPE,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGINT,
        signal.SIGCHLD,
        32,
        33,
        processes.STACK_SIGNAL,
    }
)
"""Signals that Python, torch, the hook and glibc (the first two of real time) catch in every process, and such as come
from children alone."""

CHILDREN_MAX = 64
THREADS_MAX = 512
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
"""Python threads that only watch, and let nothing go on."""


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """What a rank has spent until `at_s` (monotonic). `main_s`: the thread that is judged, on a processor or waiting for
    one, and `queue_s`: the latter alone; `process_s`: all its threads on processors; `children_s`: the greater of both
    for each child; `io_bytes`: read and written by all of its processes; `wakes`: by thread of the rank's own process,
    and main thread of each child, how often it had to wait and went on."""

    at_s: float
    main_s: float
    queue_s: float
    process_s: float
    children_s: Mapping[int, float]
    io_bytes: int
    wakes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Child:
    """A descendant of a rank's process, such as a DataLoader worker. `ppid`: its parent; `name`: of its program;
    `frames`, `wait`: of its main thread."""

    pid: int
    ppid: int
    name: str
    state: str
    frames: tuple[Frame, ...]
    wait: Wait

    @property
    def chain(self) -> tuple[tuple[str, int, str], ...]:
        """Where it is, lines included."""
        return tuple((frame.file, frame.line, frame.function) for frame in self.frames)

    @property
    def is_loaders(self) -> bool:
        """Tell whether it is a worker of a DataLoader."""
        return self.name == _LOADERS_NAME or stack_frames.is_worker_of_loader(self.frames)


@dataclass(frozen=True, slots=True)
class SideThread:
    """A Python thread beside the one that is judged. `tid`: the kernel's id of it, 0 where that is not known."""

    tid: int
    stack: Thread
    wait: Wait
    line: str

    @property
    def watches(self) -> bool:
        """Tell whether it only watches, and lets nothing go on."""
        return any(watch in frame.file for frame in self.stack.frames for watch in _WATCHES)


@dataclass(frozen=True, slots=True)
class RankSample:
    """One rank at one moment. `pid`: of the process that trains, `tid`: of the thread of it that is judged; `main`: that
    thread's stack; `why_no_stack`: empty when there is one. `others`: the Python threads beside it, and `knows_others`
    whether these are all; where it is not known, nothing is proved.

    `line`: the source of the innermost frame, empty unless it is the user's; `at_store`: it asks the rendezvous's store;
    `types`: whether somebody else may type where it reads (another process has the other end of standard input open);
    `caught`: the signals that it has handlers for; `before` and `after`: measured before the signal for the stacks, and
    after the answer.
    """

    rank: int
    pid: int
    tid: int
    state: str
    main: Thread | None
    others: tuple[SideThread, ...]
    knows_others: bool
    why_no_stack: str
    line: str
    wait: Wait
    children: tuple[Child, ...]
    at_store: bool
    types: bool
    gpu: bool
    caught: frozenset[int]
    before: ResourceUse
    after: ResourceUse
    lacks: tuple[str, ...]

    @property
    def stack(self) -> tuple[Frame, ...]:
        """The frames of the thread that is judged, innermost first; none where it shows no stack."""
        return self.main.frames if self.main is not None else ()

    @property
    def signals(self) -> frozenset[int]:
        """The signals that it has handlers for and that not every rank has."""
        return self.caught - EVERYBODYS


def measure(pids: tuple[int, ...], tid: int = 0) -> ResourceUse:
    """Return what a rank's processes have spent so far, the first of them being the rank's own. `tid`: the thread of it
    that is judged, 0 for the main one."""
    at_s, first = time.monotonic(), pids[0]
    others = {pid: stat.cpu_s for pid in pids[1:CHILDREN_MAX] if (stat := procfs.stat(pid)) is not None}
    children_s = {pid: max(cpu_s, _main_s(pid, cpu_s)) for pid, cpu_s in others.items()}
    io_bytes = sum(io_counter.io_bytes(pid) or 0 for pid in pids[:CHILDREN_MAX])
    stat = procfs.stat(first)
    process_s = stat.cpu_s if stat is not None else 0.0
    run_s, queue_s = _scheduled_s(first, tid or first)
    wakes = {one: kernel_wait.wakes(first, one) for one in _tids(first)} | {
        pid: kernel_wait.wakes(pid, pid) for pid in others
    }
    return ResourceUse(at_s, run_s + queue_s or process_s, queue_s, process_s, children_s, io_bytes, wakes)


def take(rank: int, found: list[RankStack], before: ResourceUse, trainer: tuple[int, int]) -> RankSample:
    """Look at one rank whose stacks have been taken. `trainer`: the process that has made its steps, and the thread of
    it; zeros before the first step."""
    own = _trainer(found, trainer[0])
    tid = own.tid
    if trainer[0] == own.pid and procfs.has_thread(*trainer) and stack_frames.own_stack(own.text) is None:
        tid = trainer[1]
    main = stack_frames.own_stack(own.text)
    wait = kernel_wait.wait_of(own.pid, tid)
    after = measure(tuple(dict.fromkeys((own.pid, *(one.pid for one in found)))), tid)
    return RankSample(
        rank,
        own.pid,
        tid,
        own.state,
        main,
        (),
        len(_tids(own.pid)) == 1,
        "" if main is not None else (own.text.strip().splitlines() or ["gone"])[0][:200],
        _line(own.pid, main, _started_s(own.pid)),
        wait,
        tuple(_child(one) for one in _children(found, own.pid)),
        _is_at_store(own.pid, wait),
        _may_be_typed_to(own.pid, wait),
        open_files.uses_gpu(own.pid),
        procfs.caught(own.pid),
        before,
        after,
        (wait.lack,) if wait.lack else (),
    )


def with_threads(seen: RankSample, dump: str) -> RankSample:
    """Add the Python threads beside the one that is judged, from torch's own dump of all; and that one's stack, where no
    signal could be sent for it."""
    threads = [thread for thread in stack_frames.parse(dump) if not thread.current][:THREADS_MAX]
    if not threads:
        return seen
    started_s = _started_s(seen.pid)
    is_cut = dump.rstrip().endswith(stack_frames.CUT)
    sides = [_side(seen.pid, thread, started_s) for thread in threads]
    if not is_cut and not any(one.tid == seen.pid for one in sides):
        sides[-1] = replace(
            sides[-1], tid=seen.pid
        )  # its memory cannot be read, but the oldest is the main one
    judged = next((one for one in sides if one.tid == seen.tid), None)
    others = tuple(one for one in sides if one is not judged)
    seen = replace(seen, others=others, knows_others=judged is not None and not is_cut)
    if seen.main is not None or judged is None:
        return seen
    wait = kernel_wait.wait_of(seen.pid, seen.tid)
    return replace(seen, main=judged.stack, why_no_stack="", line=judged.line, wait=wait)


def _side(pid: int, thread: Thread, started_s: float) -> SideThread:
    """Look at one Python thread of a process."""
    tid = _tid(pid, thread.ident) or 0
    wait = kernel_wait.wait_of(pid, tid) if tid else NO_WAIT
    return SideThread(tid, thread, wait, _line(pid, thread, started_s))


def _line(pid: int, thread: Thread | None, started_s: float) -> str:
    """Return the source of the innermost frame if it is the user's."""
    if thread is None or not thread.frames or not thread.frames[0].is_users:
        return ""
    return source_line.line_at(pid, thread.frames[0], started_s)


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
        main = stack_frames.own_stack(one.text)
        chosen = chosen if main is None else one
        if main is not None and not any(frame.file.endswith("/subprocess.py") for frame in main.frames[:3]):
            return chosen
        if main is None and one.state not in "TtZX" and procfs.catches(one.pid, processes.STACK_SIGNAL):
            return one  # a Python that was not to be asked, and no shell
        child = kernel_wait.wait_of(one.pid, one.pid).child
        below = [other for other in left if _is_program_of(one.pid, other) and child in (other.pid, 0, None)]
        if not below:
            return chosen
        one, left = below[0], left[left.index(below[0]) + 1 :]


def _is_program_of(pid: int, one: RankStack) -> bool:
    """Tell whether a process is a child of `pid` that runs a program of its own, and not one of multiprocessing's."""
    stat, main = procfs.stat(one.pid), stack_frames.own_stack(one.text)
    forked = main is not None and any(
        frame.file.endswith("/multiprocessing/process.py") for frame in main.frames
    )
    return stat is not None and stat.ppid == pid and not forked


def _children(found: list[RankStack], own_pid: int) -> list[RankStack]:
    """Return the processes below the rank's own, without those that only serve it."""
    below = {own_pid}
    for one in found:  # parents come before their children
        stat = procfs.stat(one.pid)
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
    main, stat = stack_frames.own_stack(one.text), procfs.stat(one.pid)
    return Child(
        one.pid,
        stat.ppid if stat is not None else 0,
        _name(one.pid),
        one.state,
        main.frames if main else (),
        kernel_wait.wait_of(one.pid, one.pid),
    )


def _may_be_typed_to(pid: int, wait: Wait) -> bool:
    """Tell whether another process may write what a rank reads from its standard input, a pipe or a terminal; True where
    that is not known, as of a FIFO or a socket."""
    if 0 not in wait.fds:
        return False
    target = open_files.link_of(pid, 0)
    if not target.startswith(("pipe:[", "/dev/pts/")):
        return True
    writers = open_files.writers(target)
    return writers is None or bool(set(writers) - {pid})


def _is_at_store(pid: int, wait: Wait) -> bool:
    """Tell whether a thread waits for an answer of the rendezvous's store, by the address that the rank was given."""
    if not wait.target.startswith("the connection to "):
        return False
    environ = procfs.text(Path(f"/proc/{pid}/environ")).split("\0")
    port = next((one.partition("=")[2] for one in environ if one.startswith("MASTER_PORT=")), "")
    return bool(port) and wait.target.endswith(f":{port}")


def _tids(pid: int) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))[:THREADS_MAX]  # noqa: PTH208
    except OSError:
        return []


def _tid(pid: int, ident: int) -> int | None:
    """Return the kernel's id of the thread with this pthread: the first number in it that is one of the process's."""
    tids = set(_tids(pid))
    raw = kernel_wait.ProcessMemory(pid).read(ident, PTHREAD_BYTES)
    numbers = struct.unpack(f"<{len(raw) // 4}i", raw[: len(raw) // 4 * 4])
    return next((number for number in numbers if number in tids), None)


def _main_s(pid: int, process_s: float) -> float:
    """Return how long the main thread was on a processor or in the queue for one; all threads' time where that is
    not told (a kernel without schedstats)."""
    return sum(_scheduled_s(pid, pid)) or process_s


def _scheduled_s(pid: int, tid: int) -> tuple[float, float]:
    """Return how long a thread was on a processor, and how long in the queue for one; 0 where it is not told."""
    try:
        run_ns, queue_ns = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[:2]
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(run_ns) / 1e9, int(queue_ns) / 1e9


def _name(pid: int) -> str:
    """Return the name of a process's program; not its arguments, which may hold secrets."""
    return procfs.text(Path(f"/proc/{pid}/comm")).strip()


def _started_s(pid: int) -> float:
    """Return when a process began, as Unix time."""
    stat = procfs.stat(pid)
    if stat is None:
        return 0.0
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + stat.start_ticks / ticks_per_s
