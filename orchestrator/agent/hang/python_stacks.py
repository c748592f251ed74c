"""Python stacks of a rank's processes, requested by a signal, and the kernel's state of a process without a stack.

`request_stacks` inspects a rank's processes and returns at once; the agent's loop then calls `poll_stacks`, which sends the signals,
for all its ranks until each is done or its own deadline has passed. A thread that has not run between two checks is in
C code, and gets the stack signal itself; one that runs gets the next signal, which Python answers (see `hook.errors`),
and the stack signal only if no answer has come in `NATIVE_S`: then it is in C code as well. A signal goes only to a
process that has a handler for it, since its default action kills; and it does not go to a thread that it would wake
from a call of C code, or that blocks it and may wait for signals itself. Each process answers with the stack of one
thread, the main one or the one that trains: reading the stacks of other threads is safe only under the GIL, by torch's
worker server (see `flight_recorder`).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent.hang import kernel_wait
from orchestrator.agent.ranks.hook.layout import SOCKET_FILE, STACKS_FILE, STACKS_MEMFD
from orchestrator.core.host import procfs
from orchestrator.core.host.procfs import Proc
from orchestrator.core.jobdir import ownership

PROCESSES_MAX = 256
TEXT_BYTES_MAX = 1 << 20
FDS_MAX = 4096
POLL_S = 0.02

ASLEEP_S = 0.01
"""For how long a thread must not have run before it counts as asleep."""

NATIVE_S = 0.1
"""How long a thread runs, or is seen to wait, without an answer before it counts as in C code. Python itself answers at the
next call or iteration of a loop."""


@dataclass(frozen=True, slots=True)
class RankStack:
    """One process of a rank: its state and its stack."""

    pid: int
    # The kernel's state letter, and what it sleeps in.
    state: str
    wchan: str
    # The stack, else why there is none.
    text: str
    # The thread that got the request, `pid` for the main one.
    tid: int


@dataclass(slots=True)
class _Dump:
    """The dump of one process by its thread `tid`: the content of `file` after `start_bytes`."""

    proc: Proc
    tid: int
    file: Path
    start_bytes: int
    seen_bytes: int
    # torch's worker server has its stack, too.
    has_worker_server: bool
    # When the thread was checked, and how often it had waited by then; -1 while it runs.
    observed_s: float
    wakes: int
    # The last signal sent, 0 for none, when, and the thread's time on a processor by then.
    sent_signum: int = 0
    sent_s: float = 0.0
    ran_s: float = 0.0
    # No signal may be sent, nor will be.
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class PendingStacks:
    """The processes of one rank, and the dumps of those that may get a signal."""

    pids: tuple[int, ...]
    dumps: Mapping[int, _Dump]
    signum: int


def rank_pids(root_pid: int, tree: Mapping[int, list[int]] | None = None) -> tuple[int, ...]:
    """Return a rank's first process and its descendants; `tree`: see `procfs.descendants`."""
    return (root_pid, *procfs.descendants(root_pid, tree))[:PROCESSES_MAX]


def request_stacks(
    pids: tuple[int, ...], folder: Path, signum: int, trainer: tuple[int, int] = (0, 0)
) -> PendingStacks:
    """Ask those of a rank's processes in `pids` (its first process and descendants) that catch the signal.

    `trainer`: the process and the thread that train; in the other processes the main thread is asked.
    """
    dumps = {}
    for pid in pids:
        tid = trainer[1] if pid == trainer[0] and procfs.has_thread(*trainer) else pid
        has_worker_server = pid in (pids[0], trainer[0]) and (folder / SOCKET_FILE.format(pid)).exists()
        dump = _request_one(pid, tid, folder, signum, has_worker_server)
        if dump is not None:
            dumps[pid] = dump
    return PendingStacks(pids, dumps, signum)


def poll_stacks(pending: PendingStacks) -> list[RankStack] | None:
    """Return the stacks when all requests are answered, else None: call again, some 20 ms later."""
    # A list, since each dump must be checked each time.
    done = [_is_done(dump, pending.signum) for dump in pending.dumps.values()]
    if all(done):
        return collect_stacks(pending)
    return None


def collect_stacks(pending: PendingStacks) -> list[RankStack]:
    """Return the stacks of the processes that have answered, and the kernel's state of the others."""
    stacks = []
    for pid in pending.pids:
        stat = procfs.stat(pid)
        dump = pending.dumps.get(pid)
        text = _new_text(dump) if dump is not None else ""
        if stat is not None or text:
            state = stat.state if stat is not None else "X"
            text = text or _why_no_stack(pid, state, dump, pending.signum)
            tid = dump.tid if dump is not None else pid
            stacks.append(RankStack(pid, state, procfs.wchan(pid), text, tid))
    return stacks


