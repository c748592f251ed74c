"""Who watches the agent? Its keeper: a process that does nothing but start the agent, and clean up if it dies.

The keeper is the agent's parent and the nearest subreaper above it. When the agent is killed, all it had started falls
to the keeper, which kills it and starts a new agent. When the keeper is killed, the kernel tells the agent (TERM), and
the agent kills its ranks and leaves. When both are killed at once, the kernel kills the ranks, and what hid deeper is
swept by the next keeper. So no rank outlives the pair. An agent that is stopped can neither obey nor fence its ranks;
its keeper lets it go on.

Before its first agent the keeper leases what that needs of the host, and holds it to the end. A keeper that was
launched over a line that may break starts nothing before the other end has said so. Where Slurm signals all processes
when it takes a node away, TERM ends neither: the agent passes it on as news, and gets HUP when its keeper dies.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent import leases
from orchestrator.agent.leases import LeaseError, Leases
from orchestrator.agent.rank import spawn
from orchestrator.agent.rank.error_file import forget_errors
from orchestrator.core import codec
from orchestrator.core.host import gpus, procfs
from orchestrator.core.jobdir import full_disk, locks
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.slurm import step_env
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire.messages import AgentConfig
from orchestrator.core.wire.tokens import is_token

DEATHS_MAX = 10
"""How often an agent may die before its keeper gives up."""

TAG = "ORCH_TAG"
"""The environment variable that marks every process of a job on a node, whatever became of its parents."""

CLEANUP_S_MAX = 20.0
"""How long processes may take to vanish after SIGKILL."""

CONFIG_BYTES_MAX = 1 << 20

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


LOCK_S_MAX = 0.3
LOCK_POLL_S = 0.02
STOPPED_S_MAX = 10.0
"""How long an agent may be stopped (state T): its node counts as lost after 60 s without a word, at least 5 heartbeats."""

LOOK_S = 60.0
"""How often a keeper whose agent lives looks around; whatever happens wakes it at once."""


def main(run_agent: Callable[[AgentConfig], int], *, is_launched: bool = False) -> int:
    """Read an AgentConfig from the first line of standard input, keep an agent running, and return the exit code.

    `is_launched`: words go to standard output, and the agent starts when the line `GO` has come.
    """
    full_disk.print_patiently()
    config = _here(codec.loads(AgentConfig, sys.stdin.buffer.readline(CONFIG_BYTES_MAX)))
    folder = JobDir(Path(config.root)).node(config.node)
    folder.mkdir(parents=True, exist_ok=True)
    tell = _say if is_launched else _note
    if not is_token(config.token):
        tell(
            w.Failed(
                "agent", "the token that it was given is empty or torn", "submit the job again", "permanent"
            )
        )
        return 1
    if not _locks(folder / "agent.lock"):
        _note(f"another agent of {config.node} is alive")
        tell(_other(folder))
        return 0
    spawn.name_process("orch-keeper")
    spawn.adopt_orphans()
    stock = leases.Stock(gpus.here, os.cpu_count() or 1)
    try:
        held = leases.take(config.needs, leases.me(config.job, config.node), stock)
    except LeaseError as err:
        tell(w.Failed("lease", err.reason, err.fix, "busy" if err.is_busy else "permanent"))
        return 1
    if is_launched and not _may_go(held):
        return 1
    if config.allocated:
        _leave_srun(folder, config.node)
    _record(folder, held)
    return _keep(dataclasses.replace(config, gpus=held.gpus), run_agent, held)


def _here(config: AgentConfig) -> AgentConfig:
    """Return the configuration with the name of this node, if it was meant for many."""
    if config.node:
        return config
    return dataclasses.replace(config, node=os.environ.get(step_env.NODE_NAME) or socket.gethostname())


def _leave_srun(folder: Path, node: str) -> None:
    """Say that we are up; what is printed from now on goes to the node's own log, and not through srun."""
    print(*step_env.UP, node, flush=True)
    log_fd = os.open(folder / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd in (1, 2):
        os.dup2(log_fd, fd)
    os.close(log_fd)


def _locks(lock: Path) -> bool:
    """Take the lock that an agent and its keeper hold as long as they live; False when others do."""
    fd = locks.open_file(lock)  # never closed
    return locks.take(fd, LOCK_S_MAX, LOCK_POLL_S)


def _note(what: object) -> None:
    print(f"{time.strftime('%H:%M:%S')} keeper: {what}", file=sys.stderr, flush=True)


def _say(word: w.Word) -> None:
    """Tell whoever launched us; one who has gone is noticed by what does not come from him any more."""
    try:
        print(codec.dumps_kind(word), flush=True)
    except BrokenPipeError:
        nothing_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing_fd, 1)  # the word is still in Python's buffer, and would be tried again at the end
        os.close(nothing_fd)


def _may_go(held: Leases) -> bool:
    """Say what is held, wait for leave to start, and cut the line; False when whoever launched us is gone."""
    _say(w.Leased(held.gpus))
    deadline_s = time.monotonic() + w.GO_S_MAX
    while (left_s := deadline_s - time.monotonic()) > 0:
        for fd in select.select([0, *held.fds], [], [], left_s)[0]:
            if fd != 0:
                held.answer(fd)
            elif sys.stdin.buffer.readline(len(w.GO) + 1).strip() == w.GO:
                _say(w.KeeperUp(os.getpid()))
                _cut_line()
                return True
            else:
                _note("whoever launched this has gone before the agent was started")
                return False
    _note(f"no leave to start the agent for {w.GO_S_MAX:.0f} s")
    return False


