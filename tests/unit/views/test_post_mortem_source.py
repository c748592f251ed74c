"""What the post-mortem says of where an attempt began."""

from __future__ import annotations

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.views import cells, post_mortem
from tests.support import jobs

BEFORE = jobs.crashed_once()[: -len(jobs.running(2, 7.1, 5)) - 1]
"""A crash at step 23, with a checkpoint of step 20."""


def test_an_attempt_that_ignored_its_checkpoint_is_not_said_to_have_begun_from_it() -> None:
    again = [jobs.again(2, 7.0, d.Checkpoint(jobs.CKPT, 20)), *jobs.running(2, 7.1, 22)]
    written_again = e.CheckpointFound(12.0, "node-0", 2, jobs.CKPT, 20)
    why = jobs.told([*BEFORE, *again, written_again, *jobs.beats(2, 13.0, 23)])
    attempt = why["attempts"][1]
    assert (attempt["first_step"], attempt["resumed_step"]) == (1, 20)
    text = cells.plain(post_mortem.post_mortem(why))
    came = "checkpoints/step-20.pt was given, but the script began at step 1 (does it read ORCH_RESUME_FROM?)"
    assert came.split("/")[-1] in text
    assert "from step-20.pt" not in text


def test_an_attempt_that_goes_on_from_its_checkpoint_is_said_to_come_from_it() -> None:
    why = jobs.told(jobs.crashed_once())
    assert (why["attempts"][1]["first_step"], why["attempts"][1]["resumed_step"]) == (21, 20)
    text = cells.plain(post_mortem.post_mortem(why))
    assert "  from step-20.pt, since" in text and "was given" not in text
