"""Rank processes of one attempt on this node: started, observed, stopped, with no process left behind.

Times are this host's monotonic seconds. Nothing here blocks: the agent calls `push` until it returns that all are gone.
"""

from __future__ import annotations

import enum
import os
import pkgutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.rank import error_file, last_traceback, step_counter
from orchestrator.agent.rank.error_file import forget_errors
from orchestrator.agent.rank.flight_recorder import OwnWork, WorkerServerClient
from orchestrator.agent.rank.hook import ERROR_FILE, RANK_DIR_ENV, SOCKET_ENV, STACK_SIGNAL_ENV, STEP_FILE
from orchestrator.agent.rank.io_counter import IoCounter
from orchestrator.agent.rank.progress_bar import ProgressBar
from orchestrator.agent.start import spawn, warm
from orchestrator.core import observations
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.durable import replace_bytes
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.log_index import LogIndex
from orchestrator.core.settings.rank_settings import Setting, to_set
from orchestrator.core.wire import messages as m

KILL_AGAIN_S = 0.5
"""How long after a KILL the processes that still live get another one."""


class RanksGoal(enum.Enum):
    """The goal for the ranks, set by the agent."""

    RUN = "run"
    STOP = "stop"


@dataclass(slots=True)
class RankProcess:
    """One rank's process and the files that belong to it."""

    rank: int
    local_rank: int
    pid: int
    folder: Path
    log: Path
    index: LogIndex
    counter: step_counter.StepCounter
    log_bytes: int = 0
    steps: int = 0
    # Steps of all its optimizers together, at the last heartbeat.
    optimizer_steps: int = 0
    exit_code: int | None = None
    world_size: int = 0
    worker_server: WorkerServerClient = field(init=False)
    own_work: OwnWork = field(init=False)
    io_counter: IoCounter = field(init=False)
    progress_bar: ProgressBar = field(init=False)

    def __post_init__(self) -> None:
        self.worker_server = WorkerServerClient(self.folder)
        self.own_work = OwnWork(self.worker_server)
        self.io_counter = IoCounter(self.pid)
        self.progress_bar = ProgressBar(self.log)

    @property
    def exited(self) -> bool:
        """Tell whether the process was reaped."""
        return self.exit_code is not None

    def progress(self, optimizer_steps: int) -> str:
        """Return how far a rank without optimizer steps is: its bar, else the batches of its DataLoaders."""
        bar, batches = self.progress_bar.text(optimizer_steps), self.counter.batches()
        return bar or (f"{batches} batch{'es' * (batches > 1)}" if batches and not optimizer_steps else "")

    def is_exiting(self) -> bool:
        """Tell whether the process that trains is exiting and has not yet ended."""
        pid = self.counter.exiting_pid()
        stat = procfs.stat(pid) if pid is not None else None
        # The rank leads a session, so that a later process with the same pid is not taken for its own.
        return stat is not None and stat.session == self.pid and (pid == self.pid or stat.state not in "ZX")

    def close(self) -> None:
        """Close the files."""
        self.index.close()
        self.counter.close()
        self.worker_server.close()