def _cut_line() -> None:
    """Let go of the pipes to whoever launched us: what is printed from now on goes to the log."""
    nothing_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing_fd, 0)
    os.close(nothing_fd)
    os.dup2(2, 1)


def _record(folder: Path, held: Leases) -> None:
    """Leave word of who we are, with the start time that guards against a reused pid."""
    stat = procfs.look(os.getpid())
    record = {
        "pid": os.getpid(),
        "start_ticks": stat.start_ticks if stat else 0,
        "boot_id": procfs.boot_id(),
        "gpus": held.gpus,
    }
    replace_text(folder / "agent.json", json.dumps(record))


def _other(folder: Path) -> w.AlreadyUp:
    """Return what the keeper that is there has left of itself; it may not have come to that yet."""
    try:
        record = codec.loads_plain((folder / "agent.json").read_bytes())
        return w.AlreadyUp(int(record["pid"]), tuple(map(str, record["gpus"])))
    except (OSError, codec.CodecError, KeyError, TypeError, ValueError):
        return w.AlreadyUp(0, ())


def _keep(config: AgentConfig, run_agent: Callable[[AgentConfig], int], held: Leases) -> int:
    watch = _Watch(held, config.allocated)
    watch.begin()
    for deaths in range(DEATHS_MAX):
        _clean_up(config)
        time.sleep(min(deaths * 0.2, 2.0))
        keeper_pid = os.getpid()
        if watch.fork() == 0:
            spawn.die_with_parent(keeper_pid, signal.SIGHUP if config.allocated else signal.SIGTERM)
            os._exit(_run(config, run_agent))
        status = watch.wait()
        if status == 0 or watch.is_ended:
            _clean_up(config)
            return 0
        _note(f"the agent of {config.node} died ({_how(status)})")
    return 1


def _clean_up(config: AgentConfig) -> None:
    """Let nothing remain of what an earlier agent started, and nothing that its ranks said unmasked."""
    clean_up_processes(config.job, config.node)
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
    """The agent that is being watched, pid 0 while there is none, and those who ask for its leases."""

    held: Leases
    allocated: bool
    agent_pid: int = 0
    is_ended: bool = False
    stopped_at: float | None = None
    bell: tuple[int, int] = (-1, -1)

    def begin(self) -> None:
        """Be woken by every signal."""
        self.bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.bell[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)  # an ignored signal would ring no bell
        for signum in _ENDING:
            signal.signal(signum, self.end)

    def fork(self) -> int:
        """Fork the agent. In it signals mean what they mean to anybody, and none that comes meanwhile is lost."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        self.agent_pid = os.fork()
        if self.agent_pid == 0:
            signal.set_wakeup_fd(-1)
            for signum in (*_ENDING, signal.SIGCHLD):
                signal.signal(signum, signal.SIG_DFL)
            if self.allocated:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the agent heeds it
            for fd in self.bell:
                os.close(fd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        return self.agent_pid

    def wait(self) -> int:
        """Reap whatever falls to us until the agent itself ends, and return its wait status."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not pid:
                self._rest()
            elif pid == self.agent_pid and os.WIFSTOPPED(status):
                self.stopped_at = time.monotonic()
            elif pid == self.agent_pid and os.WIFCONTINUED(status):
                self.stopped_at = None
            elif pid == self.agent_pid:
                self.agent_pid, self.stopped_at = 0, None
                return status

    def _rest(self) -> None:
        """Wait until something happens; answer those who ask, and let an agent go on that has been stopped for long."""
        rest_s = LOOK_S
        if self.stopped_at is not None:
            rest_s = max(self.stopped_at + STOPPED_S_MAX - time.monotonic(), 0.0)
        ready = select.select([self.bell[0], *self.held.fds], [], [], rest_s)[0]
        for fd in ready:
            if fd == self.bell[0]:
                os.read(fd, 4096)
            else:
                self.held.answer(fd)
        if self.stopped_at is not None and not ready:
            self.stopped_at = None  # whoever stops it again is noticed again
            _note(f"the agent was stopped, by a signal, for {STOPPED_S_MAX:.0f} s: it is let go on")
            os.kill(self.agent_pid, signal.SIGCONT)

    def end(self, signum: int, _frame: object) -> None:
        """Pass a signal on to the agent, which stops its ranks and leaves; without an agent, end."""
        if self.allocated and signum == signal.SIGTERM:
            if self.agent_pid:
                os.kill(self.agent_pid, signum)
            return
        self.is_ended = (
            True  # an agent that has no handler for it yet dies of it, and needs no other after it
        )
        if not self.agent_pid:
            sys.exit(128 + signum)
        os.kill(self.agent_pid, signum)


def _how(status: int) -> str:
    return (
        f"signal {os.WTERMSIG(status)}"
        if os.WIFSIGNALED(status)
        else f"code {os.waitstatus_to_exitcode(status)}"
    )


def clean_up_processes(job: str, node: str) -> list[int]:
    """Kill every process that an earlier agent of this job and node left, within a limit; return those that live on."""
    deadline_s = time.monotonic() + CLEANUP_S_MAX
    while True:
        left = _processes_of(job, node)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        _reap()
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.02)


def _processes_of(job: str, node: str) -> list[int]:
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
