"""Errors in a rank: the exception that ends its script, for the agent, and those of the hook itself; and the stacks of its Python
processes: one thread's, which a signal requests, and those of all threads at a fatal signal."""

# No pathlib: it would cost every interpreter start 5 ms.
# ruff: noqa: PTH105, PTH108, PTH116, PTH118, PTH120, PTH123

import _thread
import os
import sys

from .layout import ERROR_FILE, GIVEN_ENV, NOTES_FILE, RANK_DIR_ENV, STACKS_FILE, STACKS_MEMFD, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import TypeVar

    T = TypeVar("T")

MAIN_THREAD = _thread.get_ident()  # Python's start imports this module
GIVEN_RENDEZVOUS: "dict[str, str]" = {}  # the rendezvous that the rank was given
MESSAGE_CHARS_MAX = 4_000
TRACEBACK_CHARS_MAX = 20_000
STACK_FRAMES_MAX = 100  # as many as `faulthandler` writes


NO_SUCH_GPU = "CUDA error: invalid device ordinal"


class HookNotes:
    """Errors of the hook: one line for each place and process, in a file of the rank's folder."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, NOTES_FILE)
        self._places: set[str] = set()

    def guard(self, place: str, act: "Callable[[], T]") -> "T | None":
        """Run `act`; an exception becomes a line of the hook notes."""
        try:
            return act()
        except Exception as err:
            self.add(place, err)
            return None

    def add(self, place: str, err: Exception) -> None:
        """Note an error at a place, only the first of each place."""
        if place in self._places:
            return
        self._places.add(place)
        try:
            with open(self._path, "a") as file:
                file.write(f"pid {os.getpid()}: {place}: {type(err).__name__}: {str(err)[:500]}\n")
        except Exception:
            pass  # there is no other place to note it


class Errors:
    """Notes the exception that ends the main thread, whichever library owns `sys.excepthook` by then.

    torch.distributed's hook calls the one before it, rich's does not, and both are installed after ours. So ours
    wraps again once torch is imported and at the first step, and reads `sys.last_value` at exit.
    """

    def __init__(self, folder: str, notes: HookNotes) -> None:
        self._folder = folder
        self._notes = notes
        self._pid = os.getpid()
        names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        GIVEN_RENDEZVOUS.update(zip(names, os.environ.pop(GIVEN_ENV, "").split(), strict=False))
        self._last_written: BaseException | None = None
        self._hook: object = None

    def wrap(self) -> None:
        """Install a hook before the present one, which still does all the printing."""
        previous = sys.excepthook
        if previous is self._hook:
            return

        def note_and_pass_on(kind: "type[BaseException]", value: BaseException, trace: object) -> None:
            self.note(value)
            previous(kind, value, trace)  # type: ignore[arg-type]

        # A new function each time: the present hook may call our earlier one, which must not call back.
        self._hook = sys.excepthook = note_and_pass_on

    def at_exit(self) -> None:
        """Note the exception that a hook in place of ours has printed."""
        value = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self._pid == os.getpid() and value is not None:
            self.note(value)

    def note(self, value: BaseException) -> None:
        """Write the error file for `value`, once; not for Ctrl-C, which is not an error of the script.

        Also, importing `traceback` evaluates text, after which CPython exits with 1 instead of dying of
        SIGINT.
        """
        if value is self._last_written or isinstance(value, KeyboardInterrupt):
            return
        self._last_written = value
        self._notes.guard("error file", lambda: write_error(self._folder, value))


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


def write_error(folder: str, value: BaseException) -> None:
    """Write `value` to this process's error file."""
    path = os.path.join(folder, ERROR_FILE.format(os.getpid()))
    with open(path + ".part", "w") as out:
        out.write(to_record(value))
    os.replace(path + ".part", path)


def to_record(value: BaseException) -> str:
    """Return `value` as a `Failure` in JSON."""
    import json
    import traceback

    kind = type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else kind.__module__ + "."
    file, line, function = find_place(value)
    report = traceback.TracebackException(kind, value, value.__traceback__)  # copes with a str() that raises
    text = "".join(report.format())
    other = describe_other_rendezvous() if "/torch/distributed/rendezvous.py" in text else ""
    seen = f" ({describe_gpus(value)})" if NO_SUCH_GPU in str(report) else ""
    message = str(report).replace(NO_SUCH_GPU, NO_SUCH_GPU + seen, 1)
    record = {
        "type": module + kind.__qualname__,
        "message": f"{other}{': ' if other else ''}{message}"[:MESSAGE_CHARS_MAX],
        "traceback": cut_middle(text),
        "where": {"file": file, "line": line, "function": function} if file else None,
        "loading": find_loading_file(value),
    }
    return json.dumps(record)


