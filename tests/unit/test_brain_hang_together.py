"""Is it a hang where no rank is seen to wait for another? The rules on gangs that go round, or sleep, on their own."""

from __future__ import annotations

from orchestrator.brain import decisions as d
from orchestrator.brain import events as e
from tests.support.brain_story import Story, look, none_of
from tests.support.hang_story import ALL, BLOCKED, SLEEPS, beat, entered, gang_of, judged, silence


def test_where_nobody_is_seen_to_wait_the_one_that_is_behind_is_to_blame() -> None:
    def polled(story: Story) -> Story:
        story.hear(*(beat(rank, 9 if rank != 3 else 8) for rank in ALL))
        return story

    polls = [look(rank, doing=SLEEPS, where="train.py:20 wait_for_peers", certain=True) for rank in (0, 1, 2)]
    sleeps = look(3, doing=SLEEPS, where="train.py:12 nap", certain=True)
    assert judged(polled(gang_of(steps=0)), *polls, sleeps).ranks == (3,)
    reads = look(3, doing=BLOCKED, where="train.py:88 load")
    assert none_of(silence(polled(gang_of(steps=0)), *polls, reads, for_s=50.0), d.Judge)
    alike = look(3, doing=SLEEPS, where="train.py:20 wait_for_peers", certain=True)
    assert judged(gang_of(), *polls, alike).ranks == ALL


def test_a_rank_that_can_go_on_may_let_one_go_on_that_cannot_by_itself() -> None:
    reads = look(1, doing=BLOCKED, where="train.py:88 load", why="a FIFO that nobody writes", certain=True)
    waits = [entered(rank, 7) for rank in (2, 3)]
    writes = look(0, doing=SLEEPS, where="train.py:12 prepare", ends_s=25.0)
    assert none_of(silence(gang_of(), writes, reads, *waits, for_s=50.0), d.Judge)
    assert judged(gang_of(), entered(0, 7), reads, *waits).ranks == (1,)


def test_nobody_keeps_anybody_where_there_were_never_steps_nor_collectives() -> None:
    serves = look(0, doing=BLOCKED, where="serve.py:3 accept")
    idle = [look(rank, doing=SLEEPS, where=f"serve.py:9 idle_{rank}", certain=True) for rank in ALL]
    assert none_of(silence(gang_of(steps=0), *idle, for_s=900.0), d.Judge)
    assert none_of(silence(gang_of(steps=0), serves, *idle[1:], for_s=200.0), d.Judge)


def test_all_ranks_may_sleep_together_for_as_long_as_they_sleep() -> None:
    def asleep(rank: int, ends_s: float | None, line: int = 12) -> e.RankLook:
        return look(rank, doing=SLEEPS, where=f"train.py:{line} nap", certain=True, ends_s=ends_s)

    assert none_of(silence(gang_of(), *(asleep(rank, 90.0) for rank in ALL), for_s=90.0), d.Judge)
    assert judged(gang_of(), *(asleep(rank, 3600.0) for rank in ALL)).ranks == ALL, (
        "longer than patience lasts"
    )
    assert judged(gang_of(), asleep(0, 3600.0), *(entered(rank, 7) for rank in ALL[1:])).ranks == (0,)
    endless = [asleep(rank, None, line=12 + rank % 2) for rank in ALL]
    assert judged(gang_of(), *endless).ranks == ALL, "it made steps, and never will again"
    without_steps = gang_of(steps=0)
    assert none_of(silence(without_steps, *endless, for_s=900.0), d.Judge), "it may be all there is to do"