@dataclass(slots=True)
class NodeRanks:
    """The ranks of one attempt on this node."""

    attempt: int
    job: JobDir
    node: str
    processes: list[RankProcess] = field(default_factory=list)
    starter: warm.Starter = field(default_factory=warm.Starter)
    want: RanksGoal = RanksGoal.RUN
    how: str = ""
    kill_at: float = 0.0
    progress_at: float = 0.0
    oom_kills: int = 0
    stepped: bool = False
    first_ns: int = 0
    # The process groups that were signalled to end, and have until `kill_at`.
    graced: frozenset[int] = frozenset()
    settings: tuple[Setting, ...] = ()

    def begin(self) -> None:
        """Prepare for the first process of the attempt."""
        self.progress_at = time.monotonic()
        self.oom_kills = _oom_kills()

    def start(self, order: m.Start, ranks: tuple[m.RankStart, ...], base: Mapping[str, str]) -> None:
        """Start some ranks of the order. `base` wins over the settings, and a rank's own variables over both.

        Raises OSError when a program cannot be executed, or the disk is full.
        """
        self.job.attempt_logs(self.attempt).mkdir(parents=True, exist_ok=True)
        self.job.evidence(self.attempt).mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            env = {**to_set(self.settings, rank.rank), **base, **rank.env}
            self.processes.append(self._start_one(order, rank, env))

    def _start_one(self, order: m.Start, rank: m.RankStart, given: Mapping[str, str]) -> RankProcess:
        folder = self.job.rank_run(self.node, self.attempt, rank.rank)
        folder.mkdir(parents=True, exist_ok=True)
        step_file = folder / STEP_FILE
        step_counter.create(step_file)
        hook_folder = str(self.job.node(self.node) / "hook")
        env = {SOCKET_ENV: "1", **given, RANK_DIR_ENV: str(folder)}
        env[STACK_SIGNAL_ENV] = str(int(STACK_SIGNAL))
        env["PYTHONPATH"] = os.pathsep.join(part for part in (hook_folder, env.get("PYTHONPATH", "")) if part)
        log = self.job.rank_log(self.attempt, rank.rank)
        pid = self.starter.start(spawn.Program(order.argv, env, self.job.code, log))
        index = LogIndex(self.job.rank_index(self.attempt, rank.rank))
        size = env.get("WORLD_SIZE", "")
        world_size = int(size) if size.isdecimal() else 0
        counter = step_counter.StepCounter(step_file)
        return RankProcess(
            rank.rank, rank.local_rank, pid, folder, log, index, counter, world_size=world_size
        )

    @property
    def alive(self) -> list[RankProcess]:
        """The ranks whose process has not been reaped."""
        return [process for process in self.processes if not process.exited]

    def of_pid(self, pid: int) -> RankProcess | None:
        """Return the living rank with this pid."""
        return next((process for process in self.alive if process.pid == pid), None)

    def ended(self, process: RankProcess, status: int) -> m.Exited:
        """Note that a rank's process was reaped with this wait status; return the report of its end."""
        exit_code = process.exit_code = os.waitstatus_to_exitcode(status)
        process.steps = max(process.steps, process.counter.read().step)
        self.note_logs(time.time_ns())
        code, signum = (exit_code, None) if exit_code >= 0 else (None, -exit_code)
        failure = _failure(process, exit_code)
        oom = signum == signal.SIGKILL and _oom_kills() > self.oom_kills
        ordered = self.want is RanksGoal.STOP
        alone = process.counter.alone_with()
        return m.Exited(self.attempt, process.rank, code, signum, process.steps, failure, oom, ordered, alone)

    def heartbeats(self) -> tuple[m.RankHeartbeat, ...]:
        """Return the heartbeats of the living ranks, and note when one made a step."""
        return tuple(beat for process in self.alive if (beat := self._heartbeat(process)) is not None)

    def _heartbeat(self, process: RankProcess) -> m.RankHeartbeat | None:
        """Return one rank's heartbeat; None when it has ended and is about to be reaped."""
        now_s = time.monotonic()
        last, before = process.counter.read(), process.optimizer_steps
        if last.rows != before:
            self.progress_at = now_s
        process.steps, process.optimizer_steps = max(process.steps, last.step), last.rows
        stat = procfs.stat(process.pid)
        if stat is not None and stat.state in "ZX" and _is_reapable(process.pid):
            return None
        state, cpu_s = (stat.state, stat.cpu_s) if stat else ("X", 0.0)
        counts = process.counter.collective_counts(before, last.rows)
        return m.RankHeartbeat(
            process.rank, last.step, state, process.log_bytes, cpu_s, process.counter.rate_per_s(),
            io_bytes=process.io_counter.bytes(now_s), median_step_s=process.counter.median_step_s(),
            own_work_s=process.own_work.poll(process.counter, now_s) if last.rows else None, exiting=process.is_exiting(),
            groups=tuple(group.key for group in process.counter.groups()), collective_counts=counts,
            optimizer_steps=last.rows, alone=process.counter.alone_with(), progress=process.progress(last.rows),
        )  # fmt: skip

    def note_logs(self, now_ns: int) -> None:
        """Note the present size of each log in its index."""
        for process in self.processes:
            try:
                size_bytes = process.log.stat().st_size
            except OSError:
                continue
            if size_bytes != process.log_bytes:
                process.log_bytes = size_bytes
                process.index.note(now_ns, size_bytes)

    def stop(self, grace_s: float, how: str, signum: int = signal.SIGTERM) -> None:
        """Stop all ranks: a signal now, KILL after `grace_s`. A later call can only shorten the grace."""
        now_s = time.monotonic()
        kill_at = now_s + grace_s
        if self.want is RanksGoal.STOP:
            self.kill_at = min(self.kill_at, kill_at)
            return
        self.want, self.how, self.kill_at = RanksGoal.STOP, how, kill_at
        self.graced = frozenset(process.pid for process in self.alive)
        for process in self.alive:
            _signal_group(process.pid, signum)
            _signal_group(process.pid, signal.SIGCONT)  # a stopped process acts on it only when it goes on

    def push(self, spared: set[int]) -> bool:
        """Continue a stop; return True when no process of the attempt is left. `spared` pids are not killed.

        A wrapping shell dies of TERM while the script in it still saves: the grace is for all of its group.
        """
        now_s = time.monotonic()
        remaining = {
            pid: group for pid, group in _living(procfs.descendants(os.getpid())) if pid not in spared
        }
        if not remaining and not self.alive:
            return True
        if now_s >= self.kill_at or not self.graced.intersection(remaining.values()):
            for pid in remaining:
                _signal(pid, signal.SIGKILL)
            self.kill_at = now_s + KILL_AGAIN_S
        return False

    def makes_first_step(self) -> bool:
        """Return True once: when a rank has made its first optimizer step."""
        if self.stepped or not self.last_step_ns():
            return False
        self.stepped = True
        return True

    def first_step_ns(self) -> int:
        """Return when the first step of any rank here was made (wall clock), as far as it is remembered; 0 before it."""
        times = [first for process in self.processes if (first := process.counter.first_ns())]
        self.first_ns = min([*times, *([self.first_ns] if self.first_ns else [])], default=0)
        return self.first_ns

    def last_step_ns(self) -> int:
        """Return the time of the latest optimizer step of any rank here (wall clock), 0 before the first."""
        return max((process.counter.read().time_ns for process in self.processes), default=0)

    def all_stepped_ns(self) -> int:
        """Return a moment (wall clock) since which every rank here that makes steps has made one; 0 without steps."""
        latest = (process.counter.read().time_ns for process in self.processes)
        return min((time_ns for time_ns in latest if time_ns), default=0)

    @property
    def all_ended_well(self) -> bool:
        """Tell whether every rank ended with code 0, and so had finished what it was writing."""
        return all(process.exit_code == 0 for process in self.processes)

    def step_at(self, time_ns: int) -> int:
        """Return the number of steps made by a moment of this host's wall clock; 0 when it is not known."""
        steps = (process.counter.step_at(time_ns) for process in self.processes)
        return max((step for step in steps if step is not None), default=0)

    def close(self) -> None:
        """Close the files, and delete the error files of the ranks."""
        for process in self.processes:
            process.close()
        forget_errors(self.job.node(self.node))


