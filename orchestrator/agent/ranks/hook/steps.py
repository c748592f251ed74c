"""Steps of a rank: those of its optimizers, counted in the rank's step file by the process that holds the claim."""

# No pathlib: it would cost every interpreter start 5 ms.
# ruff: noqa: PTH113, PTH118, PTH123

import os
import sys
from _thread import get_ident

from .errors import MAIN_THREAD, HookNotes
from .graphs import Graphs
from .groups import Groups
from .launch import note_gang
from .layout import (
    COUNTS_WORD,
    EXITING_PID_WORD,
    EXITING_WORD,
    FORMED_WORD,
    MAGIC_WORD,
    NO_STEP_WORD,
    OPTIMIZER_COLUMN,
    OPTIMIZERS_MAX,
    PASSES_WORD,
    PID_WORD,
    RING_STEPS,
    RING_WORD,
    ROW_WORDS,
    SCRIPT_STEP_COLUMN,
    STEP_CLAIM_FILE,
    STEP_FILE,
    STEP_FILE_BYTES,
    STEP_FILE_MAGIC,
    STEP_FILE_VERSION,
    STEP_WORD,
    THREAD_WORD,
    TIME_WORD,
    TYPE_CHECKING,
)
from .tensors import GradientNorms, ParameterSums

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any
    from weakref import ref

CLAIMS_MAX = 64  # processes that may take over one step file in turn: a script may restart its trainer
CLAIM_RETRY_NS = 1_000_000_000
# torch's own function that makes a step with zero gradients, to fill the state of an optimizer, and its module; how many
# callers of the hook may lie between: those that wrap `Optimizer.step`.
STATE_MODULE, STATE_FUNCTION = "torch.distributed.checkpoint.state_dict", "_init_optim_state"
STATE_FRAMES_MAX = 6
# A gloo thread that frees a tensor while Python ends aborts the process: pytorch/pytorch#179291, seen in 5 of 72
# exits of a training that went well, and in 0 of 64 when the GIL was free for a moment before.
EXIT_PAUSE_S = 0.05


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

    def living(self) -> int:
        """Return a bit for each optimizer that still is there, by its number."""
        return sum(1 << number for number, (other, _) in enumerate(self._optimizers) if other() is not None)

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
        self.made = 0

    def next(self, own_step: "int | None") -> int:
        """Return the script's step after one more step of an optimizer, as `OptimizerSteps.next` returns it. Those beyond
        OPTIMIZERS_MAX never begin one, such as many small ones that step in turn."""
        if own_step is None:
            self.made += 1
        elif own_step:
            bit = 1 << own_step % OPTIMIZERS_MAX
            if self._stepped & bit:
                self.made += 1
                self._stepped = bit
            else:
                self._stepped |= bit
        return self.made


def fills_state() -> bool:
    """Return whether torch itself makes the present step, to fill the state of an optimizer before it saves or loads that."""
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
    """Return whether this process is a worker of a DataLoader: steps there are none of the training."""
    worker_info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    return worker_info is not None and worker_info() is not None


