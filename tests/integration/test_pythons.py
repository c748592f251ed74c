"""Supervisor and agents on one Python, ranks on another: both directions, for every other Python of this machine.

The ranks have a stand-in for torch, which other Pythons need not have.
"""

from __future__ import annotations

import sys

import pytest

from tests.support.local import FAKE_TORCH, STEPPER, Desk, kill
from tests.support.pythons import other_pythons

COMES_BACK_AND_HANGS = (
    STEPPER
    + """
def wait_for_ever(step):
    if attempt == 2 and step == 30 and rank == 1:
        time.sleep(3600)  # here


print("rank on", "%d.%d" % sys.version_info[:2], flush=True)
run(1_000_000 if attempt == 1 else 40, at_step=wait_for_ever)
"""
)


OTHERS = other_pythons()
ENDS = (OTHERS[:1], OTHERS[-1:])
"""The oldest and the newest; those in between are for `make soak`."""


@pytest.mark.parametrize(
    "other",
    [pytest.param(one, marks=() if [one] in ENDS else pytest.mark.soak) for one in OTHERS],
)
@pytest.mark.parametrize("ranks_on_other", [True, False], ids=["ranks on it", "agent on it"])
def test_kill_and_hang_are_handled_across_pythons(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, other: str, ranks_on_other: bool
) -> None:
    """On every Python version a killed rank is restarted and a hang is named."""
    mine = sys.executable
    if not ranks_on_other:
        monkeypatch.setattr(sys, "executable", other)  # the submit side hands it on to supervisor and agents
    job = desk.submit(
        {**FAKE_TORCH, "train.py": COMES_BACK_AND_HANGS},
        entrypoint="train.py",
        python=other if ranks_on_other else mine,
        monitor={"hang_timeout": 5},
        restart={"max": 2},
    )
    job.wait_for_step(5)
    kill(job.rank_procs()[0])
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.kinds() == ["crash", "hang", None]
    verdict = job.attempts()[1]["verdict"]
    assert verdict["ranks"] == [1]
    assert "train.py:20 wait_for_ever" in verdict["summary"], verdict
