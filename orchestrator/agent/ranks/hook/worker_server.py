"""Worker server of torch in a rank: started on a unix socket of the rank's folder, without its side effects."""

# No pathlib: it would cost every interpreter start 5 ms.
# ruff: noqa: PTH108, PTH110

import os
import sys

from .errors import HookNotes, pending_exception, rendezvous_record, to_record
from .layout import PENDING_HANDLER, SOCKET_FILE, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from typing import Any, TypeVar

    T = TypeVar("T")


def start_worker_server(server: "Callable[[str], object]", folder: str) -> None:
    """Start torch's worker server on a unix socket in `folder`, for the life of the process. Raises OSError,
    RuntimeError.

    It costs 0.5 ms and some ten idle threads. A socket's path may have 107 bytes and job folders lie deep, so the path
    names the folder by its descriptor.
    """
    import ctypes

    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        path = f"/proc/self/fd/{fd}/{SOCKET_FILE.format(os.getpid())}"
        if os.path.exists(path):
            os.unlink(path)  # of a dead process that had the same pid
        worker_server = _shield_signals(lambda: _filter_greeting(lambda: server(path)))
    finally:
        os.close(fd)
    # Never shut down, which its destructor would do: that waits up to 5 s for a silent client.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker_server))


def serve_pending_exception(c10d: "Any", notes: HookNotes) -> None:
    """Let the worker server answer with the exception that the main thread is handling, where torch has handlers in Python.

    torch calls them in a thread of its own, so that they answer while the main thread is in C code.
    """

    def answer(request: object, response: "Any") -> None:
        value = notes.guard("pending exception", pending_exception)
        text = notes.guard("pending record", rendezvous_record if value is None else lambda: to_record(value))
        response.set_content(text or "", "application/json")
        response.set_status(200)

    if hasattr(c10d, "_register_handler") and hasattr(sys, "_current_exceptions"):
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(answer))  # torch lets it go without the GIL, which aborts
        c10d._register_handler(PENDING_HANDLER, answer)


def _shield_signals(start: "Callable[[], T]") -> "T":
    """Run `start` so that SIGPIPE stays as the script has set it, and threads that begin in `start` get no signals.

    The server ignores SIGPIPE for the whole process; where a script undoes that, a client that goes away would kill it.
    """
    import signal
    import threading

    faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
    before = signal.getsignal(signal.SIGPIPE)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)  # new threads inherit it
    try:
        return start()
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGPIPE, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _filter_greeting(start: "Callable[[], object]") -> object:
    """Run `start` with stderr in memory, and pass on all lines except the server's own."""
    if not hasattr(os, "memfd_create"):
        return start()
    stderr = os.dup(2)
    memory = os.memfd_create("stderr")
    os.dup2(memory, 2)
    try:
        return start()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.lseek(memory, 0, os.SEEK_SET)
        lines = os.read(memory, 1 << 20).splitlines(keepends=True)
        os.close(memory)
        os.write(2, b"".join(line for line in lines if b"WorkerServer.cpp" not in line))


def drop_old_name(environ: "MutableMapping[str, str]") -> None:
    """Hide the old name of the flight recorder's length from a torch that knows the new one: it would warn in each
    rank's log. The agent sets both, since the node's torch is not known before the start."""
    new, old = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    version = getattr(sys.modules.get("torch.version"), "__version__", "0.0")
    knows_new = tuple(int(part) for part in version.split(".")[:2]) >= (2, 9)
    if knows_new and environ.get(old, "") == environ.get(new):
        del environ[old]
