"""Which ranks have drifted, by the sums of their parameters: named when they were replicas before, and never else."""

from __future__ import annotations

from orchestrator.brain import replicas
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.wire import reports
from orchestrator.core.wire.reports import RankHeartbeat
from tests.support.brain_story import Story


def running(nodes: int) -> Story:
    story = Story(nodes, fence_s=None)
    story.run()
    return story


def notices(story: Story, step: int, *sums: int | None, attempt: int = 1, optimizer: int = 0) -> list[d.Notice]:
    """Let ranks tell their sums after a step; return the notices."""
    story.now_s += 1.0
    found = []
    for rank, total in enumerate(sums):
        if total is not None:
            beat = RankHeartbeat(rank, step, "S", 0, 0.0, parameter_sums=((optimizer, step, step, total),))
            found += story.hear(e.FromNode(0.0, f"n{rank}", reports.Heartbeat(attempt, (beat,))))
    return [one for one in found if isinstance(one, d.Notice)]


def test_odd_one_of_three_is_named_once_with_steps_and_host() -> None:
    story = running(3)
    assert not notices(story, 5, 1, 1, 1)
    assert not notices(story, 10, 2, 2, 2)
    (notice,) = notices(story, 15, 3, 4, 3)
    assert notice.topic is d.NoticeTopic.REPLICAS
    assert notice.why == (
        "the parameters of rank 1 on n1 differ from those of ranks 0,2 at step 15; all of ranks 0-2 held the same at step 10"
    )
    assert "step 10 or before" in notice.fix
    assert not notices(story, 20, 5, 6, 5)


def test_of_two_it_is_said() -> None:
    story = running(2)
    assert not notices(story, 5, 1, 1)
    assert not notices(story, 10, 2, 2)
    (notice,) = notices(story, 15, 3, 4)
    assert "the parameters of rank 0 on n0 and of rank 1 on n1 differ at step 15" in notice.why


def test_ranks_that_never_agreed_are_said_once_and_in_no_later_attempt() -> None:
    story = running(3)
    found = [one for step in range(5, 50, 5) for one in notices(story, step, step, step + 1, step + 2)]
    assert [(one.key, one.why) for one in found] == [
        (replicas.NONE_KEY, "compare_replicas: ranks do not hold the same parameters; nothing is compared")
    ]


def test_shards_are_compared_among_their_replicas_only() -> None:
    story = running(4)
    assert not notices(story, 5, 1, 10, 1, 10)
    assert not notices(story, 10, 2, 20, 2, 20)
    assert not notices(story, 15, 3, 30, 3, 30)
    (notice,) = notices(story, 20, 4, 40, 4, 41)
    assert "rank 1 on n1 and of rank 3 on n3 differ at step 20" in notice.why


def test_replicas_must_have_agreed_while_parameters_moved() -> None:
    """A learning rate of 0 keeps equal what is trained apart."""
    story = running(3)
    for step in range(5, 40, 5):
        assert not notices(story, step, 7, 7, 7)
    assert not notices(story, 40, 8, 9, 10)
    assert not notices(story, 45, 11, 12, 13)


def test_ranks_that_part_all_at_once_are_not_named() -> None:
    """As after the warm-up of local SGD."""
    story = running(3)
    assert not notices(story, 5, 1, 1, 1)
    assert not notices(story, 10, 2, 2, 2)
    assert not notices(story, 15, 3, 4, 5)


def test_sums_of_different_steps_are_not_compared() -> None:
    """A late heartbeat completes its own step, and says nothing of a later one."""
    story = running(3)
    assert not notices(story, 5, 1, 1, 1)
    assert not notices(story, 10, 2, 2, 2)
    assert not notices(story, 15, 3, 3, None)
    assert not notices(story, 20, 4, 4, None)
    assert not notices(story, 25, None, None, 5)
    assert not notices(story, 25, 5, 5, None)
    (notice,) = notices(story, 30, 6, 6, 7)
    assert "rank 2 on n2" in notice.why
    assert "at step 25" in notice.why


