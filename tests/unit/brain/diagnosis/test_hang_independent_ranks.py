"""Which gangs that stand still may go on? Ranks on their own, or beside others that do not wait for them."""

from __future__ import annotations

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.core import observations
from orchestrator.core.wire import orders
from orchestrator.journal.journal_file import unwrap_message
from tests.support.brain_story import Story, look, none_of, notices
from tests.support.hang_story import (
    ALL,
    BLOCKED,
    SLEEPS,
    SPINS,
    WAITS,
    beat,
    entered,
    gang_of,
    judged,
    silence,
)


@pytest.mark.parametrize("activity", [SLEEPS, SPINS])
def test_computing_or_sleeping_ranks_have_no_limit(
    activity: observations.Activity,
) -> None:
    found = [look(rank, activity=activity, where=f"train.py:{rank} f") for rank in ALL]
    assert none_of(silence(gang_of(), *found, for_s=3000.0), d.Judge)
    assert none_of(silence(gang_of(steps=0), *found, for_s=3000.0), d.Judge), "it may be all there is to do"
    assert not none_of(silence(gang_of(hang_timeout_s=20.0), *found, for_s=90.0), d.Judge), "the user wants it quicker"


def test_blocked_rank_has_half_hour_if_none_waits() -> None:
    def polled() -> Story:
        story = gang_of(steps=0)
        story.hear(*(beat(rank, 9 if rank != 3 else 8) for rank in ALL))
        return story

    polls = [look(rank, activity=SLEEPS, where="train.py:20 wait_for_peers") for rank in (0, 1, 2)]
    reads = look(3, activity=BLOCKED, where="train.py:88 load")
    assert none_of(silence(polled(), *polls, reads, for_s=1790.0), d.Judge)
    assert judged(polled(), *polls, reads, for_s=1840.0).ranks == (3,)


def test_serving_program_without_steps_has_half_hour() -> None:
    """A program without steps whose ranks serve is left alone for half an hour."""
    serves = look(0, activity=BLOCKED, where="serve.py:3 accept")
    idle = [look(rank, activity=SLEEPS, where=f"serve.py:9 idle_{rank}") for rank in ALL[1:]]
    assert none_of(silence(gang_of(steps=0), serves, *idle, for_s=1790.0), d.Judge)


def test_rank_with_no_waiting_peer_proves_nothing() -> None:
    others = [entered(rank, 10, members=(1, 2, 3), group="1") for rank in (1, 2, 3)]
    asleep = look(0, SLEEPS, where="train.py:5 serve")
    assert none_of(silence(gang_of(), asleep, *others, for_s=290.0), d.Judge)


@pytest.mark.parametrize(("what", "hangs"), [("gather", False), ("all_reduce", True)])
def test_ended_member_may_have_done_its_gather_part(what: str, hangs: bool) -> None:
    story = gang_of()
    story.hear(*(story.exited(rank, 0, None, count=9) for rank in (1, 3)), beat(0, 9), beat(2, 9))
    said = silence(story, entered(0, 10, what), look(2, WAITS, why="in the store"), for_s=200.0)
    assert none_of(said, d.Judge) is not hangs


def test_complete_collective_or_library_wait_may_continue() -> None:
    others = [entered(rank, 10) for rank in (0, 1)]
    pair = [entered(rank, 5, "broadcast", members=(2, 3), group="1", why="in broadcast") for rank in (2, 3)]
    assert none_of(silence(gang_of(), *others, *pair, for_s=290.0), d.Judge)
    reads = entered(2, 9, why="in wait() of a collective")
    assert none_of(silence(gang_of(), *others, reads, entered(3, 10), for_s=290.0), d.Judge)


def test_briefly_paused_rank_is_not_stopped() -> None:
    """A rank that is held back now and then is not stopped."""
    story = gang_of()
    for _ in range(8):  # each beat finds it stopped
        story.hear(beat(2, 9, "T"))
        if any(isinstance(unwrap_message(one), orders.Inspect) for one in story.wait(1.0)):
            story.hear(*story.looked(*(look(rank, observations.Activity.PROGRESSING) for rank in ALL)))
    assert none_of(story.said, d.Judge)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("why", ["waits for its GPU", "waits for pt_data_worker, in sleep(), train.py:17"])
def test_ranks_waiting_for_no_other_are_located(nodes: int, why: str) -> None:
    """Ranks in a hang that each wait for no other are named with their line."""
    story = gang_of(nodes, hang_timeout_s=60.0)
    found = [look(rank, BLOCKED, where="train.py:40 step", why=why) for rank in range(nodes)]
    verdict = judged(story, *found, for_s=90.0)
    assert verdict.ranks == tuple(range(nodes))
    assert why in verdict.culprit
    assert "train.py:40 step" in verdict.summary
    suspicions = [notice.why for notice in notices(story.said, d.NoticeTopic.SUSPECT)]
    assert len(suspicions) == 1
    assert why in suspicions[0]
    assert "wait for each other" not in suspicions[0]


def test_hang_without_a_known_wait_says_so() -> None:
    story = gang_of(1)
    silence(story, entered(0, 10, members=(0,)))
    (notice,) = notices(story.said, d.NoticeTopic.SUSPECT)
    assert "wait for each other" not in notice.why
