"""In Slurm's queue: what is gone on from is what was saved, whatever the file server's clock, names and habits."""

from __future__ import annotations

import pytest

from tests.support.cluster import truth
from tests.support.cluster.desk import Desk

pytestmark = pytest.mark.soak  # two minutes


def test_clocks_names_and_habits_change_nothing_of_what_is_whole(desk: Desk) -> None:
    truth.assert_true(desk)


def test_a_script_that_begins_anew_is_not_resumed(desk: Desk) -> None:
    truth.assert_begun_anew(desk)


def test_a_file_that_is_written_over_at_every_step_costs_one_copy(desk: Desk) -> None:
    (job,) = truth.play(desk, ("rewritten",)).values()
    truth.assert_undisturbed(job, range(16, 25))