def _request_one(pid: int, tid: int, folder: Path, signum: int, has_worker_server: bool) -> _Dump | None:
    """Inspect one thread before a signal. `has_worker_server`: torch's worker server has its stack."""
    stat = procfs.stat(pid)
    if stat is None or stat.state in "TtZX" or not procfs.catches_signal(pid, signum):
        return None
    file = _stacks_file(pid, folder)
    if file is None:
        return None
    start_bytes = _size_bytes(file)
    if procfs.blocks_signal(tid, signum) or kernel_wait.ends_on_signal(pid, tid, has_worker_server):
        return None
    now_s = time.monotonic()
    return _Dump(
        Proc(pid, stat.start_ticks),
        tid,
        file,
        start_bytes,
        start_bytes,
        has_worker_server,
        now_s,
        _wakes(pid, tid),
    )


def _wakes(pid: int, tid: int) -> int:
    """Return how often a thread has waited, which shows whether it has run since; -1 while it runs."""
    stat = procfs.stat(tid)
    return -1 if stat is None or stat.state == "R" else kernel_wait.read_wakes(pid, tid)


def _send_due(dump: _Dump, signum: int) -> None:
    """Send the signal that is due, or find that none may be sent."""
    pid, tid = dump.proc.pid, dump.tid
    if time.monotonic() < dump.observed_s + ASLEEP_S or dump.sent_signum == signum:
        return
    before, dump.wakes, dump.observed_s = dump.wakes, _wakes(pid, tid), time.monotonic()
    is_asleep = before == dump.wakes != -1
    ran_s = kernel_wait.read_scheduled_s(pid, tid)[0]
    if dump.sent_signum and not is_asleep:
        # It runs, or wakes repeatedly, as a thread that waits for the GIL does.
        since_s = ran_s - dump.ran_s if dump.wakes == -1 else dump.observed_s - dump.sent_s
        if since_s < NATIVE_S:
            return
    due = signum if dump.sent_signum or is_asleep else signum + 1
    dump.is_refused = (
        (due != signum and tid != pid)  # Python answers in its main thread
        or procfs.blocks_signal(tid, due)
        or kernel_wait.ends_on_signal(pid, tid, dump.has_worker_server)
        # Right before the signal: the pid may be another's by now, or run a program without a handler.
        or not procfs.is_alive(dump.proc)
        or not procfs.catches_signal(pid, due)
        or not _send_signal(pid, tid, due)
    )
    dump.sent_signum, dump.sent_s, dump.ran_s = due, dump.observed_s, ran_s


def _send_signal(pid: int, tid: int, signum: int) -> bool:
    """Send a signal to one thread of a process; return whether it existed."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):
        return bool(libc.tgkill(pid, tid, signum) == 0)
    if tid != pid:
        return False  # glibc before 2.30: another thread might take the signal
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def _stacks_file(pid: int, folder: Path) -> Path | None:
    """Return the file that the process's handler writes: in the rank's folder, in memory if it was forked. None once
    the script has closed it, since its number may be another file's by now."""
    named = folder / STACKS_FILE.format(pid)
    memory = f"/memfd:{STACKS_MEMFD.format(pid)} (deleted)"
    fds = procfs.PROC / str(pid) / "fd"
    try:
        for link in sorted(fds.iterdir(), key=lambda link: int(link.name))[:FDS_MAX]:
            target = link.readlink()
            if str(target) == memory:
                return link
            if target.parts[-2:] == named.parts[-2:]:
                return named
    except OSError:
        pass  # it has ended, or closed that descriptor just now
    return None


def _is_done(dump: _Dump, signum: int) -> bool:
    """Return whether the dump is complete: the file has grown and has stopped growing, and the signal's handler has
    returned. Before that, send the signal that is due.

    `faulthandler` writes no end mark; but while it writes, the kernel blocks the signal in that thread.
    """
    tid, size_bytes = dump.tid, _size_bytes(dump.file)
    still = dump.start_bytes < size_bytes == dump.seen_bytes
    dump.seen_bytes = size_bytes
    if dump.is_refused or not procfs.is_alive(dump.proc):
        return True
    if size_bytes == dump.start_bytes:
        _send_due(dump, signum)
        return dump.is_refused
    return still and not procfs.has_pending(tid, signum) and not procfs.blocks_signal(tid, signum)


def _new_text(dump: _Dump) -> str:
    try:
        with ownership.open_for_reading(dump.file) as file:
            file.seek(dump.start_bytes)
            return file.read(TEXT_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""


def _why_no_stack(pid: int, state: str, dump: _Dump | None, signum: int) -> str:
    tid = dump.tid if dump is not None else pid
    if state in "Tt":
        reason = f"stopped (state {state})"
    elif state in "ZX":
        reason = f"ended (state {state})"
    elif state == "D":
        reason = "waits in the kernel and takes no signal (state D)"
    elif dump is not None and not dump.is_refused:
        reason = f"did not answer the stack signal (state {state})"
    elif procfs.catches_signal(pid, signum) and kernel_wait.ends_on_signal(pid, tid):
        reason = f"in a call that the stack signal would end (state {state})"
    elif tid != pid:
        reason = f"a thread other than the main one runs, which torch's worker server alone may show (state {state})"
    else:
        reason = f"no Python stack available (state {state})"
    return f"{reason}\n{procfs.kernel_stack(pid)}".rstrip() + "\n"


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
