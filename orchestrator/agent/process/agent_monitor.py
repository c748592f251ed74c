"""Monitor of an agent: its parent process, which restarts it when it dies and kills its leftover processes.

The monitor is the agent's parent and the nearest subreaper above it. When the agent is killed, its processes become
children of the monitor, which kills them and starts a new agent. When the monitor is killed, the kernel signals the agent
(TERM), and the agent kills its ranks and leaves. When both are killed at once, the kernel kills the ranks, and the next
monitor cleans up their descendants. So no rank outlives the pair.

An agent that hangs can neither obey nor fence its ranks. Its monitor continues a stopped agent, and replaces one
whose loop has not run for `monitor.node_timeout`.

Before its first agent the monitor leases what the agent needs of the host, and holds it to the end. A monitor launched
over a connection that may break starts its agent only after the line `GO`. Slurm signals all processes when it takes a
node away; there, TERM ends neither process: the agent reports it, and gets HUP when its monitor dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.outputs import memory_folders
from orchestrator.agent.process import leases
from orchestrator.agent.ranks import spawn
from orchestrator.agent.ranks.failure import forget_errors
from orchestrator.agent.ranks.template import die_with_parent
from orchestrator.core import codec
from orchestrator.core.checkpoints import memory
from orchestrator.core.host import gpus, process_tags, procfs
from orchestrator.core.jobdir import full_disk, locks
from orchestrator.core.jobdir.durable import make_subfolders, replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.slurm import step_env
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire.agent_config import AgentConfig
from orchestrator.core.wire.tokens import is_token

DEATHS_MAX = 10
"""How often an agent may die before its monitor gives up."""

CLEANUP_S_MAX = 20.0
"""How long processes may take to vanish after SIGKILL."""

CONFIG_BYTES_MAX = 1 << 20

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


LOCK_S_MAX = 0.3
LOCK_POLL_S = 0.02
STOPPED_S_MAX = 10.0
STOPPED_SHARE_MAX = 0.3
"""How long an agent may be stopped (state T), and for which share of the time after which its node counts as lost."""

SILENT_S_MIN = 10.0
"""How long an agent's loop may hang even if `monitor.node_timeout` is shorter: a rank's start alone may take 5 s."""

CHECKS = 10
"""How often a monitor checks a live agent in the time that its loop may hang; every event wakes it at once."""


class Pulse:
    """Rounds of an agent's loop, counted in memory that it shares with its monitor."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("Q")

    def beat(self) -> None:
        """Count a round; called by the agent."""
        self._words[0] += 1

    @property
    def beats(self) -> int:
        return self._words[0]


RunAgent = Callable[[AgentConfig, Callable[[], None]], int]
"""Runs an agent, which calls the second argument in each round of its loop; returns its exit code."""


def main(run_agent: RunAgent, *, is_launched: bool = False) -> int:
    """Read an AgentConfig from the first line of standard input, keep an agent running, and return the exit code.

    `is_launched`: replies go to standard output, and the agent starts after the line `GO`.
    """
    full_disk.buffer_output()
    config = _set_node(codec.loads(AgentConfig, sys.stdin.buffer.readline(CONFIG_BYTES_MAX)))
    folder = JobDir.at(config.root).node(config.node)
    make_subfolders(Path(config.root), folder)
    report = _reply if is_launched else _note
    if not is_token(config.token):
        reason = "its token is empty or incomplete"
        report(w.Failed("agent", reason, "submit the job again", "permanent"))
        return 1
    if not _acquire_lock(folder / "agent.lock"):
        _note(f"another agent of {config.node} is alive")
        report(_already_up(folder))
        return 0
    spawn.name_process("orch-monitor")
    spawn.adopt_orphans()
    stock = leases.LeaseCapacity(gpus.list_gpus, os.cpu_count() or 1)
    try:
        leases_held = leases.acquire(config.needs, leases.this_holder(config.job, config.node), stock)
    except w.RequestFailed as err:
        report(err.reply)
        return 1
    if is_launched and not _wait_for_go(leases_held):
        return 1
    if config.allocated:
        _detach_from_srun(folder, config.node)
    _record(folder, leases_held)
    tag = process_tags.make_tag(Path(config.root), config.node)
    return _supervise(dataclasses.replace(config, gpus=leases_held.gpus, tag=tag), run_agent, leases_held)


def _set_node(config: AgentConfig) -> AgentConfig:
    """Return the configuration with the name of this node, if it was made for all nodes."""
    if config.node:
        return config
    return dataclasses.replace(config, node=os.environ.get(step_env.NODE_NAME) or socket.gethostname())


