"""Hook in every Python process of a rank: this file, copied as `sitecustomize.py` to the front of PYTHONPATH.

In each process it answers the stack signals and notes an uncaught exception. Once torch is imported it starts torch's
worker server, counts optimizer steps, collectives and batches, and notes whether the rank has formed a process group.
It notes when the process is exiting. In a child that `multiprocessing` has spawned it only counts. At start it makes way
for the `sitecustomize` that would have run without it.
Under any other module name it does nothing, so that the agent can import its constants.

Rules: standard library only, and as little of it as possible, since every interpreter start pays. It never breaks a
script: it swallows each of its own errors and notes it once. It prints nothing. Syntax and annotations stay readable
for Python 3.8, hence the quoted types: ranks may run an older Python than the agent.
"""

# No pathlib: it would cost every interpreter start 5 ms.
# ruff: noqa: PTH105, PTH108, PTH110, PTH116, PTH118, PTH120, PTH123

import os
import sys

TYPE_CHECKING = False  # typing's own costs 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping
    from types import FrameType
    from typing import Any, TypeVar
    from weakref import ref

    T = TypeVar("T")

# The environment that the agent sets for a rank.
RANK_DIR_ENV = "ORCH_RANK_DIR"
STACK_SIGNAL_ENV = "ORCH_STACK_SIGNAL"  # of two stack signals; the other is the next one, see `Stacks`
SOCKET_ENV = "ORCH_SOCKET"  # not empty: start torch's worker server; the user may set it empty

# The files in a rank's folder.
STEP_FILE = "steps"
STEP_CLAIM_FILE = "steps-claim-{}"
STACKS_FILE = "stacks-{}.txt"
STACKS_MEMFD = "stacks-{}"  # of a forked child, listed under /proc/<pid>/fd
ERROR_FILE = "error-{}.json"
NOTES_FILE = "hook-notes.txt"
GROUPS_FILE = "groups.json"
SOCKET_FILE = "torch-{}.socket"

# The step file is an array of little-endian u64: a header of 128 bytes, the time of step n at n % RING_STEPS, then a
# row of ROW_WORDS words for each step. Here a step is one of any optimizer. A group's column holds one more than the
# number of collectives that the group had entered by the end of that step, 0 where it is not known. OPTIMIZER_COLUMN
# tells whose step it was: OPTIMIZERS_MAX * (the number of steps of that optimizer) + the optimizer's number, 0 where it
# is not known. SCRIPT_STEP_COLUMN: the script's step, see `ScriptSteps`. GROUPS_FILE assigns the columns for the
# generation in GROUPS_WORD, which is odd while columns change. EXITING_WORD: when the process EXITING_PID_WORD was about
# to exit. THREAD_WORD: the kernel's id of the thread that made the last step. ALONE_WORD: one of ALONE_WITH, counted from
# 1, where the process trains and has formed no process group with another one; else 0. BATCHES_WORD: how many batches its
# DataLoaders have yielded before the first step.
STEP_FILE_MAGIC = 0x4843524F  # b"ORCH" read as u32; the version is the upper half of the same word
STEP_FILE_VERSION = 5
MAGIC_WORD, PID_WORD, STEP_WORD, TIME_WORD = range(4)
EXITING_WORD, EXITING_PID_WORD, GROUPS_WORD, THREAD_WORD = range(4, 8)
ALONE_WORD = 8
BATCHES_WORD = 9
RING_WORD = 16
RING_STEPS = 1024
GROUPS_MAX = 8
OPTIMIZERS_MAX = 8
OPTIMIZER_COLUMN, SCRIPT_STEP_COLUMN = GROUPS_MAX, GROUPS_MAX + 1
ROW_WORDS = GROUPS_MAX + 2
COUNTS_WORD = RING_WORD + RING_STEPS
STEP_FILE_BYTES = 8 * (COUNTS_WORD + RING_STEPS * ROW_WORDS)
CLAIMS_MAX = 64  # processes that may take over one step file in turn: a script may restart its trainer
CLAIM_RETRY_NS = 1_000_000_000
MESSAGE_CHARS_MAX = 4_000
STACK_FRAMES_MAX = 100  # as many as `faulthandler` writes
TRACEBACK_CHARS_MAX = 20_000
ALONE_WITH = ("torch", "lightning", "accelerate")
ALONE_EVERY_STEPS = 16  # how often it is checked
# Libraries that connect ranks without torch.distributed: where one is imported, nothing is known.
OTHER_GANGS = (
    "horovod", "jax", "ray", "mpi4py", "torch_xla", "byteps", "bagua", "hivemind", "torchft", "monarch", "distributed",
    "flwr", "paddle", "tensorflow",
)  # fmt: skip
LIGHTNING_MODULES = ("lightning", "pytorch_lightning", "lightning_fabric")
# torch's own function that makes a step with zero gradients, to fill the state of an optimizer, and its module; how many
# callers of the hook may lie between: those that wrap `Optimizer.step`.
STATE_MODULE, STATE_FUNCTION = "torch.distributed.checkpoint.state_dict", "_init_optim_state"
STATE_FRAMES_MAX = 6
# A gloo thread that frees a tensor while Python ends aborts the process: pytorch/pytorch#179291, seen in 5 of 72
# exits of a training that went well, and in 0 of 64 when the GIL was free for a moment before.
EXIT_PAUSE_S = 0.05

