"""Stacks of a rank's Python processes: one thread's, which a signal requests, and those of all threads at a fatal signal."""

# No pathlib: it would cost every interpreter start 5 ms.
# ruff: noqa: PTH108, PTH116, PTH118

import os

from .layout import STACKS_FILE, STACKS_MEMFD, TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

STACK_FRAMES_MAX = 100  # as many as `faulthandler` writes


class StackDumper:
    """Two stack signals, by which a thread writes its own stack to a file.

    The first is `faulthandler`'s, which answers in C code, too, and while the GIL is held. It must only interrupt a
    thread that is in C code: in the middle of a call of a Python function the frames are not complete, and Python 3.11
    to 3.13 dies of reading them (up to one dump in 30). So a thread that runs gets the next signal first, which Python
    answers between two instructions, in its main thread. `faulthandler` does not write the stacks of all threads: one
    of them may end, and its state be freed, while the handler reads it.

    A fatal signal (SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL) leaves the stacks of all threads in the same file: the
    process has nothing more to lose.
    """

    def __init__(self, folder: str, signal_number: int) -> None:
        import _signal  # type: ignore[import-not-found]  # `signal` itself takes 2 ms
        import faulthandler

        self._pid = os.getpid()
        self._path = os.path.join(folder, STACKS_FILE.format(self._pid))
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._inode = os.fstat(self._fd).st_ino
        # `faulthandler` restores the former handler when Python ends: a late stack signal must not kill then.
        _signal.signal(signal_number, _signal.SIG_IGN)
        faulthandler.register(signal_number, file=self._fd, all_threads=False, chain=False)
        if not faulthandler.is_enabled():  # else the user has asked for it, and finds the stacks in the log
            faulthandler.enable(file=self._fd)
        self._unregister = faulthandler.unregister  # in C: it needs no frame
        self._faulthandlers_signal, self._running_signal = signal_number, signal_number + 1
        _signal.signal(self._running_signal, self._write)
        _signal.siginterrupt(self._running_signal, False)  # system calls continue, as under `faulthandler`

    def _write(self, signal_number: int, frame: "FrameType | None") -> None:
        """Write the stack that the signal has interrupted, as `faulthandler` does."""
        try:
            lines = ["Stack (most recent call first):"]
            while frame is not None and len(lines) <= STACK_FRAMES_MAX:
                code = frame.f_code
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
                frame = frame.f_back
            if os.fstat(self._fd).st_ino == self._inode:
                os.write(self._fd, ("\n".join(lines) + "\n").encode("ascii", "backslashreplace"))
        except Exception:  # a full disk, a deep recursion; a Ctrl-C in the middle of it is the script's
            # Without an answer this thread would be taken to be in C code: it must not get that signal.
            self._unregister(self._faulthandlers_signal)

    def after_fork(self) -> None:
        """Give a forked child a file of its own in memory: two processes would mix their lines in one file."""
        try:
            if os.fstat(self._fd).st_ino == self._inode:  # else the script closed it and uses its number
                fd = os.memfd_create(STACKS_MEMFD.format(os.getpid()))
                os.dup2(fd, self._fd, inheritable=False)
                os.close(fd)
                self._inode = os.fstat(self._fd).st_ino
        except (OSError, AttributeError):  # a Python without `memfd_create`
            pass  # the child is without stacks

    def at_exit(self) -> None:
        """Ignore the signal that Python answers, since its end would restore the default action, which kills; and
        remove the file if it is empty: a script may run ten thousand short Python processes."""
        import _signal

        _signal.signal(self._running_signal, _signal.SIG_IGN)
        if self._pid == os.getpid() and os.stat(self._path).st_size == 0:
            os.unlink(self._path)
