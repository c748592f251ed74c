"""Imports ahead of ranks: what a node's template imports for them, and what keeps it from being forked afterwards.

Loaded by `template.py` under a name that no program sees, and by no other way in a job.

Rules: standard library only, and readable for Python 3.8, as in `ranks/hook`.
"""

# ruff: noqa: PTH206, PTH109, PTH110, PTH115, PTH116, PTH118, PTH120, PTH208, RUF012

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any

RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_RANK",
    "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE", "ORCH_JOB_ID", "ORCH_JOB_NAME", "ORCH_ATTEMPT",
    "ORCH_CHECKPOINT_DIR", "ORCH_RESUME_FROM", "ORCH_RESUME_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_GTIDS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES", "SLURM_NODELIST", "SLURM_JOB_NODELIST",
    "SLURM_STEP_NODELIST",
)  # fmt: skip
"""Variables that a rank gets when it starts: a module that reads them when it is imported is imported by ranks only."""

RANK_ZERO = {
    "torchmetrics.utilities.prints": ("LOCAL_RANK",),
    "lightning.fabric.utilities.rank_zero": ("RANK", "LOCAL_RANK", "SLURM_PROCID"),
    "lightning_fabric.utilities.rank_zero": ("RANK", "LOCAL_RANK", "SLURM_PROCID"),
}
"""Modules that set `rank_zero_only.rank` from the first of these variables when they are imported, and keep nothing else of
them: a rank sets it once more (lightning 2.6, torchmetrics 1.9)."""

AT_START: "frozenset[str]" = frozenset()
"""What a new interpreter has imported before its program begins; the template knows."""

FOLDER = os.getcwd()
"""The working folder in which ranks start."""

SOCKET_FD = -1
"""The descriptor of the line to the agent."""


def find_fork_obstacle(handlers: "Sequence[object]") -> str:
    """Return what keeps this process from being forked as if it were new; "" when nothing does."""
    import signal
    import stat

    if os.listdir("/proc/self/task")[1:]:
        # OpenBLAS ends its threads before a fork and starts them when it needs them: they are no harm.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if os.listdir("/proc/self/task")[1:]:
            return "started a thread"
    for name in os.listdir("/proc/self/fd"):
        try:
            kind, path = os.stat(int(name)).st_mode, os.readlink("/proc/self/fd/" + name)
        except OSError:
            continue  # that of the listing itself
        if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
            return "opened the device " + path
        if stat.S_ISSOCK(kind) and int(name) != SOCKET_FD:
            return "opened a socket"
    if os.getcwd() != FOLDER:
        return "changed the working folder"
    if getattr(sys.modules.get("tempfile"), "_name_sequence", None) is not None:
        return "made a temporary file"  # it would be removed at the end of each rank
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "started a process"
    except ChildProcessError:
        pass
    now = [signal.getsignal(number) for number in signal.valid_signals()]
    return "" if now == handlers else "changed a signal handler"


class Reads(os._Environ):  # type: ignore[type-arg]
    """`os.environ`, noting which variables were asked for."""

    seen: "set[str]" = set()

    def __getitem__(self, key: str) -> str:
        if not (key in RANK_VARIABLES and is_set_again()):
            self.seen.add(key)
        return str(super().__getitem__(key))

    def __contains__(self, key: object) -> bool:
        return self.get(str(key)) is not None


def is_set_again() -> bool:
    """Return whether the module that asks for a variable is one of `RANK_ZERO`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") in RANK_ZERO


def rank_zero() -> "list[Any]":
    """Return the functions that `RANK_ZERO` names, each with its variables."""
    loaded = [(sys.modules[name], names) for name, names in RANK_ZERO.items() if name in sys.modules]
    return [(getattr(module, "rank_zero_only", None), names) for module, names in loaded]


def is_installed(root: str, own: str) -> "bool | None":
    """Return whether a top-level module is an installed one, rather than Python's own or missing; None where neither is
    certain."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    try:
        # Python's own, some of which are frozen, have a path for the first; an editable install is known to the second only.
        spec = PathFinder.find_spec(root, [own, *sys.path]) or find_spec(root)
    except ValueError:
        return None
    if spec is None or root in sys.builtin_module_names:
        return False
    path = spec.origin or ""
    below = path[len(own) :] if path.startswith(own + os.sep) else path
    if {"site-packages", "dist-packages"} & set(below.split(os.sep)):
        return True
    return False if path.startswith(os.path.dirname(os.__file__) + os.sep) else None


def of_program(imports: "list[Any]", own: str) -> "list[Any]":
    """Return those of a program's imports that are of installed packages, up to the first of which that is not certain, such
    as a module of the program: it may change what those after it do."""
    wanted = []
    for found in imports:
        installed = is_installed(found["module"].partition(".")[0], own)
        if installed is None:
            break
        if installed:
            wanted.append((found["module"], found["names"]))
    return wanted


def against(module: str, names: "list[str]", own: str, handlers: "list[Any]") -> str:
    """Import a module, and names of it; return why a fork of this process would not be as a process that imports it later.
    Raises what the import raises."""
    before = len(sys.modules)
    Reads.seen = set()
    __import__(module, fromlist=names)
    if len(sys.modules) == before:
        return ""
    if reason := find_fork_obstacle(handlers):
        return reason
    if alone := Reads.seen & set(RANK_VARIABLES):
        return "reads " + min(alone)
    if any(getattr(function, "rank", None) != 0 for function, _ in rank_zero()):
        return "keeps a rank"
    if entry := find_shadowing_file(own):
        return f"imports what {entry} of the code takes the place of"
    return ""


def find_shadowing_file(folder: str) -> str:
    """Return the file of the program's own folder that a new interpreter would import in place of a module imported here;
    "" where there is none."""
    names = {name.partition(".")[0] for name in sys.modules if name not in AT_START} - AT_START
    try:
        entries = os.listdir(folder)
    except OSError:
        return ""
    for entry in sorted(entries):
        name = entry.partition(".")[0]
        is_module = entry.endswith((".py", ".so", ".pyc"))
        if name in names and (is_module or os.path.exists(os.path.join(folder, entry, "__init__.py"))):
            return entry
    return ""
