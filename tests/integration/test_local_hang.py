"""Is a hang seen, and its culprit named, with the stacks of all ranks taken before anything is killed?"""

from __future__ import annotations

import re
import signal
import time

from orchestrator.brain.model import decisions as d
from orchestrator.core.wire import orders, reports
from tests.support.local import FAKE_TORCH, STEPPER, Desk, Sight, kill, wait_until

SLEEPER = (
    STEPPER
    + """
def sleep_for_ever(step):
    if attempt == 1 and step == 6 and rank == 3:
        time.sleep(3600)
    if attempt == 1 and step == 7:
        wait_for_peers()


def wait_for_peers():
    while True:
        time.sleep(0.1)


run(10, at_step=sleep_for_ever)
"""
)

TALKER = """
import time
for number in range(50):
    print("still here", number, flush=True)
    time.sleep(0.1)
"""


def _stacks(job: Sight) -> dict[str, str]:
    folder = job.job.folder.evidence(1)
    return {path.name: path.read_text() for path in sorted(folder.glob("*-stacks.txt"))}


def test_a_stopped_rank_is_a_hang_within_seconds(desk: Desk) -> None:
    script = STEPPER + "run(1000000 if attempt == 1 else 10)"
    job = desk.submit({**FAKE_TORCH, "train.py": script}, nodes=2, entrypoint="train.py")
    job.wait_for_step(5)
    kill(job.rank_procs()[2], signal.SIGSTOP)
    began_s = time.monotonic()
    wait_until(lambda: job.news(d.Judge), "the verdict")
    assert time.monotonic() - began_s < 30  # 5 s of standing still, and a busy machine
    assert job.wait()["state"] == "SUCCEEDED"
    verdict = job.verdict()
    assert (verdict["kind"], verdict["ranks"], verdict["node"]) == ("hang", [2], "node-1")
    assert "is stopped (state T)" in verdict["summary"]
    stacks = _stacks(job)
    assert list(stacks) == [f"rank-{rank:05d}-stacks.txt" for rank in range(4)]
    assert "state T" in stacks["rank-00002-stacks.txt"]
    assert all("in run" in stacks[f"rank-{rank:05d}-stacks.txt"] for rank in (0, 1, 3))
    assert verdict["evidence"][0].startswith("stacks of 4 ranks")
    assert any(line.startswith("rank 2 (state T; stopped") for line in verdict["evidence"])


def test_sleeping_rank_is_named_with_its_stack(desk: Desk) -> None:
    """A rank that sleeps forever is named, and its stack shows where."""
    job = desk.submit({**FAKE_TORCH, "train.py": SLEEPER}, nodes=2, entrypoint="train.py", monitor={"hang_timeout": 5})
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.kinds() == ["hang", None]
    verdict = job.verdict()
    assert (verdict["ranks"], verdict["node"]) == ([3], "node-1")
    assert "sleep_for_ever" in _stacks(job)["rank-00003-stacks.txt"]
    assert "wait_for_peers" in _stacks(job)["rank-00000-stacks.txt"]
    assert any("sleep_for_ever" in line for line in verdict["evidence"])
    kinds = [type(one) for one in job.news(reports.Inspected, d.Judge, orders.Stop)]
    looked = kinds[: kinds.index(d.Judge)]
    assert len(looked) >= 4 and set(looked) == {reports.Inspected}, "both nodes were looked at twice before the verdict"


def test_on_hang_fail_ends_the_job(desk: Desk) -> None:
    job = desk.submit(
        {"train.py": "import time; time.sleep(3600)"}, procs_per_node=1, entrypoint="train.py",
        monitor={"hang_timeout": 2, "on_hang": "fail"},
    )  # fmt: skip
    assert job.wait()["state"] == "FAILED"
    assert job.kinds() == ["hang"]


def test_on_hang_notify_reports_and_keeps_job_running(desk: Desk) -> None:
    script = "import time; time.sleep(12); print('awake')"
    job = desk.submit(
        {"train.py": script}, procs_per_node=1, entrypoint="train.py",
        monitor={"hang_timeout": 2, "on_hang": "notify"},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.kinds() == [None]
    assert "awake" in job.log()
    notices = job.attempts()[0]["notices"]
    assert len(notices) == 1
    # On a busy machine Python itself still starts, which is progress, after the gang is there
    assert re.search(r"no (sign of progress|step yet) for \d+ s", notices[0])


def test_log_output_is_a_sign_of_life(desk: Desk) -> None:
    job = desk.submit(
        {"train.py": TALKER},
        procs_per_node=1,
        entrypoint="train.py",
        monitor={"hang_timeout": 3, "on_hang": "fail"},
    )
    assert job.wait()["state"] == "SUCCEEDED"
