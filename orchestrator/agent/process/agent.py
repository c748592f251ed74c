"""Agent of one node: starts and stops ranks as ordered, and reports on them.

Rules: an order for a stale attempt is ignored. An agent without contact stops its ranks when they make no progress (the
fence), and when the job runs in another allocation, so that two attempts never run at the same time. An agent is one
process with one event loop; the exit of a rank, its child process, wakes it. Slow work runs in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping

from orchestrator.agent.host.hook_files import install_hook
from orchestrator.agent.host.node_log import NodeLog
from orchestrator.agent.host.prepare import Preparation
from orchestrator.agent.numbers.rank_metrics import NodeMetrics
from orchestrator.agent.outputs.checkpoint_memory import CheckpointMemory
from orchestrator.agent.outputs.checkpoint_scanner import CheckpointScanner, Hasher
from orchestrator.agent.outputs.log_shipper import LogShipper
from orchestrator.agent.process.attempt import NodeAttempt
from orchestrator.agent.process.departure import Departure
from orchestrator.agent.process.lost_supervisor import AgentFence, watch_allocation
from orchestrator.agent.process.supervisor_link import SupervisorLink
from orchestrator.agent.ranks import spawn
from orchestrator.agent.ranks.processes import NodeRanks, RanksGoal
from orchestrator.agent.ranks.rank_start import RankStart
from orchestrator.core import observations
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.settings.rank_settings import EnvLayers
from orchestrator.core.slurm import step_env
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.agent_config import AgentConfig

TICK_S = 0.2
"""How often logs are polled; the end of a rank does not wait for it."""

STOP_TICK_S = 0.02
"""How often a stop is continued when it waits only for processes that are not the agent's children."""

IDLE_TICK_S = 1.0

