"""Attempt on a node: its ranks, the script that calls launchers for them, and their inspector, while any of them runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from orchestrator.agent.hang.inspector import Inspector
from orchestrator.agent.launch import gangs
from orchestrator.agent.launch.script import CHECK_S, LaunchScript
from orchestrator.agent.outputs.checkpoint_scanner import CheckpointScanner
from orchestrator.agent.ranks import failure
from orchestrator.agent.ranks.processes import NodeRanks, RanksGoal
from orchestrator.agent.ranks.rank_start import NodeEnvironment, RankCall, RankStart
from orchestrator.core.observations import Failure
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.wire import reports


class NodeAttempt:
    """One attempt on this node."""

    def __init__(
        self,
        ranks: NodeRanks,
        scanner: CheckpointScanner,
        report: Callable[[reports.ReliableReport], None],
        note: Callable[[str], None],
    ) -> None:
        self.ranks = ranks
        self._scanner, self._report, self._note = scanner, report, note
        self._script: LaunchScript | None = None
        self._inspector: Inspector | None = None  # of the ranks that were started last
        self._watch_due_s = 0.0

    def run_script(self, at: NodePlan, given: Mapping[str, str], wake: Callable[[], None]) -> None:
        """Run the attempt's script, whose ranks start when it calls a launcher. Raises OSError."""
        self._script = LaunchScript(self.ranks, at, given, self._report, self._note, wake)
        self.ranks.begin()

    def start_ranks(self, environment: NodeEnvironment, starts: tuple[RankStart, ...]) -> None:
        """Start the ranks, whose files are made. Raises OSError; then those that have started are stopped."""
        ranks, at = self.ranks, environment.at
        for setting in environment.settings:
            self._note(f"setting {setting.text}")
        ranks.begin()
        self._inspector = Inspector(ranks, starts[0].program.env)
        # Where the disk is shared, one agent of the gang looks for saves; the first node is never a spare
        self._scanner.begin(at.attempt, at.plan.slurm is None or at.index == 0)
        try:
            ranks.start(starts)
        except OSError:
            ranks.stop(0.0, "asked")
            raise
        how = ranks.starter.description
        self._note(", ".join([*(f"rank {p.rank} is pid {p.pid}" for p in ranks.processes), how]))
        self._report(reports.Started(ranks.attempt, tuple(p.pid for p in ranks.processes), how, ranks.starter.forks))

    @property
    def has_script(self) -> bool:
        """Whether the attempt runs a script."""
        return self._script is not None

    @property
    def is_alive(self) -> bool:
        """Whether a rank, or the script, has not been reaped."""
        return bool(self.ranks.alive) or (self._script is not None and self._script.is_running)

    @property
    def is_inspecting(self) -> bool:
        """Whether an inspection is under way."""
        return self._inspector is not None and self._inspector.is_inspecting

    def inspect(self, number: int) -> None:
        """Begin an inspection of the ranks, if they were started."""
        if self._inspector is not None:
            self._inspector.begin(number)

    def poll(self, now_s: float) -> RankCall | None:
        """Report an inspection that is done, and watch the script; return its launcher call, once what the ranks of the call
        before have saved is reported."""
        if self._inspector is not None and (report := self._inspector.gather()) is not None:
            self._report(report)
        if now_s >= self._watch_due_s and len(self.ranks.alive) > 1 and self.ranks.goal is RanksGoal.RUN:
            self._watch_due_s = now_s + CHECK_S
            self._watch_gangs()
        if self._script is None:
            return None
        self._script.check_launchers(now_s)
        if self._script.has_call and (not self.ranks.processes or self._scanner.finish(self.ranks, now_s)):
            self._close_inspector()
            return self._script.take_call()
        return None

    def _watch_gangs(self) -> None:
        """End the attempt where its ranks are copies of one training."""
        ranks, first = self.ranks, self.ranks.alive[0]
        if gang := gangs.diagnose_ranks(first.folder.parent, len(ranks.processes), first.pid):
            self._report(reports.PrepareFailed(ranks.attempt, gang[0], "", is_final=True, fix=gang[1]))
            self._watch_due_s = float("inf")

    def note_exit(self, pid: int, status: int, *, is_reported: bool) -> None:
        """Note that a process was reaped, if it is the script or a rank; report the end of a rank if `is_reported`."""
        if self._script is not None and self._script.note_exit(pid, status):
            return
        process = self.ranks.find_by_pid(pid)
        if process is None:
            return
        exit_code = os.waitstatus_to_exitcode(status)
        why = failure.diagnose_exit(process.folder, process.log, pid, exit_code)
        if exit_code == 0 and why is None and process.counter.made_no_step():
            why = failure.last_line(process.log) or Failure("", "", "", None)
        report = self.ranks.note_exit(process, exit_code, why)
        how = f"signal {report.signal}" if report.signal else f"code {report.code}"
        self._note(f"rank {report.rank} (pid {pid}) ended with {how}")
        if exit_code and not report.ordered:
            self.ranks.metrics.gpus.note_bad_exit()
            report = replace(report, memory_full=self._scanner.memory_full_text())
        if is_reported:
            self._report(report)
        if self._script is not None:
            self._script.note_rank_exit()

    def close(self) -> None:
        """Close the files and the script's socket, once nothing of the attempt runs."""
        self.ranks.close()
        if self._script is not None:
            self._script.close()
        self._close_inspector()

    def _close_inspector(self) -> None:
        if self._inspector is not None:
            self._inspector.close()
            self._inspector = None
