"""What rides in every rank? This file, copied as `sitecustomize.py` into a folder at the front of PYTHONPATH.

In each Python process of a rank it arms `faulthandler` on the stack signal, notes an uncaught exception, counts
optimizer steps once torch is there, and then makes way for the `sitecustomize` that would have run without it.
Under any other module name it does nothing, so that the agent can import its constants.

Rules: standard library only, and as little of it as can be, since every interpreter start pays; it never breaks a
script: whatever fails in here is swallowed and noted once; it prints nothing. Syntax and annotations stay readable
for Python 3.8, hence the quoted types: ranks may run an older Python than the agent.
"""

# No pathlib: it would cost every interpreter start 5 ms.
# ruff: noqa: PTH105, PTH108, PTH110, PTH116, PTH118, PTH120, PTH123

import os
import sys

TYPE_CHECKING = False  # typing's own costs 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    T = TypeVar("T")

# What the agent sets for a rank.
RANK_DIR_ENV = "ORCH_RANK_DIR"
STACK_SIGNAL_ENV = "ORCH_STACK_SIGNAL"
SOCKET_ENV = "ORCH_SOCKET"

# What lies in a rank's folder.
BEAT_FILE = "beat"
CLAIM_FILE = "beat-claim-{}"
STACKS_FILE = "stacks-{}.txt"
STACKS_MEMFD = "stacks-{}"  # a forked child's, found under /proc/<pid>/fd
ERROR_FILE = "error-{}.json"
NOTES_FILE = "hook-notes.txt"

# The beat file is an array of little-endian u64: a header of 64 bytes, then the time of step n at n % RING_STEPS.
BEAT_MAGIC = 0x4843524F  # b"ORCH" read as u32; the version stands in the upper half of the same word
BEAT_VERSION = 1
MAGIC_WORD, PID_WORD, STEP_WORD, TIME_WORD, RING_WORD = 0, 1, 2, 3, 8
RING_STEPS = 1024
BEAT_BYTES = 8 * (RING_WORD + RING_STEPS)
CLAIMS_MAX = 64  # processes that may follow each other at one beat file: a script may restart its trainer
CLAIM_RETRY_NS = 1_000_000_000
MESSAGE_CHARS_MAX = 4_000
TRACEBACK_CHARS_MAX = 20_000
# torch's server on ORCH_SOCKET: 0.5 ms and two threads. Never shut down: that waits up to 5 s for a silent client.
WORKER_SERVER = True
# A gloo thread that frees a tensor while Python ends aborts the process: pytorch/pytorch#179291, seen in 5 of 72
# exits of a training that went well, and in 0 of 64 when the interpreter's lock was free for a moment before.
EXIT_PAUSE_S = 0.05

_MULTIPROCESSING_STARTS = (
    "from multiprocessing.forkserver import",
    "from multiprocessing.resource_tracker import",
)


def may_arm(environ: "Mapping[str, str]", argv: "list[str]") -> bool:
    """Tell whether this process may arm: a rank's, and not a child that `multiprocessing` started for its own ends."""
    if not environ.get(RANK_DIR_ENV) or "RANK" not in environ or "--multiprocessing-fork" in argv:
        return False
    return not any(arg.startswith(_MULTIPROCESSING_STARTS) for arg in argv)


def start_ticks(pid: int) -> "str | None":
    """Return when `pid` started, in clock ticks since boot (`man 5 proc`), or None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


class Notes:
    """What went wrong in the hook: one line for each place and process, in the rank's folder."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, NOTES_FILE)
        self._places: set[str] = set()

    def guard(self, place: str, act: "Callable[[], T]") -> "T | None":
        """Run `act`; what it raises goes no further than a line of notes."""
        try:
            return act()
        except Exception as err:
            self._add(place, err)
            return None

    def _add(self, place: str, err: Exception) -> None:
        if place in self._places:
            return
        self._places.add(place)
        try:
            with open(self._path, "a") as file:
                file.write(f"pid {os.getpid()}: {place}: {type(err).__name__}: {str(err)[:500]}\n")
        except Exception:
            pass  # then nobody is left to tell


class Stacks:
    """`faulthandler` on the stack signal: it writes all threads' stacks to a file, even while the GIL is held."""

    def __init__(self, folder: str, signal_number: int) -> None:
        import faulthandler

        self._pid = os.getpid()
        self._path = os.path.join(folder, STACKS_FILE.format(self._pid))
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._inode = os.fstat(self._fd).st_ino
        faulthandler.register(signal_number, file=self._fd, all_threads=True, chain=False)

    def after_fork(self) -> None:
        """Give a forked child a file of its own, in memory: two processes dumping into one would mix their lines."""
        try:
            if os.fstat(self._fd).st_ino == self._inode:  # else the script closed it and uses its number
                fd = os.memfd_create(STACKS_MEMFD.format(os.getpid()))
                os.dup2(fd, self._fd, inheritable=False)
                os.close(fd)
                self._inode = os.fstat(self._fd).st_ino
        except OSError:
            pass  # the child is without stacks

    def at_exit(self) -> None:
        """Leave no empty file behind: a script may run ten thousand short Python processes."""
        if self._pid == os.getpid() and os.stat(self._path).st_size == 0:
            os.unlink(self._path)


