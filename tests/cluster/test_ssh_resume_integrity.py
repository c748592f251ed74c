"""On hosts that share no disk: what is gone on from is what was saved, whatever the clock, names and habits."""

from __future__ import annotations

import pytest

from tests.support.cluster import truth
from tests.support.cluster.desk import Desk

pytestmark = pytest.mark.soak  # two minutes


def test_clocks_and_names_do_not_change_complete_checkpoints(desk: Desk) -> None:
    """Clocks, names and the script's way of saving do not change which checkpoints are complete."""
    truth.assert_true(desk)


def test_script_that_starts_from_scratch_is_not_resumed(desk: Desk) -> None:
    truth.assert_begun_anew(desk)


def test_file_rewritten_every_step_is_reported_without_copy(desk: Desk) -> None:
    (job,) = truth.play(desk, ("rewritten",)).values()
    truth.assert_undisturbed(job, range(1))
    assert "is cut off" in job.why()[1]["passed"][0]["why"]
