"""Events in, what follows out: which step a checkpoint holds, and scripts that ignore the one they were given."""

from __future__ import annotations

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.scheduling.repeated_failure import ALIKE_MAX
from orchestrator.core import observations
from tests.support.brain_story import Story, none_of, only

TEN = ("step-000010.pt", 10)


def _wrote(attempt: int, path: str, count: int) -> e.CheckpointFound:
    return e.CheckpointFound(0.0, "n0", attempt, path, count)


def _resumed(*wrote: tuple[str, int], crash: int = 14) -> Story:
    """Return a job whose second attempt runs, from the newest of what the first one wrote."""
    story = Story(1)
    story.life(1, crash, *wrote)
    story.run(2)
    return story


def _base(story: Story) -> int:
    assert story.brain.facts.attempt is not None
    return story.brain.facts.attempt.base_step


@pytest.mark.parametrize(
    ("path", "count", "step"),
    [
        ("step-10.pt", 11, 10),
        ("step-000010.pt", 8, 10),
        ("/ckpt/400/step-10/", 12, 10),
        ("epoch=10-step=12.ckpt", 11, 12),
        ("step-10.pt", 13, 13),
        ("epoch-3.pt", 30, 30),
        ("last.pt", 7, 7),
        ("run-7/last.pt", 8, 8),
        ("20261121-093000.pt", 9, 9),
    ],
)
def test_a_number_in_a_name_is_the_step_only_where_counting_has_come_to_about_the_same(
    path: str, count: int, step: int
) -> None:
    story = Story(1)
    story.run()
    story.hear(_wrote(1, path, count))
    assert story.brain.facts.checkpoint == d.Checkpoint(path, step)


def test_a_name_is_read_against_the_step_of_the_job_and_not_of_the_attempt() -> None:
    story = _resumed(TEN)
    story.hear(_wrote(2, "step-000020.pt", 11))
    assert story.brain.facts.checkpoint == d.Checkpoint("step-000020.pt", 20)


def test_a_script_that_ignores_its_checkpoint_ends_at_its_second_failure_and_is_asked_why() -> None:
    story = Story(1)
    story.life(1, 14, TEN)
    verdict = story.life(2, 14, ("step-000010.pt", 11))
    assert (verdict.kind, verdict.step) == (d.Kind.NO_PROGRESS, 14)
    assert any("begin anew" in line and "does it read ORCH_RESUME_FROM" in line for line in verdict.evidence)
    assert "begin anew" in only(story.said, d.EndJob).why


def test_an_attempt_that_began_anew_is_counted_from_the_beginning() -> None:
    story = _resumed(TEN)
    story.hear(story.beat(0, 12, attempt=2))
    assert story.brain.facts.step == 22
    story.hear(_wrote(2, *TEN))
    assert story.brain.facts.step == 12 and not story.brain.facts.progressed()
    story.hear(story.beat(0, 15, attempt=2))
    assert story.brain.facts.progressed(), "15 is further than the 14 of the first attempt"


def test_attempts_that_begin_anew_and_fail_elsewhere_spend_the_budget_and_say_why() -> None:
    story = Story(1, restarts_max=2)
    for attempt, count in enumerate((19, 16, 15, 18), start=1):
        story.life(attempt, count, TEN)
    end = only(story.said, d.EndJob)
    assert end.attempt == 4 and "is spent" in end.why and "begin anew" in end.why


def test_a_failure_before_the_script_was_seen_to_begin_anew_is_recognised_all_the_same() -> None:
    story = Story(1)
    story.life(1, 14, TEN)
    story.run(2)
    late = only(story.hear(story.exited(0, attempt=2, count=14)), d.Judge).verdict
    assert (late.kind, late.step) == (d.Kind.CRASH, 24)
    begin = only([*story.hear(_wrote(2, *TEN)), *story.stop_all(2), *story.wait(20.0)], d.BeginAttempt)
    assert "begin anew" in begin.why
    assert story.brain.facts.past[-1].failed_step == 14 and story.brain.facts.best_step == 14
    assert story.life(3, 14).kind is d.Kind.NO_PROGRESS


