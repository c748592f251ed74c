"""Frames of a Python stack that show what the thread does: wait in a collective, load data, save a checkpoint.

They are recognised by file and function of the frames between the innermost one and the user's own: what the user's code
has called.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath

from orchestrator.agent.ranks.stack_dump import find_users_frame, is_users_frame
from orchestrator.core.status_types import Frame

_PYTHONS_OWN = re.compile(r"/lib(64)?/python3[^/]*/(?!(site|dist)-packages/)|^<")

_DISTRIBUTED = re.compile(r"/torch/(distributed/|nn/parallel/distributed\.py|_C/_distributed)")
_NO_WAIT = re.compile(r"/torch/distributed/(elastic/|launcher/|run\.py|launch\.py|checkpoint/)")
_BACKWARD = re.compile(r"/torch/(autograd/|_tensor\.py$)")
_DEVICE = re.compile(r"/torch/(cuda|xpu|accelerator|mps)/")
_DEVICE_LINE = re.compile(r"\.(item|cpu|tolist|numpy|synchronize|to|cuda|wait_event|query)\(")
_WAIT_LINE = re.compile(r"\.wait\(")
_STORE_LINE = re.compile(r"(?i)store\w*(\(\))?\.(get|wait|check|multi_get)\(")
_LOADER = re.compile(r"/torch/utils/data/(dataloader|_utils/(fetch|worker|pin_memory))\.py$")
_WORKER = re.compile(r"/(torch/utils/data/_utils/worker|multiprocessing/(pool|process|popen_fork))\.py$")
_CHILDREN = re.compile(r"/(multiprocessing/(?!dummy)\w+|subprocess|concurrent/futures/(_base|process))\.py$")
_TASK_LOOPS = frozenset({"worker", "_worker_loop", "_process_worker"})
"""The function that each process of multiprocessing's Pool, torch's DataLoader and concurrent.futures runs."""

_POOLS_OWN = frozenset({"_handle_workers", "_handle_tasks", "_handle_results"})
_POOLS_CALLS = frozenset({"_guarded_task_generation", "_set"})
"""Where a thread of a Pool runs the user's code: an iterable, a callback."""

_PROMPT = re.compile(r"/(pdb|bdb|cmd|code|_pyrepl/\w+|IPython/.+|torch/distributed/_pdb)\.py$")
_ATTACH = re.compile(r"/(debugpy|pydevd|_pydevd_bundle|ptvsd)/")
_IMPORT = re.compile(r"^<frozen importlib")
_LOCK = re.compile(
    r"/(threading|queue|multiprocessing/(synchronize|queues|pool)|concurrent/futures/(_base|thread))\.py$"
)
_LOCK_LINE = re.compile(r"\.acquire\(|^\s*with\b.*(?i:lock|mutex|sem|cond)|^\s*with\s+[\w.\[\]]+\s*:|\.join\(|\.get\(")
STORE = "the store"

FRAMES_SHOWN_MAX = 40
"""How many frames of a stack are reported."""

_LOCK_TEXTS = {
    ("queue.py", "get"): "in get() of a queue that stays empty",
    ("queue.py", "put"): "in put() of a queue that stays full",
    ("queue.py", "join"): "in join() of a queue whose work is not done",
    ("threading.py", "join"): "in join() of another thread, which does not end",
    ("_base.py", "result"): "in result() of a future, which does not complete",
    ("<frozen importlib._bootstrap>", "acquire"): "on the lock of a module that another thread imports",
}

_RENDEZVOUS = re.compile(r"(?i)^_?(init_process_group|.*rendezvous.*|_store_based_barrier|_env_rendezvous)")
_EVALUATE = re.compile(r"(?i)eval|valid|(^|_)(test|infer|predict)")
_SAVE = re.compile(r"(?i)(^|_)(save|checkpoint|ckpt|dump)")
_EXIT = re.compile(r"(?i)^(_?exit|.*_atexit|_shutdown|_python_exit|_run_exitfuncs|destroy_process_group)")


def inner_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames inside the user's innermost one, innermost first: what their code has called."""
    return tuple(itertools.takewhile(lambda frame: not is_users_frame(frame), frames))