class Errors:
    """Notes the exception that ends the main thread, whoever owns `sys.excepthook` by then.

    torch.distributed's hook calls the one before it, rich's does not, and both come after ours: so ours wraps
    again when torch is there and at the first step, and a last look at `sys.last_value` is taken at exit.
    """

    def __init__(self, folder: str, notes: Notes) -> None:
        self._folder = folder
        self._notes = notes
        self._pid = os.getpid()
        self._noted: BaseException | None = None
        self._hook: object = None

    def wrap(self) -> None:
        """Put a hook before the present one, which still does all the printing."""
        previous = sys.excepthook
        if previous is self._hook:
            return

        def note_and_go_on(kind: "type[BaseException]", value: BaseException, trace: object) -> None:
            self.note(value)
            previous(kind, value, trace)  # type: ignore[arg-type]

        # A new function each time: the present hook may call our earlier one, which must not call back.
        self._hook = sys.excepthook = note_and_go_on

    def at_exit(self) -> None:
        """Note what a hook that replaced ours has printed."""
        value = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self._pid == os.getpid() and value is not None:
            self.note(value)

    def note(self, value: BaseException) -> None:
        """Write the error file for `value`, once; not for Ctrl-C, which is no fault of the script's.

        Besides, importing `traceback` evaluates text, and CPython then forgets to die of SIGINT and exits with 1.
        """
        if value is self._noted or isinstance(value, KeyboardInterrupt):
            return
        self._noted = value
        self._notes.guard("error file", lambda: write_error(self._folder, value))


def write_error(folder: str, value: BaseException) -> None:
    """Write `value` with its traceback and its place in the user's code to this process's error file."""
    import json
    import time
    import traceback

    kind = type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else kind.__module__ + "."
    file, line, function = place_of(value)
    report = traceback.TracebackException(kind, value, value.__traceback__)  # copes with a str() that raises
    record = {
        "pid": os.getpid(),
        "type": module + kind.__qualname__,
        "message": str(report)[:MESSAGE_CHARS_MAX],
        "traceback": cut_middle("".join(report.format())),
        "file": file,
        "line": line,
        "function": function,
        "time_ns": time.time_ns(),
    }
    path = os.path.join(folder, ERROR_FILE.format(os.getpid()))
    with open(path + ".part", "w") as out:
        json.dump(record, out)
    os.replace(path + ".part", path)


def cut_middle(text: str, chars_max: int = TRACEBACK_CHARS_MAX) -> str:
    """Shorten `text` to `chars_max` from its middle: a traceback's ends say where it began and what it was."""
    mark = "\n... its middle is left out ...\n"
    half = (chars_max - len(mark)) // 2
    return text if len(text) <= chars_max else text[:half] + mark + text[-half:]


def place_of(value: BaseException) -> "tuple[str, int, str]":
    """Return file, line and function of the deepest frame in the user's own code, else of the deepest frame."""
    if isinstance(value, SyntaxError) and value.filename:
        return value.filename, value.lineno or 0, "<module>"
    not_mine = ("<frozen", os.path.dirname(os.__file__) + os.sep)
    deepest, mine = ("", 0, ""), None
    trace = value.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        deepest = (file, trace.tb_lineno, trace.tb_frame.f_code.co_name)
        if not file.startswith(not_mine) and "/site-packages/" not in file and "/dist-packages/" not in file:
            mine = deepest
        trace = trace.tb_next
    return mine or deepest


class Steps:
    """Counts this process's optimizer steps in the rank's beat file, if this is the process that may.

    The first that steps claims the file and runs `claimed`; the others of the rank stay silent, and look again once
    a second whether the claimer has died. A forked child never writes.
    """

    def __init__(self, folder: str, notes: Notes, claimed: "Callable[[], None]") -> None:
        import itertools
        import time

        self._folder = folder
        self._notes = notes
        self._claimed = claimed
        self._next_step = itertools.count(1).__next__  # atomic under the GIL
        self._time_ns = time.time_ns
        self._beat: memoryview | None = None
        self._retry_at_ns: float = 0

    def after_step(self, optimizer: object, args: object, kwargs: object) -> None:
        """Run after each optimizer step, as torch's global hook; the time goes in before the count that vouches for it."""
        step = self._next_step()
        now_ns = self._time_ns()
        beat = self._beat or self._first_step(now_ns)
        if beat:
            beat[RING_WORD + step % RING_STEPS] = now_ns
            beat[TIME_WORD] = now_ns
            beat[STEP_WORD] = step

    def after_fork(self) -> None:
        """Fall silent for good."""
        self._beat = None
        self._retry_at_ns = float("inf")

    def at_exit(self) -> None:
        """Let torch's communication threads finish before the interpreter goes, in the process that trained."""
        if self._beat is not None:
            import time

            time.sleep(EXIT_PAUSE_S)

    def _first_step(self, now_ns: int) -> "memoryview | None":
        if now_ns < self._retry_at_ns:
            return None
        self._retry_at_ns = now_ns + CLAIM_RETRY_NS
        if self._notes.guard("claim", lambda: claim(self._folder)):
            self._retry_at_ns = float("inf")  # ours for good, even if the file is of no use
            self._beat = self._notes.guard("beat", lambda: open_beat(self._folder))
            self._notes.guard("after the claim", self._claimed)
        return self._beat