def describe_gpus(value: BaseException) -> str:
    """Describe the GPUs that this process sees; with the one that was asked for, where `torch.cuda.set_device` was refused it."""
    parts, trace = [], value.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("torch.cuda", "set_device"):
            parts = [f"GPU {frame.f_locals.get('device')} was asked for"]
        trace = trace.tb_next
    try:
        parts.append(f"this rank sees {sys.modules['torch.cuda'].device_count()} GPUs")
    except Exception:
        pass  # its number is not known
    return ", ".join(
        [*parts, *(f"{name}={os.environ.get(name, '')}" for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK"))]
    )


def describe_other_rendezvous() -> str:
    """Describe how the rendezvous of the rank's first Python, which has formed no process group, differs from the given one; empty
    where it does not."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    has_no_group = c10d is not None and not c10d._world.pg_map
    now = {name: os.environ.get(name, "") for name in GIVEN_RENDEZVOUS if has_no_group}
    return ", ".join(
        f"{name} is {now[name]} by the script, orch gave {GIVEN_RENDEZVOUS[name]}"
        for name in now
        if now[name] != GIVEN_RENDEZVOUS[name]
    )


def rendezvous_record() -> str:
    """Return `describe_other_rendezvous` as a `Failure` in JSON without a type; empty for nothing."""
    import json

    other = describe_other_rendezvous()
    return json.dumps({"type": "", "message": other, "traceback": "", "where": None}) if other else ""


def pending_exception() -> "BaseException | None":
    """Return the exception that the main thread is handling, in `except`, `finally` or `__exit__`; after its script the one
    that has ended it."""
    current = sys._current_exceptions().get(MAIN_THREAD)  # before Python 3.12 as three values
    value = current[1] if isinstance(current, tuple) else current
    return value or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def cut_middle(text: str, chars_max: int = TRACEBACK_CHARS_MAX) -> str:
    """Shorten `text` to `chars_max` by its middle: the ends of a traceback say where it began and what it was."""
    mark = "\n... its middle is left out ...\n"
    half = (chars_max - len(mark)) // 2
    return text if len(text) <= chars_max else text[:half] + mark + text[-half:]


def find_place(value: BaseException) -> "tuple[str, int, str]":
    """Return file, line and function of the deepest frame in the user's own code, else of the deepest frame."""
    if isinstance(value, SyntaxError) and value.filename:
        return value.filename, value.lineno or 0, "<module>"
    library = ("<frozen", os.path.dirname(os.__file__) + os.sep)
    deepest, users_place = ("", 0, ""), None
    trace = value.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        deepest = (file, trace.tb_lineno, trace.tb_frame.f_code.co_name)
        if not file.startswith(library) and "/site-packages/" not in file and "/dist-packages/" not in file:
            users_place = deepest
        stopped = trace.tb_frame.f_locals.get("frame")  # the frame that pdb has stopped: it may have no entry
        if type(value).__name__ == "BdbQuit" and stopped is not None and hasattr(stopped, "f_lineno"):
            return stopped.f_code.co_filename, stopped.f_lineno, stopped.f_code.co_name
        trace = trace.tb_next
    return users_place or deepest


LOADERS = (
    "torch",
    "safetensors",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "deepspeed",
)
"""Libraries whose functions load the state of a training."""


def find_loading_file(value: BaseException) -> str:
    """Return the file of a checkpoint that a library was loading when `value` was raised; empty for none."""
    places = [os.environ.get(name, "") for name in ("ORCH_RESUME_FROM", "ORCH_CHECKPOINT_DIR")]
    if os.environ.get(RANK_DIR_ENV):  # from a folder in memory links lead to that of the job
        places.append(os.path.join(os.environ[RANK_DIR_ENV], *[os.pardir] * 4, "checkpoints"))
    tops = tuple(os.path.realpath(place) for place in places if place)
    trace, found = value.__traceback__, ""
    while trace is not None:
        frame = trace.tb_frame
        library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if library in LOADERS and ("load" in frame.f_code.co_name or "read" in frame.f_code.co_name):
            for candidate in list(frame.f_locals.values()):
                path = getattr(candidate, "name", getattr(candidate, "path", candidate))
                if isinstance(path, (str, os.PathLike)):
                    real = os.path.realpath(os.fspath(path))
                    if isinstance(real, str) and any(real == top or real.startswith(top + os.sep) for top in tops):
                        found = real
        trace = trace.tb_next
    return found
