"""Who watches the agent? Its keeper: a process that does nothing but start the agent, and clean up if it dies.

The keeper is the agent's parent and the nearest subreaper above it. When the agent is killed, all it had started falls
to the keeper, which kills it and starts a new agent. When the keeper is killed, the kernel tells the agent (TERM), and
the agent kills its ranks and leaves. When both are killed at once, the kernel kills the ranks, and what hid deeper is
swept by the next keeper. So no rank outlives the pair.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.node import procfs, spawn
from orchestrator.node.ranks import forget_errors
from orchestrator.wire import codec
from orchestrator.wire.durable import replace_text
from orchestrator.wire.messages import AgentConfig
from orchestrator.wire.paths import JobDir

DEATHS_MAX = 10
"""How often an agent may die before its keeper gives up."""

TAG = "ORCH_TAG"
"""The environment variable that marks every process of a job on a node, whatever became of its parents."""

SWEEP_S_MAX = 20.0
"""How long processes may take to vanish after SIGKILL."""

CONFIG_BYTES_MAX = 1 << 20

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(run_agent: Callable[[AgentConfig], int]) -> int:
    """Read an AgentConfig from standard input, keep an agent running, and return the exit code."""
    config = codec.loads(AgentConfig, sys.stdin.buffer.read(CONFIG_BYTES_MAX))
    folder = JobDir(Path(config.root)).node(config.node)
    folder.mkdir(parents=True, exist_ok=True)
    lock_fd = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another agent of {config.node} is alive", file=sys.stderr)
        return 0
    spawn.name_process("orch-keeper")
    spawn.adopt_orphans()
    _record(folder)
    return _keep(config, run_agent)


def _record(folder: Path) -> None:
    """Leave word of who we are, with the start time that guards against a reused pid."""
    stat = procfs.look(os.getpid())
    ticks = stat.start_ticks if stat else 0
    record = {"pid": os.getpid(), "start_ticks": ticks, "boot_id": procfs.boot_id()}
    replace_text(folder / "agent.json", json.dumps(record))


def _keep(config: AgentConfig, run_agent: Callable[[AgentConfig], int]) -> int:
    watch = _Watch()
    for signum in _ENDING:
        signal.signal(signum, watch.end)
    for deaths in range(DEATHS_MAX):
        _clean_up(config)
        time.sleep(min(deaths * 0.2, 2.0))
        keeper_pid = os.getpid()
        watch.agent_pid = os.fork()
        if watch.agent_pid == 0:
            for signum in _ENDING:
                signal.signal(signum, signal.SIG_DFL)
            spawn.die_with_parent(keeper_pid, signal.SIGTERM)
            os._exit(_run(config, run_agent))
        status = watch.wait()
        if status == 0:
            _clean_up(config)
            return 0
        print(f"the agent of {config.node} died ({_how(status)})", file=sys.stderr, flush=True)
    return 1


def _clean_up(config: AgentConfig) -> None:
    """Let nothing remain of what an earlier agent started, and nothing that its ranks said unmasked."""
    sweep(config.job, config.node)
    forget_errors(JobDir.at(config.root).node(config.node))


def _run(config: AgentConfig, run_agent: Callable[[AgentConfig], int]) -> int:
    """Run the agent in the forked child; whatever escapes it is printed, and becomes an exit code."""
    try:
        return run_agent(config)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


@dataclass(slots=True)
class _Watch:
    """The agent that is being watched; pid 0 while there is none."""

    agent_pid: int = 0

    def wait(self) -> int:
        """Reap whatever falls to us until the agent itself ends, and return its wait status."""
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self.agent_pid:
                self.agent_pid = 0
                return status

    def end(self, signum: int, _frame: object) -> None:
        """Pass a signal on to the agent, which stops its ranks and leaves; without an agent, end."""
        if not self.agent_pid:
            sys.exit(128 + signum)
        os.kill(self.agent_pid, signum)


def _how(status: int) -> str:
    return (
        f"signal {os.WTERMSIG(status)}"
        if os.WIFSIGNALED(status)
        else f"code {os.waitstatus_to_exitcode(status)}"
    )


def sweep(job: str, node: str) -> None:
    """Kill every process that an earlier agent of this job and node left, within a limit."""
    deadline_s = time.monotonic() + SWEEP_S_MAX
    while time.monotonic() < deadline_s:
        left = _leftovers(job, node)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        _reap()
        if not left:
            return
        time.sleep(0.02)


def _leftovers(job: str, node: str) -> list[int]:
    ours = procfs.descendants(os.getpid())
    marked = [proc.pid for proc in procfs.with_env(f"{TAG}={job}/{node}".encode())]
    living = [pid for pid in dict.fromkeys(ours + marked) if pid != os.getpid()]
    return [pid for pid in living if (stat := procfs.look(pid)) is not None and stat.state not in "ZX"]


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
