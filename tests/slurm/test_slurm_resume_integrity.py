"""In Slurm's queue: what is gone on from is what was saved, whatever the file server's clock, names and habits."""

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


def test_file_rewritten_every_step_costs_one_copy(desk: Desk) -> None:
    (job,) = truth.play(desk, ("rewritten",)).values()
    truth.assert_undisturbed(job, range(16, 25))
