"""Facts of this node at the start of a job, gathered by a process of its own while setup lines and the template go on.

Only what takes a moment: torch is not imported, nor is the code looked at, which runs at once anyway. Nothing waits for the
facts beyond `GATHER_S_MAX`; without them the node is as ready.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.agent.checks import steps
from orchestrator.agent.start import spawn
from orchestrator.core import codec
from orchestrator.core.host_facts import HostFacts
from orchestrator.core.wire import bootstrap as w

GATHER_S_MAX = 2.0
"""How long a node that is ready otherwise may wait for its facts; nvidia-smi is slow without persistence mode."""


class Gathering:
    """The process that gathers facts, and what it has found. It runs at most once in the life of an agent."""

    def __init__(self) -> None:
        self.pid = 0
        self._facts: HostFacts | None = None
        self._began_at: float | None = None
        self._output_fd = -1

    def begin(self, bundle: Path, step: w.GatherFacts, environ: Mapping[str, str]) -> None:
        """Start the process, unless one was started before; `environ` is the ranks'. It is reaped by the agent."""
        if self._began_at is not None or not bundle.exists():
            return
        self._began_at = time.monotonic()
        self._output_fd = spawn.memory_file("facts")
        with os.fdopen(spawn.memory_file("facts-asked"), "w+b") as asked, contextlib.suppress(OSError):
            asked.write(codec.dumps(step).encode())
            asked.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(bundle), "facts"], stdin=asked, stdout=self._output_fd,
                stderr=subprocess.DEVNULL, env=dict(environ), start_new_session=True,
            )  # fmt: skip
            process.returncode = 0  # reaped by the agent, as ranks are
            self.pid = process.pid

    @property
    def is_awaited(self) -> bool:
        """Tell whether a node that is ready is to wait for its facts."""
        began_at = self._began_at
        return self.pid != 0 and began_at is not None and time.monotonic() - began_at < GATHER_S_MAX

    def ended(self, pid: int) -> bool:
        """Tell whether a process that was reaped is this one, and read what it has found."""
        if pid != self.pid or not pid:
            return False
        self.pid = 0
        with os.fdopen(self._output_fd, "rb") as output, contextlib.suppress(codec.CodecError, OSError):
            output.seek(0)
            self._facts = codec.loads(w.FactsGathered, output.read()).facts
        return True

    def take(self, gpus: Sequence[str]) -> HostFacts | None:
        """Return the facts once, with the GPUs alone that CUDA_VISIBLE_DEVICES names, if it names any."""
        facts, self._facts = self._facts, None
        if facts is None or not gpus:
            return facts
        mine = tuple(gpu for gpu in facts.gpus if gpu.index in gpus or gpu.uuid in gpus)
        uuids = {gpu.uuid for gpu in mine}
        users = tuple(user for user in facts.gpu_users if user.uuid in uuids)
        return replace(facts, gpus=mine, gpu_users=users)

    def give_up(self) -> None:
        """End a process that still runs: ranks that use the GPUs would be taken for others."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def main() -> int:
    """Answer the question on standard input."""
    step = codec.loads(w.GatherFacts, sys.stdin.buffer.read())
    print(codec.dumps(w.FactsGathered(steps.here().facts(step))))
    return 0