def test_what_was_written_before_the_script_was_seen_to_begin_anew_is_counted_anew_too() -> None:
    story = _resumed(("step-20.pt", 20), crash=24)
    story.hear(_wrote(2, "step-7.pt", 7))
    assert story.brain.facts.checkpoint == d.Checkpoint("step-7.pt", 27)
    story.hear(_wrote(2, "step-20.pt", 20))
    assert story.brain.facts.checkpoint == d.Checkpoint("step-20.pt", 20)
    assert story.brain.facts.known_steps == {"step-20.pt": 20, "step-7.pt": 7}


def test_older_checkpoints_of_a_script_that_began_anew_are_not_started_from() -> None:
    story = _resumed(("epoch-1.pt", 10), ("epoch-2.pt", 20), crash=24)
    story.hear(_wrote(2, "epoch-1.pt", 10))
    assert _base(story) == 0 and story.brain.facts.checkpoint == d.Checkpoint("epoch-2.pt", 20)


def test_a_script_that_chose_an_older_checkpoint_itself_is_counted_from_that() -> None:
    story = _resumed(TEN, ("step-000020.pt", 20), ("step-000030.pt", 30), crash=33)
    story.hear(_wrote(2, "step-000020.pt", 10))
    assert _base(story) == 10


def test_a_name_that_is_always_overwritten_gives_nothing_away() -> None:
    story = _resumed(("last.pt", 10))
    story.hear(_wrote(2, "last.pt", 10))
    assert _base(story) == 10 and story.brain.facts.checkpoint == d.Checkpoint("last.pt", 20)


def test_a_name_that_one_attempt_overwrites_gives_nothing_away_beside_the_last() -> None:
    story = _resumed(
        ("best.pt", 5), ("last.pt", 5), ("best.pt", 10), ("last.pt", 10), ("last.pt", 15), crash=17
    )
    story.hear(_wrote(2, "best.pt", 10))
    assert _base(story) == 15


def test_a_script_that_writes_again_what_was_spoiled_has_not_begun_anew() -> None:
    story = Story(1)
    story.run()
    story.hear(_wrote(1, *TEN), _wrote(1, "step-000020.pt", 20), story.exited(0, count=24))
    story.hear(e.CheckpointInvalidated(0.0, "n0", 1, "step-000020.pt"))
    assert only(story.stop_all(), d.BeginAttempt).resume == d.Checkpoint(*TEN)
    story.run(2)
    story.hear(_wrote(2, "step-000020.pt", 11))
    assert _base(story) == 10 and story.brain.facts.checkpoint == d.Checkpoint("step-000020.pt", 20)


def test_a_script_whose_names_prove_that_it_resumed_is_not_suspected_for_another_name() -> None:
    story = _resumed(("best.pt", 10), TEN, ("step-000020.pt", 20), crash=24)
    story.hear(_wrote(2, "step-000030.pt", 10), _wrote(2, "best.pt", 10))
    assert _base(story) == 20


def test_coming_equally_far_from_one_overwritten_checkpoint_is_no_progress_in_the_end() -> None:
    story = Story(1)
    verdicts = [story.life(number, 14, ("last.pt", 10)) for number in range(1, ALIKE_MAX + 2)]
    assert [one.kind for one in verdicts] == [d.Kind.CRASH] * ALIKE_MAX + [d.Kind.NO_PROGRESS]
    assert any("begin anew" in line for line in verdicts[-1].evidence)


def test_coming_equally_far_is_progress_where_names_prove_it() -> None:
    story = Story(1)
    for attempt in range(1, 3 * ALIKE_MAX):
        step = 10 * attempt
        assert story.life(attempt, 14, (f"step-{step}.pt", 10)).kind is d.Kind.CRASH
    assert story.brain.facts.spent == 0


def test_coming_equally_far_does_not_count_across_a_resume_by_the_user() -> None:
    story = Story(1)
    for attempt in range(1, ALIKE_MAX + 1):
        story.life(attempt, 14, ("last.pt", 10))
    story.run(ALIKE_MAX + 1)
    story.hear(e.CancelRequested(0.0, 1))
    story.stop_all(ALIKE_MAX + 1)
    story.hear(e.ResumeRequested(0.0, 2, ""))
    assert story.life(ALIKE_MAX + 2, 14, ("last.pt", 10)).kind is d.Kind.CRASH


def test_a_checkpoint_overwritten_with_fewer_steps_gives_way_to_the_one_before() -> None:
    story = _resumed(("epoch-1.pt", 10), ("epoch-2.pt", 20), ("last.pt", 22), crash=24)
    story.hear(_wrote(2, "epoch-1.pt", 10), _wrote(2, "last.pt", 12))
    assert story.brain.facts.checkpoint == d.Checkpoint("epoch-2.pt", 20)


