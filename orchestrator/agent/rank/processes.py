"""What runs on this node for one attempt? Its rank processes: started, looked at, stopped, and nothing left behind.

Times are this host's monotonic seconds. Nothing here blocks: the agent calls `push` until it says that all is gone.
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

from orchestrator.agent.rank import error_file, last_traceback, spawn, step_counter
from orchestrator.agent.rank.error_file import forget_errors
from orchestrator.agent.rank.flight_recorder import OwnWork, WorkerServerClient
from orchestrator.agent.rank.hook import ERROR_FILE, RANK_DIR_ENV, SOCKET_ENV, STACK_SIGNAL_ENV
from orchestrator.agent.rank.io_counter import IoCounter
from orchestrator.core import observations
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.durable import replace_bytes
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.log_index import LogIndex
from orchestrator.core.wire import messages as m

TRACE_FILE_ENVS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Where torch writes its flight recorder when it gives up by itself, by its new name and its old one. Unset, it would be
the user's cache directory, which may be on a slow disk and which nobody looks into."""


KILL_AGAIN_S = 0.5
"""How long after a KILL the processes that are still there get another."""


class RanksGoal(enum.Enum):
    """What is wanted of the ranks."""

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
    beats: step_counter.StepCounter
    log_bytes: int = 0
    count: int = 0
    exit_code: int | None = None
    world_size: int = 0
    marked: int = 0
    """The last step of which a beat has told."""
    window: WorkerServerClient = field(init=False)
    own: OwnWork = field(init=False)
    traffic: IoCounter = field(init=False)

    def __post_init__(self) -> None:
        self.window = WorkerServerClient(self.folder)
        self.own = OwnWork(self.window)
        self.traffic = IoCounter(self.pid)

    @property
    def exited(self) -> bool:
        """Tell whether the process was reaped."""
        return self.exit_code is not None

    def has_left(self) -> bool:
        """Tell whether the process that speaks for the rank has said its last word and is still there."""
        pid = self.beats.left_pid()
        stat = procfs.stat(pid) if pid is not None else None
        # The rank leads a session, so that a later process with that pid is told from its own.
        return stat is not None and stat.session == self.pid and (pid == self.pid or stat.state not in "ZX")

    def close(self) -> None:
        """Give back the files."""
        self.index.close()
        self.beats.close()
        self.window.close()


