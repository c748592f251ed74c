"""Sample of a rank at one moment: its stacks, its waits in the kernel, its resource use, its children.

This module only reads; `classify` judges. Reading may take long on a sick host, so it runs in a thread of its own. The
judged thread is the one that makes the optimizer steps; before the first step, and without steps, the main thread.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.agent.hang import kernel_wait, open_files, stack_frames
from orchestrator.agent.hang.kernel_wait import NO_WAIT, Wait
from orchestrator.agent.hang.python_stacks import RankStack
from orchestrator.agent.ranks import io_counter, rank_start, stack_dump
from orchestrator.agent.ranks.stack_dump import ThreadStack
from orchestrator.core.host import procfs
from orchestrator.core.status_types import Frame

CHILDREN_MAX = 64
THREADS_MAX = 512
PTHREAD_BYTES = 1536
"""How far into glibc's `struct pthread` the thread's id is searched: it is at 720 on x86_64, earlier elsewhere."""

_SERVICE_PROGRAMS = (
    "multiprocessing.resource_tracker",
    "torch/_inductor/compile_worker",
)
_FORK_SERVER = "multiprocessing.forkserver"
"""Children that wait for a rank, and for which a rank never waits; the children of the fork server have its words."""

_LOADER_WORKER_NAME = "pt_data_worker"
"""torch's name for the process of a DataLoader's worker; a stopped one shows no stack."""

_MONITOR_FILES = ("/tqdm/_monitor.py", "/torch/_inductor/", "/torch/utils/_cpp_extension_versioner.py")
"""Files of Python threads that only watch: no other thread waits for them."""


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """The resources that a rank has used until `at_s` (monotonic)."""

    at_s: float
    # The judged thread: on a processor or waiting for one.
    main_s: float
    # All threads of the rank's own process on processors.
    process_s: float
    # By child: the greater of both.
    children_s: Mapping[int, float]
    # Read and written by all of its processes.
    io_bytes: int
    # How often each thread of the rank's own process, and the main thread of each child, had to wait and continued.
    wakes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Child:
    """A descendant of a rank's process, such as a DataLoader worker."""

    pid: int
    ppid: int
    # The name of its program.
    name: str
    state: str
    # The frames and the wait of its main thread.
    frames: tuple[Frame, ...]
    wait: Wait

    @property
    def chain(self) -> tuple[tuple[str, int, str], ...]:
        """File, line and function of each frame."""
        return tuple((frame.file, frame.line, frame.function) for frame in self.frames)

    @property
    def is_loader_worker(self) -> bool:
        """Whether it is a worker of a DataLoader."""
        return self.name == _LOADER_WORKER_NAME or stack_frames.is_loader_worker(self.frames)


@dataclass(frozen=True, slots=True)
class SideThread:
    """A Python thread other than the judged one. `tid`: its id in the kernel, 0 where that is not known."""

    tid: int
    stack: ThreadStack
    wait: Wait
    line: str

    @property
    def is_monitor(self) -> bool:
        """Whether the thread only watches: no other thread waits for it. So does one without a frame: C code that asks for
        Python's lock, such as torch's worker server at each inspection while the judged thread keeps that lock."""
        return not self.stack.frames or any(
            watch in frame.file for frame in self.stack.frames for watch in _MONITOR_FILES
        )


@dataclass(frozen=True, slots=True)
class HangSample:
    """One rank at one moment."""

    rank: int
    # The process that trains, and the judged thread of it.
    pid: int
    tid: int
    state: str
    # The judged thread's stack; `why_no_stack` is empty when there is one.
    main: ThreadStack | None
    # The other Python threads, and whether these are all.
    other_threads: tuple[SideThread, ...]
    has_all_threads: bool
    why_no_stack: str
    # The source of the innermost frame, empty unless it is the user's.
    line: str
    # The source of the user's innermost frame, empty where it cannot be read.
    users_line: str
    wait: Wait
    children: tuple[Child, ...]
    # It waits for the rendezvous's store.
    awaits_store: bool
    uses_gpu: bool
    # Measured before the signal for the stacks, and after the answer.
    before: ResourceUse
    after: ResourceUse
    unavailable: tuple[str, ...]

    @property
    def stack(self) -> tuple[Frame, ...]:
        """The frames of the judged thread, innermost first; none where it shows no stack."""
        return self.main.frames if self.main is not None else ()