_MULTIPROCESSING_STARTS = (
    "from multiprocessing.forkserver import",
    "from multiprocessing.resource_tracker import",
)
_SPAWNED = "--multiprocessing-fork"


def may_arm(environ: "Mapping[str, str]", argv: "list[str]") -> bool:
    """Tell whether this process may arm: it is a rank's, and `multiprocessing` did not start it as a helper."""
    if not environ.get(RANK_DIR_ENV) or "RANK" not in environ:
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


class Stacks:
    """Two stack signals, by which a thread writes its own stack to a file.

    The first is `faulthandler`'s, which answers in C code, too, and while the GIL is held. It must only interrupt a
    thread that is in C code: in the middle of a call of a Python function the frames are not complete, and Python 3.11
    to 3.13 dies of reading them (up to one look in 30). So a thread that runs gets the next signal first, which Python
    answers between two instructions, in its main thread. `faulthandler` does not write the stacks of all threads: one
    of them may end, and its state be freed, while the handler reads it.
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
        self._unregister = faulthandler.unregister  # in C: it needs no frame
        self._faulthandlers_signal, self._running_signal = signal_number, signal_number + 1
        _signal.signal(self._running_signal, self._write)
        _signal.siginterrupt(self._running_signal, False)  # system calls go on, as under `faulthandler`

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


class Errors:
    """Notes the exception that ends the main thread, whichever library owns `sys.excepthook` by then.

    torch.distributed's hook calls the one before it, rich's does not, and both are installed after ours. So ours
    wraps again once torch is imported and at the first step, and reads `sys.last_value` at exit.
    """

    def __init__(self, folder: str, notes: HookNotes) -> None:
        self._folder = folder
        self._notes = notes
        self._pid = os.getpid()
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


def write_error(folder: str, value: BaseException) -> None:
    """Write `value`, its traceback and its place in the user's code to this process's error file."""
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
        "loading": loaded_by(value),
        "time_ns": time.time_ns(),
    }
    path = os.path.join(folder, ERROR_FILE.format(os.getpid()))
    with open(path + ".part", "w") as out:
        json.dump(record, out)
    os.replace(path + ".part", path)


def cut_middle(text: str, chars_max: int = TRACEBACK_CHARS_MAX) -> str:
    """Shorten `text` to `chars_max` by its middle: the ends of a traceback say where it began and what it was."""
    mark = "\n... its middle is left out ...\n"
    half = (chars_max - len(mark)) // 2
    return text if len(text) <= chars_max else text[:half] + mark + text[-half:]


def place_of(value: BaseException) -> "tuple[str, int, str]":
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


def loaded_by(value: BaseException) -> str:
    """Return the file of a checkpoint that a library was loading when `value` was raised; empty for none."""
    places = [os.environ.get(name, "") for name in ("ORCH_RESUME_FROM", "ORCH_CHECKPOINT_DIR")]
    tops = tuple(os.path.realpath(place) for place in places if place)
    trace, found = value.__traceback__, ""
    while trace is not None:
        frame = trace.tb_frame
        library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if library in LOADERS and ("load" in frame.f_code.co_name or "read" in frame.f_code.co_name):
            for held in list(frame.f_locals.values()):
                path = getattr(held, "name", getattr(held, "path", held))
                if isinstance(path, (str, os.PathLike)):
                    real = os.path.realpath(os.fspath(path))
                    if isinstance(real, str) and any(
                        real == top or real.startswith(top + os.sep) for top in tops
                    ):
                        found = real
        trace = trace.tb_next
    return found


class Groups:
    """Writes a step's row into the step file: whose step it was, the script's step, and the number of collectives of
    each process group.

    It reads torch's table of groups and imports nothing. It keeps only weak references, since a group must die when the
    script destroys it. The first GROUPS_MAX groups of the table have a column each.
    """

    def __init__(self, folder: str, notes: HookNotes, *, is_child: bool = False) -> None:
        self._path = os.path.join(folder, GROUPS_FILE)
        self._notes = notes
        self.begin(is_child=is_child)

    def begin(self, *, is_child: bool) -> None:
        """Begin without any group or step. Collectives of a child are not counted: children of two ranks may form a gang
        each, with groups of equal names."""
        self._is_child = is_child
        # In the order of torch's table; -1: the group has no count.
        self._columns: list[tuple[ref[Any], int]] = []
        self._table_length = 0
        self._generation = 0
        self._optimizer_steps = OptimizerSteps()
        self._script_steps = ScriptSteps()
        self._has_company = False  # it works with another process, or that cannot be known
        self.is_joined = False

    def cover_joins(self, join: "Any") -> None:
        """Stop counting once a script enters torch's `Join`: a rank without data left then runs the others' collectives
        and makes no steps."""
        enter = join.__enter__

        def note_and_enter(joined: "Any") -> object:
            self.is_joined = self.is_joined or bool(getattr(joined, "_enable", True))
            return enter(joined)

        join.__enter__ = note_and_enter

    def count(self, words: memoryview, step: int, optimizer: object) -> None:
        """Write the row of `step`: 2 µs for eight groups."""
        row = COUNTS_WORD + step % RING_STEPS * ROW_WORDS
        words[row + OPTIMIZER_COLUMN] = 0
        generation = self._generation
        try:
            own_step: int | None = self._optimizer_steps.next(optimizer)
        except Exception as err:  # it is not one of torch's optimizers
            own_step = None
            self._notes.add("optimizers", err)
        words[row + SCRIPT_STEP_COLUMN] = self._script_steps.next(own_step)
        torch = sys.modules.get("torch.distributed.distributed_c10d")
        if torch is not None and not self.is_joined and not self._is_child:
            try:
                world = torch._world
                table = world.pg_map
                if len(table) != self._table_length or not self._write_row(words, row, table):
                    self._assign_columns(words, world)
                    self._write_row(words, row, table)
                words[row + OPTIMIZER_COLUMN] = own_step or 0
            except Exception as err:
                self._has_company = True
                self._notes.add("collective counts", err)
        if not self._has_company and (step % ALONE_EVERY_STEPS == 1 or generation != self._generation):
            self.note_company(words)

    def note_company(self, words: memoryview) -> None:
        """Note whether this process trains alone, and with which framework: 1 µs."""
        alone_with = None if self._has_company else self._notes.guard("groups", self._alone_with)
        self._has_company = alone_with is None
        words[ALONE_WORD] = 1 + ALONE_WITH.index(alone_with) if alone_with else 0

    def _alone_with(self) -> "str | None":
        return None if self.is_joined or has_other_gang() or works_with_others() else framework()

    def _write_row(self, words: memoryview, row: int, table: "Mapping[Any, object]") -> bool:
        """Write the counts; return False when the columns were assigned for another table."""
        for (reference, column), group in zip(self._columns, table):  # noqa: B905 -- Python 3.8 has no `strict`
            if reference() is not group:
                return False
            if column >= 0:
                words[row + column] = group._get_sequence_number_for_group() + 1  # type: ignore[union-attr]
        return True

    def _assign_columns(self, words: memoryview, world: "Any") -> None:
        """Assign a column to each group and write the groups file. A group that has a column keeps it."""
        import weakref

        self._generation += 1
        words[GROUPS_WORD] = self._generation
        before = [
            (group, column) for reference, column in self._columns for group in [reference()] if column >= 0
        ]
        groups = list(world.pg_map)[:GROUPS_MAX]
        kept = {id(group): column for group, column in before if any(group is other for other in groups)}
        free = [column for column in range(GROUPS_MAX) if column not in kept.values()]
        self._columns, self._table_length = [], len(world.pg_map)
        for group in groups:
            column = kept[id(group)] if id(group) in kept else free.pop(0)
            if self._notes.guard("a group's count", group._get_sequence_number_for_group) is None:
                column = -1  # this backend counts nothing
            self._columns.append((weakref.ref(group), column))
        for word in (
            word for column in free for word in range(COUNTS_WORD + column, STEP_FILE_BYTES // 8, ROW_WORDS)
        ):
            words[word] = 0
        self._write_groups_file(world)
        self._generation += 1
        words[GROUPS_WORD] = self._generation

    def _write_groups_file(self, world: "Any") -> None:
        """Write the groups file: name and members of each group, as torch has them, and its column."""
        import json

        listing = []
        for reference, column in self._columns:
            group = reference()
            if group is not None and column >= 0:
                members = world.pg_group_ranks[group]
                label = str(getattr(group, "group_desc", ""))
                ranks = sorted(members, key=members.__getitem__)
                listing.append(
                    {"column": column, "name": world.pg_names[group], "label": label, "ranks": ranks}
                )
        with open(self._path + ".part", "w") as out:
            json.dump({"generation": self._generation + 1, "groups": listing}, out)
        os.replace(self._path + ".part", self._path)


class OptimizerSteps:
    """Numbers the steps of each optimizer of a script through weak references. An optimizer that replaces a dead one
    of the same class and the same parameter shapes continues its numbers."""

    def __init__(self) -> None:
        self._last: Callable[[], object] = object  # what a weak reference to the last one returns
        self._number = 0
        self._optimizers: list[tuple[ref[Any], object]] = []
        self._steps = [0] * OPTIMIZERS_MAX

    def next(self, optimizer: object) -> int:
        """Return the row's last word for one more step; 0 beyond OPTIMIZERS_MAX. Raises for other objects."""
        if self._last() is not optimizer:
            self._number, self._last = self._number_of(optimizer)
        if self._number >= OPTIMIZERS_MAX:
            return 0
        self._steps[self._number] = steps = self._steps[self._number] + 1
        return steps * OPTIMIZERS_MAX + self._number

    def _number_of(self, optimizer: "Any") -> "tuple[int, ref[Any]]":
        import weakref

        for number, (other, _) in enumerate(self._optimizers):
            if other() is optimizer:
                return number, other
        reference = weakref.ref(optimizer)
        groups = [group["params"] for group in optimizer.param_groups]
        shapes = [(len(group), [getattr(part, "shape", 0) for part in group[:2]]) for group in groups]
        kind = type(optimizer), shapes
        numbered = enumerate(self._optimizers)
        dead = [n for n, (other, other_kind) in numbered if other() is None and other_kind == kind]
        number = dead[0] if dead else len(self._optimizers)
        if number < OPTIMIZERS_MAX:
            self._optimizers[number : number + 1] = [(reference, kind)]
        return number, reference