def is_training() -> bool:
    """Return whether torch is imported for a script that calls `backward`: its text is a hint, which no verdict follows from."""
    path = sys.argv[0] if sys.argv else ""  # Python has taken `__file__` away by then
    if "torch" not in sys.modules or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return b".backward(" in file.read()


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
        self.graphs = Graphs(lambda optimizer: self.after_step(optimizer, (), {}))
        self._optimizer_steps, self._script_steps = OptimizerSteps(), ScriptSteps()
        self._sums, self.norms = ParameterSums(notes), GradientNorms()
        self.saved: int | None = None  # when the state was copied that is being written
        self._pid = os.getpid()
        self._count = itertools.count
        self._next_step = itertools.count(1).__next__  # atomic under the GIL
        self._time_ns = time.time_ns
        self._thread_id = get_native_id
        self._words: memoryview | None = None
        self._passes: memoryview | None = None
        self._retry_at_ns: float = 0

    def watch_backward(self, make_grads: "Callable[..., Any]") -> None:
        """Count backward passes where torch prepares one: no frame of ours is on the stack while it runs."""
        import functools

        @functools.wraps(make_grads)
        def count_and_make(*args: "Any", **kwargs: "Any") -> "Any":
            self._notes.guard("backward passes", self._begin_pass)
            return make_grads(*args, **kwargs)

        sys.modules["torch.autograd"]._make_grads = count_and_make  # type: ignore[attr-defined]

    def _begin_pass(self) -> None:
        words = self._passes = self._passes or map_step_file(self._folder)
        if not words[MAGIC_WORD]:  # no process of the rank has made a step
            count = words[PASSES_WORD] + 1
            words[RING_WORD + count % RING_STEPS] = self._time_ns()
            words[PASSES_WORD] = count

    def watch_group(self, update: "Callable[[Any], None]") -> None:
        """Note the moment when torch has formed its default process group: no frame of ours is on the stack before."""

        def update_and_note(group: "Any") -> None:
            update(group)
            if group is not None:
                self._notes.guard("process group", self._note_group)

        sys.modules["torch.distributed.distributed_c10d"]._update_default_pg = update_and_note  # type: ignore[attr-defined]

    def _note_group(self) -> None:
        self._passes = self._passes or map_step_file(self._folder)
        self._passes[FORMED_WORD] = 1

    def after_step(self, optimizer: object, args: object, kwargs: object) -> None:
        """Run after each optimizer step, as torch's global hook. STEP_WORD is written last: once it is there, the
        rest is valid. A step that torch makes to fill the optimizer's state does not count, nor one that is only captured
        into a CUDA graph."""
        if self.graphs.captures(optimizer) or fills_state():
            return
        step = self._next_step()
        if step == 1:
            self._notes.guard("gang", note_gang)
        now_ns = self._time_ns()
        words = self._words or self._first_step(now_ns)
        if words:
            words[RING_WORD + step % RING_STEPS] = now_ns
            own_step = self._number(words, step, optimizer)
            self.groups.count(words, step, own_step)
            if self._sums.every:
                self._sums.count(words, own_step, self._script_steps.made, optimizer)
            numbers = words, own_step, self._script_steps.made, optimizer, self._optimizer_steps.living
            self._notes.guard("gradient norms", lambda: self.norms.count(*numbers))
            words[THREAD_WORD] = self._thread_id()
            words[TIME_WORD] = now_ns
            words[STEP_WORD] = step

    def made(self) -> int:
        """Return how many steps of the script this process has counted; in a thread that writes, when it was given the state."""
        return self._script_steps.made if self.saved is None or get_ident() == MAIN_THREAD else self.saved

    def after_fork(self) -> None:
        """Begin to count in a forked child: it claims the file where its parent makes no steps."""
        self._words = None
        self._retry_at_ns = 0
        self._next_step = self._count(1).__next__
        self.groups.begin(is_child=True)
        self._sums, self.norms = ParameterSums(self._notes), GradientNorms()
        self._optimizer_steps, self._script_steps = OptimizerSteps(), ScriptSteps()

    def _number(self, words: memoryview, step: int, optimizer: object) -> "int | None":
        """Write the script's step, and return the step of its optimizer; None where it is not one of torch's."""
        row = COUNTS_WORD + step % RING_STEPS * ROW_WORDS
        words[row + OPTIMIZER_COLUMN] = 0
        try:
            own_step: int | None = self._optimizer_steps.next(optimizer)
        except Exception as err:
            own_step = None
            self._notes.add("optimizers", err)
        words[row + SCRIPT_STEP_COLUMN] = self._script_steps.next(own_step)
        return own_step

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
            self.groups.note_peers(words)
            words[EXITING_PID_WORD] = self._pid
            words[EXITING_WORD] = self._time_ns()
        elif os.getsid(0) == self._pid:
            # The rank's first process leads its session; no other process speaks for a rank without steps.
            fd = os.open(os.path.join(self._folder, STEP_FILE), os.O_RDWR)
            try:
                if not any(os.pread(fd, 8, 8 * STEP_WORD)):  # else the process that made steps notes its exit
                    os.pwrite(fd, self._pid.to_bytes(8, "little"), 8 * EXITING_PID_WORD)
                    os.pwrite(fd, self._time_ns().to_bytes(8, "little"), 8 * EXITING_WORD)
                    os.pwrite(fd, bytes([bool(self._notes.guard("script", is_training))]), 8 * NO_STEP_WORD)
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


def open_step_file(folder: str) -> memoryview:
    """Map the step file, cleared and with this process's id. Raises OSError, ValueError."""
    words = map_step_file(folder)
    is_formed = words[FORMED_WORD]
    words[:] = memoryview(bytes(STEP_FILE_BYTES)).cast("Q")
    words[PID_WORD], words[FORMED_WORD] = os.getpid(), is_formed
    words[MAGIC_WORD] = STEP_FILE_MAGIC | STEP_FILE_VERSION << 32
    return words


def map_step_file(folder: str) -> memoryview:
    """Map the step file that the agent made. Raises OSError, ValueError."""
    import mmap

    fd = os.open(os.path.join(folder, STEP_FILE), os.O_RDWR)
    try:
        return memoryview(mmap.mmap(fd, STEP_FILE_BYTES)).cast("Q")
    finally:
        os.close(fd)


def start_ticks(pid: int) -> "str | None":
    """Return when `pid` started, in clock ticks since boot (`man 5 proc`), or None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()