def measure(pids: tuple[int, ...], tid: int = 0) -> ResourceUse:
    """Return what a rank's processes have used so far; the first of them is the rank's own. `tid`: its judged thread, 0
    for the main one."""
    at_s, first = time.monotonic(), pids[0]
    others = {pid: stat.cpu_s for pid in pids[1:CHILDREN_MAX] if (stat := procfs.stat(pid)) is not None}
    children_s = {pid: max(cpu_s, sum(kernel_wait.read_scheduled_s(pid, pid))) for pid, cpu_s in others.items()}
    io_bytes = sum(io_counter.io_bytes(pid) or 0 for pid in pids[:CHILDREN_MAX])
    stat = procfs.stat(first)
    process_s = stat.cpu_s if stat is not None else 0.0
    wakes = {tid: kernel_wait.read_wakes(first, tid) for tid in _tids(first)}
    wakes |= {pid: kernel_wait.read_wakes(pid, pid) for pid in others}
    main_s = sum(kernel_wait.read_scheduled_s(first, tid or first)) or process_s
    return ResourceUse(at_s, main_s, process_s, children_s, io_bytes, wakes)


def sample_rank(
    rank: int, stacks: list[RankStack], before: ResourceUse, trainer: tuple[int, int], port: str
) -> HangSample:
    """Return the sample of a rank whose stacks have been taken. `trainer`: the process and the thread that have made
    its steps; zeros before the first step. `port`: that of the rendezvous's store."""
    trainer_stack = _find_trainer(stacks, trainer[0])
    tid = trainer_stack.tid
    if (
        trainer[0] == trainer_stack.pid
        and procfs.has_thread(*trainer)
        and stack_dump.dumped_stack(trainer_stack.text) is None
    ):
        tid = trainer[1]
    main = stack_dump.dumped_stack(trainer_stack.text)
    wait = kernel_wait.read_wait(trainer_stack.pid, tid)
    after = measure(tuple(dict.fromkeys((trainer_stack.pid, *(stack.pid for stack in stacks)))), tid)
    return HangSample(
        rank,
        trainer_stack.pid,
        tid,
        trainer_stack.state,
        main,
        (),
        len(_tids(trainer_stack.pid)) == 1,
        "" if main is not None else (trainer_stack.text.strip().splitlines() or ["gone"])[0][:200],
        _read_innermost_line(trainer_stack.pid, main, start_time_s(trainer_stack.pid)),
        read_users_line(trainer_stack.pid, main, start_time_s(trainer_stack.pid)),
        wait,
        tuple(_make_child(stack) for stack in _find_children(stacks, trainer_stack.pid)),
        wait.port != 0 and str(wait.port) == port,
        open_files.uses_gpu(trainer_stack.pid),
        before,
        after,
        (wait.unavailable,) if wait.unavailable else (),
    )


def add_threads(sample: HangSample, dump: str) -> HangSample:
    """Add the other Python threads, from torch's dump of all threads; and the judged thread's stack, where no signal
    could be sent for it."""
    threads = [thread for thread in stack_dump.parse_dump(dump) if not thread.current][:THREADS_MAX]
    if not threads:
        return sample
    began_s = start_time_s(sample.pid)
    is_cut = dump.rstrip().endswith(stack_dump.CUT_MARK)
    sides = [_make_side_thread(sample.pid, thread, began_s) for thread in threads]
    if not is_cut and not any(side.tid == sample.pid for side in sides):
        # Its memory cannot be read, but the oldest is the main one.
        sides[-1] = replace(sides[-1], tid=sample.pid)
    judged = next((side for side in sides if side.tid == sample.tid), None)
    others = tuple(side for side in sides if side is not judged)
    sample = replace(sample, other_threads=others, has_all_threads=judged is not None and not is_cut)
    if sample.main is not None or judged is None:
        return sample
    wait = kernel_wait.read_wait(sample.pid, sample.tid)
    line = read_users_line(sample.pid, judged.stack, began_s)
    return replace(sample, main=judged.stack, why_no_stack="", line=judged.line, users_line=line, wait=wait)


def _make_side_thread(pid: int, thread: ThreadStack, began_s: float) -> SideThread:
    tid = _find_tid(pid, thread.ident) or 0
    wait = kernel_wait.read_wait(pid, tid) if tid else NO_WAIT
    return SideThread(tid, thread, wait, _read_innermost_line(pid, thread, began_s))


def _read_innermost_line(pid: int, thread: ThreadStack | None, began_s: float) -> str:
    """Return the source of the innermost frame if it is the user's."""
    if thread is None or not thread.frames or not stack_dump.is_users_frame(thread.frames[0]):
        return ""
    return read_line(pid, thread.frames[0], began_s)