class ScriptSteps:
    """Counts the steps of a script's loop, in which several optimizers may step: the one that steps most counts.

    A step begins when an optimizer steps that has stepped since the last one began. So the two optimizers of a GAN make
    one step together, five steps of a critic before one of its generator are five, and phases one after the other, each
    with an optimizer of its own, all count.
    """

    def __init__(self) -> None:
        self._stepped = -1  # a bit for each optimizer; at first all, so that the first step begins one
        self._steps = 0

    def next(self, own_step: "int | None") -> int:
        """Return the script's step after one more step of an optimizer, as `OptimizerSteps.next` returns it. Those beyond
        OPTIMIZERS_MAX never begin one, such as many small ones that step in turn."""
        if own_step is None:
            self._steps += 1
        elif own_step:
            bit = 1 << own_step % OPTIMIZERS_MAX
            if self._stepped & bit:
                self._steps += 1
                self._stepped = bit
            else:
                self._stepped |= bit
        return self._steps


def has_other_gang() -> bool:
    """Tell whether a library other than torch.distributed's process groups may connect this process to others."""
    modules = sys.modules
    for module in OTHER_GANGS:  # half as long as `any`
        if module in modules:
            return True
    rpc_is_up = getattr(sys.modules.get("torch.distributed.rpc.api"), "_is_current_rpc_agent_set", None)
    return rpc_is_up is not None and bool(rpc_is_up())


