"""Events in, what follows out: from which save an attempt begins, what is compared before, and which saves are given up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from orchestrator.brain.brain import COMPARE_S_MAX
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.scheduling import checkpoint_trust
from orchestrator.brain.scheduling.repeated_failure import ALIKE_MAX
from orchestrator.core.checkpoints.checkpoint import CheckpointState, FileLocation, StepSource
from orchestrator.core.observations import Failure
from orchestrator.core.wire import reports
from tests.support.brain_story import Story, at, none_of, only, save
from tests.support.frames import frame

LOADING = Failure("RuntimeError", "size mismatch", "Traceback", frame("train.py:12"), loading="/ckpt/step-20.pt")
UNSAID = dataclasses.replace(LOADING, loading="")


def _crashed(*steps: int, **limits: Any) -> Story:
    """Return a job of one rank that has saved these steps and then crashed, before its end is heard."""
    story = Story(1, **limits)
    story.run()
    story.hear(*(story.saved(step) for step in steps), story.exited(0, count=max(steps, default=0) + 4))
    return story


def _resumed(*steps: int, **limits: Any) -> Story:
    """Return such a job, whose second attempt runs from the last of them."""
    story = _crashed(*steps, **limits)
    story.stop_all()
    story.run(2)
    return story


def _base(story: Story) -> int:
    assert story.brain.facts.attempt is not None
    return story.brain.facts.attempt.base_step


def _state(story: Story, step: int, attempt: int = 1) -> CheckpointState:
    return story.brain.facts.checkpoints[save(step, attempt).number].state


# What an attempt begins from


def test_attempt_resumes_from_newest_complete_checkpoint_never_stale() -> None:
    story = _crashed(10)
    begin = only(story.stop_all(), d.BeginAttempt)
    assert begin.resume == at(10)
    assert story.brain.facts.checkpoint == begin.resume


@pytest.mark.parametrize("state", [state for state in CheckpointState if state is not CheckpointState.WHOLE])
def test_incomplete_checkpoint_is_skipped_and_named(state: CheckpointState) -> None:
    story = _crashed(10)
    story.hear(story.saved(20, state=state, why="so it is"))
    begin = only(story.stop_all(), d.BeginAttempt)
    assert begin.resume == at(10)
    assert [(one.save, one.step, one.why) for one in begin.passed_over] == [(1020, 20, f"{state.value}: so it is")]
    assert "passed over: step-20.pt" in begin.why


def test_attempt_without_complete_checkpoint_starts_over_with_reason() -> None:
    """Without a complete checkpoint an attempt starts from scratch and says why."""
    story = _crashed()
    story.hear(story.saved(20, state=CheckpointState.TORN, why="it ended too early"))
    begin = only(story.stop_all(), d.BeginAttempt)
    assert begin.resume is None and "since there is no complete checkpoint" in begin.why


def test_named_checkpoint_counts_until_attempt_saves_another() -> None:
    story = _resumed(10, 20)
    story.hear(e.CancelRequested(0.0, 1))
    story.stop_all(2)
    assert only(story.hear(e.ResumeRequested(0.0, 2, 1010)), d.BeginAttempt).resume == at(10)
    story.run(3)
    story.hear(story.exited(0, attempt=3, count=2))
    assert only(story.stop_all(3), d.BeginAttempt).resume == at(10)
    story.run(4)
    story.hear(story.saved(15, 4), story.exited(0, attempt=4, count=9))
    assert only(story.stop_all(4), d.BeginAttempt).resume == at(15, 4)


def test_missing_named_checkpoint_ends_job_without_replacement() -> None:
    """Where a named checkpoint is gone the job ends; neither another nor scratch replaces it."""
    story = _crashed(10, 20, restarts_max=0)
    story.stop_all()
    story.compares = False
    order = only(story.hear(e.ResumeRequested(0.0, 1, 1010)), d.CompareCheckpoint)
    gone = story.saved(10, state=CheckpointState.GONE, why="step-10.pt is gone")
    end = only(story.hear(gone, story.compared(order, "step-10.pt is gone")), d.EndJob)
    assert end.end is d.JobEnd.FAILED
    assert end.why.startswith("it was to resume from step-10.pt (step-10.pt is gone), which is no longer complete")
    story.compares = True
    assert only(story.hear(e.ResumeRequested(0.0, 2)), d.BeginAttempt).resume == at(20)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"fits_any_size": False, "world_size": 8}, "has files of each of the 8 ranks"),
        ({"state": CheckpointState.GONE}, "no longer complete"),
    ],
)
def test_unstarted_job_uses_named_adopted_checkpoint_or_none(more: dict[str, Any], words: str) -> None:
    """A job that had not begun starts from the named adopted checkpoint or not at all."""
    for fields in ({}, more):
        story = Story(1, begins=False)
        story.hear(e.CancelRequested(0.0, 1))
        said = story.hear(story.saved(20, 0, **fields), e.ResumeRequested(0.0, 2, 20))
        if fields:
            assert words in only(said, d.EndJob).why
        else:
            assert only(said, d.BeginAttempt).resume == at(20, 0)


@pytest.mark.parametrize("then", ["a resume", "a restart", "a resume from the newest, which saves nothing"])
def test_abandoned_checkpoint_is_not_used_after_newer_save(then: str) -> None:
    """A checkpoint that the user went back from is not used once a later attempt has saved."""
    story = _crashed(500, 1000, restarts_max=0)
    story.stop_all()
    assert only(story.hear(e.ResumeRequested(0.0, 1, 1500)), d.BeginAttempt).resume == at(500)
    story.run(2)
    story.hear(story.saved(600, 2))
    if then == "a restart":
        story.hear(e.RestartRequested(0.0, 2))
        said = story.stop_all(2)
    else:
        story.hear(story.exited(0, attempt=2, count=120))
        story.stop_all(2)
        last = 2
        if then != "a resume":
            story.hear(e.ResumeRequested(0.0, 2, save(600, 2).number))
            last = 3
            story.life(last, 0)
        assert story.brain.facts.checkpoint == at(600, 2)
        said = story.hear(e.ResumeRequested(0.0, last + 1))
    begin = only(said, d.BeginAttempt)
    assert begin.resume == at(600, 2) and not begin.passed_over


def test_later_resume_without_name_uses_newest() -> None:
    """A later resume that names no checkpoint starts from the newest of all."""
    story = _crashed(10, 20, restarts_max=0)
    story.stop_all()
    story.hear(e.ResumeRequested(0.0, 1, 1010))
    story.run(2)
    story.hear(story.exited(0, attempt=2, count=2))
    story.stop_all(2)
    assert only(story.hear(e.ResumeRequested(0.0, 2)), d.BeginAttempt).resume == at(20)


def test_given_up_checkpoint_is_used_if_named() -> None:
    """A checkpoint that was given up is resumed from when the user names it."""
    story = _crashed(10, restarts_max=0)
    story.hear(story.saved(20, state=CheckpointState.DISTRUSTED, why="it was no good"))
    story.stop_all()
    assert only(story.hear(e.ResumeRequested(0.0, 1, 1020)), d.BeginAttempt).resume == at(20)


def test_checkpoint_of_other_world_size_ends_job() -> None:
    """A checkpoint for another number of ranks ends the job, and nothing else replaces it."""
    story = _crashed(10, restarts_max=0)
    story.hear(story.saved(20, fits_any_size=False))
    story.stop_all()
    story.hear(story.planned(2))
    end = only(story.hear(e.ResumeRequested(0.0, 1)), d.EndJob)
    assert end.end is d.JobEnd.FAILED and "step-20.pt has files of each of the 1 ranks" in end.why
    story.hear(story.planned(1))
    assert only(story.hear(e.ResumeRequested(0.0, 2)), d.BeginAttempt).resume == at(20)


def test_unusable_checkpoints_are_forgotten_first() -> None:
    """Checkpoints that cannot be resumed from are forgotten first."""
    story = _crashed()
    gone = [
        story.saved(step, state=CheckpointState.GONE) for step in range(100, 100 + checkpoint_trust.CHECKPOINTS_MAX)
    ]
    story.hear(story.saved(10), *gone, story.saved(900))
    known = story.brain.facts.checkpoints
    assert len(known) == checkpoint_trust.CHECKPOINTS_MAX and {1010, 1900} <= set(known) and 1100 not in known


# Comparing


def _asked(*steps: int, **limits: Any) -> tuple[Story, d.CompareCheckpoint]:
    """Return such a job when all is stopped, and what is ordered to be compared."""
    story = _crashed(*steps, **limits)
    story.compares = False
    return story, only(story.stop_all(), d.CompareCheckpoint)


def test_attempt_waits_for_comparison() -> None:
    """No attempt begins before the comparison has answered."""
    story, order = _asked(10)
    assert order.save == 1010 and none_of(story.wait(1_000.0), d.BeginAttempt)
    assert only(story.hear(story.compared(order)), d.BeginAttempt).resume == at(10)


def test_attempt_without_checkpoint_still_closes_ledger() -> None:
    story, order = _asked()
    assert order.save == 0
    late = only(story.hear(story.saved(10), story.compared(order)), d.CompareCheckpoint)
    assert late.save == 1010, "what the closing of the books has found is compared, too"
    assert only(story.hear(story.compared(late)), d.BeginAttempt).resume == at(10)


def test_differing_checkpoint_yields_to_compared_previous_one() -> None:
    story, order = _asked(10, 20)
    gone = story.saved(20, state=CheckpointState.GONE, why="step-20.pt is gone")
    older = only(story.hear(gone, story.compared(order, "step-20.pt is gone")), d.CompareCheckpoint)
    assert older.save == 1010
    begin = only(story.hear(story.compared(older)), d.BeginAttempt)
    assert begin.resume == at(10) and begin.passed_over[0].why == "gone: step-20.pt is gone"


def test_checkpoint_fetched_during_comparison_is_compared() -> None:
    story, order = _asked(10)
    newer = only(story.hear(story.saved(20), story.compared(order)), d.CompareCheckpoint)
    assert newer.save == 1020
    assert none_of(story.hear(story.compared(order)), d.BeginAttempt), "that answer is about another"
    assert only(story.hear(story.compared(newer)), d.BeginAttempt).resume == at(20)


def test_new_supervisor_repeats_comparisons() -> None:
    """A new supervisor repeats comparisons that were under way or answered."""
    story, order = _asked(10)
    again = only(story.hear(e.SupervisorStarted(0.0, 2)), d.CompareCheckpoint)
    assert again.save == order.save
    story.brain.learn(story.compared(again))
    story.brain.learn(e.SupervisorStarted(story.now_s, 3))
    decisions, _ = story.brain.decide(story.now_s)
    assert [type(one) for one in decisions] == [d.CompareCheckpoint]


def test_unresponsive_disk_ends_job_without_giving_up_checkpoints() -> None:
    """A disk that does not answer for hours ends the job, and no checkpoint is given up."""
    story, _ = _asked(10)
    assert not story.wait(COMPARE_S_MAX - 1.0)
    end = only(story.wait(2.0), d.EndJob)
    assert end.end is d.JobEnd.FAILED and "step-10.pt could not be read within 4 hours" in end.why
    story.compares = True
    assert only(story.hear(e.ResumeRequested(0.0, 1)), d.BeginAttempt).resume == at(10)


def test_node_loss_or_resume_compares_all_bytes() -> None:
    """All bytes are compared after a lost node and when the user resumes."""
    assert not _asked(10)[1].deep
    story = Story(2)
    story.run()
    story.hear(story.saved(10), e.AgentDied(0.0, "n1", "SIGKILL"))
    said = [*story.hear(story.stopped(0)), *story.hear(story.up(1, boot="b"))]
    assert only(said, d.CompareCheckpoint).deep
    story = _crashed(10, restarts_max=0)
    story.stop_all()
    assert only(story.hear(e.ResumeRequested(0.0, 1)), d.CompareCheckpoint).deep


# Progress


def test_complete_checkpoint_beyond_start_is_progress() -> None:
    story = Story(1, restarts_max=1)
    for attempt in range(1, 6):
        story.run(attempt)
        story.hear(story.saved(attempt, attempt), story.exited(0, attempt=attempt, count=0))
        story.stop_all(attempt)
    assert story.brain.facts.restarts_spent == 0 and story.brain.facts.end is None


@pytest.mark.parametrize(
    "state", [CheckpointState.OPEN, CheckpointState.TORN, CheckpointState.GONE, CheckpointState.DISTRUSTED]
)
def test_incomplete_checkpoint_is_no_progress(state: CheckpointState) -> None:
    """A checkpoint that is not complete is no progress."""
    story = _resumed(10)
    story.hear(story.saved(20, 2), story.saved(20, 2, state=state), story.exited(0, attempt=2, count=1))
    story.stop_all(2)
    assert story.brain.facts.restarts_spent == 1


def test_checkpoint_no_further_than_start_is_no_progress() -> None:
    story = _resumed(10)
    story.hear(story.saved(10, 2), story.exited(0, attempt=2, count=1))
    story.stop_all(2)
    assert story.brain.facts.restarts_spent == 1


# Scripts that do not begin from their save


def _elsewhere(attempt: int, steps: int, step: int = 0) -> e.ResumedElsewhere:
    return e.ResumedElsewhere(0.0, attempt, step, f"step-{step + steps}.pt", steps)


def test_attempt_from_scratch_counts_from_zero() -> None:
    """An attempt that started from scratch is counted from step 0."""
    story = _resumed(10)
    story.hear(story.beat(0, 12, attempt=2))
    assert story.brain.facts.step == 22
    story.hear(_elsewhere(2, 10))
    assert story.brain.facts.step == 12 and not story.brain.facts.has_progressed()
    story.hear(story.saved(20, 2))
    assert not story.brain.facts.has_progressed(), "a save may be newer than where it began, and yet old"
    story.hear(story.beat(0, 15, attempt=2))
    assert story.brain.facts.has_progressed(), "15 is further than the 14 of the first attempt"


def test_start_of_stale_attempt_is_ignored() -> None:
    """Where a stale attempt began says nothing of this one."""
    story = _resumed(10)
    story.hear(_elsewhere(1, 10))
    assert _base(story) == 10


def test_script_ignoring_checkpoint_ends_at_second_failure() -> None:
    """A script that ignores its checkpoint ends at its second failure, and the user is asked why."""
    story = Story(1)
    story.life(1, 14, story.saved(10))
    verdict = story.life(2, 14, _elsewhere(2, 10))
    assert (verdict.kind, verdict.step) == (d.VerdictKind.NO_PROGRESS, 14)
    assert any("from scratch" in line and "does it read ORCH_RESUME_FROM" in line for line in verdict.evidence)
    assert "from scratch" in only(story.said, d.EndJob).why


def test_script_choosing_older_checkpoint_is_not_suspected() -> None:
    """A script that chose an older checkpoint by itself is counted from that one and not suspected."""
    story = _resumed(10, 20, 30)
    story.hear(_elsewhere(2, 10, step=10))
    assert _base(story) == 10
    verdict = only(story.hear(story.exited(0, attempt=2, count=12)), d.Judge).verdict
    assert verdict.evidence[0] == (
        "the script did not resume from /ckpt/step-30.pt but from a checkpoint of its own choice: step-20.pt, written after 10 steps of its "
        "own, shows that it began at step 10"
    )
    assert "from scratch" not in only(story.stop_all(2), d.BeginAttempt).why


def test_attempts_from_scratch_spend_budget_with_reason() -> None:
    """Attempts that start from scratch and fail elsewhere spend the budget and say why."""
    story = Story(1, restarts_max=2)
    story.life(1, 19, story.saved(10))
    for attempt, count in enumerate((16, 15, 18), start=2):
        story.life(attempt, count, _elsewhere(attempt, 10))
    end = only(story.said, d.EndJob)
    assert end.attempt == 4 and "is spent" in end.why and "from scratch" in end.why


def test_failure_before_seen_restart_is_recognised() -> None:
    """A failure before the script was seen to start from scratch is recognised as well."""
    story = Story(1)
    story.life(1, 14, story.saved(10))
    story.run(2)
    late = only(story.hear(story.exited(0, attempt=2, count=14)), d.Judge).verdict
    assert (late.kind, late.step) == (d.VerdictKind.CRASH, 24)
    begin = only([*story.hear(_elsewhere(2, 10)), *story.stop_all(2), *story.wait(20.0)], d.BeginAttempt)
    assert "from scratch" in begin.why
    assert story.brain.facts.past_attempts[-1].failed_step == 14 and story.brain.facts.best_step == 14
    assert story.life(3, 14).kind is d.VerdictKind.NO_PROGRESS


def _last(attempt: int, step: int, **more: Any) -> e.CheckpointChanged:
    """Return what an attempt saved under a name that is overwritten, 10 steps from where it began."""
    return e.CheckpointChanged(0.0, save(step, attempt, key="#", main="last.pt", steps=10, **more))


def test_same_distance_from_overwritten_checkpoint_is_no_progress() -> None:
    """Getting equally far from one overwritten checkpoint is in the end no progress."""
    story = Story(1)
    verdicts = [story.life(n, 14, _last(n, 10 * n)) for n in range(1, ALIKE_MAX + 2)]
    assert [one.kind for one in verdicts] == [d.VerdictKind.CRASH] * ALIKE_MAX + [d.VerdictKind.NO_PROGRESS]
    assert any("from scratch" in line for line in verdicts[-1].evidence)


def test_same_distance_with_stated_steps_is_progress() -> None:
    """Getting equally far is progress where stated steps prove it."""
    story = Story(1)
    for attempt in range(1, 3 * ALIKE_MAX):
        wrote = _last(attempt, 10 * attempt, stated=10 * attempt, step_source=StepSource.STATED)
        assert story.life(attempt, 14, wrote).kind is d.VerdictKind.CRASH
    assert story.brain.facts.restarts_spent == 0


def test_same_distance_across_user_resume_does_not_count() -> None:
    """Getting equally far does not count across a resume by the user."""
    story = Story(1)
    for attempt in range(1, ALIKE_MAX + 1):
        story.life(attempt, 14, _last(attempt, 10 * attempt))
    story.run(ALIKE_MAX + 1)
    story.hear(e.CancelRequested(0.0, 1))
    story.stop_all(ALIKE_MAX + 1)
    story.hear(e.ResumeRequested(0.0, 2))
    assert story.life(ALIKE_MAX + 2, 14, _last(ALIKE_MAX + 2, 90)).kind is d.VerdictKind.CRASH


# Saves that cannot be loaded


def test_checkpoint_that_kills_loading_rank_is_given_up() -> None:
    """A checkpoint that a rank died loading is given up at once for the one before."""
    story = _resumed(10, 20)
    verdict = only(story.hear(story.exited(0, failure=LOADING, attempt=2)), d.Judge).verdict
    assert verdict.kind is d.VerdictKind.CRASH and verdict.evidence[0].startswith(
        "step-20.pt is distrusted, an older checkpoint is used: rank 0 could not load it in attempt 2: RuntimeError"
    )
    said = story.stop_all(2)
    given_up, begin = only(said, d.DistrustCheckpoint), only(said, d.BeginAttempt)
    assert (given_up.save, given_up.is_certain) == (1020, True)
    assert begin.resume == at(10) and begin.passed_over[0].why.startswith("distrusted: rank 0 could not load it")


def test_loading_failure_counts_for_checkpoint_of_its_file() -> None:
    """A file inside a checkpoint belongs to it, and one of another checkpoint does not."""
    for loading, is_of in (
        ("/host/ckpt/step-20.pt/shard-1", True),
        ("/ckpt/step-2.pt", False),
        ("/x/20.pt", False),
    ):
        story = _resumed(10, 20)
        story.hear(story.exited(0, failure=dataclasses.replace(LOADING, loading=loading), attempt=2))
        assert none_of(story.stop_all(2), d.DistrustCheckpoint) is not is_of, loading


def test_checkpoint_out_of_memory_is_not_given_up() -> None:
    story = _resumed(10, 20)
    full = dataclasses.replace(LOADING, type="OutOfMemoryError", message="CUDA out of memory")
    verdict = only(story.hear(story.exited(0, failure=full, attempt=2)), d.Judge).verdict
    assert verdict.kind is d.VerdictKind.OOM
    said = story.stop_all(2)
    assert none_of(said, d.DistrustCheckpoint) and only(said, d.BeginAttempt).resume == at(20)


def test_incomplete_checkpoint_is_given_up_not_node() -> None:
    story = Story(hosts=3)
    story.hear(*(story.up(node) for node in range(2)))
    story.run_on(0, 1)
    story.hear(story.saved(10), story.saved(20), story.exited(0, count=24))
    story.hear(story.stopped(0), story.stopped(1))
    said = story.hear(e.FromNode(0.0, "n1", reports.PrepareFailed(2, "the checkpoint is not whole here", "", 1020)))
    assert only(said, d.DistrustCheckpoint).is_certain and only(said, d.BeginAttempt).resume == at(10)
    assert not story.brain.facts.nodes["n1"].excluded


def test_checkpoint_is_given_up_after_two_equal_failures() -> None:
    """A checkpoint is given up after two attempts from it ended alike before a step."""
    story = _resumed(10, 20)
    story.hear(story.exited(0, failure=UNSAID, attempt=2))
    first = story.stop_all(2)
    assert none_of(first, d.DistrustCheckpoint) and only(first, d.BeginAttempt).resume == at(20)
    assert story.life(3, 0, failure=UNSAID).kind is d.VerdictKind.CRASH
    given_up = only(story.said, d.DistrustCheckpoint)
    assert (given_up.save, given_up.is_certain) == (1020, False)
    assert story.brain.facts.attempt is not None and story.brain.facts.attempt.resume == at(10)


@pytest.mark.parametrize("counts", [(0, 3), (3, 0)])
def test_checkpoint_with_steps_from_it_can_be_loaded(counts: tuple[int, int]) -> None:
    """A checkpoint from which one of the attempts made steps can be loaded."""
    story = _resumed(10, 20)
    story.hear(story.exited(0, failure=UNSAID, attempt=2, count=counts[0]))
    story.stop_all(2)
    story.life(3, counts[1], failure=UNSAID)
    assert none_of(story.said, d.DistrustCheckpoint)


def test_failures_before_user_resume_do_not_count() -> None:
    """Failures before a resume by the user do not count against a checkpoint."""
    story = _resumed(10, 20, restarts_max=0)
    assert story.brain.facts.end is d.JobEnd.FAILED
    story.hear(e.ResumeRequested(0.0, 1))
    story.life(2, 0, failure=UNSAID)
    story.hear(e.ResumeRequested(0.0, 2))
    story.life(3, 0, failure=UNSAID)
    assert none_of(story.said, d.DistrustCheckpoint)


def test_only_checkpoint_is_not_given_up_without_progress() -> None:
    """The only checkpoint is not given up, and the job makes no progress."""
    story = _resumed(20)
    story.hear(story.exited(0, failure=LOADING, attempt=2))
    assert only(story.stop_all(2), d.BeginAttempt).resume == at(20)
    assert story.life(3, 0, failure=LOADING).kind is d.VerdictKind.NO_PROGRESS
    assert none_of(story.said, d.DistrustCheckpoint) and _state(story, 20) is CheckpointState.WHOLE


def test_named_checkpoint_is_not_given_up_for_older() -> None:
    story = _crashed(10, 20, restarts_max=1)
    story.stop_all()
    story.run(2)
    story.hear(e.CancelRequested(0.0, 1))
    story.stop_all(2)
    story.hear(e.ResumeRequested(0.0, 2, 1020))
    story.life(3, 0, failure=LOADING)
    assert story.life(4, 0, failure=LOADING).kind is d.VerdictKind.NO_PROGRESS
    assert none_of(story.said, d.DistrustCheckpoint)


def test_failure_without_next_attempt_gives_up_no_checkpoint() -> None:
    story = _crashed(10, 20, never_on_exit_codes=(3,))
    story.stop_all()
    story.run(2)
    story.hear(story.exited(0, 3, LOADING, attempt=2))
    said = story.stop_all(2)
    assert only(said, d.EndJob).end is d.JobEnd.FAILED and none_of(said, d.DistrustCheckpoint)


def test_equal_failures_from_two_checkpoints_are_not_final() -> None:
    """Failing alike from two checkpoints of one step is not yet no progress."""
    story = _crashed(20)
    story.hear(story.saved(20, number=1021, main="other.pt"))
    story.stop_all()
    bare = Failure("", "no exception", "", None)
    story.life(2, 0, failure=bare)
    story.life(3, 0, failure=bare)
    assert only(story.said, d.DistrustCheckpoint).save == 1021
    assert story.life(4, 0, failure=bare).kind is d.VerdictKind.CRASH, "it is the first from that save"


def test_same_exception_from_two_checkpoints_blames_code() -> None:
    """The same exception from two checkpoints is of the code, and both are trusted again."""
    story = Story(1, restarts_max=9)
    story.life(1, 34, story.saved(10), story.saved(20), story.saved(30))
    assert (
        story.life(2, 0, failure=dataclasses.replace(LOADING, loading="/ckpt/step-30.pt")).kind is d.VerdictKind.CRASH
    )
    verdict = story.life(3, 0, failure=dataclasses.replace(LOADING, loading="/ckpt/step-20.pt"))
    assert verdict.kind is d.VerdictKind.NO_PROGRESS and verdict.summary.startswith(
        f"the same failure from {at(30).path} and {at(20).path}: the cause is not the files, but {LOADING.where}: rank 0"
    )
    assert story.brain.facts.end is d.JobEnd.FAILED
    assert [_state(story, step) for step in (10, 20, 30)] == 3 * [CheckpointState.WHOLE]


@pytest.mark.parametrize("other", [{"type": "KeyError"}, {"where": frame("train.py:99")}])
def test_different_exception_from_other_checkpoint_spares_code(other: dict[str, Any]) -> None:
    """Another exception or location from another checkpoint is not yet the code."""
    story = Story(1, restarts_max=9)
    story.life(1, 34, story.saved(10), story.saved(20), story.saved(30))
    story.life(2, 0, failure=dataclasses.replace(LOADING, loading="/ckpt/step-30.pt"))
    failure = dataclasses.replace(LOADING, loading="/ckpt/step-20.pt", **other)
    assert story.life(3, 0, failure=failure).kind is d.VerdictKind.CRASH
    assert story.brain.facts.attempt is not None and story.brain.facts.attempt.resume == at(10)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_given_up_checkpoints_count_again_without_later_progress(
    is_cancelled: bool,
) -> None:
    """Given-up checkpoints count again when the job ends and no attempt has got further."""
    story = Story(1, restarts_max=9)
    story.life(1, 34, story.saved(10), story.saved(20), story.saved(30))
    story.life(2, 0, failure=dataclasses.replace(LOADING, loading="/ckpt/step-30.pt"))
    for attempt in (3, 4):
        story.life(attempt, 0, failure=dataclasses.replace(UNSAID, type="KeyError"))
    assert [_state(story, step) for step in (10, 20, 30)] == [
        CheckpointState.WHOLE,
        *2 * [CheckpointState.DISTRUSTED],
    ]
    if is_cancelled:
        story.hear(e.CancelRequested(0.0, 1))
        story.stop_all(5)
    else:
        story.life(5, 0, failure=UNSAID)
        story.life(6, 0, failure=UNSAID)
    assert story.brain.facts.end is (d.JobEnd.CANCELLED if is_cancelled else d.JobEnd.FAILED)
    begin = only(story.hear(e.ResumeRequested(0.0, 2)), d.BeginAttempt)
    assert begin.resume == at(30) and not begin.passed_over


@pytest.mark.parametrize("is_later", [False, True])
def test_given_up_checkpoint_stays_so_after_progress(
    is_later: bool,
) -> None:
    """A given-up checkpoint stays so once an attempt from an older one has got further."""
    story = _resumed(10, 20)
    story.hear(story.exited(0, failure=LOADING, attempt=2))
    story.stop_all(2)
    last = 3
    if is_later:
        story.life(3, 9, story.saved(12, 3))
        last = 4
    story.run(last)
    story.hear(story.saved(13, last), e.CancelRequested(0.0, 1))
    story.stop_all(last)
    begin = only(story.hear(e.ResumeRequested(0.0, 2)), d.BeginAttempt)
    assert begin.resume == at(13, last) and _state(story, 20) is CheckpointState.DISTRUSTED


# Saves that were written out of step


def test_checkpoints_since_desync_are_given_up_even_late() -> None:
    """Checkpoints since the ranks were out of step are given up, also if they arrive late."""
    story = Story(2)
    story.run()
    story.hear(story.saved(30), story.saved(39), story.saved(40, stated=40, step_source=StepSource.STATED))
    story.hear(story.saved(41, stated=41, step_source=StepSource.STATED))
    verdict = d.Verdict(
        d.VerdictKind.DESYNC,
        (1,),
        "n1",
        "rank 1",
        (),
        d.FailureSignature(d.VerdictKind.DESYNC),
        41,
        0.0,
        False,
    )
    story.hear(story.beat(0, 50), story.beat(1, 50))
    story.brain.learn(d.Judge(story.now_s, "", 1, verdict))
    states = [_state(story, step) for step in (30, 39, 40, 41)]
    assert [state is CheckpointState.WHOLE for state in states] == [True, False, True, False], (
        "a step that was only counted may be off by two"
    )
    story.hear(story.saved(50))
    assert _state(story, 50) is CheckpointState.DISTRUSTED
    assert story.brain.facts.checkpoint == at(40)


# Saves on their way home


def _coming(step: int) -> e.CheckpointChanged:
    return e.CheckpointChanged(
        0.0,
        save(step, state=CheckpointState.OPEN, is_in_transit=True, locations=(FileLocation("n0", "/host/ckpt"),)),
    )


def _under_way() -> Story:
    """Return a job of two hosts whose newest save was on its way home when a rank crashed."""
    story = Story(hosts=2)
    story.hear(*(story.up(node) for node in range(2)))
    story.run_on(0, 1)
    story.hear(story.saved(10), _coming(20), story.exited(0, count=24))
    story.hear(story.stopped(0), story.stopped(1))
    return story


def test_next_attempt_waits_for_checkpoint_in_transfer() -> None:
    """The next attempt waits for a checkpoint that is being fetched and resumes from it."""
    story = _under_way()
    assert none_of(story.wait(300.0), d.BeginAttempt)
    assert only(story.hear(story.beat(0, 0), story.saved(20)), d.BeginAttempt).resume == at(20)


def test_unfetchable_checkpoint_is_not_waited_for() -> None:
    """A checkpoint that cannot be fetched is not waited for."""
    lost = save(20, state=CheckpointState.GONE, why="the copy broke off")
    begin = only(_under_way().hear(e.CheckpointChanged(0.0, lost)), d.BeginAttempt)
    assert begin.resume == at(10) and begin.passed_over[0].why == "gone: the copy broke off"


def test_slow_checkpoint_is_not_waited_for_forever() -> None:
    """A checkpoint that takes too long is not waited for without end."""
    assert only(_under_way().wait(601.0), d.BeginAttempt).resume == at(10)


def test_checkpoint_on_silent_host_is_not_waited_for() -> None:
    story = _under_way()
    story.hear(e.AgentDisconnected(0.0, "n0"))
    assert only(story.wait(25.0), d.BeginAttempt).resume == at(10)


def test_cancelled_job_waits_less_for_transfers() -> None:
    """A cancelled job waits less for what is being fetched."""
    story = _under_way()
    assert none_of(story.hear(e.CancelRequested(0.0, 1)), d.EndJob)
    assert only(story.wait(31.0), d.EndJob).end is d.JobEnd.CANCELLED
