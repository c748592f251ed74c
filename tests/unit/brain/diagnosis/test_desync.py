"""Are ranks that run other collectives than their peers found, and only those?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import observations
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from orchestrator.journal.journal_file import unwrap_message
from tests.support.brain_story import Story, at, look, none_of, only

GROUP = "00c0ffee"
EVERY_BEAT_STEPS = 8
Counts = Callable[[int, int], int]


def running(ranks: int = 4, **limits: Any) -> Story:
    story = Story(ranks, **{"fence_s": None, **limits})
    story.run()
    return story


def train(story: Story, first: int, last: int, counts: Counts, groups: tuple[str, ...] = (GROUP,)) -> list[d.Decision]:
    """Let a beat a second tell of every second step; `counts` says what a rank has run after a step."""
    ranks, said = len(story.brain.facts.ranks), []
    for begin in range(first, last, EVERY_BEAT_STEPS):
        story.now_s += 1.0
        steps = range(begin, min(begin + EVERY_BEAT_STEPS, last + 1), 2)
        for rank in range(ranks):
            collective_counts = tuple(
                observations.CollectiveCounts(step, 0, step, tuple(counts(rank, step) for _ in groups))
                for step in steps
            )
            beat = RankHeartbeat(rank, steps[-1], "S", 0, 0.0, groups=groups, collective_counts=collective_counts)
            said += story.hear(e.FromNode(0.0, f"n{rank}", reports.Heartbeat(1, (beat,))))
    return said


def looked(story: Story, began: int = 0, odd: int = 2, mixed: tuple[str, ...] = ()) -> list[d.Decision]:
    """Let every rank answer the look; the odd one's counts changed at `began`."""
    number = story.brain.facts.attempt.inspection  # type: ignore[union-attr]
    said = []
    for rank in range(len(story.brain.facts.ranks)):
        collective_counts = (observations.CollectiveCounts(began, 0, began, (0,)),) if began and rank == odd else ()
        last = observations.Collective(
            "0", "default group", (0, 1, 2, 3), 90 + rank, "all_reduce", "float32[1000]", 0.1
        )
        found = look(
            rank,
            observations.Activity.PROGRESSING,
            collective_counts=collective_counts,
            mixed=mixed if rank == 0 else (),
            collectives=(last,),
            where="train.py:9 step",
        )
        said += story.hear(e.FromNode(0.0, f"n{rank}", reports.Inspected(1, number, (found,))))
    return said


def three_a_step(rank: int, step: int) -> int:
    return 3 * step


def skips(rank: int, step: int) -> int:
    return 3 * step - (1 if rank == 2 and step >= 41 else 0)


def test_skipped_collective_names_rank_and_step() -> None:
    story = running()
    assert not train(story, 2, 40, skips)
    said = train(story, 42, 64, skips)
    assert {type(unwrap_message(one)) for one in said} == {orders.Inspect}
    verdict = only(looked(story, began=41), d.Judge).verdict
    assert (verdict.kind, verdict.ranks, verdict.node, verdict.step) == (d.VerdictKind.DESYNC, (2,), "n2", 41)
    assert verdict.culprit == (
        "rank 2 on n2 entered 1 collective fewer than ranks 0-1,3 in default group, from step 41 on"
    )
    assert not verdict.retry


def test_mixed_counts_give_no_verdict() -> None:
    """Where something else is counted with the collectives, counts give no verdict."""
    story = running()
    train(story, 2, 40, skips)
    train(story, 42, 64, skips)
    assert none_of(looked(story, began=41, mixed=(GROUP,)), d.Judge)
    assert none_of(train(story, 66, 200, skips), d.Judge)


def test_desync_is_found_without_inspection_answers() -> None:
    """A desync is found within a few steps even if no node answers the inspection."""
    story = running()
    train(story, 2, 40, skips)
    train(story, 42, 64, skips)
    said = story.wait(7.0)
    assert only(said, d.Judge).verdict.step == 41


def test_added_collective_is_reported_as_one_more() -> None:
    story = running()
    said = train(story, 2, 64, lambda rank, step: 3 * step + (1 if rank == 1 and step >= 30 else 0))
    assert said
    verdict = only(looked(story, began=30, odd=1), d.Judge).verdict
    assert verdict.culprit.startswith("rank 1 on n1 entered 1 collective more than ranks 0,2-3")


def test_ranks_in_agreement_are_not_judged() -> None:
    """Ranks that agree are not judged."""
    assert not train(running(), 2, 200, three_a_step)


def test_group_whose_counts_never_agreed_is_not_judged() -> None:
    """The stages of a pipeline send and receive unequal numbers of times."""
    assert not train(running(), 2, 200, lambda rank, step: (3 + rank) * step)