def works_with_others() -> bool:
    """Tell whether this process is in a process group with another one. Raises for another torch.

    Accelerate on CPUs, unless it is told so, forms a group and then takes each process for the only one: it counts as
    soon as it has run a collective.
    """
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    if torch is None:
        return False
    groups = [group for group, ranks in torch._world.pg_group_ranks.items() if len(ranks) > 1]
    if not groups or accelerate_state().get("num_processes") != 1:
        return bool(groups)
    return any(group._get_sequence_number_for_group() for group in groups)


def accelerate_state() -> "Mapping[str, object]":
    """Return Accelerate's state of this process, empty where it is not in use."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return getattr(state, "_shared_state", None) or {}


def framework() -> str:
    """Return the one of ALONE_WITH that is to form this script's process group."""
    if any(module in sys.modules for module in LIGHTNING_MODULES):
        return "lightning"
    return "accelerate" if accelerate_state() else "torch"


def fills_state() -> bool:
    """Tell whether torch itself makes the present step, to fill the state of an optimizer before it saves or loads that."""
    if STATE_MODULE not in sys.modules:
        return False
    frame = sys._getframe(1)
    for _ in range(STATE_FRAMES_MAX):
        if frame is None:
            return False
        if frame.f_code.co_name == STATE_FUNCTION:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_data_worker() -> bool:
    """Tell whether this process is a worker of a DataLoader: steps there are none of the training."""
    worker_info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    return worker_info is not None and worker_info() is not None


