"""Template of a node's ranks: a process that has imported what ranks import first, and forks each rank.

Run by the job's own Python with the environment that the ranks of the node share. `warm_start.py` is the agent's side; they talk
over a socket of packets, one JSON object each: what to import, then the template's `ready` or `fresh`, then for each order of a
rank `pid` or `error`.

What is imported must leave the process as a fork needs it: see `imports_ahead`. Else the template ends and names the module. A rank is a child of the agent, not of the
template: the process between them ends at once, and the agent is the nearest subreaper.

Rules: standard library only, and readable for Python 3.8, as in `ranks/hook`.
"""

# ruff: noqa: PTH100, PTH104, PTH109, PTH118, PTH120, PTH123, RUF063

import gc
import os
import sys

AT_START = frozenset(sys.modules)
"""What a new interpreter has imported before its program begins."""

ENVIRON = dict(os.environ)
"""The variables that ranks share."""

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

COMMAND_ROOM = 4096
"""Bytes of the template's command line kept free for the ranks': `ps` shows there what a rank runs."""


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


def await_adoption(agent: int) -> None:
    """Wait until the agent has adopted this process, and end with it."""
    import time

    deadline_s = time.monotonic() + ADOPTED_S_MAX
    while os.getppid() != agent:
        if time.monotonic() > deadline_s:
            os._exit(1)
        time.sleep(0.0005)
    die_with_parent(agent, 9)


def die_with_parent(parent_pid: int, signum: int) -> None:
    """Ask the kernel to send `signum` to this process when its parent dies; end at once if it already has."""
    import ctypes

    ctypes.CDLL(None).prctl(1, int(signum), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent_pid:
        os._exit(1)


def become_rank(order: "dict[str, Any]", arm: "ModuleType", ahead: "ModuleType") -> None:
    """Turn this process into the rank of an order: what `spawn.start` does for a new interpreter."""
    os.setsid()
    await_adoption(order["agent"])
    try:
        os.rename(order["ticket"], order["ticket"] + "." + str(os.getpid()))
    except OSError:
        os._exit(1)  # the agent has given this fork up
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    set_by_imports = {name: value for name, value in os.environ.items() if ENVIRON.get(name) != value}
    os.environ.clear()
    os.environ.update({**order["env"], **set_by_imports})
    os.chdir(order["cwd"])
    apply_limits(order["limits"])
    show_argv(order["argv"])
    if hasattr(sys, "orig_argv"):
        sys.orig_argv = list(order["argv"])
    # Seeds were fixed at import in the template; give each rank its own.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    for function, names in ahead.rank_zero():
        function.rank = next((int(os.environ[name]) for name in names if name in os.environ), 0)
    arm.start()


def apply_limits(limits: "Sequence[Sequence[Any]]") -> None:
    """Take limits that `spawn.read_limits` has read: each is a function of `os` or `resource`, and what it is called with."""
    import resource

    for name, *values in limits:
        try:
            (getattr(resource, name, None) or getattr(os, name))(*values)
        except (OSError, ValueError):
            pass  # one that this process may not raise


def show_argv(words: "Sequence[str]") -> None:
    """Let `ps` and /proc/<pid>/cmdline show `words` for this process, cut to the room of its own arguments.

    The words are written over the process's arguments, at the address that proc(5) gives: fields 48 and 49 of
    /proc/self/stat.
    """
    import ctypes

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
        run_guarded(lambda: call(words[1]))
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

    run_guarded(execute)


def run_guarded(act: "Callable[[], object]") -> None:
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


def load_module(path: str, name: str) -> "ModuleType":
    """Return a file of orch as a module that programs do not see."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Import, report, serve; then, in a rank, run its program."""
    import json
    import signal
    import socket

    folder = os.path.dirname(os.path.abspath(__file__))
    ahead = load_module(os.path.join(folder, "imports_ahead.py"), "orch_imports_ahead")
    sys.path.insert(0, sys.argv[2])
    from _orch_hook import arm  # type: ignore[import-not-found]  # not armed: this process is no rank yet

    socket_fd = int(sys.argv[1])
    vars(ahead).update(AT_START=AT_START, SOCKET_FD=socket_fd)
    line = socket.socket(fileno=socket_fd)
    sys.path[:] = [entry for entry in sys.path if entry not in (folder, os.path.realpath(folder), sys.argv[2])]
    request = json.loads(line.recv(PACKET_BYTES_MAX))
    own, sys.argv[:] = request["own"], request["argv"]
    fixed: list[tuple[str, list[str]]] = [(module, []) for module in request["modules"]]
    modules = fixed + ahead.of_program(request["imports"], own)
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    environ_class = os.environ.__class__
    gc.disable()  # nothing that an import makes is garbage: a fifth of torch's time
    os.environ.__class__ = ahead.Reads
    for number, (module, names) in enumerate(modules):
        is_fixed = number < len(fixed)
        try:
            reason = ahead.against(module, names, own, handlers)
        except BaseException as err:
            if is_fixed:
                continue  # no torch, or one without such a module
            reason = f"raises {type(err).__name__}: {' '.join(str(err)[:200].split())}"
        if reason:
            line.send(json.dumps({"fresh": reason, "module": module, "is_fixed": is_fixed}).encode())
            os._exit(0)
    os.environ.__class__ = environ_class
    gc.collect()
    gc.freeze()
    gc.enable()
    ready = [module for module, _ in modules if module in sys.modules]
    line.send(json.dumps({"ready": ready, "pid": os.getpid()}).encode())
    order = serve(line)
    become_rank(order, arm, ahead)
    run(order["argv"][1:])


if __name__ == "__main__":
    main()
