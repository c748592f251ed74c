"""Slurm backend: agents come up by srun, failures name the right node, the end of an allocation is noticed. Test programs
stand in for srun and scontrol."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.backends.slurm import allocation, backend, end_causes
from orchestrator.backends.slurm.allocation import Grant, find_grant
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.core.errors import OwnershipLostError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.observations import Retryable
from orchestrator.core.status_types import AllocationEndCause
from tests.support import fake_host

pytestmark = pytest.mark.slow

SRUN = """#!/bin/sh
n=0; until mkdir "{folder}/runs/$n" 2>/dev/null; do n=$((n + 1)); test -d "{folder}/runs" || exit 9; done
run="{folder}/runs/$n"
printf '%s\\n' "$@" >"$run/argv.part"; env >"$run/env"; cat >"$run/stdin"; mv "$run/argv.part" "$run/argv"
test ! -e "{folder}/say.$n" || cat "{folder}/say.$n"
until test -e "{folder}/end.$n"; do test -d "{folder}" || exit 9; sleep 0.05; done
exit "$(cat "{folder}/end.$n")"
"""
SCONTROL = """#!/bin/sh
echo "$@" >>"{folder}/asked"
case "$1 $2" in "show config") echo 'KillWait                = 7 sec'; exit ;; esac
test ! -e "{folder}/refusal" || {{ cat "{folder}/refusal" >&2; exit 1; }}
case "$2" in show) cat "{folder}/job" ;; esac
echo "ERROR: ld.so: object 'libdarshan.so' from LD_PRELOAD cannot be preloaded: ignored." >&2
"""
RUNNING = "JobId=8 JobState=RUNNING Restarts=0 RunTime=00:00:30 TimeLimit=00:02:00 ExcNodeList=(null) NodeList=n[1-3]"
ENVIRON = {"SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_MEM_PER_CPU": "1", "ORCH_ENDING": ""}


@dataclass
class World:
    """A job folder in an allocation of three nodes."""

    folder: Path
    job: JobDir
    woken: threading.Event = field(default_factory=threading.Event)
    backends: list[SlurmBackend] = field(default_factory=list)

    def backend(self, *, options: tuple[str, ...] = (), **environ: str) -> SlurmBackend:
        grant = find_grant(self.job, {**ENVIRON, **environ})
        assert grant is not None
        env = {**os.environ, **ENVIRON, **environ}
        one = SlurmBackend(self.job, grant, env, self.woken.set, options)
        self.backends.append(one)
        return one

    def launch(self, one: SlurmBackend, *nodes: str) -> list[tuple[str, LaunchError]]:
        for node in nodes:
            one.launch(fake_host.config(node, job=self.job.id, root=str(self.job.root), allocated=True))
        return one.failures()

    def failures(self, one: SlurmBackend) -> dict[str, LaunchError]:
        found: dict[str, LaunchError] = {}

        def is_found() -> bool:
            found.update(one.failures())
            return bool(found)

        fake_host.wait_for(is_found, "a failure")
        return found

    def run(self, number: int, what: str = "argv") -> list[str]:
        path = self.folder / "runs" / str(number) / "argv"
        fake_host.wait_for(path.exists, f"srun number {number}")
        return path.with_name(what).read_text().splitlines()

    def runs(self) -> int:
        return len(list((self.folder / "runs").iterdir()))

    def say(self, number: int, text: str) -> None:
        (self.folder / f"say.{number}").write_text(text)

    def end(self, number: int, code: int = 1) -> None:
        (self.folder / f"end.{number}").write_text(str(code))

    def shows(self, text: str) -> None:
        (self.folder / "job").write_text(f"{text}\n")

    def prints(self, text: str) -> None:
        with self.job.batch_log.open("a") as file:
            file.write(f"{text}\n")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    before = [(signum, signal.getsignal(signum)) for signum in (signal.SIGUSR1, signal.SIGTERM)]
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        fake_host.program(tmp_path / "bin", name, text.format(folder=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    one = World(tmp_path, JobDir(tmp_path / "jobs" / "j"))
    for folder in (one.job.logs, one.job.scripts, tmp_path / "runs"):
        folder.mkdir(parents=True)
    one.job.slurm.write_text('["8"]')
    one.shows(RUNNING)
    yield one
    for number in range(one.runs() + 1):
        one.end(number)
    for made in one.backends:
        made.close()
    for signum, handler in before:
        signal.signal(signum, handler)


# --- agents


def test_launches_of_one_round_share_one_srun(world: World) -> None:
    """All launches of one round share one srun, which gets its orders on standard input."""
    one = world.backend()
    assert world.launch(one, "n3", "n1") == [] and world.woken.is_set()
    argv = world.run(0)
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n1,n3", "--overlap", "--no-kill", "--mem=0"} <= set(argv)
    assert argv[-2:] == ["/bin/sh", str(world.job.scripts / "agent.sh")]
    told = json.loads(world.run(0, "stdin")[0])
    assert told["node"] == "" and told["token"] == "c" * 64 and told["token"] not in " ".join(argv)
    assert "SLURM_JOB_ID=8" in world.run(0, "env") and "SLURM_MEM_PER_CPU=1" not in world.run(0, "env")
    assert world.launch(one, "n1") == []
    assert len(list(world.job.steps.glob("*.json"))) == 1, "it is coming up already"


def test_failed_node_is_reported_and_its_victims_restarted(
    world: World,
) -> None:
    """A node that fails is reported, and the nodes that it took along are restarted silently."""
    world.say(
        0,
        "srun: error: Task launch for StepId=8.0 failed on node n2: Communication failure\nsrun: Job step aborted\n",
    )
    one = world.backend()
    world.end(0)
    world.launch(one, "n1", "n2", "n3")
    assert [str(err) for err in world.failures(one).values()] == ["srun: Communication failure"]
    # The others are known to be gone when srun is, which may be a look later.
    fake_host.wait_for(lambda: one.failures() == [] and world.runs() > 1, "another srun")
    assert "--nodelist=n1,n3" in world.run(1)
    world.launch(one, "n2")
    assert "--nodelist=n2" in world.run(2)


def test_step_refused_by_slurm_is_tried_per_node(world: World) -> None:
    refusal = "srun: error: Unable to create step for job 8: Requested node configuration is not available\n"
    world.say(0, refusal)
    world.say(2, refusal)
    one = world.backend()
    for number in (0, 2):
        world.end(number)
    world.launch(one, "n1", "n2", "n3")
    failures = world.failures(one)
    fake_host.wait_for(lambda: world.runs() == 4, "an srun for each node")
    assert len(failures) == 1
    ((node, err),) = failures.items()
    assert f"--nodelist={node}" in world.run(2) and err.retryable is Retryable.PERMANENT


def test_silent_agent_is_failure_and_its_srun_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that never reports is a failure, and its srun is ended."""
    monkeypatch.setattr(backend, "STEP_S_MAX", 0.0)
    one = world.backend()
    world.launch(one, "n1")
    assert "no agent came up" in str(world.failures(one)["n1"])


