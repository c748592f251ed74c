"""Who is missing where ranks do unlike things: in another collective, in none, or without steps?"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.brain.model import decisions as d
from orchestrator.core import observations
from tests.support.brain_story import Story, none_of
from tests.support.frames import frame
from tests.support.hang_story import ALL, BLOCKED, SLEEPS, beat, entered, gang_of, judged, silence


def test_rank_in_later_collective_is_outlier() -> None:
    """A broadcast lets its first rank go at once: it is in #8 by now, and the others in another #7 still."""
    inside = "in all_reduce"
    waiting = [entered(rank, 7, why=inside) for rank in (1, 2, 3)]
    for what, ranks in (("broadcast", (0,)), ("all_reduce", ())):
        before = (observations.EnteredCollective(7, what, "float32[10]"),)
        gone_on = entered(0, 8, why=inside)
        gone_on = replace(gone_on, collectives=(replace(gone_on.collectives[0], earlier=before),))
        verdict = judged(gang_of(), gone_on, *waiting, for_s=640.0)
        assert verdict.ranks == ranks
    assert "no rank is missing" in verdict.culprit


def test_point_to_point_waits_prove_no_missing_rank() -> None:
    """Where ranks wait for single others, it is unknown whether one is missing."""
    in_recv = [entered(rank, 7, why="in recv") for rank in ALL]
    assert none_of(silence(gang_of(), *in_recv, for_s=500.0), d.Judge)
    waits = [entered(rank, 7, why="in wait() of a collective", mixed=("k",)) for rank in ALL]
    assert none_of(silence(gang_of(), *waits, for_s=50.0), d.Judge)
    asleep = entered(3, 7, activity=SLEEPS)
    three = [entered(rank, 7) for rank in (0, 1, 2)]
    assert none_of(silence(gang_of(), *three, asleep, for_s=15.0), d.Judge)


def test_missing_stepless_rank_has_same_stall_timeout() -> None:
    """A rank without steps that a collective misses has the same stall timeout as any other."""

    def served() -> Story:
        story = gang_of(steps=0)
        for rank in (0, 1, 2):
            story.hear(beat(rank, 9))
        return story

    late = entered(3, 6, activity=BLOCKED, why="waits for a child to end")
    waiting = [entered(rank, 7) for rank in (0, 1, 2)]
    assert none_of(silence(served(), *waiting, late, for_s=590.0), d.Judge)
    assert judged(served(), *waiting, late, for_s=640.0).ranks == (3,)


def test_rank_waiting_after_exception_is_named_with_it() -> None:
    """A rank that waits after an exception is named with it, whichever ranks are in the minority."""
    raised = observations.Failure("ValueError", "bad batch", "", frame("train.py:4 load"))
    sides = [entered(rank, 10, "broadcast") for rank in (0, 1)] + [entered(2, 10)]
    verdict = judged(gang_of(), *sides, entered(3, 10, raised=raised))
    assert verdict.ranks == (3,)
    assert "raised ValueError: bad batch at train.py:4 load, then in all_reduce #10" in verdict.culprit