class Steps:
    """Counts this process's optimizer steps in the rank's step file, if this process holds the claim.

    The first process that steps claims the file and runs `on_claim`. The other processes of the rank do not write, and
    check once a second whether the claimer has died. A child that trains in place of the rank's first process, forked or
    spawned, claims as any other; a worker of a DataLoader never does.
    """

    def __init__(
        self, folder: str, notes: HookNotes, on_claim: "Callable[[], None]", *, is_child: bool = False
    ) -> None:
        import itertools
        import time
        from _thread import get_native_id

        self._folder = folder
        self._notes = notes
        self._on_claim = on_claim
        self.groups = Groups(folder, notes, is_child=is_child)
        self._pid = os.getpid()
        self._count = itertools.count
        self._next_step = itertools.count(1).__next__  # atomic under the GIL
        self._time_ns = time.time_ns
        self._thread_id = get_native_id
        self._words: memoryview | None = None
        self._retry_at_ns: float = 0

    def after_step(self, optimizer: object, args: object, kwargs: object) -> None:
        """Run after each optimizer step, as torch's global hook. STEP_WORD is written last: once it is there, the
        rest is valid. A step that torch makes to fill the optimizer's state does not count."""
        if fills_state():
            return
        step = self._next_step()
        now_ns = self._time_ns()
        words = self._words or self._first_step(now_ns)
        if words:
            words[RING_WORD + step % RING_STEPS] = now_ns
            self.groups.count(words, step, optimizer)
            words[THREAD_WORD] = self._thread_id()
            words[TIME_WORD] = now_ns
            words[STEP_WORD] = step

    def after_fork(self) -> None:
        """Begin to count in a forked child: it claims the file where its parent makes no steps."""
        self._words = None
        self._retry_at_ns = 0
        self._next_step = self._count(1).__next__
        self.groups.begin(is_child=True)

    def at_exit(self) -> None:
        """Let torch's communication threads finish before the interpreter ends, and note that the process exits."""
        if self._pid != os.getpid():
            return
        if self._words is not None:
            import time

            time.sleep(EXIT_PAUSE_S)
        self._notes.guard("exit", self._note_exit)

    def _note_exit(self) -> None:
        words = self._words
        if words is not None:
            self.groups.note_company(words)
            words[EXITING_PID_WORD] = self._pid
            words[EXITING_WORD] = self._time_ns()
        elif os.getsid(0) == self._pid:
            # The rank's first process leads its session; no other process speaks for a rank without steps.
            fd = os.open(os.path.join(self._folder, STEP_FILE), os.O_RDWR)
            try:
                if not any(os.pread(fd, 8, 8 * STEP_WORD)):  # else the process that made steps notes its exit
                    os.pwrite(fd, self._pid.to_bytes(8, "little"), 8 * EXITING_PID_WORD)
                    os.pwrite(fd, self._time_ns().to_bytes(8, "little"), 8 * EXITING_WORD)
            finally:
                os.close(fd)

    def _first_step(self, now_ns: int) -> "memoryview | None":
        if now_ns < self._retry_at_ns:
            return None
        self._retry_at_ns = now_ns + CLAIM_RETRY_NS
        if self._notes.guard("worker", is_data_worker):
            self._retry_at_ns = float("inf")
            return None
        if self._notes.guard("claim", lambda: claim(self._folder)):
            self._retry_at_ns = float("inf")  # ours for good, even if the file cannot be used
            self._words = self._notes.guard("step file", lambda: open_step_file(self._folder))
            self._notes.guard("after the claim", self._on_claim)
        return self._words


