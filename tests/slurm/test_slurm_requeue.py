"""What if Slurm takes an allocation away, or loses it? Ranks save themselves, and the job goes on in the next one."""

from __future__ import annotations

import re

import pytest

from orchestrator.core.jobdir import status_file
from orchestrator.core.slurm.sbatch_options import EXPEDITED
from tests.support.cluster.desk import FAKE_TORCH, STEPPER, Desk, Job
from tests.support.cluster.slurm import SlurmBox
from tests.support.cluster.slurm_jobs import SAVES, TRAINS, allocations


def node_log(job: Job, node: str, attempt: int = 1) -> str:
    """Return what the agent of a node has noted of an attempt."""
    return job.folder.node_log(attempt, node).read_text()


def lose_batch_script(slurm: SlurmBox, job: Job) -> None:
    """Kill the batch script on the first node, with what Slurm has there for it, and the supervisor."""
    host, id = slurm.host("node1"), job.slurm_id()
    words = (f"slurmstepd: [{id}.batch]", f"job{int(id):05d}/slurm_script")
    host.kill([one.proc for one in host.processes() if any(word in one.command for word in words)])
    job.kill_supervisor()


def require_expedited(slurm: SlurmBox) -> None:
    """Skip, with one line that says what is missing, where Slurm knows no expedited requeue."""
    version = slurm.login.run(["sbatch", "--version"]).stdout
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (25, 11):
        pytest.skip(f"{EXPEDITED} needs Slurm 25.11 or newer, and this is {version.strip()}")


