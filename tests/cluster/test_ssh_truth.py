"""On hosts that share no disk: what is gone on from is what was saved, whatever the clock, names and habits."""

from __future__ import annotations

import pytest

from tests.support.cluster import truth
from tests.support.cluster.desk import Desk

pytestmark = pytest.mark.soak  # two minutes


def test_clocks_names_and_habits_change_nothing_of_what_is_whole(desk: Desk) -> None:
    truth.assert_true(desk)


def test_a_script_that_begins_anew_is_not_resumed(desk: Desk) -> None:
    truth.assert_begun_anew(desk)


def test_a_file_that_is_written_over_at_every_step_has_no_copy_and_that_is_said(desk: Desk) -> None:
    (job,) = truth.play(desk, ("rewritten",)).values()
    truth.assert_undisturbed(job, range(1))
    assert "is cut off" in job.why()[1]["passed"][0]["why"]
