"""Template of a node's ranks: a process that has imported what ranks import first, and forks each rank.

Run by the job's own Python with the environment that the ranks of the node share. `warm.py` is the agent's side; they talk
over a socket of packets, one JSON object each: first the template's `ready`, `unfit` or `shadowed`, then for each order of a rank
`pid` or `error`.

Rules: standard library only, and readable for Python 3.8, as in `hook.py`. What is imported must leave the process as a
fork needs it (`unfit`); else the template names the module that did not, and ends. A rank is a child of the agent, not of
the template: the process between them ends at once, and the agent is the nearest subreaper.
"""

# ruff: noqa: PTH100, PTH104, PTH109, PTH110, PTH115, PTH116, PTH118, PTH120, PTH123, PTH208, RUF012, RUF063

import gc
import os
import sys

AT_START = frozenset(sys.modules)
"""What a new interpreter has imported before its program begins."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from types import CodeType, ModuleType
    from typing import Any

PACKET_BYTES_MAX = 1 << 20
"""The size of a packet on the socket: an order holds a rank's environment."""

ADOPTED_S_MAX = 10.0
"""How long a new rank waits until it is the agent's child."""

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

COMMAND_ROOM = 4096
"""Bytes of the template's command line kept free for the ranks': `ps` shows there what a rank runs."""


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
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "started a process"
    except ChildProcessError:
        pass
    now = [signal.getsignal(number) for number in signal.valid_signals()]
    return "" if now == handlers else "changed a signal handler"


class Reads(os._Environ):  # type: ignore[type-arg]
    """`os.environ`, noting which variables of single ranks were asked for."""

    seen: "set[str]" = set()

    def __getitem__(self, key: str) -> str:
        if key in ALONE:
            self.seen.add(key)
        return str(super().__getitem__(key))

    def __contains__(self, key: object) -> bool:
        if key in ALONE:
            self.seen.add(str(key))
        return super().__contains__(key)


def import_all(names: "list[str]") -> "tuple[list[str], str, str]":
    """Import modules in turn; return those that are there, and the first that made this process unfit, with the reason."""
    import importlib
    import signal

    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    known = os.environ.__class__
    imported: list[str] = []
    os.environ.__class__ = Reads
    try:
        for name in names:
            Reads.seen.clear()
            try:
                importlib.import_module(name)
            except Exception:
                continue  # the rank will say what is wrong, if it needs it
            reason = unfit(handlers) or ("reads " + min(Reads.seen) if Reads.seen else "")
            if reason:
                return imported, name, reason
            imported.append(name)
    finally:
        os.environ.__class__ = known
    return imported, "", ""


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


def serve(line: "socket.socket") -> "dict[str, Any]":
    """Fork a rank for each order, until the agent closes the line. In a rank, return its order."""
    import json

    while True:
        packet = line.recv(PACKET_BYTES_MAX)
        if not packet:
            os._exit(0)
        order = json.loads(packet)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            rank = os.fork()
            if rank:
                os.write(writing, str(rank).encode())
                os._exit(0)
            os.close(reading)
            os.close(writing)
            line.close()
            return order  # type: ignore[no-any-return]
        os.close(writing)
        text = os.read(reading, 100)
        os.close(reading)
        os.waitpid(between, 0)
        line.send(json.dumps({"pid": int(text)} if text else {"error": "it cannot be forked"}).encode())


def become_rank(order: "dict[str, Any]", hook: "ModuleType") -> None:
    """Turn this process into the rank of an order: what `spawn.start` does for a new interpreter."""
    import ctypes
    import signal
    import time

    os.setsid()
    deadline_s = time.monotonic() + ADOPTED_S_MAX
    while os.getppid() != order["agent"]:
        if time.monotonic() > deadline_s:
            os._exit(1)
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != order["agent"]:
        os._exit(1)
    try:
        os.rename(order["ticket"], order["ticket"] + "." + str(os.getpid()))
    except OSError:
        os._exit(1)  # the agent has given this fork up
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    show_command(order["argv"])
    # These were drawn when they were imported, once for all ranks.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    hook._start()


def show_command(words: "list[str]") -> None:
    """Show a rank's own command line in place of the template's, at the address that proc(5) gives."""
    import ctypes

    if hasattr(sys, "orig_argv"):
        sys.orig_argv = list(words)
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    begin, room = int(fields[45]), int(fields[46]) - int(fields[45])
    if room > 0:
        ctypes.memset(begin, 0, room)
        text = b"\0".join(os.fsencode(word) for word in words)[: room - 1]
        ctypes.memmove(begin, text, len(text))


def run(words: "list[str]") -> None:
    """Run a script with its arguments, or -m and a module with its own, as the interpreter would."""
    import builtins
    import types

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = main
    is_safe = bool(getattr(sys.flags, "safe_path", False))
    if words[0] == "-m":
        import runpy

        sys.argv[:] = ["-m", *words[2:]]
        if not is_safe:
            sys.path.insert(0, os.getcwd())
        call = runpy._run_module_as_main  # type: ignore[attr-defined]
        guarded(lambda: call(words[1]))
        return
    from importlib.machinery import SourceFileLoader

    sys.argv[:] = words
    path = os.path.abspath(words[0]) if sys.version_info >= (3, 9) else words[0]
    if not is_safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None

    def execute() -> None:
        with open(path, "rb") as file:
            code: CodeType = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)

    guarded(execute)


def guarded(act: "Callable[[], object]") -> None:
    """Run the program; an exception is printed without the template's own frames, and ends the process as usual."""
    try:
        act()
    except SystemExit:
        raise
    except BaseException as err:
        trace = err.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        err.__traceback__ = trace
        sys.last_type, sys.last_value, sys.last_traceback = type(err), err, trace
        if sys.version_info >= (3, 12):
            sys.last_exc = err
        if isinstance(err, KeyboardInterrupt):
            raise
        sys.excepthook(type(err), err, trace)
        sys.exit(1)


def load_hook(folder: str) -> "ModuleType":
    """Return the hook as a module, loaded but not armed: this process is no rank yet."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("orch_hook", os.path.join(folder, "sitecustomize.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__name__ = "sitecustomize"
    return module


def main() -> None:
    """Import, report, serve; then, in a rank, run its program."""
    import json
    import socket

    folder, names, own = sys.argv[2], sys.argv[3].split(","), sys.argv[4]
    line = socket.socket(fileno=SOCKET_FD)
    sys.path.pop(0)  # the folder of this file
    hook = load_hook(folder)
    imported, module, reason = import_all([name for name in names if name])
    entry = "" if reason else shadowed(own)
    if reason or entry:
        answer = {"unfit": module, "reason": reason} if reason else {"shadowed": entry}
        line.send(json.dumps(answer).encode())
        os._exit(0)
    gc.collect()
    gc.freeze()
    line.send(json.dumps({"ready": imported}).encode())
    order = serve(line)
    become_rank(order, hook)
    run(order["argv"][1:])


SOCKET_FD = -1
if __name__ == "__main__":
    SOCKET_FD = int(sys.argv[1])
    main()
