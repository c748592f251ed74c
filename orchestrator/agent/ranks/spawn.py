"""Start of a rank as a new interpreter, where it is not forked from a template (`warm_start`); and the processes of a
rank that are warned to save a checkpoint.

Each program leads a session of its own, and dies with its agent (PR_SET_PDEATHSIG). Its output goes straight to a file, so that
no reader can slow it or lose a byte of it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.agent.ranks.template import apply_limits, die_with_parent
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import ownership

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_RLIMITS = 16  # how many there are, see getrlimit(2)
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run; `output` is opened for appending; `limits`: see `read_limits`, empty: those of the agent."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    output: Path
    limits: tuple[tuple[Any, ...], ...] = ()


def start(program: Program) -> int:
    """Start a program and return its pid. Raises OSError when it cannot be executed."""
    agent_pid = os.getpid()

    def begin() -> None:
        die_with_parent(agent_pid, signal.SIGKILL)
        apply_limits(program.limits)

    with ownership.open_for_append(program.output) as output:
        process = subprocess.Popen(
            program.argv,
            cwd=program.cwd,
            env=dict(program.env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=begin,
        )
    process.returncode = 0  # reaped by the agent for all its children at once; Popen must not wait for it
    return process.pid


def read_limits(pid: int) -> tuple[tuple[Any, ...], ...]:
    """Return what a process hands on to those that it starts, besides its variables: umask, niceness, processors and resource
    limits, as `template.apply_limits` takes them. Raises OSError, ValueError when it is gone."""
    _, _, rest = procfs.read_text(Path(f"/proc/{pid}/status")).partition("\nUmask:")
    return (
        ("umask", int(rest.partition("\n")[0], 8)),
        ("setpriority", os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid)),
        ("sched_setaffinity", 0, sorted(os.sched_getaffinity(pid))),
        *(("setrlimit", number, resource.prlimit(pid, number)) for number in range(_RLIMITS)),
    )


def reap() -> Iterator[tuple[int, int]]:
    """Reap the children that have ended; yield the pid and the wait status of each, and of those stopped or continued."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if not (os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGTRAP):  # halted by `ptrace` for a moment
            yield pid, status


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that none escapes."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def name_process(name: str) -> None:
    """Set the short name that `ps -o comm` and `top` show (at most 15 bytes)."""
    _LIBC.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def open_memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory. Builds of Python for old systems, such as conda's, lack
    `memfd_create`: there it is a deleted temporary file, which is its owner's alone."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


_SHELLS = frozenset({"ash", "bash", "busybox", "dash", "fish", "ksh", "ksh93", "mksh", "sh", "yash", "zsh"})


def find_scripts(first: int, stepped: int, tree: Mapping[int, list[int]], signum: int) -> list[int]:
    """Return the processes of a rank that get a warning to save a checkpoint. Its helpers, such as the workers of a DataLoader, must
    outlive the warning: the script needs them until it has saved.

    `first`: the rank's first process; `stepped`: the one that has made steps, 0 for none; `tree`: a fresh result of
    `procfs.children`.

    | what runs | which processes get the warning |
    |---|---|
    | a process has made steps | the first process of its program |
    | else Python, also in a shell line or a wrapper such as `uv run` | that process, and none that it has started |
    | else | the shells of the line, and the programs that they have started |
    | shells around these | those that have a trap for the signal |
    """
    shells, programs, pythons = list[int](), list[int](), list[int]()
    shell_line = [first]
    for pid in shell_line:  # grows while it is walked
        if _executable_name(pid) in _SHELLS:
            shells.append(pid)
            shell_line += tree.get(pid, ())
        else:
            programs.append(pid)
    candidates = list(programs)
    for pid in candidates:
        if _executable_name(pid).startswith(("python", "pypy")):
            pythons.append(pid)
        else:
            candidates += tree.get(pid, ())
    trapping = [pid for pid in shells if procfs.catches_signal(pid, signum)]
    return trapping + (_find_trainer(first, stepped, tree) or pythons or shells + programs)


def _find_trainer(first: int, stepped: int, tree: Mapping[int, list[int]]) -> list[int]:
    """Return the first process of the program that makes the steps; none where it is not known."""
    if stepped != first and stepped not in procfs.descendants(first, tree):
        return []
    parents = {child: parent for parent, below in tree.items() for child in below}
    pid = stepped
    while pid != first and _shares_program(pid, parents[pid]):
        pid = parents[pid]
    return [pid]


def _shares_program(pid: int, parent: int) -> bool:
    """Return whether a process runs no program of its own: it is a fork, or was started by `multiprocessing`."""
    own, parents = (procfs.read_text(Path(f"/proc/{which}/cmdline")) for which in (pid, parent))
    return own == parents or "multiprocessing" in own


def _executable_name(pid: int) -> str:
    """Return the name of the file that a process executes; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return ""
