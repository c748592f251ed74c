"""What does a checkpoint cost? As long as ranks made no steps because of it: all of a slow save, and nothing of a thread's."""

from __future__ import annotations

import pytest

from orchestrator.client import job_checkpoints
from orchestrator.journal.goodput import TimeKind
from tests.integration.test_local_checkpoints import SAVER
from tests.support.local import FAKE_TORCH, Desk

SAVE_S = 1.5
SCRIPT = """
import threading


def write(step):
    save(f"step-{step}.pt", step)
    time.sleep(1.5)


def at_step(step):
    if step % 20 == 0:
        HOW


run(110, each_s=0.02, at_step=at_step)
"""


@pytest.mark.parametrize(
    ("how", "least_s", "most_s"),
    [("write(step)", 1.3, 1.9), ("threading.Thread(target=write, args=(step,)).start()", 0.0, 0.2)],
)
def test_stall_is_time_without_steps(desk: Desk, how: str, least_s: float, most_s: float) -> None:
    script = SAVER + SCRIPT.replace("HOW", how)
    if most_s < SAVE_S:
        script += "run(500, each_s=0.02, start=110)\n"  # until the checkpoints are seen as complete
    job = desk.submit({**FAKE_TORCH, "train.py": script}, procs_per_node=2, entrypoint="train.py")
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    rows = job_checkpoints.list_checkpoints(job.job.folder, job.job.plan(), verify=False)
    stalls = [row["stall_s"] for row in rows]
    assert len(stalls) == 5
    assert all(stall_s is not None and least_s <= stall_s <= most_s for stall_s in stalls), stalls
    spent = job.job.goodput().rank_seconds()
    both_s = 2 * sum(stalls)  # of a checkpoint the longest stall of a rank: the other one may have had less
    assert 0.7 * both_s - 0.5 <= spent[TimeKind.CHECKPOINT] <= both_s + 1.0, stalls
