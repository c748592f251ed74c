"""Connections by srun to the nodes of the Slurm allocation that this process is in, for the sessions of a check."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import fanout
from orchestrator.backends.ssh.bootstrap_session import HostConnection, RemoteProcess
from orchestrator.client.checks.host_sessions import SESSIONS_S_MAX, ReachHosts
from orchestrator.core.slurm import step_env
from orchestrator.core.slurm.hostlist import expand

SRUN_OPTIONS = (
    "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0",
    "--export=ALL", "--unbuffered",
)  # fmt: skip
"""One task, in addition to what runs on the node, with all resources of the allocation there."""

END_S_MAX = 10.0
"""How long a command of Slurm may take to end after the end of its input, and after SIGTERM."""

READ_BYTES = 64 << 10
ERRORS_BYTES_MAX = 4096


def allocation_nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes of the allocation that this process is in; none outside of one, and inside a step of one."""
    if not environ.get("SLURM_JOB_ID"):
        return ()
    try:
        return expand(environ.get("SLURM_JOB_NODELIST", ""))
    except ValueError:
        return ()


def reach_by_srun(environ: Mapping[str, str], limit_s: float = SESSIONS_S_MAX) -> ReachHosts:
    """Return the function that opens sessions to the nodes of this allocation."""

    def reach(
        names: Sequence[str],
        visit: Callable[[HostConnection, str], None],
        failed: Callable[[str, LaunchError], None],
    ) -> None:
        def run_session(name: str) -> None:
            try:
                visit(_SrunLine(name, environ), name)
            except LaunchError as err:
                failed(name, err)

        fanout.fan_out(names, run_session, limit_s, len(names))

    return reach


class _SrunLine:
    def __init__(self, node: str, environ: Mapping[str, str]) -> None:
        self._node = node
        self._environ = environ

    def run(self, command: str) -> RemoteProcess:
        argv = ("srun", *SRUN_OPTIONS, f"--nodelist={self._node}", "/bin/sh", "-c", command)
        return SlurmCommand(argv, step_env.srun_env(self._environ), own_session=True)


class SlurmCommand:
    """A command of Slurm that runs for as long as its input is open."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], *, own_session: bool) -> None:
        """Start the command; with `own_session` it gets no signals of the terminal. Raises LaunchError."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- it lives as long as the command
        self._buffer = bytearray()
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env,
                start_new_session=own_session, bufsize=0,
            )  # fmt: skip
        except OSError as err:
            fix = "run the check on a machine with Slurm's commands"
            raise LaunchError(argv[0], f"{argv[0]} cannot be run: {err.strerror}", fix) from err

    @property
    def errors(self) -> str:
        """The end of its standard error."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - ERRORS_BYTES_MAX))
        return self._errors.read().decode(errors="replace")

    def send(self, data: bytes) -> None:
        """Write to its standard input. Raises BrokenPipeError."""
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]

    def line(self, wait_s: float) -> bytes | None:
        """Return the next line of its standard output, None at the end. Raises TimeoutError."""
        assert self._process.stdout is not None
        end_s = time.monotonic() + wait_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    raise TimeoutError
                data = os.read(self._process.stdout.fileno(), READ_BYTES)
                if not data:
                    rest, self._buffer = bytes(self._buffer), bytearray()
                    return rest or None
                self._buffer += data
        line, _, remainder = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(remainder)
        return line

    def exit_code(self, wait_s: float) -> int | None:
        """Return its exit code. Raises TimeoutError."""
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired as err:
            raise TimeoutError from err

    def close(self, wait_s: float = END_S_MAX) -> None:
        """End its input, and the command itself if that does not end it within this time."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S_MAX)
        self._errors.close()