def drop_import_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames without those of Python's import machinery, or all when there are no others."""
    return tuple(frame for frame in frames if not _IMPORT.search(frame.file)) or frames


def find_shown_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """Return the user's innermost frame; without one, the innermost of all."""
    users = find_users_frame(frames)
    if users is None:
        return drop_import_frames(frames)[0].brief if frames else None
    outside = frames[frames.index(users) + 1 :]
    inside_loader = any(_LOADER.search(frame.file) for frame in outside)
    inside_loader = inside_loader and not any(frame.file.endswith("/worker.py") for frame in outside)
    return replace(users.brief, within="DataLoader of the main thread" if inside_loader else "")


def describe_shown_frame(frames: tuple[Frame, ...]) -> str:
    """Describe the same place; empty without frames."""
    return str(find_shown_frame(frames) or "")


def format_frames(frames: tuple[Frame, ...]) -> tuple[tuple[str, ...], int]:
    """Return frames for people, without those of the import machinery, and how many of them the user's innermost one has
    called."""
    kept = drop_import_frames(frames)
    inside = len(inner_frames(kept)) if find_users_frame(kept) is not None else 0
    return tuple(str(frame.brief) for frame in kept[:FRAMES_SHOWN_MAX]), min(inside, FRAMES_SHOWN_MAX)


def find_rank_wait(frames: tuple[Frame, ...], line: str) -> str:
    """Return the call in which other ranks are waited for, or an empty text. `line`: the source of the innermost
    frame, if known.

    C code has no frame: `work.wait()` and `store.get()` are recognised by the user's line alone.
    """
    inner = inner_frames(frames)
    if not inner:
        if _STORE_LINE.search(line):
            return STORE
        return "wait() of a collective" if _WAIT_LINE.search(line) else ""
    if "/torch/" not in inner[0].file:
        return ""
    waits = [frame for frame in inner if _DISTRIBUTED.search(frame.file) and not _NO_WAIT.search(frame.file)]
    if waits:
        return _collective_name(waits)
    if _BACKWARD.search(inner[0].file):
        return "backward, for the gradients"
    return ""


def is_collective(frames: tuple[Frame, ...]) -> bool:
    """Return whether the call is a collective or the rendezvous itself, not a computation that ends in one."""
    return any(
        "/torch/distributed/" in frame.file and not _NO_WAIT.search(frame.file) for frame in inner_frames(frames)
    )


def awaits_device(frames: tuple[Frame, ...], line: str) -> bool:
    """Return whether the rank is in a call that waits for its GPU to finish."""
    inner = inner_frames(frames)
    return bool(inner and _DEVICE.search(inner[0].file)) or bool(not inner and _DEVICE_LINE.search(line))


def awaits_loader(frames: tuple[Frame, ...]) -> bool:
    """Return whether the rank waits for the workers of a DataLoader."""
    names = {frame.function for frame in inner_frames(frames) if _LOADER.search(frame.file)}
    return bool(names & {"_try_get_data", "_get_data", "_shutdown_workers"})


def uses_child_processes(frames: tuple[Frame, ...]) -> bool:
    """Return whether the user has called code that works by child processes."""
    return any(_CHILDREN.search(frame.file) for frame in inner_frames(frames))


def runs_users_code(frames: tuple[Frame, ...]) -> bool:
    """Return whether a child runs the user's code; a forked child has the user's frames also while it is idle."""
    idle = any(_WORKER.search(frame.file) for frame in inner_frames(frames))
    return not idle and find_users_frame(frames) is not None


def is_loader_worker(frames: tuple[Frame, ...]) -> bool:
    """Return whether a process is a worker of torch's DataLoader."""
    return any(frame.function == "_worker_loop" and frame.file.endswith("/data/_utils/worker.py") for frame in frames)


def awaits_task(frames: tuple[Frame, ...]) -> bool:
    """Return whether a worker process waits for its next task."""
    inner = inner_frames(frames)
    gets = any(frame.function == "get" and frame.file.endswith("/queues.py") for frame in inner)
    return gets and any(frame.function in _TASK_LOOPS for frame in inner)


