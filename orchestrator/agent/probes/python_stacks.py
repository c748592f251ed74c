"""Where does a rank stand? Its Python stacks by signal, the kernel's word for the rest, and what it died of.

`ask` sends the stack signal to a rank's processes and returns at once; the agent's loop then calls `answer` for all
its ranks until each is done or its own deadline has passed. The signal goes only to a process that has a handler
for it, since its default action kills; and not to a thread that it would wake from a call of C code, or that blocks it
and may wait for signals itself. Each process
answers with the stack of one thread, the main one or the one that trains: to read the others' is safe only under the
GIL, by torch's window (see `flight`).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent.probes import kernel_wait
from orchestrator.agent.rank.hook import SOCKET_FILE, STACKS_FILE, STACKS_MEMFD
from orchestrator.core.host import procfs
from orchestrator.core.host.procfs import Proc

PROCESSES_MAX = 256
TEXT_BYTES_MAX = 1 << 20
FDS_MAX = 4096
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class RankStack:
    """One process of a rank: the kernel's state letter, what it sleeps in, and a stack, else why there is none. `tid`:
    the thread that was asked for it, `pid` for the main one."""

    pid: int
    state: str
    wchan: str
    text: str
    tid: int


@dataclass(slots=True)
class _Dump:
    """One process that was asked: its answer is what stands in `file` after `start_bytes`. `tid`: the thread that was
    sent the signal."""

    proc: Proc
    tid: int
    file: Path
    start_bytes: int
    seen_bytes: int


@dataclass(frozen=True, slots=True)
class PendingStacks:
    """The processes of one rank, and of them those that owe an answer."""

    pids: tuple[int, ...]
    dumps: Mapping[int, _Dump]
    signum: int


def take(root_pid: int, folder: Path, signum: int, limit_s: float = 1.0) -> list[RankStack]:
    """Ask one rank and wait for its answer, `limit_s` at most."""
    asked = ask(root_pid, folder, signum)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = answer(asked)
        if found is not None:
            return found
        time.sleep(POLL_S)
    return last_answer(asked)


def processes(root_pid: int, tree: Mapping[int, list[int]] | None = None) -> tuple[int, ...]:
    """Return a rank's first process and its descendants; `tree`: see `procfs.descendants`."""
    return (root_pid, *procfs.descendants(root_pid, tree))[:PROCESSES_MAX]


def ask(root_pid: int, folder: Path, signum: int) -> PendingStacks:
    """Send the stack signal to a rank's first process and its descendants, where it is caught."""
    return ask_these(processes(root_pid), folder, signum)


def ask_these(
    pids: tuple[int, ...], folder: Path, signum: int, trainer: tuple[int, int] = (0, 0)
) -> PendingStacks:
    """Send the stack signal to some processes of a rank, its first one and descendants, where it is caught. `trainer`:
    the process and the thread of it that train; of the other processes the main thread is asked."""
    dumps = {}
    for pid in pids:
        tid = trainer[1] if pid == trainer[0] and procfs.has_thread(*trainer) else pid
        is_shown = pid in (pids[0], trainer[0]) and (folder / SOCKET_FILE.format(pid)).exists()
        dump = _ask_one(pid, tid, folder, signum, is_shown)
        if dump is not None:
            dumps[pid] = dump
    return PendingStacks(pids, dumps, signum)


def answer(asked: PendingStacks) -> list[RankStack] | None:
    """Return the stacks when all that were asked have answered, else None: call again, some 20 ms later."""
    # A list, since each is to be looked at each time.
    done = [_is_done(dump, asked.signum) for dump in asked.dumps.values()]
    if all(done):
        return last_answer(asked)
    return None


def last_answer(asked: PendingStacks) -> list[RankStack]:
    """Return what there is: stacks of those that answered, the kernel's word for the others."""
    found = []
    for pid in asked.pids:
        stat = procfs.stat(pid)
        dump = asked.dumps.get(pid)
        text = _new_text(dump) if dump is not None else ""
        if stat is not None or text:
            state = stat.state if stat is not None else "X"
            text = text or _why_none(pid, state, dump is not None, asked.signum)
            found.append(
                RankStack(pid, state, procfs.wchan(pid), text, dump.tid if dump is not None else pid)
            )
    return found


def _ask_one(pid: int, tid: int, folder: Path, signum: int, is_shown: bool) -> _Dump | None:
    """Send the signal to one thread; not where that may do harm. `is_shown`: torch's window shows its stack, too."""
    stat = procfs.stat(pid)
    if stat is None or stat.state in "TtZX" or not procfs.catches(pid, signum):
        return None
    file = _stacks_file(pid, folder)
    if file is None:
        return None
    start_bytes = _size_bytes(file)
    if procfs.blocks(tid, signum) or kernel_wait.is_frail(pid, tid, is_shown):
        return None
    dump = _Dump(Proc(pid, stat.start_ticks), tid, file, start_bytes, start_bytes)
    # Again, with nothing in between: the pid may be another's by now, or have become a program without a handler.
    if not procfs.alive(dump.proc) or not procfs.catches(pid, signum):
        return None
    return dump if _is_sent(pid, tid, signum) else None


def _is_sent(pid: int, tid: int, signum: int) -> bool:
    """Send a signal to one thread of a process; tell whether it was there."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):
        return bool(libc.tgkill(pid, tid, signum) == 0)
    if tid != pid:
        return False  # glibc before 2.30: then a thread that is not the one meant might take it
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def _stacks_file(pid: int, folder: Path) -> Path | None:
    """Return where the process's handler writes: its file in the rank's folder, in memory if it was forked. None once the
    script has closed that, since its number may be another file's by now."""
    named = folder / STACKS_FILE.format(pid)
    memory = f"/memfd:{STACKS_MEMFD.format(pid)} (deleted)"
    fds = procfs.PROC / str(pid) / "fd"
    try:
        for link in sorted(fds.iterdir(), key=lambda one: int(one.name))[:FDS_MAX]:
            target = link.readlink()
            if str(target) == memory:
                return link
            if target.parts[-2:] == named.parts[-2:]:
                return named
    except OSError:
        pass  # it has ended, or closed that descriptor just now
    return None


def _is_done(dump: _Dump, signum: int) -> bool:
    """Tell whether the dump is all there: the file has grown and is still, and the signal's handler has returned.

    `faulthandler` writes no end mark; but while it writes, the kernel blocks the signal in that thread.
    """
    tid, size_bytes = dump.tid, _size_bytes(dump.file)
    still = dump.start_bytes < size_bytes == dump.seen_bytes
    dump.seen_bytes = size_bytes
    if not procfs.alive(dump.proc):
        return True
    return still and not procfs.has_pending(tid, signum) and not procfs.blocks(tid, signum)


def _new_text(dump: _Dump) -> str:
    try:
        with dump.file.open("rb") as file:
            file.seek(dump.start_bytes)
            return file.read(TEXT_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""


def _why_none(pid: int, state: str, asked: bool, signum: int) -> str:
    if state in "Tt":
        reason = f"stopped (state {state})"
    elif state in "ZX":
        reason = f"ended (state {state})"
    elif state == "D":
        reason = "waits in the kernel and takes no signal (state D)"
    elif asked:
        reason = f"did not answer the stack signal (state {state})"
    elif procfs.catches(pid, signum) and kernel_wait.is_frail(pid, pid):
        reason = f"in a call that the stack signal would end (state {state})"
    else:
        reason = f"no Python stack to be had (state {state})"
    return f"{reason}\n{procfs.kernel_stack(pid)}".rstrip() + "\n"


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