def read_users_line(pid: int, thread: ThreadStack | None, began_s: float) -> str:
    """Return the source of the user's innermost frame."""
    frame = stack_dump.find_users_frame(thread.frames) if thread is not None else None
    return read_line(pid, frame, began_s) if frame is not None else ""


def _find_trainer(stacks: list[RankStack], trainer_pid: int) -> RankStack:
    """Return the process that is the rank: the one that made steps; else, of a chain of processes that each wait for
    the next, the last with a Python stack.

    An entry point may be a shell script or a launcher: then the rank is the child that it waits for.
    """
    for stack in stacks:
        if stack.pid == trainer_pid:
            return stack
    chosen, stack, rest = stacks[0], stacks[0], stacks[1:]
    while True:
        main = stack_dump.dumped_stack(stack.text)
        chosen = chosen if main is None else stack
        if main is not None and not any(frame.file.endswith("/subprocess.py") for frame in main.frames[:3]):
            return chosen
        if main is None and stack.state not in "TtZX" and procfs.catches_signal(stack.pid, rank_start.STACK_SIGNAL):
            return stack  # not a shell, but a Python that the stack signal would have disturbed
        child = kernel_wait.read_wait(stack.pid, stack.pid).child
        programs = (other for other in rest if _is_program_of(stack.pid, other))
        candidates = [other for other in programs if child in (other.pid, 0, None)]
        if not candidates:
            return chosen
        stack, rest = candidates[0], rest[rest.index(candidates[0]) + 1 :]


def _is_program_of(pid: int, stack: RankStack) -> bool:
    """Return whether a process is a child of `pid` that runs a program of its own, and no fork of multiprocessing."""
    stat, main = procfs.stat(stack.pid), stack_dump.dumped_stack(stack.text)
    forked = main is not None and any(frame.file.endswith("/multiprocessing/process.py") for frame in main.frames)
    return stat is not None and stat.ppid == pid and not forked


def _find_children(stacks: list[RankStack], own_pid: int) -> list[RankStack]:
    """Return the descendants of the rank's own process, without those that only serve it."""
    descendants = {own_pid}
    for stack in stacks:  # parents come before their children
        stat = procfs.stat(stack.pid)
        if stat is not None and stat.ppid in descendants:
            descendants.add(stack.pid)
    descendants.discard(own_pid)
    return [stack for stack in stacks if stack.pid in descendants and not _is_service_process(stack.pid)][:CHILDREN_MAX]


def _is_service_process(pid: int) -> bool:
    argv = _argv(pid)
    if _FORK_SERVER in argv:
        stat = procfs.stat(pid)
        return stat is None or argv != _argv(stat.ppid)
    return any(word in argv for word in _SERVICE_PROGRAMS)


def _argv(pid: int) -> str:
    return procfs.read_text(procfs.PROC / str(pid) / "cmdline")


def _make_child(stack: RankStack) -> Child:
    main, stat = stack_dump.dumped_stack(stack.text), procfs.stat(stack.pid)
    ppid = stat.ppid if stat is not None else 0
    wait = kernel_wait.read_wait(stack.pid, stack.pid)
    return Child(stack.pid, ppid, _name(stack.pid), stack.state, main.frames if main else (), wait)


def _tids(pid: int) -> list[int]:
    return sorted(map(int, procfs.list_names(procfs.PROC / str(pid) / "task")))[:THREADS_MAX]


def _find_tid(pid: int, ident: int) -> int | None:
    """Return the kernel's id of a pthread: the first number in its struct that is a thread id of the process."""
    tids = set(_tids(pid))
    raw = kernel_wait.ProcessMemory(pid).read(ident, PTHREAD_BYTES)
    numbers = struct.unpack(f"<{len(raw) // 4}i", raw[: len(raw) // 4 * 4])
    return next((number for number in numbers if number in tids), None)


def _name(pid: int) -> str:
    """Return the name of a process's program, without its arguments, which may hold secrets."""
    return procfs.read_text(Path(f"/proc/{pid}/comm")).strip()


def start_time_s(pid: int) -> float:
    """Return the start time of a process, as Unix time."""
    stat = procfs.stat(pid)
    if stat is None:
        return 0.0
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + stat.start_ticks / ticks_per_s


def read_line(pid: int, frame: Frame, began_s: float) -> str:
    """Return the line of a frame of process `pid`, which began at `began_s` (Unix time); empty if unreadable."""
    return stack_dump.read_source_line(frame, began_s, f"/proc/{pid}/cwd")
