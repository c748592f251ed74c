"""Fork of the bootstrap process into the monitor that keeps running on the host.

A new interpreter would import the same code a second time, which is most of what a launch costs a host. The child drops
everything that ties it to the connection: session, standard streams, open files, variables, name. It keeps the bundle's
descriptor, from which it still imports. The garbage collector is off until the fork, since importing makes no garbage.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from orchestrator.agent.ranks import template
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import bootstrap as w

WAIT_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class AgentMonitor:
    """A monitor that was just started, with the pipes to and from it."""

    pid: int
    orders: IO[bytes]
    replies: IO[bytes]

    def send(self, line: str) -> None:
        """Send the monitor a line. Raises EOFError when it has ended."""
        try:
            self.orders.write(line.encode() + b"\n")
            self.orders.flush()
        except BrokenPipeError as err:
            raise EOFError from err

    def receive(self) -> bytes:
        """Wait for the monitor's next line. Raises EOFError when it has ended."""
        line = self.replies.readline(w.REPLY_BYTES_MAX)
        if not line:
            raise EOFError
        return line

    def wait(self, wait_s: float) -> int:
        """Return the monitor's exit code, negative for a signal; kill the monitor if it does not end in time."""
        deadline_s = time.monotonic() + wait_s
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline_s:
                self.kill()
                ended = os.waitpid(self.pid, 0)
                break
            time.sleep(WAIT_POLL_S)
        return os.waitstatus_to_exitcode(ended[1])

    def kill(self) -> None:
        """Kill the monitor."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def detach(self) -> None:
        """Close the pipe to the monitor, and let it keep running."""
        with contextlib.suppress(BrokenPipeError):
            self.orders.close()


def fork_monitor(job: JobDir, log_fd: int, bundle_fd: int) -> AgentMonitor:
    """Fork a monitor that reads its configuration and replies over pipes, and writes the rest to its log."""
    orders_read, orders_write = os.pipe()
    replies_read, replies_write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(orders_read)
        os.close(replies_write)
        return AgentMonitor(pid, os.fdopen(orders_write, "wb"), os.fdopen(replies_read, "rb"))
    code = 1
    try:
        _become_monitor(job, (orders_read, replies_write, log_fd), bundle_fd)
        from orchestrator.agent.process import agent, agent_monitor  # other requests need neither

        gc.freeze()
        gc.enable()
        code = agent_monitor.main(agent.run_agent, is_launched=True)
    except BaseException:
        sys.excepthook = sys.__excepthook__
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    raise AssertionError("the monitor exits above")


def _become_monitor(job: JobDir, streams: tuple[int, int, int], bundle_fd: int) -> None:
    os.setsid()
    for stream_fd, fd in enumerate(streams):
        os.dup2(fd, stream_fd)
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd != bundle_fd:
            with contextlib.suppress(OSError):
                os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(fd, mode, buffering=size, closefd=False, errors="surrogateescape")
        for fd, mode, size in ((0, "r", -1), (1, "w", -1), (2, "w", 1))
    )
    os.chdir(job.root)
    for name in [name for name in os.environ if name.startswith("SSH_")]:
        del os.environ[name]
    template.show_argv((sys.executable, "-I", "-S", "-X", "utf8", str(job.bundle), "agent", "launched"))