def claim(folder: str) -> bool:
    """Take the rank's beat file for this process, unless a living one has it. Raises OSError."""
    for number in range(CLAIMS_MAX):
        path = os.path.join(folder, CLAIM_FILE.format(number))
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            with open(path) as file:
                owner = file.read().split()
            if len(owner) != 2 or start_ticks(int(owner[0])) == owner[1]:
                return False  # alive, or not yet done writing its name
            continue
        try:
            os.write(fd, f"{os.getpid()} {start_ticks(os.getpid())}".encode())
        except OSError:
            pass  # the disk is full: without a name the claim holds for good, which is no harm
        os.close(fd)
        return True
    return False


def open_beat(folder: str) -> memoryview:
    """Map the beat file that the agent made, cleared and in this process's name. Raises OSError, ValueError."""
    import mmap

    fd = os.open(os.path.join(folder, BEAT_FILE), os.O_RDWR)
    try:
        beat = memoryview(mmap.mmap(fd, BEAT_BYTES)).cast("Q")
    finally:
        os.close(fd)
    beat[:] = memoryview(bytes(BEAT_BYTES)).cast("Q")
    beat[PID_WORD] = os.getpid()
    beat[MAGIC_WORD] = BEAT_MAGIC | BEAT_VERSION << 32
    return beat


class AfterTorch:
    """A finder that finds nothing: it is asked about every new module, and so sees when torch's optimizers are there.

    Wrapping torch's loader instead would put a frame of ours into the traceback of a failing `import torch`.
    """

    def __init__(self, arrived: "Callable[[AfterTorch, Callable[..., object]], None]") -> None:
        self._arrived = arrived

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing; when torch's step hook can be registered, run `arrived` with the way to do it."""
        module = sys.modules.get("torch.optim.optimizer")
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if register is not None:
            self._arrived(self, register)


def serve(path: str) -> None:
    """Start torch's worker server on a unix socket, for good. Raises ImportError, OSError, RuntimeError."""
    import ctypes

    from torch._C._distributed_c10d import _WorkerServer

    if os.path.exists(path):
        os.unlink(path)  # of a dead process that had the claim before
    server = _without_its_greeting(lambda: _WorkerServer(path))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))  # its destructor is a shutdown


def _without_its_greeting(start: "Callable[[], object]") -> object:
    """Run `start` with stderr in memory, and pass on what came except the server's own line."""
    memory, stderr = os.memfd_create("stderr"), os.dup(2)
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


class Hook:
    """All of it, in one process of a rank. Every way in swallows what goes wrong."""

    def __init__(self, environ: "Mapping[str, str]") -> None:
        import atexit

        folder = environ[RANK_DIR_ENV]
        self._socket = environ.get(SOCKET_ENV, "")
        self._notes = Notes(folder)
        self._errors = Errors(folder, self._notes)
        self._steps = Steps(folder, self._notes, self._claimed)
        self._stacks = self._notes.guard("stacks", lambda: Stacks(folder, int(environ[STACK_SIGNAL_ENV])))
        atexit.register(self._steps.at_exit)  # the first to register is the last to run
        self._errors.wrap()
        sys.meta_path.insert(0, AfterTorch(self._torch_arrived))
        atexit.register(self._errors.at_exit)
        os.register_at_fork(after_in_child=self._steps.after_fork)
        if self._stacks is not None:
            atexit.register(self._notes.guard, "stacks at exit", self._stacks.at_exit)
            os.register_at_fork(after_in_child=self._stacks.after_fork)

    def _torch_arrived(self, finder: AfterTorch, register: "Callable[..., object]") -> None:
        def count_steps() -> None:
            sys.meta_path.remove(finder)  # fails in a second thread, which must not register again
            # A compiled optimizer.step would trace into the hook and warn about it; this mark keeps dynamo out.
            Steps.after_step._torchdynamo_disable = True  # type: ignore[attr-defined]
            register(self._steps.after_step)

        self._notes.guard("step hook", count_steps)
        self._errors.wrap()

    def _claimed(self) -> None:
        self._errors.wrap()
        if self._socket and WORKER_SERVER:
            serve(self._socket)


def _start() -> None:
    """Arm this process once, if it is one to arm."""
    with open("/proc/self/cmdline", errors="replace") as file:  # sys.argv says "-c" and no more here
        argv = file.read().split("\0")
    if may_arm(os.environ, argv) and not hasattr(sys, "_orch_hook"):
        sys._orch_hook = Hook(os.environ)  # type: ignore[attr-defined]


if __name__ == "sitecustomize":
    try:
        _start()
    except Exception:
        pass  # not even a folder to note it in
    # Make way, as if we had never been; children find us through the environment.
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    sys.modules.pop(__name__, None)
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # the next, or the ImportError `site` expects
