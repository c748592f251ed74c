"""The table of ranks with what they use and tell, as it was looked at, and as wide as the terminal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from orchestrator.core.jobdir.status_file import CheckpointStatus, Status
from orchestrator.core.status_types import ReportedNumber, Training, Usage
from orchestrator.views import cells
from orchestrator.views import status as status_view
from tests.support import golden, jobs

USAGE = Usage(1.04, 12_300_000_000, 0.97, 70_100_000_000)


def _measured(ranks: int, loss: float = 2.34567, usage: Usage = USAGE) -> Status:
    """Return the status of a job whose ranks tell everything."""
    known = jobs.status([*jobs.submitted(), *jobs.running(1, 1.0, 20), jobs.saved(4.5)], 6.0)
    return replace(
        known,
        training=_with_loss(known.training, loss),
        ranks=tuple(
            replace(rank, training=_with_loss(rank.training, loss), usage=usage) for rank in known.ranks[:ranks]
        ),
    )


def _with_loss(training: Training, loss: float) -> Training:
    return replace(training, loss=ReportedNumber(loss))


def test_ranks_with_all_numbers_match_golden_file() -> None:
    """Ranks that report everything are shown as they were reviewed."""
    golden.check("status-measured.txt", cells.plain_text(status_view.job(_measured(4))))


@pytest.mark.parametrize(
    ("chars", "heads"),
    [
        (160, "RANK NODE PID STATE STEP STEPS/S LOSS CPU MEMORY GPU GPU MEMORY BEAT EXIT"),
        (92, "RANK NODE STATE STEP STEPS/S LOSS CPU MEMORY GPU GPU MEMORY BEAT EXIT"),
        (80, "RANK NODE STATE STEP STEPS/S LOSS CPU MEMORY GPU BEAT EXIT"),
        (60, "RANK NODE STATE STEP STEPS/S LOSS GPU BEAT EXIT"),
        (40, "RANK NODE STATE STEP STEPS/S EXIT"),
    ],
)
def test_rank_table_fits_terminal_dropping_columns_in_order(chars: int, heads: str) -> None:
    lines = cells.plain_text(status_view.job(_measured(4), chars_max=chars)).splitlines()[-5:]
    assert " ".join(lines[0].split()) == heads
    assert max(map(len, lines)) <= max(chars, len(lines[0]))


def test_non_finite_loss_is_shown_as_such() -> None:
    text = cells.plain_text(status_view.job(_measured(1, loss=math.nan)))
    assert "  loss nan  " in text
    assert "GPU" not in cells.plain_text(status_view.job(_measured(1, usage=Usage(1.0))))


def test_checkpoint_that_is_not_safe_yet_has_a_line() -> None:
    known = _measured(1)
    assert "not safe yet" not in cells.plain_text(status_view.job(known))
    waits = replace(known, checkpoint=CheckpointStatus(jobs.CKPT, 20, False, 8_400_000_000, 2_100_000_000))
    lines = cells.plain_text(status_view.job(waits)).splitlines()
    (at,) = [index for index, line in enumerate(lines) if line.startswith("checkpoint ")]
    assert lines[at + 1] == "            not safe yet: 2.1 GB of 8.4 GB copied to another host or a disk"