def is_service_thread(frames: tuple[Frame, ...]) -> bool:
    """Return whether a thread only serves others, and does nothing by itself."""
    if not frames or find_users_frame(frames) is not None:
        return False
    if frames[0].function == "_worker" and frames[0].file.endswith("/concurrent/futures/thread.py"):
        return True  # it waits for its next task: in one, it would have frames inside
    names = {frame.function for frame in frames if "/multiprocessing/" in frame.file}
    carries = bool(names & {"_feed", "_serve"}) or bool(names & _POOLS_OWN and not names & _POOLS_CALLS)
    return carries or any(frame.file.endswith("/data/_utils/pin_memory.py") for frame in frames)


def awaits_threads(frames: tuple[Frame, ...]) -> bool:
    """Return whether the script has ended, and its other threads keep the process."""
    return any(frame.function == "_shutdown" and frame.file.endswith("/threading.py") for frame in inner_frames(frames))


def find_prompt(frames: tuple[Frame, ...], line: str) -> str:
    """Return what waits for a person to type, such as `pdb` or `input()`; empty without one."""
    prompts = [PurePosixPath(frame.file) for frame in inner_frames(frames) if _PROMPT.search(frame.file)]
    names = [path.stem.lstrip("_") for path in prompts]
    if names:
        return "pdb" if "pdb" in names else names[-1]  # pdb reads its lines through cmd
    asks = re.search(r"\b(input|breakpoint|getpass)\(", line)
    return f"{asks[1]}()" if asks else ""


def awaits_debugger(frames: tuple[Frame, ...]) -> bool:
    """Return whether the rank waits for a debugger to attach; not whether it runs under one."""
    callers = (frame for frame in frames if not _PYTHONS_OWN.search(frame.file))
    caller = next(callers, None)
    return caller is not None and _ATTACH.search(caller.file) is not None


def awaits_lock(frames: tuple[Frame, ...], line: str) -> bool:
    """Return whether a thread that does not move is in a call that waits for another thread of the same process."""
    inner = inner_frames(frames)
    if inner and _IMPORT.search(inner[0].file):
        return inner[0].function == "acquire"
    return bool(_LOCK.search(inner[0].file)) if inner else bool(_LOCK_LINE.search(line))


def describe_lock(frames: tuple[Frame, ...]) -> str:
    """Describe what a thread waits for that `awaits_lock`."""
    for frame in reversed(inner_frames(frames)):  # what the user has called comes first
        text = _LOCK_TEXTS.get((PurePosixPath(frame.file).name, frame.function))
        if text:
            return text
    return "on a lock"


def find_phase(frames: tuple[Frame, ...]) -> str:
    """Return the phase of a rank by its main thread's frames: the innermost frame with a phase decides."""
    phases = (_frame_phase(frame) for frame in frames)
    return next(filter(None, phases), "train" if frames else "")


def _frame_phase(frame: Frame) -> str:
    if _IMPORT.search(frame.file):
        return "import"
    if _RENDEZVOUS.search(frame.function) and not is_users_frame(frame):
        return "rendezvous"
    if "/torch/distributed/rendezvous.py" in frame.file:
        return "rendezvous"
    if _EXIT.search(frame.function) and not is_users_frame(frame):
        return "exit"
    if frame.file.endswith(("/torch/serialization.py", "/safetensors/torch.py")) or (
        "/torch/distributed/checkpoint/" in frame.file
    ):
        return "save" if "load" not in frame.function else ""
    if is_users_frame(frame) and _SAVE.search(frame.function):
        return "save"
    if is_users_frame(frame) and _EVALUATE.search(frame.function):
        return "evaluate"
    return ""


def _collective_name(waits: list[Frame]) -> str:
    """Return what the user has called: the outermost frame of torch's own functions, without wrappers."""
    names = list(_call_names(waits))
    return names[-1] if names else waits[-1].function


def _call_names(waits: list[Frame]) -> Iterator[str]:
    for frame in waits:
        if frame.file.endswith("/rendezvous.py"):
            yield "the rendezvous"
        elif frame.file.endswith("/nn/parallel/distributed.py"):
            yield "DistributedDataParallel"
        elif "/fsdp/" in frame.file or "/_composable/" in frame.file:
            yield "FSDP"
        elif frame.function not in ("wrapper", "inner"):
            yield frame.function
