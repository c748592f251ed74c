"""Processes as the kernel shows them in /proc (`man 5 proc`). Nothing is kept.

A pid alone does not identify a process, since the kernel reuses it; a pid with its start time does, until the next boot.
A process may end between any two reads: then a reader returns None, nothing or False, and never raises.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
ENVIRON_BYTES_MAX = 8 << 20
KERNEL_STACK_BYTES_MAX = 16 << 10
IDLE_NICENESS = 19

TRACKER_S_MAX = 5.0
"""How long a resource tracker may take to remove what its program has left, once that is killed."""

_TRACKER = re.compile(rb"\0from [^\0]*resource_tracker import main|\A([^\0]*/)?torch_shm_manager\0")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Proc:
    """One process, distinct from a later one with its pid. `start_ticks`: clock ticks since boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class ProcStat:
    """Fields of /proc/<pid>/stat. `state` is the kernel's letter: R S D T t Z X I; `cpu_s` is user and system time."""

    state: str
    ppid: int
    pgrp: int
    session: int
    cpu_s: float
    start_ticks: int
    rss_bytes: int


def stat(pid: int) -> ProcStat | None:
    """Return the state of `pid`, None without such a process."""
    fields = _stat_fields(PROC / str(pid) / "stat")
    if len(fields) < 22:
        return None
    return ProcStat(
        state=fields[0].decode(),
        ppid=int(fields[1]),
        pgrp=int(fields[2]),
        session=int(fields[3]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def age_s(pid: int) -> float | None:
    """Return for how long `pid` has lived, None without such a process."""
    known = stat(pid)
    if known is None:
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - known.start_ticks / _TICKS_PER_S)


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of this process's control group (cgroups(7)) and those above it, each with whether it is of version 2.

    Version 2 has one line `0::PATH` in /proc/self/cgroup, version 1 a line for each hierarchy with its controllers; there
    only that of `controller` counts. `root` has /proc and /sys.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        words = line.split(":", 2)
        if len(words) < 3:
            continue
        controllers, path = words[1:]
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = Path(path.lstrip("/"))
        yield from ((base / folder, not controllers) for folder in (inner, *inner.parents))


def _stat_fields(path: Path) -> list[bytes]:
    # The command's name stands in parentheses and may hold any text, also ')' and spaces: cut at the last parenthesis.
    return _read(path, 4096).rpartition(b")")[2].split()


def is_alive(proc: Proc) -> bool:
    """Return whether exactly this process runs; a zombie does not."""
    now = stat(proc.pid)
    return now is not None and now.start_ticks == proc.start_ticks and now.state not in "ZX"


def send_signal(pid: int, signum: int) -> None:
    """Send a signal to a process; one that has ended or is another user's gets none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def lower_thread_priority() -> None:
    """Give the calling thread the lowest priority (on Linux a thread has its own, `man 2 setpriority`)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), IDLE_NICENESS)


def has_thread(pid: int, tid: int) -> bool:
    """Return whether a process has that thread, by the kernel's id."""
    return (PROC / str(pid) / "task" / str(tid)).exists()


def state_of_threads(pid: int) -> str:
    """Return the state of a process whose main thread has ended: that of another thread, which may still work. Z if all
    others are in the kernel (D), and so end with the process."""
    paths = sorted((PROC / str(pid) / "task").glob("*/stat"))
    states = [fields[0].decode() for path in paths if (fields := _stat_fields(path))]
    return next((state for state in states if state not in "DZX"), "Z")


def children() -> dict[int, list[int]]:
    """Return the children of every process, from one scan of /proc, lowest pid first."""
    tree: dict[int, list[int]] = {}
    for pid in pids():
        if (now := stat(pid)) is not None:
            tree.setdefault(now.ppid, []).append(pid)
    return tree


def descendants(pid: int, tree: Mapping[int, list[int]] | None = None) -> list[int]:
    """Return children, grandchildren and so on of `pid`, parents before their children.

    `tree`: a fresh result of `children`, for a caller with several pids.
    """
    tree = children() if tree is None else tree
    below = list(tree.get(pid, ()))
    for child in below:  # grows while it is walked; a pid has one parent, so it ends
        below.extend(tree.get(child, ()))
    return below