def _detach_from_srun(folder: Path, node: str) -> None:
    """Print the line by which srun's reader knows that the agent is up; later output goes to the node's own log."""
    print(*step_env.UP, node, flush=True)
    for fd in (1, 2):
        _redirect(fd, folder / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _redirect(fd: int, to: Path, flags: int) -> None:
    opened = os.open(to, flags, 0o644)
    os.dup2(opened, fd)
    os.close(opened)


def _acquire_lock(lock: Path) -> bool:
    """Take the lock that an agent and its monitor hold while they live; False when another pair holds it."""
    fd = locks.open_file(lock)  # never closed
    if not locks.acquire(fd, LOCK_S_MAX, LOCK_POLL_S):
        return False
    locks.sign(fd)
    return True


def _note(text: object) -> None:
    print(f"{time.strftime('%H:%M:%S')} monitor: {text}", file=sys.stderr, flush=True)


def _reply(reply: w.Reply) -> None:
    """Send a reply to the launcher; a launcher that is gone is noticed by its missing `GO`."""
    try:
        print(codec.dumps_kind(reply), flush=True)
    except BrokenPipeError:
        # The reply is still in Python's buffer, and is written again at exit.
        _redirect(1, Path(os.devnull), os.O_WRONLY)


def _wait_for_go(leases_held: leases.Leases) -> bool:
    """Report the leases, wait for `GO`, and close the pipes; return False when the launcher is gone."""
    _reply(w.Leased(leases_held.gpus))
    deadline_s = time.monotonic() + w.GO_S_MAX
    while (left_s := deadline_s - time.monotonic()) > 0:
        for fd in select.select([0, *leases_held.fds], [], [], left_s)[0]:
            if fd != 0:
                leases_held.answer(fd)
            elif sys.stdin.buffer.readline(len(w.GO) + 1).strip() == w.GO:
                _reply(w.AgentMonitorUp(os.getpid()))
                _close_pipes()
                return True
            else:
                _note("the launcher has gone before the agent was started")
                return False
    _note(f"no order to start the agent within {w.GO_S_MAX:.0f} s")
    return False


def _close_pipes() -> None:
    """Close the pipes to the launcher: later output goes to the log."""
    _redirect(0, Path(os.devnull), os.O_RDONLY)
    os.dup2(2, 1)


def _record(folder: Path, leases_held: leases.Leases) -> None:
    """Write this monitor's record, with the start time that guards against a reused pid."""
    stat = procfs.stat(os.getpid())
    record = {
        "pid": os.getpid(),
        "start_ticks": stat.start_ticks if stat else 0,
        "boot_id": procfs.boot_id(),
        "gpus": leases_held.gpus,
    }
    replace_text(folder / "agent.json", json.dumps(record))


def _already_up(folder: Path) -> w.AlreadyUp:
    """Return the record of the running monitor, with pid 0 when it has not written one yet."""
    try:
        record = codec.loads_plain((folder / "agent.json").read_bytes())
        return w.AlreadyUp(int(record["pid"]), tuple(map(str, record["gpus"])))
    except (OSError, codec.CodecError, KeyError, TypeError, ValueError):
        return w.AlreadyUp(0, ())


def _supervise(config: AgentConfig, run_agent: RunAgent, leases_held: leases.Leases) -> int:
    watch = _AgentWatch(leases_held, config.allocated, config.node_timeout_s)
    watch.begin()
    for deaths in range(DEATHS_MAX):
        _clean_up(config)
        time.sleep(min(deaths * 0.2, 2.0))
        monitor_pid = os.getpid()
        if watch.fork() == 0:
            die_with_parent(monitor_pid, signal.SIGHUP if config.allocated else signal.SIGTERM)
            os._exit(_run(config, run_agent, watch.pulse.beat))
        status = watch.wait()
        if status == 0 or watch.is_ended:
            _clean_up(config)
            return 0
        _note(f"the agent of {config.node} died ({_describe_status(status)})")
    _clean_up(config)
    return 1


def _clean_up(config: AgentConfig) -> None:
    """Kill the processes of an earlier agent, and delete its checkpoints in memory and the unmasked errors of its ranks; also what
    agents of other jobs have left in memory."""
    clean_up_processes(config.tag, is_monitor=True)
    memory_folders.clean_abandoned(config.memory_dir or memory.DEFAULT_DIR)
    forget_errors(JobDir.at(config.root).node(config.node))


def _run(config: AgentConfig, run_agent: RunAgent, beat: Callable[[], None]) -> int:
    """Run the agent in the forked child; print an exception that escapes, and return the exit code."""
    try:
        return run_agent(config, beat)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


@dataclass(slots=True)
class _AgentWatch:
    """The watched agent, and the leases to answer for."""

    leases_held: leases.Leases
    allocated: bool
    node_timeout_s: float
    # 0 while no agent runs
    agent_pid: int = 0
    is_ended: bool = False
    stopped_at: float | None = None
    wakeup: tuple[int, int] = (-1, -1)
    # The rounds of the agent's loop at the last check, and for how long there were no more
    pulse: Pulse = field(default_factory=Pulse)
    beats: int = 0
    silent_s: float = 0.0

    def begin(self) -> None:
        """Let every signal wake this process."""
        self.wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)  # an ignored signal would not wake
        for signum in _END_SIGNALS:
            signal.signal(signum, self.forward_signal)

    def fork(self) -> int:
        """Fork the agent, with default signal handlers; a signal that comes in the meantime is not lost."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
        self.silent_s = 0.0
        self.agent_pid = os.fork()
        if self.agent_pid == 0:
            signal.set_wakeup_fd(-1)
            for signum in (*_END_SIGNALS, signal.SIGCHLD):
                signal.signal(signum, signal.SIG_DFL)
            if self.allocated:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the agent handles it
            for fd in self.wakeup:
                os.close(fd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)
        return self.agent_pid

    def wait(self) -> int:
        """Reap all children until the agent itself ends, and return its wait status."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not pid:
                self._wait_event()
            elif pid == self.agent_pid and os.WIFSTOPPED(status):
                self.stopped_at = time.monotonic()
            elif pid == self.agent_pid and os.WIFCONTINUED(status):
                self.stopped_at = None
            elif pid == self.agent_pid:
                self.agent_pid, self.stopped_at = 0, None
                return status

    def _wait_event(self) -> None:
        """Wait for a signal or a question about a lease; continue an agent that was stopped for too long, and kill one
        that hangs."""
        look_s = wait_s = self._silent_s_max / CHECKS
        began_s = time.monotonic()
        stopped_s_max = min(STOPPED_S_MAX, STOPPED_SHARE_MAX * self.node_timeout_s)
        if self.stopped_at is not None:
            wait_s = max(self.stopped_at + stopped_s_max - began_s, 0.0)
        ready = select.select([self.wakeup[0], *self.leases_held.fds], [], [], wait_s)[0]
        for fd in ready:
            if fd == self.wakeup[0]:
                os.read(fd, 4096)
            else:
                self.leases_held.answer(fd)
        if self.stopped_at is not None and not ready:
            self.stopped_at = None  # a further stop is noticed again
            _note(f"the agent was stopped by a signal for {stopped_s_max:.0f} s: continued")
            os.kill(self.agent_pid, signal.SIGCONT)
        # A monitor that was itself held up cannot judge its agent's silence.
        self._check_loop(min(time.monotonic() - began_s, look_s))

    @property
    def _silent_s_max(self) -> float:
        return max(self.node_timeout_s, SILENT_S_MIN)

    def _check_loop(self, waited_s: float) -> None:
        """Kill an agent whose loop hangs, unless it waits for a disk: then it could not end."""
        stat = procfs.stat(self.agent_pid)
        if self.pulse.beats != self.beats or stat is None or stat.state == "D":
            self.beats, self.silent_s = self.pulse.beats, 0.0
            return
        self.silent_s += waited_s
        if self.silent_s >= self._silent_s_max:
            _note(f"the agent's loop has not run for {self.silent_s:.0f} s: replaced")
            self.silent_s = 0.0
            os.kill(self.agent_pid, signal.SIGKILL)

    def forward_signal(self, signum: int, _frame: object) -> None:
        """Forward a signal to the agent, which stops its ranks and leaves; without an agent, exit."""
        if self.allocated and signum == signal.SIGTERM:
            if self.agent_pid:
                os.kill(self.agent_pid, signum)
            return
        # An agent without a handler dies of the signal, and is not restarted.
        self.is_ended = True
        if not self.agent_pid:
            sys.exit(128 + signum)
        os.kill(self.agent_pid, signum)


