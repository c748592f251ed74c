"""Post-mortem of an attempt that its user ended while it looked like a hang."""

from __future__ import annotations

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import News
from tests.support import jobs

RUNNING = [*jobs.submitted(), *jobs.running(1, 1.0, 20)]
TEXT = "no step for 12 s (usual: 0.1 s): rank 1 on node-0: in sleep(), train.py:9 main"
SUSPECTED = d.Notice(20.0, TEXT, 1, d.NoticeTopic.SUSPECT, "train.py:9")
RESTARTED = d.Finish(30.0, "a restart requested by the user", 1, d.AttemptEnd.RESTART)
CANCELLED = d.Finish(30.0, "cancelled by the user", 1, d.AttemptEnd.CANCELLED)


@pytest.mark.parametrize("end", [RESTARTED, CANCELLED])
def test_suspicion_stays_when_user_ends_attempt(end: News) -> None:
    assert _remarks([*RUNNING, SUSPECTED, end]) == [f"suspicion at 11:07:00 UTC: {TEXT}"]


@pytest.mark.parametrize(
    "after",
    [
        [*jobs.beats(1, 25.0, 30), RESTARTED],
        [d.Finish(30.0, "every rank exited with code 0", 1)],
        [],  # the job's own suspicion is shown
    ],
    ids=["steps", "done", "running"],
)
def test_suspicion_is_dropped_otherwise(after: list[News]) -> None:
    assert _remarks([*RUNNING, SUSPECTED, *after]) == []


def _remarks(news: list[News]) -> list[str]:
    remarks: list[str] = jobs.told(news)["attempts"][0]["remarks"]
    return remarks
