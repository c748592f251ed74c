"""Is it a hang where no rank is seen to wait for another? The rules on gangs that compute, or sleep, on their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.brain import decisions as d
from orchestrator.brain import events as e
from tests.support.brain_story import Story, look, none_of
from tests.support.hang_story import ALL, BLOCKED, SLEEPS, SPINS, beat, entered, gang_of, judged, silence


@pytest.mark.parametrize("doing", [SLEEPS, SPINS])
def test_ranks_that_compute_or_sleep_and_wait_for_no_other_may_do_so_for_as_long_as_they_like(
    doing: e.Doing,
) -> None:
    found = [
        look(rank, doing=doing, where=f"train.py:{rank} f", certain=doing is SLEEPS, ends_s=7200.0)
        for rank in ALL
    ]
    assert none_of(silence(gang_of(), *found, for_s=3000.0), d.Judge)
    assert none_of(silence(gang_of(steps=0, patience_s=20.0), *found, for_s=3000.0), d.Judge), (
        "it may be all there is to do"
    )
    assert not none_of(silence(gang_of(patience_s=20.0), *found, for_s=90.0), d.Judge), (
        "the user wants it quicker"
    )


def test_where_no_rank_is_seen_to_wait_one_that_is_blocked_has_twice_the_patience() -> None:
    def polled() -> Story:
        story = gang_of(steps=0)
        story.hear(*(beat(rank, 9 if rank != 3 else 8) for rank in ALL))
        return story

    polls = [look(rank, doing=SLEEPS, where="train.py:20 wait_for_peers") for rank in (0, 1, 2)]
    reads = look(3, doing=BLOCKED, where="train.py:88 load")
    assert none_of(silence(polled(), *polls, reads, for_s=590.0), d.Judge)
    assert judged(polled(), *polls, reads, for_s=640.0).ranks == (3,)


def test_a_rank_that_can_go_on_may_let_one_go_on_that_cannot_by_itself() -> None:
    locked = look(1, doing=BLOCKED, where="train.py:88 load", why="on a lock", certain=True)
    waits = [entered(rank, 7) for rank in (2, 3)]
    writes = look(0, doing=SLEEPS, where="train.py:12 prepare", ends_s=25.0)
    assert none_of(silence(gang_of(), writes, locked, *waits, for_s=50.0), d.Judge)
    assert judged(gang_of(), entered(0, 7), locked, *waits).ranks == (1,)
    everywhere = [replace(locked, rank=rank) for rank in ALL]
    assert none_of(silence(gang_of(), *everywhere, for_s=50.0), d.Judge), "no rank keeps another"


def test_a_program_without_steps_whose_ranks_serve_is_let_be_up_to_the_ceiling() -> None:
    serves = look(0, doing=BLOCKED, where="serve.py:3 accept")
    idle = [look(rank, doing=SLEEPS, where=f"serve.py:9 idle_{rank}") for rank in ALL[1:]]
    assert none_of(silence(gang_of(steps=0), serves, *idle, for_s=590.0), d.Judge)
