"""Is a user told when a resume changes the effective batch size?"""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.cli import lifecycle
from tests.support import jobs

BATCH = {"per_device": 16, "accumulation": 4}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"batch": BATCH}, {"batch": BATCH, "nodes": 1}, "effective batch 256 → 128: 128 = 16 per device × 4 accumulated × 2 ranks\n         to keep 256, let the script accumulate 8 times, and --set batch.accumulation=8\n"),
        ({"batch": BATCH}, {"batch": BATCH, "nodes": 3}, "effective batch 256 → 384: 384 = 16 per device × 4 accumulated × 6 ranks\n"),
        ({"batch": BATCH}, {"batch": {**BATCH, "accumulation": 8}, "nodes": 1}, ""),
        ({"batch": BATCH}, {"batch": BATCH}, ""),
        ({}, {"nodes": 1}, ""),
        ({}, {"batch": BATCH}, ""),
    ],
)  # fmt: skip
def test_another_effective_batch_is_told_with_both_numbers(
    before: dict[str, Any], after: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lifecycle._warn_of_batch(jobs.plan(**before), jobs.plan(**after))
    err = capsys.readouterr().err
    assert said in err and bool(said) == bool(err)
