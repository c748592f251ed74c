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

from orchestrator.agent.hang import inspector
from orchestrator.agent.host import rendezvous
from orchestrator.agent.host.hook_files import install_hook
from orchestrator.agent.host.node_log import NodeLog
from orchestrator.agent.host.prepare import Preparation
from orchestrator.agent.launch.script import LaunchScript
from orchestrator.agent.numbers.rank_numbers import NodeNumbers
from orchestrator.agent.outputs.log_shipper import LogShipper
from orchestrator.agent.outputs.save_scanner import Hasher, SaveScanner
from orchestrator.agent.process.lost_supervisor import Fence, LostSupervisor, NewerAllocation
from orchestrator.agent.process.supervisor_link import SupervisorLink
from orchestrator.agent.ranks import failure, spawn
from orchestrator.agent.ranks.processes import NodeRanks, RanksGoal
from orchestrator.agent.ranks.rank_start import RankCall, RankStart
from orchestrator.core import observations
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.settings.rank_env import NodeAttempt
from orchestrator.core.settings.rank_settings import Layers
from orchestrator.core.slurm import step_env
from orchestrator.core.wire import messages as m

TICK_S = 0.2
"""How often logs are polled; the end of a rank does not wait for it."""

STOP_TICK_S = 0.02
"""How often a stop is continued when it waits only for processes that are not the agent's children."""

IDLE_TICK_S = 1.0

ALONE_S_MAX = 900.0
"""An agent without ranks leaves after this time without contact: another is started when it is needed."""

ALONE_PENDING_S_MAX = 7 * 86_400.0
"""The same for an agent with unacknowledged reports, such as the end of ranks: a laptop may stay closed for days."""

EXIT_GRACE_S = 2.0
"""TERM to KILL for the ranks of an agent that is ended by a signal."""

SHIP_LAST_S_MAX = 60.0
"""A dismissed agent stays until its logs have arrived, unless nothing has arrived for this time."""