EXIT_GRACE_S = 2.0
"""TERM to KILL for the ranks of an agent that is ended by a signal."""

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """One node's agent."""

    def __init__(
        self, config: AgentConfig, environ: Mapping[str, str], pulse: Callable[[], None] = lambda: None
    ) -> None:
        """`pulse` is called in each round of the loop, so that the monitor sees that the loop runs."""
        self._config = config
        self._pulse = pulse
        self._job = JobDir.at(config.root)
        self._node_log = NodeLog(self._job, config.node)
        self._latest_attempt = 0  # the highest attempt named in any order
        self._incarnation = f"{procfs.boot_id()[:8]}-{os.getpid()}-{time.monotonic_ns()}"
        self._lost_supervisor = watch_allocation(config, environ, self._note)
        launcher = environ.get(step_env.LAUNCHER_ADDRESS, "") if config.allocated else ""
        environ = step_env.job_env(environ) if config.allocated else environ
        self._link = SupervisorLink(config, self._hello, self._obey, launcher)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        hasher, report, note, memory = Hasher(), self._link.report, self._note, None
        if config.memory_bytes:
            memory = CheckpointMemory(config, self._job, report, note, self._wake_soon)
        self._memory = memory
        self._preparation = Preparation(config, self._incarnation, environ, hasher, report, note, self._launch, memory)
        self._scanner = CheckpointScanner(config, hasher, report, note, self._wake, memory)
        self._numbers = NodeMetrics()
        self._shipper = LogShipper(self._job, config.node, self._link.send_chunk, self._note)
        self._departure = Departure(self._job, self._link, self._shipper if config.ships else None, memory)
        self._attempt: NodeAttempt | None = None
        self._waiting_order: orders.PrepareNode | orders.Stop | None = None  # for the end of an older attempt
        self._waiting_start: orders.Start | None = None  # its ranks wait for a full disk
        self._last_stop = 0  # the latest attempt that was ordered to stop
        self._beat_due_s = 0.0
        self._fence = AgentFence(config.fence_s, config.disconnected_timeout_s)
        self._leaving = False

    async def run(self) -> int:
        """Serve until dismissed; return the exit code."""
        self._loop = loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for signum in _END_SIGNALS:
            loop.add_signal_handler(signum, self._end_by_signal, signum)
        if self._config.allocated:
            loop.add_signal_handler(signal.SIGTERM, self._forward_term)
        hook = loop.run_in_executor(None, install_hook, self._job.node(self._config.node))
        beginning = asyncio.gather(hook, self._scanner.recover())
        while not beginning.done():  # disks may be full, or slow
            self._pulse()
            await asyncio.wait([beginning], timeout=IDLE_TICK_S)
        beginning.result()
        dialing = asyncio.create_task(self._link.run())
        while not (self._leaving and self._ranks is None and self._departure.is_ready(self._growing_attempts)):
            assert not dialing.done(), f"dialling ended: {dialing}"
            self._wake.clear()
            self._tick(time.monotonic())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._pause_s())
        dialing.cancel()
        self._preparation.close()
        self._departure.finish()
        self._scanner.close()
        await asyncio.sleep(0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a signal while the loop closes prints a warning
        for signum in _END_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        return 0

    @property
    def _ranks(self) -> NodeRanks | None:
        return self._attempt.ranks if self._attempt is not None else None

    def _pause_s(self) -> float:
        if self._preparation.is_importing:
            return STOP_TICK_S
        if self._attempt is None:
            return IDLE_TICK_S
        ranks = self._attempt.ranks
        is_stopping = ranks.goal is RanksGoal.STOP and not ranks.alive and not self._scanner.is_finishing
        return STOP_TICK_S if is_stopping or self._attempt.is_inspecting else TICK_S

    def _end_by_signal(self, signum: int) -> None:
        """Stop the ranks and leave: a signal ends this agent, or its monitor died."""
        self._note(f"ended by signal {signum}")
        self._departure.note_signal()
        self._leave()

    def _forward_term(self) -> None:
        """Report the TERM that Slurm sends to all processes of the job: the supervisor stops the ranks in order."""
        self._note("Slurm has signalled this node's processes to end")
        self._link.report_signal()

    def _leave(self, grace_s: float = EXIT_GRACE_S) -> None:
        self._leaving = True
        if self._ranks is not None:
            self._ranks.stop(grace_s, "ended")
        self._wake.set()

    def _wake_soon(self) -> None:
        """Wake the loop, from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake.set)

    def _ends_with_agent(self, ranks: NodeRanks) -> bool:
        """Return whether these ranks end because the agent was ended: only the agent's end is reported then."""
        return self._leaving and ranks.how == "ended"

    # Orders

    def _hello(self, pending: int) -> reports.Hello:
        ranks, ready = self._ranks, self._preparation.ready
        seen = tuple(observations.ReportedRank(p.rank, p.pid, p.exited) for p in ranks.processes) if ranks else ()
        self._beat_due_s = 0.0
        self._wake.set()
        self._shipper.pause()
        return reports.Hello(
            protocol=reports.PROTOCOL, job=self._config.job, token=self._config.token, node=self._config.node,
            incarnation=self._incarnation, host=socket.gethostname(), pid=os.getpid(), running=ranks.attempt if ranks else 0,
            ready=ready.attempt, address=ready.address, port=ready.port, ranks=seen, pending=pending,
            root=self._config.root, ships=self._config.ships, gpus=self._config.gpus,
            memory_addresses=self._memory.addresses if self._memory else (),
            is_memory_empty=bool(self._memory and self._memory.is_empty),
        )  # fmt: skip

    def _obey(self, order: orders.Order) -> None:
        assert not isinstance(order, orders.Ack), "SupervisorLink takes acknowledgements"
        self._wake.set()
        match order:
            case orders.Dismiss():
                self._departure.dismiss()
                self._leave()
            case orders.ResumeOffsets():
                if self._config.ships:
                    self._shipper.begin(order)
            case orders.ChunkAck():
                self._shipper.acknowledge(order)
            case orders.Discard():
                self._scanner.discard(order.checkpoint)
            case orders.CopyCheckpoint():
                assert self._memory is not None, "ordered of agents with memory"
                self._memory.copy(order)
            case _:
                self._obey_for_attempt(order)

    def _obey_for_attempt(self, order: orders.AttemptOrder) -> None:
        if order.attempt < self._latest_attempt:
            return
        self._latest_attempt = order.attempt
        match order:
            case orders.PrepareNode():
                self._prepare(order)
            case orders.Probe():
                self._preparation.probe(order)
            case orders.Start():
                self._start(order)
            case orders.Stop():
                self._stop(order)
            case orders.Fence():
                self._fence.apply(order)
            case orders.Inspect() if self._attempt is not None:
                self._attempt.inspect(order.inspection)

    def _prepare(self, order: orders.PrepareNode) -> None:
        """Prepare an attempt; ranks of an older one are stopped first."""
        if self._ranks is not None:
            self._supersede(self._ranks, order)
            if self._ranks.attempt == self._preparation.ready.attempt == order.attempt:
                self._link.report(self._preparation.ready)  # its script has called a launcher
            return
        self._note(f"preparing attempt {order.attempt}" + (", setup lines first" if order.plan.setup else ""))
        self._preparation.begin(order)

    def _launch(self, at: NodePlan, layers: EnvLayers) -> None:
        """Run the script of an attempt, whose ranks start when it calls a launcher."""
        if at.attempt <= self._last_stop:
            return
        attempt = self._new_attempt(at.attempt)
        try:
            attempt.run_script(at, layers.given, self._wake.set)
        except OSError as err:
            reason = f"the script cannot be run: {err.strerror}: {err.filename}"
            self._link.report(reports.PrepareFailed(at.attempt, reason, ""))
            return
        self._begin_attempt(attempt)

    def _new_attempt(self, number: int) -> NodeAttempt:
        starter, tag = self._preparation.starter, self._config.tag
        ranks = NodeRanks(number, self._job, self._config.node, starter=starter, metrics=self._numbers, tag=tag)
        return NodeAttempt(ranks, self._scanner, self._link.report, self._note)

    def _begin_attempt(self, attempt: NodeAttempt) -> None:
        self._attempt = attempt
        self._fence.begin()

    def _supersede(self, ranks: NodeRanks, order: orders.PrepareNode | orders.Stop) -> None:
        """Stop the ranks of an older attempt, and keep the order until they are gone."""
        if ranks.attempt < order.attempt:
            self._waiting_order = order
            ranks.stop(0.0, "asked")

    def _start(self, order: orders.Start) -> None:
        """Start the ranks of a prepared attempt; on a full disk, as soon as it has room."""
        is_retry, self._waiting_start = self._waiting_start is not None, None
        if order.attempt <= self._last_stop:
            return
        script_attempt = self._attempt
        if (
            script_attempt is not None and not script_attempt.ranks.awaits_start
        ) or self._preparation.ready.attempt != order.attempt:
            return
        prepared, attempt = self._preparation, script_attempt or self._new_attempt(order.attempt)
        trainer_settings = self._numbers.reports.settings(self._job.node(self._config.node), prepared.layers.given)
        environment, starts = prepared.rank_starts(order, attempt.ranks.call, trainer_settings)
        try:
            attempt.ranks.make_files(starts)
        except OSError as err:
            if full_disk.is_unavailable(err):
                self._waiting_start = order
                if not is_retry:
                    self._note(f"the ranks wait for the disk: {err.strerror}")
            else:
                self._report_unstarted(starts[0], order.attempt, err)
            return
        prepared.release()  # the port is rank 0's from here on
        self._begin_attempt(attempt)
        try:
            attempt.start_ranks(environment, starts)
        except OSError as err:
            self._report_unstarted(starts[0], order.attempt, err)
            return
        self._beat_due_s = time.monotonic() + self._config.heartbeat_s

    def _report_unstarted(self, rank: RankStart, attempt: int, err: OSError) -> None:
        reason = f"{err.filename or rank.program.argv[0]} cannot be started: {err.strerror}"
        self._link.report(reports.PrepareFailed(attempt, reason, ""))

    def _stop(self, order: orders.Stop) -> None:
        self._waiting_start = None
        self._last_stop = max(self._last_stop, order.attempt)
        if (ranks := self._ranks) is None:
            self._preparation.release()
            self._link.report(reports.Stopped(order.attempt, "asked"))
            return
        if ranks.attempt != order.attempt:
            self._supersede(ranks, order)
            return
        name = self._preparation.save_signal if order.may_save else "TERM"
        self._note(f"stopping attempt {order.attempt}: {name}, after {order.grace_s:g} s KILL")
        ranks.stop(order.grace_s, "asked", signal.Signals[f"SIG{name}"])

    # Events on the node

    def _reap(self) -> None:
        for pid, status in spawn.reap():
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                self._beat_due_s = 0.0
            else:
                self._note_exit(pid, status)
        self._wake.set()

    def _note_exit(self, pid: int, status: int) -> None:
        if not self._preparation.note_exit(pid, status) and (attempt := self._attempt) is not None:
            attempt.note_exit(pid, status, is_reported=not self._ends_with_agent(attempt.ranks))

    def _tick(self, now_s: float) -> None:
        attempt, ranks, no_contact_s = self._attempt, self._ranks, now_s - self._link.proved_at
        self._pulse()
        self._preparation.poll()
        self._scanner.poll()
        if self._memory is not None:
            self._memory.poll()
        self._numbers.gpus.report_states(now_s, self._latest_attempt, self._link.report)
        if self._waiting_start is not None:
            self._start(self._waiting_start)
        if attempt is None:
            self._leaving = self._leaving or self._departure.is_due(no_contact_s)
        else:
            self._tick_attempt(attempt, now_s)
        lost_supervisor = self._lost_supervisor
        if lost_supervisor and not self._leaving and lost_supervisor.check(no_contact_s):
            self._leave(0.0)
        if now_s >= self._beat_due_s:
            self._beat_due_s = now_s + self._config.heartbeat_s
            beats, number = (ranks.heartbeats(), ranks.attempt) if ranks else ((), self._latest_attempt)
            self._link.send_heartbeat(number, beats, self._scanner.scan_count, self._scanner.is_unfinished)
        if self._link.connected:
            self._shipper.poll(self._growing_attempts)

    def _tick_attempt(self, attempt: NodeAttempt, now_s: float) -> None:
        ranks = attempt.ranks
        ranks.note_logs(time.time_ns())
        if (call := attempt.poll(now_s)) is not None:
            self._preparation.prepare_call(call)
        if ranks.take_first_step():
            self._beat_due_s, ranks.starter.has_stepped = 0.0, True
        if ranks.goal is RanksGoal.RUN:
            if ranks.processes and not self._scanner.is_finishing:
                self._scanner.scan(ranks, now_s)
            no_contact_s = self._fence.exceeded_s(ranks, self._link.proved_at, self._link.connected_at, now_s)
            if no_contact_s is not None:
                self._note(f"no contact and no step for {no_contact_s:.0f} s: stopping attempt {ranks.attempt}")
                ranks.stop(0.0, "fenced" if attempt.is_alive else "ended")
        if ranks.goal is RanksGoal.STOP and self._continue_stop(ranks, now_s):
            self._finish_attempt(attempt)

    def _continue_stop(self, ranks: NodeRanks, now_s: float) -> bool:
        """Continue a stop; return whether all processes are gone and all checkpoints are reported."""
        if not self._scanner.is_finishing and not ranks.continue_stop(self._preparation.pids):
            return False
        # An agent ended by a signal has no time to hash checkpoints.
        is_signalled = self._leaving and self._departure.is_urgent
        return self._scanner.finish(ranks, now_s) or is_signalled

    def _finish_attempt(self, attempt: NodeAttempt) -> None:
        """Report an attempt without processes as stopped, after its last log lines; then obey the waiting order."""
        ranks = attempt.ranks
        attempt.close()
        if attempt.has_script:
            self._last_stop = max(self._last_stop, ranks.attempt)  # a start that comes too late has no script
        self._shipper.send_last(self._growing_attempts)
        self._attempt = None
        if not self._ends_with_agent(ranks):
            self._link.report(reports.Stopped(ranks.attempt, ranks.how))
        waiting, self._waiting_order = self._waiting_order, None
        if waiting is not None and waiting.attempt == self._latest_attempt:
            self._obey(waiting)

    @property
    def _growing_attempts(self) -> tuple[int, ...]:
        """The attempts whose files still grow on this node."""
        running = self._ranks.attempt if self._ranks is not None else self._latest_attempt
        return tuple(dict.fromkeys((running, self._latest_attempt)))

    def _note(self, text: str) -> None:
        """Write a line to the node's log of the latest attempt; a deleted job folder must not come back."""
        if self._latest_attempt and self._job.root.exists():
            self._node_log.add(self._latest_attempt, text)


def run_agent(config: AgentConfig, pulse: Callable[[], None] = lambda: None) -> int:
    """Run the agent that `config` describes until it is dismissed; return the exit code. `pulse`: see `Agent`."""
    spawn.name_process("orch-agent")
    spawn.adopt_orphans()
    os.chdir(config.root)
    return asyncio.run(Agent(config, dict(os.environ), pulse).run())