def claim(folder: str) -> bool:
    """Claim the rank's step file for this process, unless a living one holds it. Raises OSError."""
    for number in range(CLAIMS_MAX):
        path = os.path.join(folder, STEP_CLAIM_FILE.format(number))
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            with open(path) as file:
                owner = file.read().split()
            if len(owner) != 2 or (int(owner[0]) != os.getpid() and start_ticks(int(owner[0])) == owner[1]):
                return False  # alive, or still writing its name; own pid: another program, before an exec
            continue
        try:
            os.write(fd, f"{os.getpid()} {start_ticks(os.getpid())}".encode())
        except OSError:
            pass  # the disk is full: without a name the claim holds for good, which does no harm
        os.close(fd)
        return True
    return False


def map_step_file(folder: str) -> memoryview:
    """Map the step file as it is. Raises OSError, ValueError."""
    import mmap

    fd = os.open(os.path.join(folder, STEP_FILE), os.O_RDWR)
    try:
        return memoryview(mmap.mmap(fd, STEP_FILE_BYTES)).cast("Q")
    finally:
        os.close(fd)


def open_step_file(folder: str) -> memoryview:
    """Map the step file that the agent made, cleared and with this process's id. Raises OSError, ValueError."""
    words = map_step_file(folder)
    words[:] = memoryview(bytes(STEP_FILE_BYTES)).cast("Q")
    words[PID_WORD] = os.getpid()
    words[MAGIC_WORD] = STEP_FILE_MAGIC | STEP_FILE_VERSION << 32
    return words