SHIP_ALONE_S_MAX = 10.0
"""Nor does it stay after this time without a connection: `orch collect` fetches the rest later."""

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """One node's agent."""

    def __init__(
        self, config: m.AgentConfig, environ: Mapping[str, str], pulse: Callable[[], None] = lambda: None
    ) -> None:
        """`pulse` is called in each round of the loop, so that the keeper knows that it goes round."""
        self._config = config
        self._pulse = pulse
        self._job = JobDir.at(config.root)
        self._node_log = NodeLog(self._job, config.node)
        self._incarnation = f"{procfs.boot_id()[:8]}-{os.getpid()}-{time.monotonic_ns()}"
        launcher, self._lost_supervisor = "", None
        if config.allocated:
            launcher = environ.get(step_env.LAUNCHER_ADDRESS, "")
            newer = NewerAllocation(self._job.allocation, environ)
            assert config.fence_s is not None, "a node of Slurm is not the supervisor's own machine"
            self._lost_supervisor = LostSupervisor(environ, newer, config.fence_s, self._note)
            environ = step_env.of_the_job(environ)
        self._link = SupervisorLink(config, self._hello, self._obey, launcher)
        self._wake = asyncio.Event()
        hasher = Hasher()
        self._preparation = Preparation(
            config, self._incarnation, environ, hasher, self._link.report, self._launch
        )
        self._scanner = SaveScanner(config, hasher, self._link.report, self._note, self._wake)
        self._numbers = NodeNumbers()
        self._shipper = LogShipper(self._job, config.node, self._link.chunk, self._note)
        self._probing: set[asyncio.Task[None]] = set()
        self._ranks: NodeRanks | None = None
        self._script: LaunchScript | None = None  # of these ranks
        self._waiting: m.Prepare | m.Stop | None = None  # for the end of an older attempt
        self._unstarted: m.Start | None = None  # its ranks wait for a disk that takes nothing
        self._inspector: inspector.Inspector | None = None
        self._next_call: RankCall | None = (
            None  # of the script that runs; it waits for what the last one has left
        )
        self._last_stop = 0  # the latest attempt that was ordered to stop
        self._latest = 0  # the highest attempt named in any order
        self._beat_due = 0.0
        self._fence = Fence(config.fence_s, config.away_fence_s)
        self._leaving = False
        self._dismissed_at: float | None = None

    async def run(self) -> int:
        """Serve until dismissed; return the exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for signum in _ENDING:
            loop.add_signal_handler(signum, self._end_by_signal, signum)
        if self._config.allocated:
            loop.add_signal_handler(signal.SIGTERM, self._forward_term)
        hook = loop.run_in_executor(None, install_hook, self._job.node(self._config.node))
        beginning = asyncio.gather(hook, self._scanner.recover())
        while not beginning.done():  # disks may be full, or slow
            self._pulse()
            await asyncio.wait([beginning], timeout=IDLE_TICK_S)
        beginning.result()
        dialing = asyncio.create_task(self._link.keep())
        while not (self._leaving and self._ranks is None and self._has_shipped(time.monotonic())):
            assert not dialing.done(), f"dialling ended: {dialing}"
            self._wake.clear()
            self._tick(time.monotonic())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._pause_s())
        dialing.cancel()
        self._preparation.close()
        self._scanner.close()
        if self._dismissed_at is not None:
            self._link.say_goodbye()
        self._link.close()
        await asyncio.sleep(0)
        return 0

    def _pause_s(self) -> float:
        ranks = self._ranks
        if self._preparation.is_importing:
            return STOP_TICK_S
        if ranks is None:
            return IDLE_TICK_S
        is_stopping = ranks.want is RanksGoal.STOP and not ranks.alive and not self._scanner.is_finishing
        is_inspecting = self._inspector is not None and self._inspector.is_inspecting
        return STOP_TICK_S if is_stopping or is_inspecting else TICK_S

    def _end_by_signal(self, signum: int) -> None:
        """Stop the ranks and leave: a signal ends this agent, or its keeper died."""
        self._note(f"ended by signal {signum}")
        self._leave()

    def _forward_term(self) -> None:
        """Report the TERM that Slurm sends to all processes of the job: the supervisor stops the ranks in order."""
        self._note("Slurm has told this node's processes to end")
        self._link.report_signal()

    def _leave(self, grace_s: float = EXIT_GRACE_S) -> None:
        self._leaving = True
        if self._ranks is not None:
            self._ranks.stop(grace_s, "ended")
        self._wake.set()

    def _ends_with_agent(self, ranks: NodeRanks) -> bool:
        """Tell whether these ranks end because the agent was ended: only the agent's end is reported then."""
        return self._leaving and ranks.how == "ended"

    # Orders

    def _hello(self, pending: int) -> m.Hello:
        ranks, ready = self._ranks, self._preparation.ready
        seen = tuple(observations.RankSeen(p.rank, p.pid, p.exited) for p in ranks.processes) if ranks else ()
        self._beat_due = 0.0
        self._wake.set()
        self._shipper.hold()
        return m.Hello(
            protocol=m.PROTOCOL, job=self._config.job, token=self._config.token, node=self._config.node,
            incarnation=self._incarnation, host=socket.gethostname(), pid=os.getpid(), running=ranks.attempt if ranks else 0,
            ready=ready.attempt, address=ready.address, port=ready.port, ranks=seen, pending=pending,
            root=self._config.root, ships=self._config.ships, gpus=self._config.gpus,
        )  # fmt: skip

    def _obey(self, order: m.Order) -> None:
        assert not isinstance(order, m.Ack), "SupervisorLink takes acknowledgements"
        self._wake.set()
        match order:
            case m.Dismiss():
                self._dismissed_at = self._dismissed_at or time.monotonic()
                self._leave()
            case m.ResumeOffsets():
                if self._config.ships:
                    self._shipper.begin(order)
            case m.ChunkAck():
                self._shipper.acknowledge(order)
            case m.Discard():
                self._scanner.discard(order.save)
            case _:
                self._obey_for_attempt(order)

    def _obey_for_attempt(self, order: m.AttemptOrder) -> None:
        if order.attempt < self._latest:
            return
        self._latest = order.attempt
        match order:
            case m.Prepare():
                self._prepare(order)
            case m.Probe():
                task = asyncio.get_running_loop().create_task(self._probe(order))
                self._probing.add(task)
                task.add_done_callback(self._probing.discard)
            case m.Start():
                self._start(order)
            case m.Stop():
                self._stop(order)
            case m.Fence():
                self._fence.set(order)
            case m.Inspect() if self._inspector is not None:
                self._inspector.begin(order.inspection)

    def _prepare(self, order: m.Prepare) -> None:
        """Prepare an attempt; ranks of an older one are stopped first."""
        if self._ranks is not None:
            self._supersede(self._ranks, order)
            if self._ranks.attempt == self._preparation.ready.attempt == order.attempt:
                self._link.report(self._preparation.ready)  # its script has called a launcher
            return
        self._note(f"preparing attempt {order.attempt}" + (", setup lines first" if order.plan.setup else ""))
        self._preparation.begin(order)

    def _launch(self, at: NodeAttempt, layers: Layers) -> None:
        """Run the script of an attempt, whose ranks start when it calls a launcher."""
        if at.attempt <= self._last_stop:
            return
        ranks = self._new_ranks(at.attempt)
        try:
            script = LaunchScript(at, layers.given, self._called, self._script_refused, self._note)
        except OSError as err:
            reason = f"the script cannot be run: {err.strerror}: {err.filename}"
            self._link.report(m.PrepareFailed(at.attempt, reason, ""))
            return
        ranks.script_pid, self._script, self._next_call = script.pid, script, None
        self._note(f"the script runs (pid {script.pid})")
        ranks.begin()
        self._fence.begin()
        self._ranks = ranks

    def _new_ranks(self, attempt: int) -> NodeRanks:
        return NodeRanks(
            attempt,
            self._job,
            self._config.node,
            starter=self._preparation.starter,
            numbers=self._numbers,
            tag=self._config.tag,
        )

    def _script_refused(self, report: m.PrepareFailed) -> None:
        """Report that the attempt cannot go on, unless it is being stopped: that ends stand-ins, too."""
        if self._ranks is not None and self._ranks.want is RanksGoal.RUN:
            self._link.report(report)

    def _called(self, call: RankCall) -> None:
        """Note that the script has called a launcher."""
        self._next_call = call
        self._wake.set()

    def _take_call(self, ranks: NodeRanks, call: RankCall, now_s: float) -> None:
        """Make ready for a launcher call, once what the ranks of the one before have saved is reported."""
        if ranks.processes and not self._scanner.finish(ranks, now_s):
            return
        self._next_call = None
        if self._inspector is not None:
            self._inspector.close()
            self._inspector = None
        ranks.renew(call)
        self._preparation.called(call)

    async def _probe(self, order: m.Probe) -> None:
        """Report at which of these addresses this node reaches the first node."""
        reached, missed = await rendezvous.probe(
            order.addresses, order.port, self._config.token, order.attempt
        )
        hits = ", ".join(f"{hit.address} over {hit.interface or '?'}" for hit in reached)
        self._note(f"the first node is reached at {hits or 'none of its addresses'}; {'; '.join(missed)}")
        self._link.report(m.Probed(order.attempt, reached, missed))

    def _supersede(self, ranks: NodeRanks, order: m.Prepare | m.Stop) -> None:
        """Stop the ranks of an older attempt, and keep the order until they are gone."""
        if ranks.attempt < order.attempt:
            self._waiting = order
            ranks.stop(0.0, "asked")

    def _start(self, order: m.Start) -> None:
        """Start the ranks of a prepared attempt; on a disk that takes nothing, as soon as it does."""
        is_again, self._unstarted = self._unstarted is not None, None
        if order.attempt <= self._last_stop:
            return
        called = self._ranks
        if (
            called is not None and not called.awaits_start
        ) or self._preparation.ready.attempt != order.attempt:
            return
        prepared = self._preparation
        reports = self._numbers.reports.settings(self._job.node(self._config.node), prepared.layers.given)
        evidence = self._job.evidence(order.attempt)
        environment = prepared.environment(order, order.interface, evidence, reports)
        call = called.call if called is not None else None
        starts = environment.starts((order.address, order.port), call)
        ranks = called or self._new_ranks(order.attempt)
        try:
            ranks.make_files(starts)
        except OSError as err:
            if full_disk.is_withheld(err):
                self._unstarted = order
                if not is_again:
                    self._note(f"the ranks wait for the disk: {err.strerror}")
            else:
                self._report_unstarted(starts[0], order.attempt, err)
            return
        prepared.let_go()  # the port is rank 0's from here on
        self._ranks = ranks
        for setting in environment.settings:
            self._note(f"setting {setting.text}")
        ranks.begin()
        self._fence.begin()
        self._inspector = inspector.Inspector(ranks, starts[0].program.env)
        # Where the disk is shared, one agent of the gang looks for saves; the first node is never a spare
        at = environment.at
        self._scanner.begin(order.attempt, at.plan.slurm is None or at.index == 0)
        try:
            ranks.start(starts)
        except OSError as err:
            self._report_unstarted(starts[0], order.attempt, err)
            ranks.stop(0.0, "asked")
            return
        self._note(
            ", ".join([*(f"rank {p.rank} is pid {p.pid}" for p in ranks.processes), ranks.starter.how])
        )
        self._link.report(m.Started(ranks.attempt, tuple(p.pid for p in ranks.processes), ranks.starter.how))
        self._beat_due = time.monotonic() + self._config.heartbeat_s

    def _report_unstarted(self, rank: RankStart, attempt: int, err: OSError) -> None:
        reason = f"{err.filename or rank.program.argv[0]} cannot be started: {err.strerror}"
        self._link.report(m.PrepareFailed(attempt, reason, ""))

    def _stop(self, order: m.Stop) -> None:
        self._unstarted = None
        self._last_stop = max(self._last_stop, order.attempt)
        if (ranks := self._ranks) is None:
            self._preparation.let_go()
            self._link.report(m.Stopped(order.attempt, "asked"))
            return
        if ranks.attempt != order.attempt:
            self._supersede(ranks, order)
            return
        self._note(f"stopping attempt {order.attempt}: {order.signal}, after {order.grace_s:g} s KILL")
        ranks.stop(order.grace_s, "asked", signal.Signals[f"SIG{order.signal}"])

    # Events on the node

    def _reap(self) -> None:
        """Reap the children that ended, and note those that were stopped or continued."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGTRAP:
                continue  # halted by `ptrace` for a moment that no heartbeat need show
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                self._beat_due = 0.0
            else:
                self._ended(pid, status)
        self._wake.set()

    def _ended(self, pid: int, status: int) -> None:
        if self._preparation.ended(pid, status):
            return
        ranks = self._ranks
        if ranks is not None and self._script is not None and pid == self._script.pid:
            self._script_ended(ranks, self._script, os.waitstatus_to_exitcode(status))
            return
        process = ranks.of_pid(pid) if ranks else None
        if ranks is None or process is None:
            return
        exit_code = os.waitstatus_to_exitcode(status)
        why = failure.of_exit(process.folder, process.log, pid, exit_code)
        report = ranks.ended(process, exit_code, why)
        how = f"signal {report.signal}" if report.signal else f"code {report.code}"
        self._note(f"rank {report.rank} (pid {pid}) ended with {how}")
        if not self._ends_with_agent(ranks):
            self._link.report(report)
        is_over = not ranks.alive and ranks.all_ended_well and ranks.want is RanksGoal.RUN
        if self._script is not None and is_over:
            self._script.ranks_ended()

    def _script_ended(self, ranks: NodeRanks, script: LaunchScript, exit_code: int) -> None:
        report = script.ended(exit_code)
        self._note(
            f"the script ended with {f'code {exit_code}' if exit_code >= 0 else f'signal {-exit_code}'}"
        )
        if ranks.want is RanksGoal.RUN:
            self._link.report(report)

    def _tick(self, now_s: float) -> None:
        ranks, no_contact_s = self._ranks, now_s - self._link.proved_at
        self._pulse()
        self._preparation.poll()
        self._scanner.poll()
        if self._unstarted is not None:
            self._start(self._unstarted)
        if ranks is None:
            patience_s = ALONE_PENDING_S_MAX if self._link.has_pending else ALONE_S_MAX
            is_alone = no_contact_s > patience_s
            is_over = not self._link.connected and self._job.ended.exists()
            self._leaving = self._leaving or is_alone or is_over
        else:
            self._tick_ranks(ranks, now_s)
        lost = self._lost_supervisor
        if lost and not self._leaving and lost.check(no_contact_s):
            self._leave(0.0)
        if now_s >= self._beat_due:
            self._beat_due = now_s + self._config.heartbeat_s
            beats, attempt = (ranks.heartbeats(), ranks.attempt) if ranks else ((), self._latest)
            self._link.beat(attempt, beats, self._scanner.looks, self._scanner.is_unfinished)
        if self._link.connected:
            self._shipper.poll(self._attempts)

    def _tick_ranks(self, ranks: NodeRanks, now_s: float) -> None:
        ranks.note_logs(time.time_ns())
        if self._script is not None and ranks.want is RanksGoal.RUN:
            self._script.watch(now_s)
            if self._next_call is not None and not ranks.alive:
                self._take_call(ranks, self._next_call, now_s)
        if ranks.makes_first_step():
            self._beat_due, ranks.starter.has_stepped = 0.0, True
        if self._inspector is not None and (report := self._inspector.gather()) is not None:
            self._link.report(report)
        if ranks.want is RanksGoal.RUN:
            if ranks.processes and not self._scanner.is_finishing:
                self._scanner.scan(ranks, now_s)
            quiet_s = self._fence.over_s(ranks, self._link.proved_at, self._link.connected_at, now_s)
            if quiet_s is not None:
                self._note(f"no contact and no step for {quiet_s:.0f} s: stopping attempt {ranks.attempt}")
                ranks.stop(
                    0.0, "fenced" if ranks.alive or (self._script and self._script.is_running) else "ended"
                )
        if ranks.want is RanksGoal.STOP and self._is_over(ranks, now_s):
            self._stopped(ranks)

    def _is_over(self, ranks: NodeRanks, now_s: float) -> bool:
        """Drive a stop on; tell whether all processes are gone and all checkpoints are reported."""
        if not self._scanner.is_finishing and not ranks.push(self._preparation.pids):
            return False
        # An agent ended by a signal has no time to hash checkpoints.
        is_signalled = self._leaving and self._dismissed_at is None
        return self._scanner.finish(ranks, now_s) or is_signalled

    def _stopped(self, ranks: NodeRanks) -> None:
        """Report an attempt without processes as stopped, after its last log lines; then obey the waiting order."""
        ranks.close()
        if self._script is not None:
            self._script.close()
            self._last_stop = max(self._last_stop, ranks.attempt)  # a start that comes too late has no script
        self._shipper.push(self._attempts)
        if self._inspector is not None:
            self._inspector.close()
        self._ranks = self._inspector = self._script = self._next_call = None
        if not self._ends_with_agent(ranks):
            self._link.report(m.Stopped(ranks.attempt, ranks.how))
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.attempt == self._latest:
            self._obey(waiting)

    @property
    def _attempts(self) -> tuple[int, ...]:
        """The attempts whose files still grow on this node."""
        running = self._ranks.attempt if self._ranks is not None else self._latest
        return tuple(dict.fromkeys((running, self._latest)))

    def _has_shipped(self, now_s: float) -> bool:
        """Tell whether a dismissed agent may leave: its logs have arrived, or do not get through."""
        if not self._config.ships or self._dismissed_at is None or self._shipper.has_arrived(self._attempts):
            return True
        is_stuck = now_s - max(self._dismissed_at, self._shipper.progress_at) > SHIP_LAST_S_MAX
        return is_stuck or self._link.disconnected_s > SHIP_ALONE_S_MAX

    def _note(self, text: str) -> None:
        """Write a line to the node's log of the latest attempt; a deleted job folder must not come back."""
        if self._latest and self._job.root.exists():
            self._node_log.add(self._latest, text)


def run_agent(config: m.AgentConfig, pulse: Callable[[], None] = lambda: None) -> int:
    """Run the agent that `config` describes until it is dismissed; return the exit code. `pulse`: see `Agent`."""
    spawn.name_process("orch-agent")
    spawn.adopt_orphans()
    os.chdir(config.root)
    return asyncio.run(_serve(Agent(config, dict(os.environ), pulse)))


async def _serve(agent: Agent) -> int:
    code = await agent.run()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a signal while the loop closes prints a warning
    for signum in _ENDING:
        signal.signal(signum, signal.SIG_IGN)
    return code
