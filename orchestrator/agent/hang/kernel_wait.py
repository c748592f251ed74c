"""Kernel wait of a thread: its system call, with the file that it waits at, from /proc.

/proc/<pid>/task/<tid>/syscall has the call's number and arguments; /proc/<pid>/mem has a path and the descriptors of a
poll. Both are readable for a user who may trace the process: its own user, where neither Yama nor the container forbids
it. What cannot be read is named in `unavailable`, and nothing is guessed in its place.
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.agent.hang import open_files
from orchestrator.core.host import procfs

PATH_BYTES_MAX = 4096
POLLED_FDS_MAX = 16

LONG_SLEEP_S = 1.0

_X86_64 = {
    0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 8: "lseek",
    9: "mmap", 10: "mprotect", 11: "munmap", 12: "brk", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv",
    20: "writev", 21: "access", 22: "pipe", 23: "select", 24: "sched_yield", 25: "mremap", 26: "msync", 28: "madvise",
    30: "shmat", 34: "pause", 35: "nanosleep", 40: "sendfile", 41: "socket", 42: "connect", 43: "accept",
    44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 48: "shutdown", 56: "clone", 57: "fork", 58: "vfork",
    59: "execve", 60: "exit", 61: "wait4", 62: "kill", 65: "semop", 69: "msgsnd", 70: "msgrcv", 72: "fcntl",
    73: "flock", 74: "fsync", 75: "fdatasync", 76: "truncate", 77: "ftruncate", 78: "getdents", 80: "chdir",
    82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link", 87: "unlink", 88: "symlink", 89: "readlink",
    90: "chmod", 92: "chown", 101: "ptrace", 128: "rt_sigtimedwait", 130: "rt_sigsuspend", 133: "mknod", 137: "statfs",
    138: "fstatfs", 149: "mlock", 151: "mlockall", 157: "prctl", 162: "sync", 165: "mount", 166: "umount2",
    186: "gettid", 187: "readahead", 188: "setxattr", 191: "getxattr", 194: "listxattr", 202: "futex",
    208: "io_getevents", 217: "getdents64", 219: "restart_syscall", 220: "semtimedop", 221: "fadvise64",
    230: "clock_nanosleep", 231: "exit_group", 232: "epoll_wait", 233: "epoll_ctl", 237: "mbind", 242: "mq_timedsend",
    243: "mq_timedreceive", 247: "waitid", 250: "keyctl", 256: "migrate_pages", 257: "openat", 258: "mkdirat",
    262: "newfstatat", 263: "unlinkat", 264: "renameat", 265: "linkat", 266: "symlinkat", 267: "readlinkat",
    268: "fchmodat", 269: "faccessat", 270: "pselect6", 271: "ppoll", 275: "splice", 276: "tee", 277: "sync_file_range",
    278: "vmsplice", 279: "move_pages", 281: "epoll_pwait", 285: "fallocate", 288: "accept4", 295: "preadv",
    296: "pwritev", 299: "recvmmsg", 306: "syncfs", 307: "sendmmsg", 308: "setns", 310: "process_vm_readv",
    311: "process_vm_writev", 316: "renameat2", 318: "getrandom", 322: "execveat", 323: "userfaultfd", 324: "membarrier",
    326: "copy_file_range", 327: "preadv2", 328: "pwritev2", 332: "statx", 333: "io_pgetevents",
    426: "io_uring_enter", 435: "clone3", 436: "close_range", 437: "openat2", 439: "faccessat2", 440: "process_madvise",
    441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip
_AARCH64 = {
    4: "io_getevents", 5: "setxattr", 8: "getxattr", 11: "listxattr", 21: "epoll_ctl", 22: "epoll_pwait",
    25: "fcntl", 29: "ioctl", 32: "flock", 33: "mknodat", 34: "mkdirat", 35: "unlinkat", 36: "symlinkat", 37: "linkat",
    38: "renameat", 39: "umount2", 40: "mount", 43: "statfs", 44: "fstatfs", 45: "truncate", 46: "ftruncate",
    47: "fallocate", 48: "faccessat", 49: "chdir", 53: "fchmodat", 54: "fchownat", 56: "openat", 57: "close",
    59: "pipe2", 61: "getdents64", 62: "lseek", 63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64",
    68: "pwrite64", 69: "preadv", 70: "pwritev", 71: "sendfile", 72: "pselect6", 73: "ppoll", 75: "vmsplice",
    76: "splice", 77: "tee", 78: "readlinkat", 79: "newfstatat", 80: "fstat", 81: "sync", 82: "fsync", 83: "fdatasync",
    84: "sync_file_range", 93: "exit", 94: "exit_group", 95: "waitid", 98: "futex", 101: "nanosleep",
    115: "clock_nanosleep", 117: "ptrace", 124: "sched_yield", 128: "restart_syscall", 129: "kill", 133: "rt_sigsuspend",
    137: "rt_sigtimedwait", 167: "prctl", 178: "gettid", 182: "mq_timedsend", 183: "mq_timedreceive", 188: "msgrcv",
    189: "msgsnd", 192: "semtimedop", 193: "semop", 196: "shmat", 198: "socket", 202: "accept", 203: "connect",
    206: "sendto", 207: "recvfrom", 210: "shutdown", 211: "sendmsg", 212: "recvmsg", 213: "readahead", 214: "brk",
    215: "munmap", 216: "mremap", 219: "keyctl", 220: "clone", 221: "execve", 222: "mmap", 223: "fadvise64",
    226: "mprotect", 227: "msync", 228: "mlock", 230: "mlockall", 233: "madvise", 235: "mbind", 238: "migrate_pages",
    239: "move_pages", 242: "accept4", 243: "recvmmsg", 260: "wait4", 267: "syncfs", 268: "setns", 269: "sendmmsg",
    270: "process_vm_readv", 271: "process_vm_writev", 276: "renameat2", 278: "getrandom", 281: "execveat",
    282: "userfaultfd", 283: "membarrier", 285: "copy_file_range", 286: "preadv2", 287: "pwritev2", 291: "statx",
    292: "io_pgetevents", 426: "io_uring_enter", 435: "clone3", 436: "close_range", 437: "openat2", 439: "faccessat2",
    440: "process_madvise", 441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip
CALLS: Mapping[str, Mapping[int, str]] = {"x86_64": _X86_64, "aarch64": _AARCH64}
"""Names of system calls by their number (`arch/x86/entry/syscalls/syscall_64.tbl`, `asm-generic/unistd.h`)."""

READS = frozenset({"read", "readv", "pread64", "preadv", "recvfrom", "recvmsg", "getdents64", "accept", "accept4"})
WRITES = frozenset({"write", "writev", "pwrite64", "pwritev", "sendto", "sendmsg", "fsync", "fdatasync"})
_LIMIT_MS = {"poll": 2, "epoll_wait": 3, "epoll_pwait": 3}
"""Calls with a time limit among their arguments (ms; below 0 for none), and which one it is."""

_LIMIT_ADDRESS = {
    "select": 4, "pselect6": 4, "ppoll": 2, "rt_sigtimedwait": 2, "epoll_pwait2": 3, "io_getevents": 4, "futex": 3,
}  # fmt: skip
"""Calls with the address of a time limit among their arguments; 0 for none."""

POLLS = frozenset({"poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2"})
NETWORK = POLLS | {"read", "readv", "recvfrom", "recvmsg"}
LOCKS = frozenset({"flock", "fcntl"})
_ENDED_BY_SIGNALS = frozenset(
    {"pause", "rt_sigsuspend", "rt_sigtimedwait", "semop", "semtimedop", "msgrcv", "msgsnd", "io_getevents"}
)
_FD_FIRST = READS | WRITES | LOCKS | {"ioctl", "connect"}
_PATH_FIRST = frozenset({"open", "stat", "lstat", "truncate", "rename", "mkdir", "unlink"})
_PATH_SECOND = frozenset({"openat", "openat2", "newfstatat", "statx", "mkdirat", "unlinkat", "renameat"})
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
    # Its time limit: None without one, 0 where there is one that is not known.
    limit_s: float | None
    # It waits only for time to pass.
    is_sleeping: bool
    wchan: str
    # What could not be read, and why.
    unavailable: str
    # The process whose end it waits for: 0 for any child, None when it does not wait for one.
    child: int | None = None
    # The port at the other end, where it waits at one TCP connection alone
    port: int = 0

    @property
    def is_running(self) -> bool:
        """Whether the thread is outside any system call, as far as /proc shows it."""
        return not self.call and not self.unavailable

    @property
    def is_unlimited(self) -> bool:
        """Whether the thread waits without a time limit."""
        return self.call != "" and self.limit_s is None


NO_WAIT = Wait("", "", (), None, False, "", "")
"""The wait of a thread that runs, or that is not known."""


def read_wait(pid: int, tid: int) -> Wait:
    """Return what a thread of a process waits for."""
    task = procfs.PROC / str(pid) / "task" / str(tid)
    wchan = procfs.read_text(task / "wchan").strip()
    wchan = "" if wchan == "0" else wchan
    try:
        text = (task / "syscall").read_text()
    except FileNotFoundError:
        unavailable = "" if not task.exists() else f"{task}/syscall: this kernel does not have it"
        return Wait("", "", (), None, False, wchan, unavailable)
    except OSError as err:
        return Wait("", "", (), None, False, wchan, f"{task}/syscall: {(err.strerror or str(err)).lower()}")
    call, args = _parse_call(text)
    return _decode(pid, call, args, wchan) if call else Wait("", "", (), None, False, wchan, "")


def read_wakes(pid: int, tid: int) -> int:
    """Return the voluntary context switches of a thread: how often it had to wait, and continued. The kernel has no other
    counter for what passes through recv() and send()."""
    lines = procfs.read_text(procfs.PROC / str(pid) / "task" / str(tid) / "status").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:")), 0)


def read_scheduled_s(pid: int, tid: int) -> tuple[float, float]:
    """Return how long a thread was on a processor, and how long in the queue for one; 0 where it is not known."""
    try:
        run_ns, queue_ns = (procfs.PROC / str(pid) / "task" / str(tid) / "schedstat").read_text().split()[:2]
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(run_ns) / 1e9, int(queue_ns) / 1e9


def ends_on_signal(pid: int, tid: int, has_other_source: bool = False) -> bool:
    """Return whether a thread is in a call that any signal ends, handled or not (signal(7)): a long sleep or a pause of C
    code.

    Python repeats its own calls (PEP 475), and its sleeps are other calls: an absolute time, or `select` before Python
    3.11. Short sleeps are iterations of a loop that polls, as in torch's store, and may end sooner without harm. Polls
    count only where another source shows the stack (`has_other_source`): most of them are Python's own.
    """
    call, args = _read_call(pid, tid)
    match call:
        case _ if call in _ENDED_BY_SIGNALS:
            return True
        case "select" | "pselect6" if args[0] == 0:
            return False
        case _ if call in POLLS:
            return has_other_source
        case "nanosleep":
            span_s = ProcessMemory(pid).seconds(args[0])
        case "clock_nanosleep" if not args[1] & _TIMER_ABSTIME:
            span_s = ProcessMemory(pid).seconds(args[2])
        case _:
            return False
    return span_s is not None and span_s >= LONG_SLEEP_S


def _read_call(pid: int, tid: int) -> tuple[str, list[int]]:
    """Return the system call that a thread is in, and its arguments; empty when it runs, or may not be read."""
    return _parse_call(procfs.read_text(procfs.PROC / str(pid) / "task" / str(tid) / "syscall"))


def _parse_call(text: str) -> tuple[str, list[int]]:
    fields = text.split()
    if not fields or fields[0] in ("running", "-1"):
        return "", []
    number = int(fields[0])
    names = CALLS.get(platform.machine(), {})
    return names.get(number, f"system call {number}"), [int(word, 16) for word in fields[1:7]]


def describe_wait(wait: Wait) -> str:
    """Describe what a thread waits for, as a continuation of `it is`, or with a verb of its own."""
    if not wait.call:
        return f"in the kernel ({wait.wchan})" if wait.wchan else "at an unknown place"
    if wait.is_sleeping:
        return "in sleep()"
    limit = "" if wait.limit_s is None else ", with a time limit"
    if wait.call == "futex":
        return f"waits for another thread (futex){limit}"
    target = f" of {wait.target}" if wait.target else ""
    return f"in {_NAMES.get(wait.call, wait.call)}(){target}{limit}"


_NAMES = {
    "readv": "read", "pread64": "read", "preadv": "read", "recvfrom": "recv", "recvmsg": "recv", "openat": "open",
    "openat2": "open", "newfstatat": "stat", "statx": "stat", "pwrite64": "write", "writev": "write", "sendto": "send",
    "sendmsg": "send", "pselect6": "select", "ppoll": "poll", "epoll_pwait": "epoll_wait", "accept4": "accept",
}  # fmt: skip


def _decode(pid: int, call: str, args: list[int], wchan: str) -> Wait:
    memory = ProcessMemory(pid)
    fds = _fds(memory, call, args)
    target, port = "", 0
    if call in _PATH_FIRST or call in _PATH_SECOND:
        target = open_files.relative_path(pid, memory.path(args[0] if call in _PATH_FIRST else args[1]))
    elif fds:
        targets = tuple(dict.fromkeys(open_files.describe_fd(pid, fd) for fd in fds))
        target, port = ", ".join(one.text for one in targets), targets[0].port if len(targets) == 1 else 0
    limit_s = _limit_s(call, args)
    watches_nothing = call in ("select", "pselect6") and args[0] == 0 and limit_s is not None
    asleep = call in ("nanosleep", "clock_nanosleep") or watches_nothing
    return Wait(call, target, fds, limit_s, asleep, wchan, memory.unavailable, _awaited_child(call, args), port)


def _awaited_child(call: str, args: list[int]) -> int | None:
    match call:
        case "wait4":
            return max(0, _signed(args[0]))  # below 0: any, or any of a group
        case "waitid":
            return args[1] if args[0] == os.P_PID else 0
        case _:
            return None


def _limit_s(call: str, args: list[int]) -> float | None:
    """Return the time limit of a call: None without one, 0 where only its address is among the arguments."""
    if call in _LIMIT_MS:
        value_ms = _signed(args[_LIMIT_MS[call]])
        return None if value_ms < 0 else value_ms / 1000
    if call in _LIMIT_ADDRESS:
        return 0.0 if args[_LIMIT_ADDRESS[call]] else None
    return 0.0 if call in ("nanosleep", "clock_nanosleep", "restart_syscall") else None


def _signed(register: int) -> int:
    """Return a register's value as an `int` of C."""
    value: int = struct.unpack("<i", struct.pack("<I", register & 0xFFFFFFFF))[0]
    return value


def _fds(memory: ProcessMemory, call: str, args: list[int]) -> tuple[int, ...]:
    if call in _FD_FIRST:
        return (args[0] & 0xFFFFFFFF,)
    if call in ("poll", "ppoll"):
        raw = memory.read(args[0], 8 * min(args[1], POLLED_FDS_MAX))
        entries = struct.iter_unpack("<ihh", raw[: len(raw) // 8 * 8])
        return tuple(fd for fd, _events, _revents in entries if fd >= 0)
    return ()


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

    def seconds(self, address: int) -> float | None:
        """Return a timespec in seconds; None where it is not a sane one."""
        raw = self.read(address, 16) if address else b""
        if len(raw) < 16:
            return None
        whole, part_ns = struct.unpack("<qq", raw)
        return float(whole + part_ns * 1e-9) if whole >= 0 and 0 <= part_ns < 10**9 else None

    def path(self, address: int) -> str:
        """Return the NUL-terminated text at an address."""
        raw = self.read(address, PATH_BYTES_MAX)
        return raw.partition(b"\0")[0].decode(errors="replace")