def _under_way() -> Story:
    """Return a job of two hosts whose newest checkpoint was on its way home when a rank crashed."""
    story = Story(hosts=2)
    story.hear(*(story.up(node) for node in range(2)))
    story.run_on(0, 1)
    story.hear(_wrote(1, "step-10", 10), _coming(1, "step-20"), story.exited(0, count=24))
    story.hear(story.stopped(0), story.stopped(1))
    return story


def _coming(attempt: int, path: str) -> e.CheckpointFetchStarted:
    return e.CheckpointFetchStarted(0.0, "n0", attempt, path)


def test_the_next_attempt_waits_for_a_checkpoint_on_its_way_and_begins_from_it() -> None:
    story = _under_way()
    assert none_of(story.wait(300.0), d.BeginAttempt)
    begin = only(story.hear(story.beat(0, 0), _wrote(1, "step-20", 20)), d.BeginAttempt)
    assert begin.resume == d.Checkpoint("step-20", 20)


def test_a_checkpoint_that_cannot_come_is_not_waited_for() -> None:
    begin = only(_under_way().hear(e.CheckpointInvalidated(0.0, "n0", 1, "step-20")), d.BeginAttempt)
    assert begin.resume == d.Checkpoint("step-10", 10)


def test_a_checkpoint_that_takes_too_long_is_not_waited_for_without_end() -> None:
    assert only(_under_way().wait(601.0), d.BeginAttempt).resume == d.Checkpoint("step-10", 10)


def test_a_checkpoint_on_a_host_that_is_not_heard_any_more_is_not_waited_for() -> None:
    story = _under_way()
    story.hear(e.AgentDisconnected(0.0, "n0"))
    assert only(story.wait(25.0), d.BeginAttempt).resume == d.Checkpoint("step-10", 10)


def test_a_cancelled_job_waits_less_for_what_is_on_its_way() -> None:
    story = _under_way()
    assert none_of(story.hear(e.CancelRequested(0.0, 1)), d.EndJob)
    assert only(story.wait(31.0), d.EndJob).end is d.JobEnd.CANCELLED


def test_what_does_not_arrive_leaves_what_is_at_home_under_its_name() -> None:
    story = _under_way()
    story.hear(_coming(1, "step-10"), e.CheckpointInvalidated(0.0, "n0", 1, "step-10"))
    assert story.brain.facts.checkpoint == d.Checkpoint("step-10", 10)


def test_what_does_not_arrive_after_its_attempt_leaves_what_is_at_home_too() -> None:
    story = _under_way()
    story.hear(_coming(1, "step-10"))
    story.wait(601.0)
    story.hear(_coming(2, "step-10"), e.CheckpointInvalidated(0.0, "n0", 1, "step-10"))
    assert story.brain.facts.checkpoint == d.Checkpoint("step-10", 10)
    assert "step-10" in story.brain.facts.fetching, "the present attempt's is still on its way"


def _outside(story: Story, attempt: int, node: str, name: str, steps: int, own_disk: bool) -> None:
    file = observations.SavedFile(f"code/{name}", "{job_dir}/code/*.pt")
    story.hear(e.SavedOutside(0.0, node, attempt, file, steps, 1.0, own_disk))


def test_what_is_saved_outside_is_remembered_and_never_started_from() -> None:
    story = Story(2)
    story.run()
    _outside(story, 1, "n0", "1.pt", 10, False)
    _outside(story, 1, "n1", "2.pt", 20, False)
    assert [(saved.file.path, saved.step) for saved in story.brain.facts.saved_outside] == [("code/2.pt", 20)]
    _outside(story, 1, "n0", "3.pt", 30, True)
    assert [saved.file.path for saved in story.brain.facts.saved_outside] == ["code/2.pt", "code/3.pt"]
    story.hear(story.exited(0, 1))
    begun = only(story.stop_all(), d.BeginAttempt)
    assert begun.resume is None
    assert begun.why.endswith("from the beginning, unless the script goes on by itself from code/3.pt")
    story.run(2)
    _outside(story, 2, "n0", "4.pt", 5, True)
    assert story.brain.facts.saved_outside[-1].step is None, "the script may have gone on from step 30"
