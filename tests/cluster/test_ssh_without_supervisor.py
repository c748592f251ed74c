"""What if nothing is heard of the supervisor for long? Ranks that work go on, and are adopted afterwards."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.cluster.box import Box
from tests.support.cluster.desk import FAKE_TORCH, TOGETHER, WAIT_S_MAX, Desk, Job

WORKS = (
    TOGETHER
    + """
kind, pause_s = sys.argv[1], float(sys.argv[2])
gate = Path(os.environ["ORCH_CHECKPOINT_DIR"]).parent / "gate"
number = 0
meet()
while not together(gate.exists()):
    number += 1
    if kind == "inference":
        os.write(1, f"prompt {number}\\n".encode())
    else:
        optimizer.step()
    if kind == "evaluation" and number % 20 == 0:
        os.write(1, b"evaluating\\n")
        time.sleep(pause_s)
        os.write(1, b"evaluated\\n")
    time.sleep(0.2)
"""
)
"""Works until the file `gate` is on rank 0's host: without steps, with evaluations of so many seconds, or with steps."""

KINDS = ("inference", "evaluation", "training")
SHORT = (KINDS[:2], 10.0, 5.5)  # between two evaluations steps are made, as in training
LONG = pytest.param(KINDS, 600.0, 180.0, marks=pytest.mark.soak)
AWAYS = pytest.mark.parametrize(("kinds", "away_s", "pause_s"), [SHORT, LONG], ids=["short", "long"])


def _submit(desk: Desk, kinds: tuple[str, ...], away_s: float, pause_s: float) -> list[Job]:
    """Submit a job of each kind, on hosts of its own, and wait until each has shown what its agents need to know."""
    jobs = []
    for number, kind in enumerate(kinds):
        hosts: dict[str, Any] = {"hosts": f"node[{2 * number + 1}-{2 * number + 2}]"}
        script = f"train.py {kind} {pause_s}"
        jobs.append(
            desk.submit(
                {**FAKE_TORCH, "train.py": WORKS}, entrypoint=script, ssh=hosts, procs_per_node=1,
                monitor={"heartbeat_s": 0.2, "node_timeout": 6, "hang_timeout": 4 * away_s},
            )
        )  # fmt: skip
    for job in jobs:
        job.wait_for_state("RUNNING")
    jobs[1].wait_until(lambda: "evaluated" in jobs[1].log(), "the first evaluation", 10 * pause_s + 60.0)
    time.sleep(1.5 * away_s)  # so long inference must have worked, to be left alone for as long
    return jobs


def _assert_adopted(jobs: list[Job], before: list[list[int]], pause_s: float) -> None:
    for job, pids in zip(jobs, before, strict=True):
        job.status()  # whoever looks revives a supervisor whose guard is gone as well
        job.until(lambda seen: all(one["state"] == "up" for one in seen["nodes"]), "both hosts")
        assert [one["pid"] for one in job.seen()["ranks"]] == pids, job.story()
        (job.on_host(job.placed()[0]).root / "gate").touch()
    for job in jobs:
        status = job.wait(WAIT_S_MAX + pause_s)  # an evaluation may just have begun
        assert (status["state"], status["restarts"]) == ("SUCCEEDED", 0), job.story()


def _pids(jobs: list[Job]) -> list[list[int]]:
    return [[one["pid"] for one in job.seen()["ranks"]] for job in jobs]


@pytest.mark.soak
@AWAYS
def test_ranks_run_while_supervisor_and_watchdog_are_dead(
    desk: Desk, kinds: tuple[str, ...], away_s: float, pause_s: float
) -> None:
    """Ranks keep running while the supervisor and its watchdog are dead."""
    jobs = _submit(desk, kinds, away_s, pause_s)
    before = _pids(jobs)
    for job in jobs:
        job.kill_supervisor()
    time.sleep(away_s)
    _assert_adopted(jobs, before, pause_s)


@AWAYS
def test_ranks_run_while_submit_machine_sleeps(
    desk: Desk, box: Box, kinds: tuple[str, ...], away_s: float, pause_s: float
) -> None:
    """Ranks keep running while the submit machine sleeps."""
    jobs = _submit(desk, kinds, away_s, pause_s)
    before = _pids(jobs)
    box.freeze("login")
    time.sleep(away_s)
    box.thaw("login")
    _assert_adopted(jobs, before, pause_s)


@pytest.mark.soak
def test_dead_ssh_supervisor_restarts_by_itself(desk: Desk) -> None:
    """A dead supervisor of a job over SSH is started again automatically."""
    (job, *_others) = jobs = _submit(desk, KINDS, 1.0, 1.0)
    before, dead = _pids(jobs), job.supervisor()
    desk.box.login.kill([dead])
    job.wait_until(lambda: job.supervisor() != dead, "another supervisor", 15.0)
    _assert_adopted(jobs, before, 1.0)