def find_by_env(marker: bytes) -> list[Proc]:
    """Return the processes whose first environment holds each NUL-separated `NAME=value` of `marker` exactly.

    It is the environment given at exec: changes that a process makes later do not show. Other users' are not readable.
    """
    required = {entry for entry in marker.split(b"\0") if entry}
    assert required, "an empty marker would match every process"
    matches = []
    for pid in pids():
        entries = _read(PROC / str(pid) / "environ", ENVIRON_BYTES_MAX).split(b"\0")
        if required.issubset(entries) and (now := stat(pid)) is not None:
            matches.append(Proc(pid, now.start_ticks))
    return matches


def environment(pid: int, name: str) -> str:
    """Return a variable of a process's first environment, see `find_by_env`; empty where it has none."""
    head = f"{name}=".encode()
    entries = _read(PROC / str(pid) / "environ", ENVIRON_BYTES_MAX).split(b"\0")
    values = (entry.removeprefix(head) for entry in entries if entry.startswith(head))
    return next(values, b"").decode(errors="replace")


def is_tracker(pid: int) -> bool:
    """Return whether a process is a tracker that removes its program's shared memory once all other processes have ended: a
    resource tracker of Python (`multiprocessing`, loky), or torch's manager of shared files."""
    return bool(_TRACKER.search(_read(PROC / str(pid) / "cmdline", ENVIRON_BYTES_MAX)))


def wchan(pid: int) -> str:
    """Return the kernel function `pid` sleeps in; empty when it runs, or when the kernel does not tell."""
    name = _read(PROC / str(pid) / "wchan", 256).decode(errors="replace")
    return "" if name == "0" else name


def kernel_stack(pid: int) -> str:
    """Return where in the kernel the main thread is; empty when not readable (it is root's alone)."""
    return _read(PROC / str(pid) / "stack", KERNEL_STACK_BYTES_MAX).decode(errors="replace")


def catches_signal(pid: int, signum: int) -> bool:
    """Return whether `pid` has a handler for the signal; without one, most signals kill."""
    return _in_mask(pid, b"SigCgt", signum)


def blocks_signal(pid: int, signum: int) -> bool:
    """Return whether the main thread, or that of this id, holds the signal back, as it does while it is in its handler."""
    return _in_mask(pid, b"SigBlk", signum)


def has_pending(pid: int, signum: int) -> bool:
    """Return whether the signal was sent to the process, or to this thread of it, and is not yet delivered."""
    return _in_mask(pid, b"ShdPnd", signum) or _in_mask(pid, b"SigPnd", signum)


def read_text(path: Path) -> str:
    """Return the content of a file of /proc; empty when the process is gone or belongs to another user."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def boot_id() -> str:
    """Return the id of this boot of the kernel, which gives start times their meaning."""
    return _read(PROC / "sys/kernel/random/boot_id", 256).decode().strip()


def oom_kills() -> int:
    """Return how many processes the kernel of this host has killed for memory since it booted."""
    for line in read_text(PROC / "vmstat").splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill":
            return int(number)
    return 0


def pids() -> Iterator[int]:
    """Yield every process's id, ascending."""
    return iter(sorted(int(name) for name in os.listdir(PROC) if name.isdigit()))  # noqa: PTH208 -- half the time


def list_names(folder: Path) -> list[str]:
    """Return the sorted names in a folder; none where it is gone or belongs to another user."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 -- half the time
    except OSError:
        return []


def _in_mask(pid: int, field: bytes, signum: int) -> bool:
    return bool(_mask(pid, field) >> (signum - 1) & 1)


def _mask(pid: int, field: bytes) -> int:
    for line in _read(PROC / str(pid) / "status", 16 << 10).splitlines():
        name, _, value = line.partition(b":")
        if name == field:
            return int(value, 16)
    return 0


def _read(path: Path, bytes_max: int) -> bytes:
    """Read a file of /proc; empty when the process is gone (ESRCH, ENOENT) or not ours to read (EACCES)."""
    try:
        with path.open("rb") as file:
            return file.read(bytes_max)
    except OSError:
        return b""
