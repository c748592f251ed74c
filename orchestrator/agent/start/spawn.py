"""Start of a rank's program: the only place where one is started, today as a fresh interpreter.

Each program leads a session of its own, so that one signal reaches all of it, and dies with its agent
(PR_SET_PDEATHSIG). Its output goes straight to a file, so that no reader can slow it or lose a byte of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run; `output` is opened for appending."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    output: Path


def start(program: Program) -> int:
    """Start a program and return its pid. Raises OSError when it cannot be executed."""
    agent_pid = os.getpid()
    with program.output.open("ab", buffering=0) as output:
        process = subprocess.Popen(
            program.argv,
            cwd=program.cwd,
            env=dict(program.env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(agent_pid, signal.SIGKILL),
        )
    process.returncode = 0  # reaped by the agent for all its children at once; Popen must not wait for it
    return process.pid


def die_with_parent(parent_pid: int, signum: int) -> None:
    """Ask the kernel to send `signum` to this process when its parent dies; end at once if it already has."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that none escapes."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def show_argv(words: Sequence[str]) -> None:
    """Let `ps` and /proc/<pid>/cmdline show `words` for this process, cut to the room of its own arguments.

    The words are written over the process's arguments, at the address that proc(5) gives: fields 48 and 49 of
    /proc/self/stat.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    begin, room = int(fields[45]), int(fields[46]) - int(fields[45])
    if room > 0:
        ctypes.memset(begin, 0, room)
        text = b"\0".join(os.fsencode(word) for word in words)[: room - 1]
        ctypes.memmove(begin, text, len(text))


def name_process(name: str) -> None:
    """Set the short name that `ps -o comm` and `top` show (at most 15 bytes)."""
    _LIBC.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory. Builds of Python for old systems, such as conda's, lack
    `memfd_create`: there it is a deleted temporary file, which is its owner's alone."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
