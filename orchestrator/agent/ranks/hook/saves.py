"""Asynchronous saves of a rank: `torch.distributed.checkpoint.save` copies the state and returns, and a thread writes the copy.

With `checkpoint.async: dcp`. What may not be so stays as torch does it: a save in another thread, of a part of the ranks or without
collectives, and all after the script's first `async_save` of its own. Whether a save is asynchronous is the same on all ranks. The
thread's collectives run in a process group of their own: in the default one each rank would mix them differently with the training's.
The next save or load, `destroy_process_group` and the end of the script wait for the save before, and raise its exception.
"""

import atexit
import os
import sys
from _thread import get_ident

from .errors import MAIN_THREAD, HookNotes
from .layout import TYPE_CHECKING
from .steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CHECKPOINT = "torch.distributed.checkpoint"
SAVER = f"{CHECKPOINT}.state_dict_saver"
# Of which `async_save` makes one, in the main thread of each rank
EXECUTORS = ("_ThreadBasedAsyncCheckpointExecutor", "_ProcessBasedAsyncCheckpointExecutor")
FUNCTIONS = ((SAVER, "save"), (CHECKPOINT, "save"), (f"{CHECKPOINT}.state_dict_loader", "load"), (CHECKPOINT, "load"))


class Saves:
    """The saves of this process, of which the last one may still be being written. Only its main thread saves so."""

    def __init__(self, notes: HookNotes, steps: Steps) -> None:
        self._notes, self._steps, self._pid = notes, steps, os.getpid()
        self._is_off = self._has_failed = False
        self._group: Any = None
        self._stager: Any = None
        self._future: Any = None
        atexit.register(self._end_process)

    def watch_groups(self, destroy: "Callable[..., None]") -> None:
        """Wrap torch's `destroy_process_group`, which ends the group of the saves, too."""
        for place in ("torch.distributed", "torch.distributed.distributed_c10d"):
            sys.modules[place].destroy_process_group = wrap(self._destroy, destroy)  # type: ignore[attr-defined]

    def watch(self, check: "Callable[[Any], Any]") -> None:
        """Wrap `save` and `load`: `check` decorates both in torch, so that nobody has imported them yet; or else they are there, where
        this rank was forked from its node's template."""
        import concurrent.futures.thread  # noqa: F401  # its end comes after ours: writers may use executors
        import threading

        getattr(threading, "_register_atexit", atexit.register)(self._end_script)
        sys.modules[f"{CHECKPOINT}.utils"]._api_bc_check = lambda function: self._wrap(check(function))  # type: ignore[attr-defined]
        for place, name in FUNCTIONS:
            if hasattr(sys.modules.get(place), name):
                setattr(sys.modules[place], name, self._wrap(getattr(sys.modules[place], name)))

    def _wrap(self, function: "Any") -> "Any":
        if function.__name__ == "load":
            return wrap(self._wait_and_call, function)
        names = vars(sys.modules[SAVER]) if function.__name__ == "save" else {}
        kinds = {name: names[name] for name in EXECUTORS if isinstance(names.get(name), type)}
        names.update({name: wrap(self._make_executor, kind) for name, kind in kinds.items()})
        return wrap(self._save, function) if names else function

    def _wait_and_call(self, function: "Callable[..., Any]", *args: "Any", **options: "Any") -> "Any":
        self._wait()
        return function(*args, **options)

    def _make_executor(self, kind: "Callable[..., Any]", *args: "Any", **options: "Any") -> "Any":
        self._is_off = self._is_off or self._is_main()
        return self._wait_and_call(kind, *args, **options)

    def _destroy(self, destroy: "Callable[..., None]", *args: "Any", **options: "Any") -> None:
        self._wait_and_call(destroy, *args, **options)
        if not sys.modules["torch.distributed"].is_initialized():
            self._group = self._steps.groups.uncounted = None

    def _is_main(self) -> bool:
        return self._pid == os.getpid() and get_ident() == MAIN_THREAD

    def _save(self, save: "Callable[..., Any]", *args: "Any", **options: "Any") -> "Any":
        """Save in a thread; or here where the state cannot be copied or the process ends, of which other ranks notice nothing."""
        self._wait()
        is_of_part = (
            len(args) + ("state_dict" in options) != 1 or options.get("process_group") or options.get("no_dist")
        )
        if is_of_part or not options.get("use_collectives", True) or not self._is_main() or not self._may_save():
            return save(*args, **options)
        state = sys.modules[SAVER]._stateful_to_state_dict(args[0] if args else options["state_dict"])
        options.update(state_dict=state, process_group=self._group)
        self._future = self._notes.guard("saves", lambda: self._start(save, options))
        return save(**options) if self._future is None else None

    def _start(self, save: "Callable[..., Any]", options: "dict[str, Any]") -> "Any":
        """Copy the state to this host's memory, from a GPU to pinned memory that is kept for the next one, and start the thread."""
        from concurrent.futures.thread import ThreadPoolExecutor

        staging, pins = sys.modules[f"{CHECKPOINT}.staging"], sys.modules["torch"].cuda.is_initialized()
        # Pinned; shared with no process; no thread of its own; copies that are waited for one by one: torch waits for others on the
        # current GPU alone, which need not be that of the state.
        how = staging.StagingOptions(pins, False, False, False)
        self._stager = self._stager or staging.DefaultStager(how)
        copy = {**options, "state_dict": self._stager.stage(options["state_dict"])}
        self._steps.saved, executor = self._steps.made(), ThreadPoolExecutor(1)
        future = executor.submit(save, **copy)
        executor.shutdown(wait=False)
        return future

    def _may_save(self) -> bool:
        """Return whether saves may be asynchronous, with a process group for them, in which ranks wait for each other as long as in the
        default one. All ranks come to the same."""
        dist = sys.modules["torch.distributed"]
        if self._group is None and dist.is_initialized() and not self._is_off:
            limit = self._notes.guard(
                "limit of a group",
                lambda: dist.group.WORLD._get_backend(dist.group.WORLD._device_types[0]).options._timeout,
            )
            self._group = self._notes.guard("group", lambda: dist.new_group(backend="gloo", timeout=limit))
            made = [None] * dist.get_world_size()
            dist.all_gather_object(made, self._group is not None)
            self._is_off, self._steps.groups.uncounted = not all(made), self._group
        return not self._is_off

    def _wait(self) -> None:
        """Wait for the save before, as long as its disk and its process group take, and raise its exception; in the main thread."""
        if self._future is not None and self._is_main():
            error = self._future.exception()  # a Ctrl-C leaves it to be waited for
            self._future = self._steps.saved = None
            if error is not None:
                raise error

    def _end_script(self) -> None:
        """Wait for the last save. Its exception is the script's, where that has raised none."""
        try:
            self._wait()
        except BaseException as err:
            if getattr(sys, "last_value", None) is None:
                self._has_failed = True
                sys.excepthook(type(err), err, err.__traceback__)

    def _end_process(self) -> None:
        """End with code 1 where the last save has failed: Python itself would end with 0. The last to run at exit."""
        if self._has_failed:
            self._notes.guard("flush", lambda: [stream.flush() for stream in (sys.stdout, sys.stderr)])
            os._exit(1)


def wrap(act: "Callable[..., Any]", function: "Any") -> "Any":
    """Return what calls `act` with a function and its arguments, in place of the function."""
    import functools

    return functools.wraps(function)(functools.partial(act, function))