class Batches:
    """Counts the batches that DataLoaders yield until the first optimizer step, for a rank that makes none.

    It takes the place of the attribute in which an iterator of torch's DataLoader counts its batches. A wrapper around
    `__next__` would stand in every traceback of a DataLoader.
    """

    NAME = "_num_yielded"

    def __init__(self, folder: str, notes: HookNotes) -> None:
        self._folder = folder
        self._notes = notes
        self._class: Any = None
        self._words: memoryview | None = None

    def watch(self, iterator_class: "Any") -> None:
        """Begin, as an attribute of torch's class of iterators."""
        self._class = iterator_class
        setattr(iterator_class, self.NAME, self)

    def end(self) -> None:
        """Leave the class: its iterators keep their counts."""
        if self._class is not None:
            delattr(self._class, self.NAME)
            self._class = None

    def __get__(self, iterator: "Any", owner: object = None) -> "Any":
        """Return an iterator's own count."""
        if iterator is None:
            return self
        if self.NAME not in iterator.__dict__:
            raise AttributeError(self.NAME)
        return iterator.__dict__[self.NAME]

    def __set__(self, iterator: "Any", count: int) -> None:
        """Set an iterator's own count; above 0 it has yielded one more batch."""
        iterator.__dict__[self.NAME] = count
        if count:
            self._notes.guard("batches", self._note)

    def _note(self) -> None:
        self._words = words = self._words or map_step_file(self._folder)
        words[BATCHES_WORD] += 1


