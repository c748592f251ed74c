"""A node's script with its stand-ins as real processes, which find orch in the bundle alone: what it is answered, and what ends its attempt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.agent.host import hook_files
from orchestrator.agent.launch.script import LaunchScript
from orchestrator.agent.ranks import spawn
from orchestrator.agent.ranks.processes import NodeRanks
from orchestrator.agent.ranks.rank_start import RankCall
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.wire import reports
from orchestrator.submission import bundle
from tests.support import jobs

pytestmark = pytest.mark.slow

WAIT_S_MAX = 30.0


@dataclass
class Seen:
    """What a script has led to."""

    is_called: bool = False
    refused: list[reports.PrepareFailed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    call: RankCall | None = None
    end: reports.LaunchEnded | None = None


async def play(folder: Path, text: str, *, until_call: bool = False) -> Seen:
    """Run a script on a node of two ranks that never end, until it ends or its attempt must, or until it calls a launcher."""
    job, seen = JobDir(folder), Seen()
    job.code.mkdir(exist_ok=True)
    job.node("node-0").mkdir(parents=True)
    hook_files.install_hook(job.node("node-0"))
    job.bundle.write_bytes(bundle.build())
    job.attempt_logs(1).mkdir(parents=True)
    at = NodePlan(jobs.plan(nodes=1, entrypoint=None, launch=text), job, "node-0", 1, ("node-0",))
    ranks, given = NodeRanks(1, job, "node-0"), {"PATH": os.environ["PATH"], "PYTHONPATH": "."}

    def report(report: reports.ReliableReport) -> None:
        if isinstance(report, reports.LaunchEnded):
            seen.end = report
        elif isinstance(report, reports.PrepareFailed):
            seen.refused.append(report)

    script = LaunchScript(ranks, at, given, report, seen.notes.append, lambda: None)
    deadline_s = time.monotonic() + WAIT_S_MAX
    try:
        while not (seen.refused or seen.end or (until_call and seen.is_called)):
            assert time.monotonic() < deadline_s, f"the script goes on: {seen}"
            script.check_launchers(time.monotonic())
            pid, status = os.waitpid(ranks.script_pid, os.WNOHANG)
            assert not pid or script.note_exit(pid, status)
            seen.is_called = seen.is_called or script.has_call
            await asyncio.sleep(0.02)
        seen.call = script.take_call() if seen.is_called and until_call else None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.script_pid, signal.SIGKILL)
        script.close()
        await asyncio.sleep(0)
    return seen


def test_calls_that_need_no_ranks_are_answered(tmp_path: Path) -> None:
    text = "mpirun -n 1 echo one && srun bash -c 'echo two'; scontrol show hostnames a,b; squeue; exit 4"
    seen = asyncio.run(play(tmp_path, text))
    assert seen.end is not None and (seen.end.code, seen.is_called, seen.refused) == (4, False, [])
    assert "two\na\nb\n" in seen.end.tail and "use orch status" in seen.end.tail
    job = JobDir(tmp_path)  # over SSH no other process can open the file that the agent's own code comes from
    assert f"sys.path.insert(0, {str(job.bundle)!r})" in (job.node("node-0") / "launch" / "srun").read_text()


LIMITS = """
ulimit -n 333; umask 027
nice -n 3 taskset -c 0 torchrun --no-python printf $'\\xff'
"""


def test_call_keeps_arguments_and_process_attributes(
    tmp_path: Path,
) -> None:
    """A call passes on its arguments unchanged, and what its process would have inherited."""
    seen = asyncio.run(play(tmp_path, LIMITS, until_call=True))
    assert seen.call is not None and os.fsencode(seen.call.argv[-1]) == b"\xff"
    code = "import os,resource; print(resource.getrlimit(7)[0], os.umask(0), os.nice(0) - int(os.environ['N']), os.sched_getaffinity(0))"
    program = spawn.Program(
        (sys.executable, "-c", code), {"N": str(os.nice(0))}, tmp_path, tmp_path / "out", seen.call.limits
    )
    os.waitpid(spawn.start(program), 0)
    assert program.output.read_text() == f"333 {0o027} 3 {{0}}\n"


REFUSED = {
    "a call while ranks run": ("torchrun python & sleep 1; torchrun python", "one gang at a time", True),
    "a launcher past orch": ("env -i /bin/bash -c 'exec -a torchrun sleep 60'", "runs without orch: torchrun 60", True),
    "a folder that is gone": ("mkdir gone; cd gone; rmdir ../gone; torchrun python", "and there is no such folder", True),
    "a stand-in that is killed": ("timeout -s KILL 2 torchrun python; sleep 60", "ended by its script", False),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_call_leaving_ranks_alone_ends_the_attempt(case: str, tmp_path: Path) -> None:
    text, reason, is_final = REFUSED[case]
    (report,) = asyncio.run(play(tmp_path, text)).refused
    assert reason in report.reason and report.is_final is is_final
