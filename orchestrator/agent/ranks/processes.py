"""Rank processes of one attempt on this node: started, observed, and stopped with all their descendants.

Times are this host's monotonic seconds. Nothing here blocks: the agent calls `continue_stop` until it returns True.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from orchestrator.agent.numbers.rank_metrics import NodeMetrics, RankMetrics, find_device
from orchestrator.agent.ranks import spawn, step_counter, warm_start
from orchestrator.agent.ranks.failure import forget_errors
from orchestrator.agent.ranks.flight_recorder import LocalComputeTime, WorkerServerClient
from orchestrator.agent.ranks.hook.layout import STEP_FILE
from orchestrator.agent.ranks.io_counter import IoCounter
from orchestrator.agent.ranks.rank_start import RankCall, RankStart
from orchestrator.core.host import process_tags, procfs
from orchestrator.core.jobdir.durable import make_subfolders
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.log_index import LogIndex
from orchestrator.core.observations import Failure
from orchestrator.core.wire import reports

KILL_REPEAT_S = 0.5
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
    # When a heartbeat last found more of them.
    stepped_at: float = 0.0
    # Sums of parameters that heartbeats have reported.
    sums_reported: int = 0
    exit_code: int | None = None
    world_size: int = 0
    device: str = ""
    node_metrics: InitVar[NodeMetrics | None] = None
    worker_server: WorkerServerClient = field(init=False)
    local_compute: LocalComputeTime = field(init=False)
    io_counter: IoCounter = field(init=False)
    metrics: RankMetrics = field(init=False)

    def __post_init__(self, node_metrics: NodeMetrics | None) -> None:
        self.worker_server = WorkerServerClient(self.folder)
        self.local_compute = LocalComputeTime(self.worker_server)
        self.io_counter = IoCounter(self.pid)
        self.metrics = RankMetrics(node_metrics or NodeMetrics(), self.rank, self.log, self.device)

    @property
    def exited(self) -> bool:
        """Whether the process was reaped."""
        return self.exit_code is not None

    def is_exiting(self) -> bool:
        """Return whether the process that trains is exiting and has not yet ended."""
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
    starter: warm_start.RankStarter = field(default_factory=warm_start.RankStarter)
    metrics: NodeMetrics = field(default_factory=NodeMetrics)
    goal: RanksGoal = RanksGoal.RUN
    how: str = ""
    kill_at: float = 0.0
    # When resource trackers are killed, too; 0 before anything is
    trackers_at: float = 0.0
    # When the gang was last certainly complete. A step proves only that all ranks had made the previous one: the last data
    # that a rank needs of its peers may have been in transit when they were cut off.
    progress_at: float = 0.0
    oom_kills: int = 0
    has_stepped: bool = False
    # The process groups that have until `kill_at`, and which processes were signalled to end.
    graceful_groups: frozenset[int] = frozenset()
    signalled: set[int] = field(default_factory=set)
    signum: int = signal.SIGTERM
    # By which its processes are known
    tag: str = ""
    # The shell of the script that calls a launcher for them (0: there is none), and the call that they run for
    script_pid: int = 0
    call: RankCall | None = None

    def begin(self) -> None:
        """Prepare for the first process of the attempt."""
        self.progress_at = time.monotonic()
        self.oom_kills = procfs.oom_kills()

    def make_files(self, starts: Iterable[RankStart]) -> None:
        """Make the files of ranks, before any of them is started. Raises OSError."""
        make_subfolders(self.job.root, self.job.attempt_logs(self.attempt))
        make_subfolders(self.job.root, self.job.evidence(self.attempt))
        for rank in starts:
            folder = self.job.rank_run(self.node, self.attempt, rank.rank)
            make_subfolders(self.job.root, folder)
            step_counter.create_step_file(folder / STEP_FILE)
            self.job.rank_log(self.attempt, rank.rank).open("ab").close()

    @property
    def awaits_start(self) -> bool:
        """Whether a launcher was called for ranks that are not started."""
        return self.call is not None and not self.processes and self.goal is RanksGoal.RUN

    def begin_call(self, call: RankCall) -> None:
        """Prepare for the ranks of the next launcher call, and kill the leftover processes of the previous ranks."""
        sessions = {process.pid for process in self.processes}
        for pid in process_tags.descendants(os.getpid(), self.tag) if sessions else ():
            stat = procfs.stat(pid)
            if stat is not None and stat.session in sessions and not procfs.is_tracker(pid):
                procfs.send_signal(pid, signal.SIGKILL)
        self.close()
        self.processes, self.has_stepped, self.call = [], False, call

    def start(self, starts: Iterable[RankStart]) -> None:
        """Start ranks. Raises OSError when a program cannot be executed, or the disk is full."""
        for rank in starts:
            self.processes.append(self._start_one(rank))

    def _start_one(self, rank: RankStart) -> RankProcess:
        folder = self.job.rank_run(self.node, self.attempt, rank.rank)
        env, log = rank.program.env, rank.program.output
        pid = self.starter.start(rank.program)
        index = LogIndex(self.job.rank_index(self.attempt, rank.rank))
        size = env.get("WORLD_SIZE", "")
        world_size = int(size) if size.isdecimal() else 0
        counter = step_counter.StepCounter(folder / STEP_FILE)
        return RankProcess(
            rank.rank, rank.local_rank, pid, folder, log, index, counter, world_size=world_size,
            device=find_device(env, rank.local_rank), node_metrics=self.metrics,
        )  # fmt: skip

    @property
    def alive(self) -> list[RankProcess]:
        """The ranks whose process has not been reaped."""
        return [process for process in self.processes if not process.exited]

    def find_by_pid(self, pid: int) -> RankProcess | None:
        """Return the living rank with this pid."""
        return next((process for process in self.alive if process.pid == pid), None)

    def note_exit(self, process: RankProcess, exit_code: int, why: Failure | None) -> reports.Exited:
        """Note that a rank's process was reaped; return the report of its end. `exit_code`: negative for a signal."""
        process.exit_code = exit_code
        process.steps = max(process.steps, process.counter.read().step)
        self.note_logs(time.time_ns())
        code, signum = (exit_code, None) if exit_code >= 0 else (None, -exit_code)
        oom = signum == signal.SIGKILL and procfs.oom_kills() > self.oom_kills
        ordered = self.goal is RanksGoal.STOP
        return reports.Exited(
            self.attempt, process.rank, code, signum, process.steps, why, oom, ordered,
            alone=process.counter.framework_without_group(),
            progress=process.metrics.printed.progress(process.counter.read().rows), training=process.metrics.training(),
            gpu_users=self._gpu_users(process, why.message) if why is not None else (),
        )  # fmt: skip

    def _gpu_users(self, process: RankProcess, message: str) -> tuple[str, ...]:
        own_pids = [process.pid, *process.io_counter.pids]
        return process.metrics.describe_gpu_users(message, process.local_rank, own_pids, time.monotonic())

    def heartbeats(self) -> tuple[reports.RankHeartbeat, ...]:
        """Return the heartbeats of the living ranks, and note when one made a step."""
        return tuple(beat for process in self.alive if (beat := self._heartbeat(process)) is not None)

    def _heartbeat(self, process: RankProcess) -> reports.RankHeartbeat | None:
        """Return one rank's heartbeat; None when it has ended and is about to be reaped."""
        now_s = time.monotonic()
        last, before = process.counter.read(), process.optimizer_steps
        if last.rows != before:
            is_next = last.rows == before + 1 > 1
            self.progress_at = max(self.progress_at, process.stepped_at if is_next else now_s)
            process.stepped_at = now_s
        process.steps, process.optimizer_steps = max(process.steps, last.step), last.rows
        stat = procfs.stat(process.pid)
        state, cpu_s = (stat.state, stat.cpu_s) if stat else ("X", 0.0)
        if stat is not None and state in "ZX":
            if _is_reapable(process.pid):
                return None
            state = procfs.state_of_threads(process.pid)
        counts = process.counter.collective_counts(before, last.rows)
        process.sums_reported, sums = process.counter.parameter_sums(process.sums_reported)
        io_bytes = process.io_counter.total_bytes(now_s)
        usage, training = process.metrics.measure_if_due(process.io_counter.pids, now_s)
        passes, median_pass_s = process.counter.backward_passes()
        nonfinite_norms, norms = process.counter.nonfinite_norms()
        return reports.RankHeartbeat(
            process.rank, last.step, state, process.log_bytes, cpu_s,
            io_bytes=io_bytes, median_step_s=process.counter.median_step_s(),
            own_work_s=process.local_compute.poll(process.counter, now_s) if last.rows else None, exiting=process.is_exiting(),
            groups=tuple(group.key for group in process.counter.groups()), collective_counts=counts,
            optimizer_steps=last.rows, alone=process.counter.framework_without_group(), progress=process.metrics.printed.progress(last.rows),
            passes=passes, median_pass_s=median_pass_s, has_group=process.counter.has_formed_group(),
            rate_per_s=process.counter.rate_per_s(), nonfinite_losses=max(process.metrics.nonfinite_losses(), nonfinite_norms),
            gradient_norms=norms, usage=usage, training=training, parameter_sums=sums,
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
                process.index.record(now_ns, size_bytes)

    def stop(self, grace_s: float, how: str, signum: int = signal.SIGTERM) -> None:
        """Stop all ranks: a signal to their scripts now, KILL to all after `grace_s`. A later call can only shorten the
        grace."""
        now_s = time.monotonic()
        kill_at = now_s + grace_s
        if self.goal is RanksGoal.STOP:
            self.kill_at = min(self.kill_at, kill_at)
            return
        self.goal, self.how, self.kill_at, self.signum = RanksGoal.STOP, how, kill_at, signum
        graced = (self.script_pid, *(process.pid for process in self.alive))
        self.graceful_groups = frozenset(pid for pid in graced if pid)
        tree = procfs.children() if self.alive else {}
        for process in self.alive:
            self._signal_once(spawn.find_scripts(process.pid, process.counter.read().pid, tree, signum))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGCONT)  # a stopped process acts on it only when it continues

    def _signal_once(self, pids: Iterable[int]) -> None:
        for pid in pids:
            if pid not in self.signalled:
                self.signalled.add(pid)
                procfs.send_signal(pid, self.signum)

    def continue_stop(self, kept_pids: set[int]) -> bool:
        """Continue a stop; return True when no process of the attempt is left. `kept_pids` pids and the agent's own tools, such as
        nvidia-smi, are not killed, and resource trackers not before they had time to do their work.

        Processes that a rank and its scripts leave behind are signalled to end then. A shell with a trap may end before its script.
        """
        now_s = time.monotonic()
        below = process_tags.descendants(os.getpid(), self.tag)
        remaining = {pid: group for pid, group in _find_living(below) if pid not in kept_pids}
        if not remaining and not self.alive:
            return True
        if now_s >= self.kill_at or not self.graceful_groups.intersection(remaining.values()):
            self.trackers_at = self.trackers_at or now_s + procfs.TRACKER_S_MAX
            for pid in remaining:
                if now_s >= self.trackers_at or not procfs.is_tracker(pid):
                    procfs.send_signal(pid, signal.SIGKILL)
            self.kill_at = now_s + KILL_REPEAT_S
        else:
            busy = {
                group
                for pid, group in remaining.items()
                if pid in self.signalled or self.find_by_pid(group) is not None
            }
            if self.alive:  # the script is told to end when its ranks have
                busy.add(self.script_pid)
            self._signal_once(pid for pid, group in remaining.items() if group in self.graceful_groups - busy)
        return False

    def take_first_step(self) -> bool:
        """Return True once: when a rank has made its first optimizer step."""
        if self.has_stepped or not self.last_step_ns():
            return False
        self.has_stepped = True
        return True

    def last_step_ns(self) -> int:
        """Return the time of the latest optimizer step of any rank here (wall clock), 0 before the first."""
        return max((process.counter.read().time_ns for process in self.processes), default=0)

    def steps(self) -> dict[int, int]:
        """Return how many steps each rank here has made; those whose files are closed by then are left out."""
        steps_by_rank = {}
        for process in self.processes:
            with contextlib.suppress(ValueError):
                steps_by_rank[process.rank] = process.counter.read().step
        return steps_by_rank

    @property
    def all_ended_well(self) -> bool:
        """Whether every rank ended with code 0, and so had finished what it was writing."""
        return all(process.exit_code == 0 for process in self.processes)

    def close(self) -> None:
        """Close the files, and delete the error files of the ranks."""
        for process in self.processes:
            process.close()
        forget_errors(self.job.node(self.node))


def _is_reapable(pid: int) -> bool:
    """Return whether a child in state Z has ended and can be reaped.

    A child whose main thread has ended while others run is in state Z, too, and cannot be reaped.
    """
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _find_living(pids: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the living ones of the processes that are not in the agent's session, as no process of a rank is; each with its
    process group."""
    own_session = os.getsid(0)
    for pid in pids:
        stat = procfs.stat(pid)
        if stat is not None and stat.state not in "ZX" and stat.session != own_session:
            yield pid, stat.pgrp