@dataclass(slots=True)
class NodeRanks:
    """The ranks of one attempt on this node."""

    attempt: int
    job: JobDir
    node: str
    processes: list[RankProcess] = field(default_factory=list)
    want: RanksGoal = RanksGoal.RUN
    how: str = ""
    kill_at: float = 0.0
    progress_at: float = 0.0
    oom_kills: int = 0
    stepped: bool = False
    graced: frozenset[int] = frozenset()
    """The process groups that were told to end, and have until `kill_at` to do it."""

    def begin(self) -> None:
        """Make ready for the first process of the attempt."""
        self.progress_at = time.monotonic()
        self.oom_kills = _oom_kills()

    def start(self, order: m.Start, ranks: tuple[m.RankStart, ...], base: Mapping[str, str]) -> None:
        """Start some ranks of the order. Raises OSError when a program cannot be executed, or has no room for its files."""
        self.job.attempt_logs(self.attempt).mkdir(parents=True, exist_ok=True)
        self.job.evidence(self.attempt).mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            self.processes.append(self._start_one(order, rank, base))

    def _start_one(self, order: m.Start, rank: m.RankStart, base: Mapping[str, str]) -> RankProcess:
        folder = self.job.rank_run(self.node, self.attempt, rank.rank)
        folder.mkdir(parents=True, exist_ok=True)
        beat_file = folder / "beat"
        step_counter.create(beat_file)
        hook_folder = str(self.job.node(self.node) / "hook")
        trace = str(self.job.evidence(self.attempt) / "torch-trace-of-rank-")  # torch appends the number
        kept = dict.fromkeys(TRACE_FILE_ENVS, trace)
        env = {SOCKET_ENV: "1", **kept, **order.defaults, **base, **rank.env, RANK_DIR_ENV: str(folder)}
        env[STACK_SIGNAL_ENV] = str(int(STACK_SIGNAL))
        env["PYTHONPATH"] = os.pathsep.join(part for part in (hook_folder, env.get("PYTHONPATH", "")) if part)
        log = self.job.rank_log(self.attempt, rank.rank)
        pid = spawn.start(spawn.Program(order.argv, env, self.job.code, log))
        index = LogIndex(self.job.rank_index(self.attempt, rank.rank))
        size = env.get("WORLD_SIZE", "")
        world_size = int(size) if size.isdecimal() else 0
        reader = step_counter.StepCounter(beat_file)
        return RankProcess(rank.rank, rank.local_rank, pid, folder, log, index, reader, world_size=world_size)

    @property
    def alive(self) -> list[RankProcess]:
        """The ranks whose process has not been reaped."""
        return [process for process in self.processes if not process.exited]

    def of_pid(self, pid: int) -> RankProcess | None:
        """Return the living rank with this pid."""
        return next((process for process in self.alive if process.pid == pid), None)

    def ended(self, process: RankProcess, status: int) -> m.Exited:
        """Note that a rank's process was reaped with this wait status, and tell what it left behind."""
        exit_code = process.exit_code = os.waitstatus_to_exitcode(status)
        process.count = max(process.count, process.beats.read().step)
        self.note_logs(time.time_ns())
        code, signum = (exit_code, None) if exit_code >= 0 else (None, -exit_code)
        failure = _failure(process, exit_code)
        oom = signum == signal.SIGKILL and _oom_kills() > self.oom_kills
        ordered = self.want is RanksGoal.STOP
        return m.Exited(self.attempt, process.rank, code, signum, process.count, failure, oom, ordered)

    def look(self) -> tuple[m.RankHeartbeat, ...]:
        """Return the signs of life of the living ranks, and note when one made a step."""
        return tuple(beat for process in self.alive if (beat := self._look(process)) is not None)

    def _look(self, process: RankProcess) -> m.RankHeartbeat | None:
        """Return one rank's signs of life; None when it has ended and is about to be reaped."""
        now_s = time.monotonic()
        count = process.beats.read().step
        if count > process.count:
            process.count = count
            self.progress_at = now_s
        stat = procfs.stat(process.pid)
        if stat is not None and stat.state in "ZX" and _is_reapable(process.pid):
            return None
        state, cpu_s = (stat.state, stat.cpu_s) if stat else ("X", 0.0)
        marks, process.marked = process.beats.marks(process.marked, count), count
        return m.RankHeartbeat(
            process.rank, count, state, process.log_bytes, cpu_s, process.beats.rate_per_s(),
            io_bytes=process.traffic.bytes(now_s), median_step_s=process.beats.usual_s(),
            own_work_s=process.own.poll(process.beats, now_s) if count else None, exiting=process.has_left(),
            groups=tuple(group.key for group in process.beats.groups()), collective_counts=marks,
        )  # fmt: skip

    def note_logs(self, now_ns: int) -> None:
        """Write down how far each log has grown by now."""
        for process in self.processes:
            try:
                size_bytes = process.log.stat().st_size
            except OSError:
                continue
            if size_bytes != process.log_bytes:
                process.log_bytes = size_bytes
                process.index.note(now_ns, size_bytes)

    def stop(self, grace_s: float, how: str, signum: int = signal.SIGTERM) -> None:
        """Ask everything to end: a signal now, KILL after `grace_s`. A later call can only hurry."""
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
        """Drive a stop on; return True when no process of the attempt is left. `spared` pids are not ours to kill.

        A wrapping shell dies of TERM while the script in it still saves: the grace is for all of its group.
        """
        now_s = time.monotonic()
        left = {pid: group for pid, group in _living(procfs.descendants(os.getpid())) if pid not in spared}
        if not left and not self.alive:
            return True
        if now_s >= self.kill_at or not self.graced.intersection(left.values()):
            for pid in left:
                _signal(pid, signal.SIGKILL)
            self.kill_at = now_s + KILL_AGAIN_S
        return False

    def makes_first_step(self) -> bool:
        """Tell once, as soon as it is seen, that a rank has made its first optimizer step."""
        if self.stepped or not self.last_step_ns():
            return False
        self.stepped = True
        return True

    def last_step_ns(self) -> int:
        """Return the time of the latest optimizer step of any rank here (wall clock), 0 when there was none."""
        return max((process.beats.read().time_ns for process in self.processes), default=0)

    def all_stepped_ns(self) -> int:
        """Return a moment (wall clock) after which every rank here that makes steps has made one; 0 without steps."""
        latest = (process.beats.read().time_ns for process in self.processes)
        return min((time_ns for time_ns in latest if time_ns), default=0)

    @property
    def all_ended_well(self) -> bool:
        """Tell whether every rank ended with code 0, and so had done with whatever it was writing."""
        return all(process.exit_code == 0 for process in self.processes)

    def step_at(self, time_ns: int) -> int:
        """Return how many steps had been made at a moment of this host's wall clock; 0 when that is not known."""
        known = (process.beats.step_at(time_ns) for process in self.processes)
        return max((step for step in known if step is not None), default=0)

    def close(self) -> None:
        """Give back the files."""
        for process in self.processes:
            process.close()
        forget_errors(self.job.node(self.node))


def install_hook(node_folder: Path) -> None:
    """Put the hook where the ranks find it. One that is there already stays: to write it anew a disk may be too full."""
    folder = node_folder / "hook"
    folder.mkdir(parents=True, exist_ok=True)
    source = pkgutil.get_data("orchestrator.agent.rank", "hook.py")
    assert source is not None
    file = folder / "sitecustomize.py"
    if not file.exists() or file.read_bytes() != source:
        full_disk.wait_for(lambda: replace_bytes(file, source, durable=False))


def _is_reapable(pid: int) -> bool:
    """Tell whether a child in state Z has ended and only waits to be reaped, which is no zombie to worry about.

    One whose main thread is gone while others run is in state Z too, and cannot be reaped.
    """
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _living(pids: list[int]) -> Iterator[tuple[int, int]]:
    """Yield those of the processes that are not dead, each with its process group."""
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
    """Return what the rank said as it died: the hook's word, or the last traceback in its log, or the last line there.

    A script may have caught and logged exceptions, or its workers died of theirs: neither killed a rank that a signal
    did, and an uncaught exception always exits with code 1.
    """
    own = process.folder / ERROR_FILE.format(process.pid)
    if exit_code == -signal.SIGABRT and not own.exists():
        return last_traceback.of_a_watchdog(process.log)
    if exit_code == 0 or (exit_code < 0 and not own.exists()):
        return None
    error = error_file.error_of(process.folder, process.pid)
    if error is None:
        found = last_traceback.find(process.log) if exit_code == 1 else None
        return found or (last_traceback.last_words(process.log) if exit_code > 0 else None)
    where = f"{error.file}:{error.line}" if error.file else ""
    if where and error.function:
        where = f"{where} {error.function}"
    return observations.Failure(error.type, error.message, error.traceback, where)


STACK_SIGNAL = signal.SIGRTMIN + 6
"""Asks a process for its stack. USR1 and USR2 belong to NCCL, Lightning and submitit, so it is a real-time one."""
