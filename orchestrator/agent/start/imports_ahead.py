"""Imports ahead of ranks: what a node's template imports for them, and what is left out since a fork could tell.

Loaded by `template.py` under a name that no program sees, and by no other way in a job. The first module is imported in
the template's process; without it there is no template. The others are imported by a child, which becomes the template
where all went well; else another child leaves out the module that did not.

Rules: standard library only, and readable for Python 3.8, as in `hook.py`.
"""

# ruff: noqa: PTH206, PTH109, PTH110, PTH115, PTH116, PTH118, PTH120, PTH208, RUF012

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any

ALONE = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_RANK",
    "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE", "ORCH_JOB_ID", "ORCH_JOB_NAME", "ORCH_ATTEMPT",
    "ORCH_CHECKPOINT_DIR", "ORCH_RESUME_FROM", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS",
    "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE",
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

MODULE_S_MAX = 30.0
"""How long a module of the program may take to import before it is left out."""

LEFT_OUT_MAX = 4
"""How many packages are left out; those after the next that would be are not imported either."""

AT_START: "frozenset[str]" = frozenset()
"""What a new interpreter has imported before its program begins; the template knows."""

FOLDER = os.getcwd()
"""The working folder in which ranks start."""

SOCKET_FD = -1
"""The descriptor of the line to the agent."""


def prctl_death_signal(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies; 0 for none."""
    import ctypes

    ctypes.CDLL(None).prctl(1, number, 0, 0, 0)  # PR_SET_PDEATHSIG


def unfit(handlers: "Sequence[object]") -> str:
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
        if not (key in ALONE and is_set_again()):
            self.seen.add(key)
        return str(super().__getitem__(key))

    def __contains__(self, key: object) -> bool:
        return self.get(str(key)) is not None


def is_set_again() -> bool:
    """Tell whether the module that asks for a variable is one of `RANK_ZERO`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") in RANK_ZERO


def rank_zero() -> "list[Any]":
    """Return the functions that `RANK_ZERO` tells of, each with its variables."""
    loaded = [(sys.modules[name], names) for name, names in RANK_ZERO.items() if name in sys.modules]
    return [(getattr(module, "rank_zero_only", None), names) for module, names in loaded]


def is_installed(root: str, own: str) -> "bool | None":
    """Tell whether a top-level module is an installed one, rather than Python's own or missing; None where neither is
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


def of_program(steps: "list[Any]", own: str) -> "tuple[list[Any], set[str]]":
    """Return the installed modules that a program imports, each with its names and the variables that the program has set
    before; and the variables that are set before the first of them."""
    wanted: list[Any] = []
    sets: set[str] = set()
    for step in steps:
        if step["sets"]:
            sets.add(step["sets"])
            continue
        installed = is_installed(step["module"].partition(".")[0], own)
        if installed is None:
            break  # what it does is not known
        if installed:
            wanted.append((step["module"], step["names"], set(sets)))
    return wanted, wanted[0][2] if wanted else sets


def against(module: str, names: "list[str]", sets: "set[str]", own: str, handlers: "list[Any]") -> str:
    """Import a module, and names of it; return why a fork of this process would not be as a process that imports it later."""
    before = len(sys.modules)
    Reads.seen = set()
    try:
        __import__(module, fromlist=names)
    except BaseException as err:
        return f"raises {type(err).__name__}: {str(err)[:200]}"
    if len(sys.modules) == before:
        return ""
    if reason := unfit(handlers):
        return reason
    if alone := Reads.seen & set(ALONE):
        return "reads " + min(alone)
    if any(getattr(function, "rank", None) != 0 for function, _ in rank_zero()):
        return "keeps a rank"
    if changed := sets & Reads.seen:
        return f"reads {min(changed)}, which the program sets before"
    if entry := shadowed(own):
        return f"imports what {entry} of the code takes the place of"
    return ""


def package_of(module: str) -> str:
    """Return what is left out with a module: all of its package, but of torch the module alone."""
    root = module.partition(".")[0]
    return module if root == "torch" else root


def import_rest(wanted: "list[Any]", own: str, handlers: "list[Any]") -> "tuple[dict[str, str], int]":
    """Import modules in a child, and again in another without the package that something is to be said against. Return in
    the child that imported them all, with those left out and the pipe on which it tells its parent to end."""
    left_out: dict[str, str] = {}
    while True:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            prctl_death_signal(9)
            for module, names, sets in wanted:
                if package_of(module) in left_out:
                    continue
                os.write(writing, module.encode() + b"\n")
                if reason := against(module, names, sets, own, handlers):
                    os.write(writing, b" " + " ".join(reason.split()).encode(errors="replace") + b"\n")
                    os._exit(1)
            return left_out, writing
        os.close(writing)
        module, reason = end_of(child, reading)
        if not reason:
            os._exit(0)  # the child is the template
        if len(left_out) == LEFT_OUT_MAX:
            wanted = wanted[: [name for name, _, _ in wanted].index(module)]
        left_out[package_of(module)] = reason


def end_of(child: int, reading: int) -> "tuple[str, str]":
    """Wait for a child that imports; return the module that it failed at, and why, or "" once it has taken over."""
    import select

    lines = [""]
    while not lines[-1].startswith(" "):
        if not select.select([reading], [], [], MODULE_S_MAX)[0]:
            os.kill(child, 9)
            lines.append(f" takes longer than {MODULE_S_MAX:g} s to import")
            break
        piece = os.read(reading, 65536).decode(errors="replace")
        if piece.endswith("\0"):
            return "", ""
        # A line is written at once, and shorter than what a pipe takes at once.
        lines += piece.splitlines() or [" ends the process"]
    os.close(reading)
    os.waitpid(child, 0)
    return lines[-2], lines[-1][1:]


def shadowed(folder: str) -> str:
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