def test_node_outside_allocation_is_refused_for_good(world: World) -> None:
    one = world.backend()
    ((node, err),) = world.launch(one, "n9")
    assert (node, err.retryable, world.runs()) == ("n9", Retryable.PERMANENT, 0)


def test_agent_is_gone_only_when_srun_reports_it(world: World) -> None:
    world.say(0, "0: orch agent on n1\n1: orch agent on n2\nsrun: error: n2: task 1: Killed\n")
    one = world.backend()
    world.launch(one, "n1", "n2")
    fake_host.wait_for(lambda: one.agent_death("n2"), "the end of the agent")
    assert one.agent_death("n2") == "srun: Killed" and one.agent_death("n1") is None
    world.launch(one, "n2")
    assert one.agent_death("n2") is None, "another one is coming up"


def test_next_supervisor_watches_sruns_of_previous_one(world: World) -> None:
    world.say(0, "0: orch agent on n1\n1: orch agent on n2\n")
    world.launch(world.backend(), "n1", "n2")
    world.run(0)
    path = next(world.job.steps.glob("*.log"))
    fake_host.wait_for(lambda: "on n2" in path.read_text(), "the words of the agents")
    later = world.backend()
    assert later.agent_death("n1") is None
    with path.open("a") as log:
        log.write("srun: error: n1: task 0: Exited with exit code 137\n")
    assert later.agent_death("n1") == "srun: Exited with exit code 137"
    world.launch(later, "n1")
    world.run(1)
    assert len(list(world.job.steps.glob("8.0-*.json"))) == 2, "no name is used twice"


def test_launch_without_srun_fails_with_fix(world: World) -> None:
    one = world.backend(PATH=str(world.folder / "nothing"))
    ((_, err),) = world.launch(one, "n1")
    assert (err.reason, err.fix) == (
        "srun: No such file or directory",
        "Slurm's commands must be on the batch host",
    )


# --- the allocation


def test_allocation_is_own_only_if_jobs_current_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "RECORD_S_MAX", 0.0)
    assert find_grant(world.job, {}) is None
    assert find_grant(world.job, {**ENVIRON, "SLURM_RESTART_COUNT": "2"}) == Grant("8", 2, ("n1", "n2", "n3"))
    world.job.slurm.write_text('["8", "9"]')
    for number in ("8", "7"):
        with pytest.raises(OwnershipLostError):
            find_grant(world.job, {**ENVIRON, "SLURM_JOB_ID": number})


