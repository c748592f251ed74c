"""Is a process's main thread in a loop of machine code that nothing in it can leave? It is halted once, for a moment.

ptrace(2) tells at which instruction the thread is; the code from there on is read, not executed. Not by single steps: a
thread whose tracer dies between two of them is killed by SIGTRAP. Where ptrace is not allowed nothing is guessed.

Rules: who asks is a thread of the agent, since Yama lets only ancestors trace; and a thread of its own, since whatever a
tracer's end finds attached goes on by itself. It never calls wait: the agent reaps all its children at once, and sees a
halt of one as any other; that a thread is halted is told by its registers, which cannot be read before.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.node import opcodes
from orchestrator.node.kernel import Memory

HALT_S_MAX = 0.5
"""How long a thread may take to halt: it does so when it next has a processor, and computes until then."""

ASK_S_MAX = 1.0
"""How long all of it may take; `PTRACE_SEIZE` waits for a process that executes a program."""

POLL_S = 0.0005

_GETSIGINFO, _DETACH, _GETREGSET, _SEIZE, _INTERRUPT = 0x4202, 17, 0x4204, 0x4206, 0x4207
_EVENT_STOP = 128
_NT_PRSTATUS = 1
_SIGINFO_BYTES = 128
_REGISTERS_BYTES_MAX = 1024

_COUNTERS: Mapping[str, tuple[int, int]] = {"x86_64": (216, 128), "aarch64": (272, 256)}
"""How long the registers of a 64-bit process are (`struct user_regs_struct`, `user_pt_regs`), and where the program counter
stands in them."""


class _Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


@dataclass(slots=True)
class _Trace:
    """At which instruction a thread is, once that is known; `lack`: why nobody may know."""

    address: int | None = None
    lack: str = ""


def is_trapped(pid: int) -> tuple[bool, str]:
    """Tell whether the main thread of a process is proved never to leave its loop; where it may not be asked, why."""
    machine = platform.machine()
    if machine not in _COUNTERS:
        return False, f"machine code of {machine} is not known"
    trace = _Trace()
    tracer = threading.Thread(target=_trace, args=(pid, trace), daemon=True)
    tracer.start()
    tracer.join(ASK_S_MAX)
    if trace.address is None:
        return False, trace.lack
    read = functools.partial(Memory(pid).read, size_bytes=opcodes.LENGTH_MAX)
    return opcodes.never_leaves(read, trace.address, machine), ""


def _trace(tid: int, trace: _Trace) -> None:
    if _ptrace(_SEIZE, tid, None, None) < 0:
        code = ctypes.get_errno()
        if code != errno.ESRCH:
            trace.lack = f"ptrace: {os.strerror(code).lower()}"
        return
    _ptrace(_INTERRUPT, tid, None, None)
    until_s = time.monotonic() + HALT_S_MAX
    while (registers := _registers(tid)) is None and time.monotonic() < until_s:
        time.sleep(POLL_S)
    signum = _signal_due(tid)
    if signum is not None:
        _ptrace(_DETACH, tid, None, signum)
    size_bytes, offset = _COUNTERS[platform.machine()]
    if registers is not None and len(registers) == size_bytes:
        trace.address = struct.unpack_from("=Q", registers, offset)[0]


def _registers(tid: int) -> bytes | None:
    """Return the registers of a thread that is halted, None before."""
    room = ctypes.create_string_buffer(_REGISTERS_BYTES_MAX)
    vector = _Vector(ctypes.addressof(room), _REGISTERS_BYTES_MAX)
    if _ptrace(_GETREGSET, tid, _NT_PRSTATUS, ctypes.addressof(vector)) < 0:
        return None
    return room.raw[: vector.size]


def _signal_due(tid: int) -> int | None:
    """Return the signal that a halted thread was about to get, 0 for none; None for a thread that is not halted."""
    info = ctypes.create_string_buffer(_SIGINFO_BYTES)
    if _ptrace(_GETSIGINFO, tid, None, ctypes.addressof(info)) < 0:
        return None
    signum, _, code = struct.unpack_from("=iii", info)
    return 0 if code >> 8 == _EVENT_STOP else int(signum)


def _ptrace(request: int, tid: int, address: int | None, data: int | None) -> int:
    return int(_LIBC.ptrace(request, tid, address, data))


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.restype = ctypes.c_long
_LIBC.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