def test_preempted_job_saves_and_resumes_in_new_allocation(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit({"train.py": SAVES, **FAKE_TORCH}, entrypoint="train.py 300 1")
    job.wait_for_step(20)
    other = slurm.queue.preempt(4)
    job.wait_for_line("saved step")
    slurm.queue.scancel(other, user="root")
    seen = job.wait()
    assert seen["state"] == "SUCCEEDED" and job.kinds()[0] == "preempted"
    assert seen["restarts"] == 1 and len(allocations(job)) == 2
    steps = job.steps_logged(0, 1) + job.steps_logged(0, 2)
    assert steps == list(range(1, 301)), "no step is lost, and none is made twice"


def test_preemption_grace_is_used_to_the_end(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit({"train.py": SAVES, **FAKE_TORCH}, entrypoint="train.py 200 1", slurm={"partition": "low"})
    job.wait_for_step(20)
    other = slurm.queue.sbatch(
        "sleep 600", "--nodes=4", "--exclusive", "--no-requeue", "--output=/dev/null", user="root"
    )
    job.wait_for_line("saved step")
    slurm.queue.scancel(other, user="root")
    assert job.wait()["state"] == "SUCCEEDED" and job.kinds() == ["preempted", None]
    assert job.steps_logged(0, 1) + job.steps_logged(0, 2) == list(range(1, 201))


def test_requeued_job_resumes_and_so_does_time_limited(slurm: SlurmBox, desk: Desk) -> None:
    """A job resumes if somebody requeues it, or if it has saved before its time limit."""
    job = desk.submit(
        {"train.py": SAVES, **FAKE_TORCH},
        entrypoint="train.py 400 2",
        time_limit="10m",
        time_limit_action="requeue",
    )
    job.wait_for_step(20)
    slurm.queue.requeue(job.slurm_id())
    job.wait_until(lambda: len(job.steps_logged(0, 2)) > 20, "steps of the second attempt")
    slurm.queue.end_in(job.slurm_id(), 120)
    slurm.queue.warn(job.slurm_id())
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.kinds() == ["preempted", "time_limit", None] and len(allocations(job)) == 3
    assert [step for attempt in (1, 2, 3) for step in job.steps_logged(0, attempt)] == list(range(1, 401))


def test_early_time_limit_warning_is_ignored(slurm: SlurmBox, desk: Desk) -> None:
    job = desk.submit(TRAINS, time_limit="10m")
    job.wait_for_step(5)
    slurm.queue.warn(job.slurm_id())
    job.wait_until(lambda: "Slurm has not sent it" in job.folder.supervisor_log.read_text(), "what came of it")
    assert job.wait_for_step(job.seen()["step"] + 40)["attempt"] == 1 and job.kinds() == [None]
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


@pytest.mark.parametrize(
    ("is_supervised", "extra"),
    [
        (False, []),
        pytest.param(True, [], marks=pytest.mark.soak),
        pytest.param(False, [EXPEDITED], marks=pytest.mark.soak),
    ],
)
def test_gang_behind_network_cut_ends_before_next_attempt(
    slurm: SlurmBox, desk: Desk, is_supervised: bool, extra: list[str]
) -> None:
    """A gang that trains on behind a network cut ends before the next attempt starts, also where Slurm gives nodes at once."""
    if extra:
        require_expedited(slurm)
    job = desk.submit(TRAINS, slurm={"extra": extra})
    job.wait_for_step(5)
    assert job.placed() == ["node1", "node2"]
    for node in ("node1", "node2"):
        for other in ("login", "node3", "node4"):
            slurm.cut_between(node, other)
    if not is_supervised:
        lose_batch_script(slurm, job)
    cut_at_step = job.steps_logged(0)[-1]
    job.wait_until(lambda: job.steps_logged(0)[-1] > cut_at_step + 100, "steps of a gang that Slurm does not reach")
    for node in ("node1", "node2"):
        slurm.queue.down(node)  # sooner than slurmctld finds out
    job.wait_for_step(5, attempt=2)
    assert set(job.placed()) == {"node3", "node4"} and len(allocations(job)) == 2
    began_s = status_file.parse_iso(job.why()[1]["started_at"])
    for rank in range(4):
        assert job.folder.rank_log(1, rank).stat().st_mtime < began_s, "two attempts never run together"
        assert f"in allocation {allocations(job)[1]}: leaving" in node_log(job, f"node{rank // 2 + 1}")
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


@pytest.mark.soak
def test_job_on_lost_node_runs_at_once_on_others(slurm: SlurmBox, desk: Desk) -> None:
    require_expedited(slurm)
    job = desk.submit(TRAINS, slurm={"extra": [EXPEDITED]})
    job.wait_for_step(5)
    lost = job.placed()[1]
    slurm.cut_between(lost, "login")
    slurm.cut_between(lost, job.placed()[0])
    slurm.queue.down(lost)
    job.wait_for_step(5, attempt=2)
    assert lost not in job.placed() and len(allocations(job)) == 2
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


@pytest.mark.parametrize(("end", "says"), [("SUCCEEDED", "COMPLETED"), ("FAILED", "FAILED"), ("CANCELLED", "FAILED")])
@pytest.mark.parametrize("extra", [[], pytest.param([EXPEDITED], marks=pytest.mark.soak)])
def test_slurm_holds_no_job_that_has_ended(slurm: SlurmBox, desk: Desk, end: str, says: str, extra: list[str]) -> None:
    """Slurm has the same word for its end with both kinds of requeue."""
    if extra:
        require_expedited(slurm)
    script = {"SUCCEEDED": "run(3, 0.01)", "FAILED": "sys.exit(3)", "CANCELLED": "run(100000, 0.05)"}[end]
    job = desk.submit({"train.py": STEPPER + script, **FAKE_TORCH}, restart={"max": 0}, slurm={"extra": extra})
    if end == "CANCELLED":
        job.wait_for_step(5)
        desk.orch("cancel", job.id)
    assert job.wait()["state"] == end
    job.wait_until(lambda: not slurm.queue.entries(), "an empty queue")
    shown = slurm.login.run(["scontrol", "-o", "show", "job", job.slurm_id()]).stdout
    assert f"JobState={says} " in shown and f"ExitCode={int(end != 'SUCCEEDED')}:0 " in shown and "Restarts=0 " in shown