def install_hook(node_folder: Path) -> None:
    """Install the hook in the node's folder. An unchanged hook is not written again: the disk may be full by now."""
    folder = node_folder / "hook"
    folder.mkdir(parents=True, exist_ok=True)
    source = pkgutil.get_data("orchestrator.agent.rank", "hook.py")
    assert source is not None
    file = folder / "sitecustomize.py"
    if not file.exists() or file.read_bytes() != source:
        full_disk.wait_for(lambda: replace_bytes(file, source, durable=False))


def _is_reapable(pid: int) -> bool:
    """Tell whether a child in state Z has ended and can be reaped.

    A child whose main thread has ended while others run is in state Z, too, and cannot be reaped.
    """
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _living(pids: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the living ones of the processes, each with its process group."""
    for pid in pids:
        stat = procfs.stat(pid)
        if stat is not None and stat.state not in "ZX":
            yield pid, stat.pgrp


def _signal_group(pid: int, signum: int) -> None:
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        return


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return


def _oom_kills() -> int:
    """Return how many processes the kernel of this host has killed for memory since it booted."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill":
            return int(number)
    return 0


def _failure(process: RankProcess, exit_code: int) -> observations.Failure | None:
    """Return why a rank died: the hook's error file, else the last traceback in its log, else the log's last line.

    A script may have caught and logged exceptions, or its workers may have died of theirs: a rank that a signal killed
    did not die of those, and an uncaught exception always exits with code 1.
    """
    own_file = process.folder / ERROR_FILE.format(process.pid)
    if exit_code == -signal.SIGABRT and not own_file.exists():
        return last_traceback.of_a_watchdog(process.log)
    if exit_code == 0 or (exit_code < 0 and not own_file.exists()):
        return None
    error = error_file.error_of(process.folder, process.pid)
    if error is None:
        traceback = last_traceback.find(process.log) if exit_code == 1 else None
        return traceback or (last_traceback.last_line(process.log) if exit_code > 0 else None)
    where = f"{error.file}:{error.line}" if error.file else ""
    if where and error.function:
        where = f"{where} {error.function}"
    return observations.Failure(error.type, error.message, error.traceback, where, error.loading)


STACK_SIGNAL = signal.SIGRTMIN + 6
"""Requests a process's stack from `faulthandler`, the next signal from Python (see `hook.Stacks`). USR1 and USR2 belong to
NCCL, Lightning and submitit, so they are real-time signals."""