def _describe_status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"code {code}"


def clean_up_node(job: JobDir, node: str) -> list[int]:
    """Kill what a job's node has left running on this host, and delete its checkpoints in memory; return the pids that are still
    alive."""
    pids = clean_up_processes(process_tags.make_tag(job.root, node))
    memory_folders.clean_up_recorded(job, node)
    return pids


def clean_up_processes(tag: str, *, is_monitor: bool = False) -> list[int]:
    """Kill all processes of earlier agents of a job's node, by their tag; return the pids that are still alive after
    `CLEANUP_S_MAX`. To a monitor, which adopts what they leave, all its descendants are theirs but those of another job.
    Resource trackers have time to do their work."""
    began_s = time.monotonic()
    while True:
        pids = _find_processes(tag, is_monitor)
        for pid in pids:
            if time.monotonic() < began_s + procfs.TRACKER_S_MAX and procfs.is_tracker(pid):
                continue
            procfs.send_signal(pid, signal.SIGKILL)
        if is_monitor:
            _reap()
        if not pids or time.monotonic() > began_s + CLEANUP_S_MAX:
            return pids
        time.sleep(0.02)


def _find_processes(tag: str, is_monitor: bool) -> list[int]:
    ours = process_tags.descendants(os.getpid(), tag) if is_monitor else []
    living = [pid for pid in dict.fromkeys(ours + process_tags.find_tagged(tag)) if pid != os.getpid()]
    return [pid for pid in living if (stat := procfs.stat(pid)) is not None and stat.state not in "ZX"]


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