def endings(one: SlurmBackend) -> list[tuple[AllocationEndCause, float | None]]:
    assert one.allocation is not None
    return [(ending.cause, ending.left_s) for ending in one.allocation.endings()]


def test_time_limit_signal_is_reported_with_time_left(world: World) -> None:
    one = world.backend()
    os.kill(os.getpid(), signal.SIGUSR1)
    fake_host.wait_for(world.woken.is_set, "the news")
    assert endings(one) == [(AllocationEndCause.TIME_LIMIT, 90.0)] and endings(one) == []


def test_signal_long_before_time_limit_is_ignored(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_causes, "EARLY_S_MAX", 0.0)
    one = world.backend(options=("--signal=B:USR1@89",))  # 90 s are left
    os.kill(os.getpid(), signal.SIGUSR1)
    said: list[str] = []

    def is_said() -> bool:
        said.append(capsys.readouterr().out)
        return "Slurm has not sent it" in "".join(said)

    fake_host.wait_for(is_said, "what came of it")
    assert endings(one) == [] and not world.woken.is_set()
    world.shows(RUNNING.replace("RunTime=00:00:30", "RunTime=00:00:31"))
    os.kill(os.getpid(), signal.SIGUSR1)
    fake_host.wait_for(world.woken.is_set, "the news")
    assert endings(one) == [(AllocationEndCause.TIME_LIMIT, 89.0)]


def test_term_is_explained_by_daemon_messages(world: World) -> None:
    word = "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-11-21T06:22:58{} ***"
    world.prints(word.format(" DUE TO TIME LIMIT"))  # of the stay before
    one = world.backend()
    world.prints(word.format(" DUE TO PREEMPTION"))
    os.kill(os.getpid(), signal.SIGTERM)
    fake_host.wait_for(world.woken.is_set, "the news")
    assert endings(one) == [(AllocationEndCause.PREEMPTED, 7.0)]


def test_signal_before_supervisor_start_is_handled(world: World) -> None:
    """A signal that came before the supervisor started is handled too."""
    one = world.backend(ORCH_ENDING="USR1")
    fake_host.wait_for(world.woken.is_set, "the news")
    assert endings(one) == [(AllocationEndCause.TIME_LIMIT, 90.0)]


def test_term_that_ends_nothing_is_ignored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "EXPLAIN_S_MAX", 0.0)
    one = world.backend()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    fake_host.wait_for(world.woken.is_set, "the news")
    assert endings(one) == [(AllocationEndCause.TIME_LIMIT, 90.0)]


def test_agents_warning_shows_preemption_grace(world: World) -> None:
    one = world.backend()
    world.shows(f"{RUNNING} EndTime=2026-11-21T06:00:40 PreemptTime=2026-11-21T06:00:30")
    assert one.allocation is not None
    one.allocation.check()
    fake_host.wait_for(world.woken.is_set, "the news")
    assert endings(one) == [(AllocationEndCause.PREEMPTED, 10.0)]


def test_requeue_excludes_avoided_nodes_beside_user_ones(world: World) -> None:
    world.shows(RUNNING.replace("(null)", "n7"))
    one = world.backend()
    assert one.allocation is not None
    assert one.allocation.requeue({"n2": "no Python"}) == ""
    asked = (world.folder / "asked").read_text().splitlines()
    assert "requeue 8" in asked and "update JobId=8 ExcNodeList=n7,n2" in asked


def test_no_node_is_avoided_without_enough_others(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """No node is avoided where too few would be left."""
    world.shows(f"{RUNNING} NumNodes=3-3 TotalNodes=3")
    one = world.backend()
    assert one.allocation is not None
    assert one.allocation.requeue({"n2": "lost"}) == ""
    assert "ExcNodeList" not in (world.folder / "asked").read_text()
    assert "again: 2 of 3 nodes would be left, and the job takes 3" in capsys.readouterr().out


def test_refused_requeue_is_reported(
    world: World,
) -> None:
    """A requeue that Slurm refuses is reported in its words; one that it has done is not a refusal."""
    one = world.backend()
    assert one.allocation is not None
    (world.folder / "refusal").write_text("Requested operation is presently disabled for job 8\n")
    assert one.allocation.requeue({}) == "Requested operation is presently disabled for job 8"
    (world.folder / "refusal").write_text("Job is pending execution for job 8\n")
    assert one.allocation.requeue({}) == ""
