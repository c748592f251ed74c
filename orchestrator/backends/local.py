"""Backend `local`: each node is an agent process on this machine, the same that SSH and Slurm start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from orchestrator.backends.api import Backend, LaunchError
from orchestrator.core import codec
from orchestrator.core.jobdir import locks, ownership
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire.agent_config import AgentConfig

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
"""How a node's log is opened; a pipe in its place is refused rather than waited for."""


class LocalBackend(Backend):
    """Agents of one job on this machine."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._suspected: set[str] = set()

    def launch(self, config: AgentConfig) -> None:
        """Run the node's rendered launch script, with the configuration on its standard input."""
        folder = self._job.node(config.node)
        script = self._job.scripts / f"{config.node}.sh"
        try:
            folder.parent.mkdir(exist_ok=True)  # without parents: the job folder may have been deleted
            folder.mkdir(exist_ok=True)
            with os.fdopen(os.open(folder / "agent.log", _APPEND, 0o644), "ab") as log:
                process = subprocess.Popen(
                    ["/bin/sh", str(script)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd=self._job.root,
                )
        except OSError as err:
            raise LaunchError("process", f"{err.strerror}: {err.filename}") from err
        self._processes[config.node] = process
        self._suspected.discard(config.node)
        assert process.stdin is not None
        try:
            process.stdin.write(codec.dumps(config).encode())
            process.stdin.close()
        except BrokenPipeError as err:
            raise LaunchError("process", f"the launch script ended at once; see {folder / 'agent.log'}") from err

    def agent_death(self, node: str) -> str | None:
        """Check twice that the agent's lock is free, since a new agent takes it a moment after its start."""
        process = self._processes.get(node)
        if process is not None and process.poll() is None:
            return None
        if locks.is_held(self._job.node(node) / "agent.lock"):
            self._suspected.discard(node)
            return None
        if process is None and node not in self._suspected:
            self._suspected.add(node)
            return None
        self._suspected.discard(node)
        self._processes.pop(node, None)
        code = f" with code {process.returncode}" if process is not None else ""
        return f"its agent ended{code}; {_last_line(self._job.node(node) / 'agent.log')}"


def _last_line(log: Path) -> str:
    try:
        lines = ownership.read_regular(log).decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1][:300] if lines else "no output"
