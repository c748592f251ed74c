"""Activation of the hook in one process of a rank.

In each process it answers the stack signals and notes an uncaught exception. Once torch is imported it starts torch's
worker server, counts optimizer steps and collectives, and notes whether the rank has formed a process group.
It notes when the process is exiting. In a child that `multiprocessing` has spawned, and in its fork server and the
children of that, it only counts. For its rules see the package.
"""

# No pathlib: it would cost every interpreter start 5 ms.
# ruff: noqa: PTH108, PTH118, PTH123

import os
import sys

from .errors import Errors, HookNotes, StackDumper
from .files import FileWatch
from .launch import note_launcher
from .layout import (
    ASYNC_ENV,
    RANK_DIR_ENV,
    SOCKET_ENV,
    SOCKET_FILE,
    STACK_SIGNAL_ENV,
    SUBMITTED_FROM_ENV,
    TYPE_CHECKING,
)
from .own_code import import_from_copy
from .steps import Steps
from .tensors import watch_norms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

# In the program of `-c`, or a word of its own.
_RESOURCE_TRACKER = "from multiprocessing.resource_tracker import"
_ONLY_COUNTS = ("--multiprocessing-fork", "from multiprocessing.forkserver import")


def may_arm(environ: "Mapping[str, str]", argv: "list[str]") -> bool:
    """Return whether this process may arm: it is a rank's, and not the resource tracker of `multiprocessing`."""
    if not environ.get(RANK_DIR_ENV) or "RANK" not in environ:
        return False
    return not any(_RESOURCE_TRACKER in arg for arg in argv)


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


class Hook:
    """All parts of the hook in one process of a rank. Every entry point swallows errors."""

    def __init__(self, environ: "Mapping[str, str]", *, only_counts: bool = False) -> None:
        """`only_counts`: in a child that `multiprocessing` has spawned or forks from its server, which may be one of many
        workers for data."""
        import atexit

        folder = self._folder = environ[RANK_DIR_ENV]
        self._pid = os.getpid()
        self._notes = HookNotes(folder)
        if SUBMITTED_FROM_ENV in environ:
            self._notes.guard("own code", lambda: import_from_copy(environ[SUBMITTED_FROM_ENV], folder))
        if only_counts:
            self._steps = Steps(folder, self._notes, lambda: None, is_child=True)
            self._watch_files(is_child=True)
            self._when_imported("torch.optim.optimizer", "register_optimizer_step_post_hook", self._register)
            atexit.register(self._steps.at_exit)
            os.register_at_fork(after_in_child=self._steps.after_fork)
            return
        self._errors = Errors(folder, self._notes)
        self._steps = Steps(folder, self._notes, self._errors.wrap)
        self._watch_files()
        self._stacks = self._notes.guard("stacks", lambda: StackDumper(folder, int(environ[STACK_SIGNAL_ENV])))
        if environ.get(ASYNC_ENV):
            from .saves import Saves

            saves = Saves(self._notes, self._steps)
            self._when_imported("torch.distributed.checkpoint.utils", "_api_bc_check", saves.watch)
            self._when_imported("torch.distributed.distributed_c10d", "destroy_process_group", saves.watch_groups)
        atexit.register(self._steps.at_exit)  # the first to register is the last to run
        self._errors.wrap()
        self._when_imported("torch.optim.optimizer", "register_optimizer_step_post_hook", self._count_steps)
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

    def _watch_files(self, *, is_child: bool = False) -> None:
        made = self._steps.made
        self._notes.guard("files", lambda: FileWatch(self._folder, self._notes, made, is_child=is_child))

    def _count_steps(self, register: "Callable[..., object]") -> None:
        self._errors.wrap()
        self._register(register)
        self._when_imported("torch.distributed.distributed_c10d", "_update_default_pg", self._steps.watch_group)

    def _register(self, register: "Callable[..., object]") -> None:
        # A compiled optimizer.step would trace into the hook and warn about it; this mark keeps dynamo out.
        Steps.after_step._torchdynamo_disable = True  # type: ignore[attr-defined]
        register(self._steps.after_step)
        self._when_imported("torch.autograd", "_make_grads", self._steps.watch_backward)
        self._when_imported("torch.compiler", "is_compiling", lambda one: watch_norms(self._steps, one))
        self._when_imported("torch.cuda.graphs", "CUDAGraph", self._steps.graphs.watch)

    def _start_worker_server(self, server: "Callable[[str], object]") -> None:
        import atexit

        if self._pid == os.getpid():  # a forked child would answer in place of its parent
            from .worker_server import drop_old_name, serve_pending_exception, start_worker_server

            drop_old_name(os.environ)
            self._when_imported("torch.distributed.algorithms.join", "Join", self._steps.groups.wrap_join)
            atexit.register(self._notes.guard, "worker server at exit", self._remove_socket)
            c10d = sys.modules["torch._C._distributed_c10d"]
            self._notes.guard("pending exceptions", lambda: serve_pending_exception(c10d, self._notes))
            start_worker_server(server, self._folder)

    def _remove_socket(self) -> None:
        if self._pid == os.getpid():
            os.unlink(os.path.join(self._folder, SOCKET_FILE.format(self._pid)))


def start() -> None:
    """Arm this process once, if it may arm."""
    with open("/proc/self/cmdline", errors="replace") as file:  # sys.argv is only "-c" here
        argv = file.read().split("\0")
    if may_arm(os.environ, argv) and not hasattr(sys, "_orch_hook"):
        import _signal  # type: ignore[import-not-found]

        # Raises in a subinterpreter, whose end says nothing.
        _signal.signal(_signal.SIGINT, _signal.getsignal(_signal.SIGINT))
        note_launcher(argv[:-1])
        sys._orch_hook = Hook(  # type: ignore[attr-defined]
            os.environ, only_counts=any(mark in arg for arg in argv for mark in _ONLY_COUNTS)
        )