def test_vanishing_difference_is_no_desync() -> None:
    """A thread that saves a checkpoint enters its collectives at other steps on each rank."""
    late = running()
    assert not train(late, 2, 200, lambda rank, step: step // 100 if rank else (step + 12) // 100)


def a_thread_lags(rank: int, step: int) -> int:
    """Return the count of a group that runs once in 200 steps, six later on odd ranks."""
    return max(0, step - 6 * (rank % 2)) // 200


def test_past_difference_does_not_count_for_the_next() -> None:
    story = running()
    assert not train(story, 2, 700, a_thread_lags)
    assert not story.brain.facts.counts_differ_since


def test_difference_without_steps_is_no_desync() -> None:
    """While no step is made a difference cannot pass and is no desync."""
    story = running()
    train(story, 2, 204, a_thread_lags)
    assert story.brain.facts.counts_differ_since
    for rank in range(4):
        beat = RankHeartbeat(rank, 204, "S", 0, 0.0, median_step_s=0.1, groups=(GROUP,))
        story.hear(e.FromNode(0.0, f"n{rank}", reports.Heartbeat(1, (beat,))))
    story.now_s += 25.0  # an evaluation, for instance
    assert not train(story, 206, 400, a_thread_lags)


def test_rank_with_restarted_counts_is_not_judged() -> None:
    """A rank whose counts start again is not judged."""
    story = running()
    assert not train(story, 2, 20, lambda rank, step: 3 * step + 1000 * rank)


def test_only_members_of_a_group_are_compared() -> None:
    story = running()
    for begin in range(2, 60, 8):
        story.now_s += 1.0
        for rank in range(4):
            collective_counts = tuple(
                observations.CollectiveCounts(step, 0, step, (3 * step, (rank // 2 + 1) * step))
                for step in range(begin, begin + 8, 2)
            )
            beat = RankHeartbeat(
                rank,
                begin + 6,
                "S",
                0,
                0.0,
                groups=(GROUP, f"part{rank // 2}"),
                collective_counts=collective_counts,
            )
            assert not story.hear(e.FromNode(0.0, f"n{rank}", reports.Heartbeat(1, (beat,))))


def test_on_desync_notify_reports_once_and_job_continues() -> None:
    story = running(on_desync="notify")
    train(story, 2, 64, skips)
    verdict = only(looked(story, began=41), d.Notice).verdict
    assert verdict is not None and verdict.kind is d.VerdictKind.DESYNC
    assert not train(story, 66, 120, skips)


def test_noticed_hang_is_withdrawn_despite_desync_notice() -> None:
    """A hang that was noticed is withdrawn although a desync is reported meanwhile."""
    story = running(on_desync="notify", on_hang="notify")
    train(story, 2, 64, skips)
    looked(story, began=41)
    facts = story.brain.facts
    assert facts.attempt is not None and facts.attempt.last_notice(d.NoticeTopic.DESYNC)
    hang = d.Verdict(
        d.VerdictKind.HANG,
        (),
        "",
        "no step for 60 s",
        (),
        d.FailureSignature(d.VerdictKind.HANG, d.FailureCause.NETWORK),
        64,
        story.now_s,
        True,
    )
    story.brain.learn(d.Notice(story.now_s, "hang", 1, d.NoticeTopic.HANG, verdict=hang))
    said = train(story, 66, 120, skips)
    assert only(said, d.Notice).withdrawn and len(said) == 1
    assert facts.attempt.active_notice(d.NoticeTopic.HANG) is None and facts.attempt.active_notice(d.NoticeTopic.DESYNC)


def all_exit(story: Story) -> list[d.Decision]:
    return story.hear(*(story.exited(rank, 0, None, count=64) for rank in range(4)))


def test_desync_fails_job_whose_ranks_exit_before_the_answer() -> None:
    story = running()
    train(story, 2, 40, skips)
    train(story, 42, 64, skips)
    said = all_exit(story)
    assert only(said, d.Judge).verdict.kind is d.VerdictKind.DESYNC and none_of(said, d.Finish)
    assert only(story.stop_all(), d.EndJob).end is d.JobEnd.FAILED


def test_desync_notice_precedes_success_after_all_exits() -> None:
    story = running(on_desync="notify")
    train(story, 2, 64, skips)
    assert [type(one) for one in all_exit(story)][:2] == [d.Notice, d.Finish]
    assert only(story.stop_all(), d.EndJob).end is d.JobEnd.SUCCEEDED


def test_equal_counts_after_all_exits_succeed() -> None:
    story = running()
    train(story, 2, 64, three_a_step)
    said = all_exit(story)
    assert none_of(said, d.Judge) and only(said, d.Finish).ending is d.AttemptEnd.DONE


def test_checkpoint_written_after_desync_is_given_up() -> None:
    story = running()
    train(story, 2, 40, skips)
    story.hear(story.saved(38))
    train(story, 42, 56, skips)
    story.hear(story.saved(50))
    train(story, 58, 64, skips)
    only(looked(story, began=41), d.Judge)
    facts = story.brain.facts
    assert facts.checkpoint == at(38)
    story.hear(story.saved(60))
    assert facts.checkpoint == at(38)
    assert only(story.stop_all(), d.EndJob).end is d.JobEnd.FAILED


def test_new_supervisor_judges_only_groups_seen_agreeing() -> None:
    """A new supervisor does not judge groups whose counts it has not seen agree."""
    story = running()
    train(story, 2, 40, skips)
    story.hear(e.SupervisorStarted(0.0, 2), *(dataclasses.replace(story.up(node, running=1)) for node in range(4)))
    assert not train(story, 42, 100, skips)
