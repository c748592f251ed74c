"""Losses that are not finite in, verdicts and distrusted checkpoints out."""

from __future__ import annotations

import math

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.status_types import ReportedNumber, Training
from orchestrator.core.wire.reports import Heartbeat, RankHeartbeat
from tests.support.brain_story import Story, at, none_of, only, save


def report(story: Story, step: int, loss: float, *, nonfinite: int | None = None, attempt: int = 1) -> list[d.Decision]:
    """Let rank 0 report a loss with the steps of this attempt."""
    story.now_s += 5.0
    count = nonfinite if nonfinite is not None else 0 if math.isfinite(loss) else 2
    rank = RankHeartbeat(
        0,
        step,
        "S",
        0,
        0.0,
        optimizer_steps=step,
        nonfinite_losses=count,
        training=Training(ReportedNumber(loss)),
    )
    return story.hear(e.FromNode(0.0, "n0", Heartbeat(attempt, (rank,))))


def diverged(on_nan: str = "rollback") -> Story:
    """Return a job whose loss was finite at steps 10, 20 and 30, and is not from step 40 on; it has saved 10, 20 and 35."""
    story = Story(1, on_nan=on_nan)
    story.run()
    for step in (10, 20, 30):
        report(story, step, 2.5 - step / 100)
        story.hear(story.saved(step + 5 if step == 30 else step))
    report(story, 40, math.nan)
    return story


def test_rollback_restarts_before_last_finite_loss() -> None:
    story = diverged()
    verdict = only(story.said, d.Judge).verdict
    assert (verdict.kind, verdict.ranks, verdict.step, verdict.retry) == (
        d.VerdictKind.DIVERGED,
        (0,),
        40,
        True,
    )
    assert verdict.summary == "rank 0 on n0: the loss is nan, and was 2.2 before"
    assert verdict.evidence == ("the loss was finite up to step 20",)
    begin = only(story.stop_all(), d.BeginAttempt)
    assert begin.resume == at(20)
    assert [one.step for one in begin.passed_over] == [35]


@pytest.mark.parametrize("on_nan", ["notify", "fail"])
def test_on_nan_decides_next_action(on_nan: str) -> None:
    story = diverged(on_nan)
    assert any(isinstance(one, d.Notice) and one.topic is d.NoticeTopic.LOSS for one in story.said)
    if on_nan == "notify":
        assert none_of(story.said, d.Judge)
    else:
        assert only(story.stop_all(), d.EndJob).end is d.JobEnd.FAILED


def test_single_nonfinite_loss_is_no_divergence() -> None:
    """A GradScaler skips such a step on purpose."""
    story = Story(1, on_nan="rollback")
    story.run()
    report(story, 10, 2.0)
    report(story, 20, math.inf, nonfinite=1)
    report(story, 30, 1.9)
    assert none_of(story.said, d.Judge)


def test_second_divergence_before_passing_first_fails_job() -> None:
    story = diverged()
    story.stop_all()
    story.run(2)
    report(story, 5, 2.2, attempt=2)
    report(story, 15, 2.2, attempt=2)
    report(story, 20, math.nan, attempt=2)
    verdict = [one for one in story.said if isinstance(one, d.Judge)][-1].verdict
    assert not verdict.retry
    assert "attempt 1 diverged at the same place" in verdict.evidence[-1]
    assert only(story.stop_all(2), d.EndJob).end is d.JobEnd.FAILED


def test_divergence_after_passing_first_rolls_back() -> None:
    story = diverged()
    story.stop_all()
    story.run(2)
    for step in (10, 30, 50):
        report(story, step, 2.0 - step / 100, attempt=2)
    story.hear(story.saved(60, 2))
    report(story, 70, math.nan, attempt=2)
    verdict = [one for one in story.said if isinstance(one, d.Judge)][-1].verdict
    assert verdict.retry


def test_attempt_without_finite_loss_distrusts_own_checkpoint() -> None:
    story = diverged()
    story.stop_all()
    story.run(2)
    report(story, 5, math.nan, attempt=2)
    assert story.brain.facts.checkpoints[save(20).number].state is CheckpointState.DISTRUSTED
    assert only(story.stop_all(2), d.BeginAttempt).resume == at(10)


def test_first_attempt_without_a_finite_loss_fails() -> None:
    story = Story(1, on_nan="rollback")
    story.run()
    report(story, 5, math.nan)
    verdict = only(story.said, d.Judge).verdict
    assert not verdict.retry
    assert "no loss of it was finite" in verdict.evidence[0]


def report_norms(story: Story, step: int, *norms: tuple[int, float]) -> None:
    """Let rank 0, which never tells a loss, report that its norms are not finite."""
    story.now_s += 5.0
    known = tuple((at, ReportedNumber(norm)) for at, norm in norms)
    rank = RankHeartbeat(0, step, "S", 0, 0.0, optimizer_steps=step, nonfinite_losses=2, gradient_norms=known)
    story.hear(e.FromNode(0.0, "n0", Heartbeat(1, (rank,))))


def test_norms_roll_back_before_last_finite_one() -> None:
    """The gradients of step 31 are those of the weights that step 30 has left."""
    story = Story(1, on_nan="rollback")
    story.run()
    story.hear(story.saved(20), story.saved(30), story.saved(31))
    report_norms(story, 33, (32, math.nan), (31, 1.25))
    verdict = only(story.said, d.Judge).verdict
    assert (verdict.kind, verdict.ranks, verdict.retry) == (d.VerdictKind.DIVERGED, (0,), True)
    assert verdict.summary == "rank 0 on n0: gradient norm is nan at step 32 (last finite 1.25 at step 31)"
    begin = only(story.stop_all(), d.BeginAttempt)
    assert begin.resume == at(30)
    assert [one.step for one in begin.passed_over] == [31]


def test_first_attempt_without_a_finite_norm_fails() -> None:
    story = Story(1, on_nan="rollback")
    story.run()
    report_norms(story, 3, (1, math.nan))
    verdict = only(story.said, d.Judge).verdict
    assert not verdict.retry
    assert verdict.evidence == ("no norm of it was finite, from the first step on",)


def test_repeated_report_of_one_loss_proves_no_later_step_sound() -> None:
    """A script that prints seldom: reports repeat its last loss every few seconds."""
    story = Story(1, on_nan="rollback")
    story.run()
    for step, loss in ((10, 2.4), (20, 2.3), (30, 2.3), (40, 2.3), (50, 2.3)):
        report(story, step, loss)
    story.hear(story.saved(10), story.saved(40))
    report(story, 60, math.nan)
    assert only(story.said, d.Judge).verdict.evidence == ("the loss was finite up to step 10",)
    assert only(story.stop_all(), d.BeginAttempt).resume == at(10)