class ImportWatcher:
    """A finder on `sys.meta_path` that finds nothing: Python asks it at every import, so it sees a torch module arrive.

    Wrapping torch's loader instead would put a frame of ours into the traceback of a failing `import torch`.
    """

    def __init__(self, module: str, name: str, on_import: "Callable[[Any], None]", notes: HookNotes) -> None:
        self._module = module
        self._name = name
        self._on_import = on_import
        self._notes = notes

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return None, until `module` has `name`: then run `on_import` with its value, and leave the list."""
        value = getattr(sys.modules.get(self._module), self._name, None)
        if value is None:
            return None
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return None  # another thread was first
        self._notes.guard(self._name, lambda: self._on_import(value))
        # The caller walks along the list that has just become shorter, and would pass over the next finder.
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return spec
        return None


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
        worker_server = _without_its_signals(lambda: _without_its_greeting(lambda: server(path)))
    finally:
        os.close(fd)
    # Never shut down, which its destructor would do: that waits up to 5 s for a silent client.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker_server))


def _without_its_signals(start: "Callable[[], T]") -> "T":
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


def _without_its_greeting(start: "Callable[[], object]") -> object:
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


def keep_new_name(environ: "MutableMapping[str, str]") -> None:
    """Hide the old name of the flight recorder's length from a torch that knows the new one: it would warn in each
    rank's log. The agent sets both, since the node's torch is not known before the start."""
    new, old = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    version = getattr(sys.modules.get("torch.version"), "__version__", "0.0")
    knows_new = tuple(int(part) for part in version.split(".")[:2]) >= (2, 9)
    if knows_new and environ.get(old, "") == environ.get(new):
        del environ[old]


class Hook:
    """All parts of the hook in one process of a rank. Every entry point swallows errors."""

    def __init__(self, environ: "Mapping[str, str]", *, only_counts: bool = False) -> None:
        """`only_counts`: in a child that `multiprocessing` has spawned, which may be one of many workers for data."""
        import atexit

        folder = self._folder = environ[RANK_DIR_ENV]
        self._pid = os.getpid()
        self._notes = HookNotes(folder)
        if only_counts:
            self._steps = Steps(folder, self._notes, lambda: None, is_child=True)
            self._when_imported("torch.optim.optimizer", "register_optimizer_step_post_hook", self._register)
            atexit.register(self._steps.at_exit)
            os.register_at_fork(after_in_child=self._steps.after_fork)
            return
        self._errors = Errors(folder, self._notes)
        self._batches = Batches(folder, self._notes)
        self._steps = Steps(folder, self._notes, self._claimed)
        self._stacks = self._notes.guard("stacks", lambda: Stacks(folder, int(environ[STACK_SIGNAL_ENV])))
        atexit.register(self._steps.at_exit)  # the first to register is the last to run
        self._errors.wrap()
        self._when_imported("torch.optim.optimizer", "register_optimizer_step_post_hook", self._count_steps)
        self._when_imported("torch.utils.data.dataloader", "_BaseDataLoaderIter", self._batches.watch)
        os.register_at_fork(after_in_child=self._batches.end)
        if environ.get(SOCKET_ENV):
            self._when_imported("torch._C._distributed_c10d", "_WorkerServer", self._start_worker_server)
        atexit.register(self._errors.at_exit)
        os.register_at_fork(after_in_child=self._steps.after_fork)
        if self._stacks is not None:
            atexit.register(self._notes.guard, "stacks at exit", self._stacks.at_exit)
            os.register_at_fork(after_in_child=self._stacks.after_fork)

    def _when_imported(self, module: str, name: str, on_import: "Callable[[Any], None]") -> None:
        value = getattr(sys.modules.get(module), name, None)
        if value is None:
            sys.meta_path.insert(0, ImportWatcher(module, name, on_import, self._notes))
        else:  # this rank was forked from its node's template
            self._notes.guard(name, lambda: on_import(value))

    def _claimed(self) -> None:
        self._errors.wrap()
        self._batches.end()

    def _count_steps(self, register: "Callable[..., object]") -> None:
        self._errors.wrap()
        self._register(register)

    def _register(self, register: "Callable[..., object]") -> None:
        # A compiled optimizer.step would trace into the hook and warn about it; this mark keeps dynamo out.
        Steps.after_step._torchdynamo_disable = True  # type: ignore[attr-defined]
        register(self._steps.after_step)

    def _start_worker_server(self, server: "Callable[[str], object]") -> None:
        import atexit

        if self._pid == os.getpid():  # a forked child would answer in place of its parent
            keep_new_name(os.environ)
            self._when_imported("torch.distributed.algorithms.join", "Join", self._steps.groups.cover_joins)
            atexit.register(self._notes.guard, "worker server at exit", self._remove_socket)
            start_worker_server(server, self._folder)

    def _remove_socket(self) -> None:
        if self._pid == os.getpid():
            os.unlink(os.path.join(self._folder, SOCKET_FILE.format(self._pid)))


def _start() -> None:
    """Arm this process once, if it may arm."""
    with open("/proc/self/cmdline", errors="replace") as file:  # sys.argv is only "-c" here
        argv = file.read().split("\0")
    if may_arm(os.environ, argv) and not hasattr(sys, "_orch_hook"):
        import _signal

        # Raises in a subinterpreter, whose end says nothing.
        _signal.signal(_signal.SIGINT, _signal.getsignal(_signal.SIGINT))
        sys._orch_hook = Hook(os.environ, only_counts=_SPAWNED in argv)  # type: ignore[attr-defined]


if __name__ == "sitecustomize":
    try:
        _start()
    except Exception:
        pass  # not even a folder to note it in
    # Make way as if the hook had never been loaded; children find it through the environment.
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    sys.modules.pop(__name__, None)
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # the next, or the ImportError `site` expects
