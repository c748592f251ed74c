"""What the post-mortem says of where an attempt began."""

from __future__ import annotations

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.checkpoints.resume_choice import ResumePoint, SkippedCheckpoint
from orchestrator.core.codec import Json
from orchestrator.views import cells, post_mortem
from tests.support import jobs

BEFORE = jobs.crashed_once()[: -len(jobs.running(2, 7.1, 5)) - 1]
"""A crash at step 23, with a checkpoint of step 20."""


def test_attempt_ignoring_checkpoint_did_not_begin_from_it() -> None:
    """An attempt that ignored its checkpoint is not said to have begun from it."""
    again = [jobs.again(2, 7.0, ResumePoint(jobs.CKPT, 20, 1)), *jobs.running(2, 7.1, 22)]
    elsewhere = e.ResumedElsewhere(12.0, 2, 0, "step-20.pt", 20)
    why = jobs.told([*BEFORE, *again, elsewhere, *jobs.beats(2, 13.0, 23)])
    attempt = why["attempts"][1]
    assert (attempt["first_step"], attempt["resumed_step"]) == (1, 20)
    text = cells.plain_text(post_mortem.post_mortem(why))
    came = "checkpoints/step-20.pt was given, but the script started at step 1 (does it read ORCH_RESUME_FROM?)"
    assert came.split("/")[-1] in text
    assert "from step-20.pt" not in text


def test_attempt_shows_checkpoint_proof_and_skipped_newer_ones() -> None:
    """An attempt shows how its checkpoint is proved and which newer ones it did not start from."""
    passed = (SkippedCheckpoint(3, "step-22.pt", 22, "torn: the attempt ended while it was written"),) * 4
    begin = d.BeginAttempt(7.0, "restart after crash", 2, ResumePoint(jobs.CKPT, 20, 1), passed)
    why = jobs.told([*BEFORE, begin, *jobs.running(2, 7.1, 5)])
    why["attempts"][1]["resumed_save"] = {
        "save": 1, "step_source": "stated", "closed_by": "every rank has made a step since", "compared": "sha256",
    }  # fmt: skip
    text = cells.plain_text(post_mortem.post_mortem(why))
    torn = "    skipped: step-22.pt (step 22), torn: the attempt ended while it was written\n"
    proof = "    checkpoint 1, step 20 (from its name or content); verified by sha256\n    complete: every rank has made a step since\n"
    assert f"UTC\n{proof}{torn * 3}    skipped: 1 more\n" in text
    assert post_mortem.transition(why, 2).startswith("from step-20.pt; attempt 1 ended")  # a notice tells it


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"checkpoint": None, "offered": []},
            "there is no checkpoint: orch resume would start from the beginning\n",
        ),
        (
            {"checkpoint": None, "offered": ["/a", "/b"]},
            "start from the beginning; orch checkpoints shows 2 files that it could start from\n",
        ),
        (
            {"passed": [{"save": 2, "path": "step-22.pt", "step": 22, "why": "gone: step-22.pt is gone"}]},
            " and repeat 5 steps\n  skipped: step-22.pt (step 22), gone: it is gone\n",
        ),
        (
            {
                "misfit": {
                    "path": f"{jobs.ROOT}/checkpoints/step-20",
                    "why": "has files of each of the 8 ranks",
                }
            },
            "a restart is refused: step-20 has files of each of the 8 ranks\n",
        ),
    ],
)
def test_post_mortem_ends_with_current_restart_checkpoint(found: Json, said: str) -> None:
    """A post-mortem ends with what a restart starts from with the files as they are now."""
    why = {**jobs.told([*jobs.crashed_once(), jobs.end(2, 13.0, d.JobEnd.CANCELLED, "cancelled")]), **found}
    assert said in cells.plain_text(post_mortem.post_mortem(why))


def test_attempt_resuming_from_checkpoint_names_it() -> None:
    """An attempt that resumes from its checkpoint is said to come from it."""
    why = jobs.told(jobs.crashed_once())
    assert (why["attempts"][1]["first_step"], why["attempts"][1]["resumed_step"]) == (21, 20)
    text = cells.plain_text(post_mortem.post_mortem(why))
    assert "  from step-20.pt, since" in text and "was given" not in text
