"""Kernel wait of a thread: its system call with the file and the time limit, from /proc.

/proc/<pid>/task/<tid>/syscall has the call's number and arguments, /proc/<pid>/mem what they point to. Both are
readable for a user who may trace the process: its own user, where neither Yama nor the container forbids it. What
cannot be read is named in `unavailable`, and nothing is guessed in its place.
"""

from __future__ import annotations

import os
import platform
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.agent.probes import open_files
from orchestrator.core.host import procfs

PATH_BYTES_MAX = 4096
POLLED_FDS_MAX = 16

LONG_SLEEP_S = 1.0

_X86_64 = {
    0: "read", 1: "write", 2: "open", 4: "stat", 6: "lstat", 7: "poll", 16: "ioctl", 17: "pread64", 18: "pwrite64",
    19: "readv", 20: "writev", 23: "select", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto",
    45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 65: "semop", 69: "msgsnd", 70: "msgrcv", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync",
    76: "truncate", 82: "rename", 83: "mkdir", 87: "unlink", 128: "rt_sigtimedwait", 130: "rt_sigsuspend", 202: "futex",
    208: "io_getevents", 217: "getdents64", 219: "restart_syscall", 220: "semtimedop", 230: "clock_nanosleep", 232: "epoll_wait",
    247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4",
    295: "preadv", 296: "pwritev", 332: "statx", 426: "io_uring_enter", 437: "openat2", 441: "epoll_pwait2",
    449: "futex_waitv",
}  # fmt: skip
_AARCH64 = {
    4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 34: "mkdirat", 35: "unlinkat",
    38: "renameat", 56: "openat", 61: "getdents64", 63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64",
    68: "pwrite64", 69: "preadv", 70: "pwritev", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 82: "fsync",
    83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 128: "restart_syscall",
    133: "rt_sigsuspend", 137: "rt_sigtimedwait", 188: "msgrcv", 189: "msgsnd", 192: "semtimedop", 193: "semop", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom",
    211: "sendmsg", 212: "recvmsg", 242: "accept4", 260: "wait4", 291: "statx", 426: "io_uring_enter", 437: "openat2",
    441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip
CALLS: Mapping[str, Mapping[int, str]] = {"x86_64": _X86_64, "aarch64": _AARCH64}
"""Names of system calls by their number (`arch/x86/entry/syscalls/syscall_64.tbl`, `asm-generic/unistd.h`)."""

READS = frozenset(
    {"read", "readv", "pread64", "preadv", "recvfrom", "recvmsg", "getdents64", "accept", "accept4"}
)
WRITES = frozenset({"write", "writev", "pwrite64", "pwritev", "sendto", "sendmsg", "fsync", "fdatasync"})
OPENS = frozenset({"open", "openat", "openat2"})
_LIMIT_IN_ARGUMENTS = frozenset({"poll", "epoll_wait", "epoll_pwait"})
"""Calls whose time limit is an argument: it was read together with the call, and not from memory."""

POLLS = frozenset({"poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2"})
NETWORK = POLLS | {"read", "readv", "recvfrom", "recvmsg"}
LOCKS = frozenset({"flock", "fcntl"})
_FRAIL = frozenset(
    {"pause", "rt_sigsuspend", "rt_sigtimedwait", "semop", "semtimedop", "msgrcv", "msgsnd", "io_getevents"}
)
_FD_FIRST = READS | WRITES | LOCKS | {"ioctl", "connect"}
_PATH_FIRST = frozenset({"open", "stat", "lstat", "truncate", "rename", "mkdir", "unlink"})
_PATH_SECOND = frozenset({"openat", "openat2", "newfstatat", "statx", "mkdirat", "unlinkat", "renameat"})
_FUTEX_WAIT, _FUTEX_WAIT_BITSET = 0, 9
_FUTEX_PRIVATE = 128
_FUTEX_REALTIME = 256
_TIMER_ABSTIME = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """The system call that a thread is in, and what it waits for there."""

    # Empty when the thread runs, or when its call may not be read.
    call: str
    # The file, pipe or connection behind the call's descriptor or path.
    target: str
    # The descriptors that it waits at.
    fds: tuple[int, ...]
    # The time after which the wait ends at the latest: None without a limit, 0 where the limit is not known.
    ends_s: float | None
    # It waits only for time to pass.
    asleep: bool
    wchan: str
    # What could not be read, and why.
    unavailable: str
    # The process whose end it waits for: 0 for any child, None when it does not wait for one.
    child: int | None = None
    # It waits at a futex in memory that other processes may share.
    is_shared: bool = False

    @property
    def runs(self) -> bool:
        """Tell whether the thread is outside any system call, as far as /proc shows it."""
        return not self.call and not self.unavailable

    @property
    def for_ever(self) -> bool:
        """Tell whether the thread waits without a time limit."""
        return self.call != "" and self.ends_s is None


NO_WAIT = Wait("", "", (), None, False, "", "")
"""The wait of a thread that runs, or that is not known."""


def wait_of(pid: int, tid: int) -> Wait:
    """Return what a thread of a process waits for.

    The time limit read from its memory counts only if the thread has not run in the meantime: otherwise it may be in
    another call by then, and the memory may hold anything.
    """
    task = procfs.PROC / str(pid) / "task" / str(tid)
    wchan = procfs.text(task / "wchan").strip()
    wchan = "" if wchan == "0" else wchan
    try:
        text = (task / "syscall").read_text()
    except FileNotFoundError:
        unavailable = "" if not task.exists() else f"{task}/syscall: this kernel does not have it"
        return Wait("", "", (), None, False, wchan, unavailable)
    except OSError as err:
        return Wait("", "", (), None, False, wchan, f"{task}/syscall: {(err.strerror or str(err)).lower()}")
    call, args = _call_in(text)
    if not call:
        return Wait("", "", (), None, False, wchan, "")
    wakes_before = wakes(pid, tid)
    wait = _decoded(pid, call, args, wchan)
    is_same = procfs.text(task / "syscall") == text and wakes(pid, tid) == wakes_before
    is_certain = is_same or wait.ends_s is None or call in _LIMIT_IN_ARGUMENTS
    return wait if is_certain else replace(wait, ends_s=0.0)


def wakes(pid: int, tid: int) -> int:
    """Return the voluntary context switches of a thread: how often it had to wait, and went on. The kernel has no other
    counter for what passes through recv() and send()."""
    lines = procfs.text(procfs.PROC / str(pid) / "task" / str(tid) / "status").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:")), 0)


def scheduled_s(pid: int, tid: int) -> tuple[float, float]:
    """Return how long a thread was on a processor, and how long in the queue for one; 0 where it is not known."""
    try:
        run_ns, queue_ns = (procfs.PROC / str(pid) / "task" / str(tid) / "schedstat").read_text().split()[:2]
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(run_ns) / 1e9, int(queue_ns) / 1e9


def is_frail(pid: int, tid: int, is_shown: bool = False) -> bool:
    """Tell whether a thread is in a call that any signal ends, handled or not (signal(7)): a long sleep or a pause of C
    code.

    Python repeats its own calls (PEP 475), and its sleeps are other calls: an absolute time, or `select` before Python
    3.11. Short sleeps are iterations of a loop that polls, as in torch's store, and may end sooner without harm. Polls
    count only where another source shows the stack (`is_shown`): most of them are Python's own.
    """
    call, args = _call(pid, tid)
    match call:
        case _ if call in _FRAIL:
            return True
        case "select" | "pselect6" if args[0] == 0:
            return False
        case _ if call in POLLS:
            return is_shown
        case "nanosleep":
            span_s = ProcessMemory(pid).seconds(args[0], 1e-9)
        case "clock_nanosleep" if not args[1] & _TIMER_ABSTIME:
            span_s = ProcessMemory(pid).seconds(args[2], 1e-9)
        case _:
            return False
    return span_s is not None and span_s >= LONG_SLEEP_S


def _call(pid: int, tid: int) -> tuple[str, list[int]]:
    """Return the system call that a thread is in, and its arguments; empty when it runs, or may not be read."""
    return _call_in(procfs.text(procfs.PROC / str(pid) / "task" / str(tid) / "syscall"))


def _call_in(text: str) -> tuple[str, list[int]]:
    words = text.split()
    if not words or words[0] in ("running", "-1"):
        return "", []
    number = int(words[0])
    names = CALLS.get(platform.machine(), {})
    return names.get(number, f"system call {number}"), [int(word, 16) for word in words[1:7]]


def in_words(wait: Wait) -> str:
    """Say what a thread waits for, as what follows `it is`, or with a verb of its own."""
    if not wait.call:
        return f"in the kernel ({wait.wchan})" if wait.wchan else "somewhere that cannot be seen"
    if wait.asleep:
        return f"in sleep(), {seconds_text(wait.ends_s)} to go" if wait.ends_s else "in sleep()"
    limit = "" if wait.ends_s is None else f", for {seconds_text(wait.ends_s)} more"
    if wait.call == "futex":
        return f"waits for another thread (futex){limit}"
    target = f" of {wait.target}" if wait.target else ""
    return f"in {_NAMES.get(wait.call, wait.call)}(){target}{limit}"


_NAMES = {
    "readv": "read", "pread64": "read", "preadv": "read", "recvfrom": "recv", "recvmsg": "recv", "openat": "open",
    "openat2": "open", "newfstatat": "stat", "statx": "stat", "pwrite64": "write", "writev": "write", "sendto": "send",
    "sendmsg": "send", "pselect6": "select", "ppoll": "poll", "epoll_pwait": "epoll_wait", "accept4": "accept",
}  # fmt: skip


def seconds_text(value_s: float) -> str:
    """Return `4.2 s`, or `3,590 s`."""
    return f"{value_s:,.1f} s" if value_s < 10 else f"{value_s:,.0f} s"


def _decoded(pid: int, call: str, args: list[int], wchan: str) -> Wait:
    memory = ProcessMemory(pid)
    ends_s, limited = _ends_s(memory, call, args)
    fds = _fds(pid, memory, call, args)
    target = ""
    if call in _PATH_FIRST or call in _PATH_SECOND:
        path = memory.path(args[0] if call in _PATH_FIRST else args[1])
        target = open_files.shortened(pid, path)
    elif fds:
        target = ", ".join(dict.fromkeys(open_files.described(pid, fd) for fd in fds))
    asleep = call in ("nanosleep", "clock_nanosleep") or (
        call in ("select", "pselect6") and args[0] == 0 and limited
    )
    if limited and ends_s is None:
        # There is a limit that cannot be read: the wait ends, at an unknown time.
        ends_s = 0.0
    is_shared = call == "futex" and not args[1] & _FUTEX_PRIVATE
    return Wait(call, target, fds, ends_s, asleep, wchan, memory.unavailable, _child(call, args), is_shared)


def _child(call: str, args: list[int]) -> int | None:
    match call:
        case "wait4":
            return max(0, _signed(args[0]))  # below 0: any, or any of a group
        case "waitid":
            return args[1] if args[0] == os.P_PID else 0
        case _:
            return None


def _ends_s(memory: ProcessMemory, call: str, args: list[int]) -> tuple[float | None, bool]:
    """Return in how many seconds the call ends by itself, and whether it has a limit at all.

    A relative limit counts from now on: `faulthandler`'s signal has just interrupted the call, and Python repeats it
    with the remaining time (PEP 475). Absolute limits are exact.
    """
    match call:
        case "clock_nanosleep" if args[1] & _TIMER_ABSTIME:
            clock = time.CLOCK_REALTIME if args[0] == 0 else time.CLOCK_MONOTONIC
            return _rest_s(memory.seconds(args[2], 1e-9), clock), True
        case "nanosleep" | "clock_nanosleep":
            return None, True  # of C code: no signal has interrupted it, and the rest is not in memory
        case "select":
            return memory.seconds(args[4], 1e-6), args[4] != 0
        case "pselect6":
            return memory.seconds(args[4], 1e-9), args[4] != 0
        case "ppoll":
            return memory.seconds(args[2], 1e-9), args[2] != 0
        case "rt_sigtimedwait":
            return memory.seconds(args[2], 1e-9), args[2] != 0
        case "epoll_pwait2" | "io_getevents":
            address = args[3 if call == "epoll_pwait2" else 4]
            return memory.seconds(address, 1e-9), address != 0
        case "poll":
            return _from_ms(args[2])
        case "epoll_wait" | "epoll_pwait":
            return _from_ms(args[3])
        case "futex":
            return _futex_s(memory, args)
        case "restart_syscall":
            return None, True  # a relative sleep that was interrupted: only the kernel knows the rest
        case _:
            return None, False


def _futex_s(memory: ProcessMemory, args: list[int]) -> tuple[float | None, bool]:
    if args[3] == 0:
        return None, False
    given = memory.seconds(args[3], 1e-9)
    if args[1] & 0x7F == _FUTEX_WAIT:
        return given, True
    realtime = args[1] & _FUTEX_REALTIME or args[1] & 0x7F != _FUTEX_WAIT_BITSET
    return _rest_s(given, time.CLOCK_REALTIME if realtime else time.CLOCK_MONOTONIC), True


def _rest_s(at_s: float | None, clock: int | None) -> float | None:
    """Return the time until `at_s` on that clock; `at_s` itself where it is a span already."""
    if at_s is None or clock is None:
        return at_s
    return max(0.0, at_s - time.clock_gettime(clock))


def _from_ms(word: int) -> tuple[float | None, bool]:
    value = _signed(word)
    return (None, False) if value < 0 else (value / 1000, True)


def _signed(word: int) -> int:
    """Return a register's value as an `int` of C."""
    value: int = struct.unpack("<i", struct.pack("<I", word & 0xFFFFFFFF))[0]
    return value


def _fds(pid: int, memory: ProcessMemory, call: str, args: list[int]) -> tuple[int, ...]:
    if call in _FD_FIRST:
        return (args[0] & 0xFFFFFFFF,)
    if call in ("poll", "ppoll"):
        raw = memory.read(args[0], 8 * min(args[1], POLLED_FDS_MAX))
        entries = struct.iter_unpack("<ihh", raw[: len(raw) // 8 * 8])
        return tuple(fd for fd, _events, _revents in entries if fd >= 0)
    if call in ("select", "pselect6"):
        bits = int.from_bytes(memory.read(args[1], 128), "little") if args[1] else 0
        return tuple(fd for fd in range(min(args[0], 1024)) if bits >> fd & 1)[:POLLED_FDS_MAX]
    if call.startswith("epoll_"):
        return _epoll_fds(pid, args[0] & 0xFFFFFFFF)
    return ()


def _epoll_fds(pid: int, fd: int) -> tuple[int, ...]:
    """Return the descriptors that an epoll descriptor watches."""
    lines = procfs.text(procfs.PROC / str(pid) / "fdinfo" / str(fd)).splitlines()
    rows = [line.split() for line in lines if line.startswith("tfd:")]
    return tuple(int(words[1]) for words in rows if len(words) > 1)[:POLLED_FDS_MAX]


class ProcessMemory:
    """The memory of a process; `unavailable` says why it cannot be read."""

    def __init__(self, pid: int) -> None:
        self._path = f"/proc/{pid}/mem"
        self.unavailable = ""

    def read(self, address: int, size_bytes: int) -> bytes:
        """Return the bytes at an address; fewer where the memory ends, none where it cannot be read."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as err:
            self.unavailable = f"{self._path}: {(err.strerror or str(err)).lower()}"
            return b""
        try:
            return os.pread(fd, size_bytes, address)
        except (OSError, OverflowError):
            return b""
        finally:
            os.close(fd)

    def seconds(self, address: int, unit_s: float) -> float | None:
        """Return a timespec (`unit_s` 1e-9) or timeval (1e-6) in seconds; None where it is not a sane one."""
        raw = self.read(address, 16) if address else b""
        if len(raw) < 16:
            return None
        whole, part = struct.unpack("<qq", raw)
        is_sane = 0 <= part < round(1 / unit_s) and whole >= 0
        return float(whole + part * unit_s) if is_sane else None

    def path(self, address: int) -> str:
        """Return the NUL-terminated text at an address."""
        raw = self.read(address, PATH_BYTES_MAX)
        return raw.partition(b"\0")[0].decode(errors="replace")