def test_trainer_that_begins_anew_is_compared_from_scratch() -> None:
    story = running(3)
    for step in (5, 10, 15):
        assert not notices(story, step, step, step, step)
    assert not notices(story, 5, 50, 51, 52)
    assert not notices(story, 10, 60, 61, 62)


def test_other_supervisor_compares_from_scratch() -> None:
    story = running(3)
    for step in (5, 10):
        assert not notices(story, step, step, step, step)
    story.hear(e.SupervisorStarted(0.0, 2))
    story.hear(*(story.up(node, running=1) for node in range(3)))
    assert not notices(story, 15, 1, 2, 1)
    assert not story.brain.facts.sums_at_steps[0].keys() - {15}


def test_each_optimizer_is_compared_by_itself() -> None:
    story = running(3)
    for step in (5, 10):
        assert not notices(story, step, step, step, step)
        assert not notices(story, step, 7 * step, 8 * step, 9 * step, optimizer=1)
    assert not notices(story, 15, 70, 80, 90, optimizer=1)
    (notice,) = notices(story, 15, 3, 3, 4)
    assert "rank 2" in notice.why


def test_only_last_steps_are_remembered() -> None:
    story = running(2)
    for step in range(1, 100):
        assert not notices(story, step, step, step)
    assert len(story.brain.facts.sums_at_steps[0]) == replicas.STEPS_MAX


def beat(story: Story, rank: int, *sums: tuple[int, int], optimizers: tuple[int, ...] = (0,)) -> list[d.Notice]:
    """Let a rank tell sums of several steps in one heartbeat; return the notices."""
    story.now_s += 1.0
    told = tuple((optimizer, step, step, total) for step, total in sums for optimizer in optimizers)
    one = RankHeartbeat(rank, sums[-1][0], "S", 0, 0.0, parameter_sums=told)
    found = story.hear(e.FromNode(0.0, f"n{rank}", reports.Heartbeat(1, (one,))))
    return [one for one in found if isinstance(one, d.Notice)]


def test_each_step_of_a_heartbeat_is_compared() -> None:
    """Heartbeats bring several steps where these are quick; the rank that drifts does so before the last of them."""
    story = running(2)
    for rank in (0, 1):
        assert not beat(story, rank, (2, 1), (4, 2), (6, 3))
    assert not beat(story, 0, (8, 4), (10, 5), (12, 6))
    (notice,) = beat(story, 1, (8, 14), (10, 15), (12, 16))
    assert "differ at step 8; all of ranks 0-1 held the same at step 6" in notice.why


def test_each_optimizer_of_a_heartbeat_is_compared() -> None:
    story = running(2)
    for step in (1, 2, 3):
        assert not [*beat(story, 0, (step, step), optimizers=(0, 1)), *beat(story, 1, (step, step), optimizers=(0, 1))]
    assert not beat(story, 0, (4, 4), optimizers=(0, 1))
    story.now_s += 1.0
    drifted = RankHeartbeat(1, 4, "S", 0, 0.0, parameter_sums=((0, 4, 4, 5), (1, 4, 4, 4)))
    found = story.hear(e.FromNode(0.0, "n1", reports.Heartbeat(1, (drifted,))))
    assert [one.topic for one in found if isinstance(one, d.Notice)] == [d.NoticeTopic.REPLICAS]


def test_ranks_of_which_some_have_told_nothing_are_not_said_to_differ() -> None:
    """The first heartbeats of two hosts come one after the other, each with the sums of several steps."""
    story = running(4)
    for rank in range(4):
        assert not beat(story, rank, (2, 10 + rank % 2), (4, 20 + rank % 2), (6, 30 + rank % 2))
    assert not beat(story, 0, (8, 40))


def test_host_whose_heartbeats_are_late_is_compared() -> None:
    story = running(2)
    for rank in (0, 1):
        assert not beat(story, rank, (2, 1), (4, 2), (6, 3))
    for first in (8, 14):
        assert not beat(story, 0, (first, first), (first + 2, first + 2), (first + 4, first + 4))
    (notice,) = beat(story, 1, (8, 7), (10, 8), (12, 9))
    assert "differ at step 8" in notice.why
