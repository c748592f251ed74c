"""Looks in, verdicts out: the rules of `brain/hang.py` and `brain/collectives.py`."""

from __future__ import annotations

import pytest

from orchestrator.brain import decisions as d
from orchestrator.brain import events as e
from tests.support.brain_story import Story, look, none_of, only
from tests.support.hang_story import (
    ALL,
    BLOCKED,
    SLEEPS,
    SPINS,
    WAITS,
    WORKS,
    beat,
    beats,
    entered,
    gang_of,
    judged,
    silence,
    stood,
)

# Proofs


def test_a_rank_that_cannot_go_on_is_named_with_its_place_and_the_others_with_what_they_wait_in() -> None:
    story = gang_of()
    read = entered(
        2, 9654, doing=BLOCKED, where="train.py:88 load", why="in read() of data/shard-17.bin", certain=True
    )
    verdict = judged(story, entered(0, 9655), entered(1, 9655), read, entered(3, 9655))
    assert (verdict.kind, verdict.ranks, verdict.node, verdict.step) == (d.Kind.HANG, (2,), "n2", 9)
    assert verdict.culprit == "rank 2 on n2: in read() of data/shard-17.bin, train.py:88 load"
    assert verdict.waiting == (
        "ranks 0,1,3 in all_reduce #9,655 (default group), entered 5 s ago; rank 2 never entered it"
    )
    assert (
        verdict.evidence[0]
        == "stacks of 4 ranks, twice, 2 s apart, unchanged · collective sequence numbers · /proc state"
    )
    assert verdict.evidence[1].startswith(
        "rank 2 (state S; blocked, in read() of data/shard-17.bin): train.py:88 load"
    )
    assert verdict.evidence[2].startswith("ranks 0,1,3 (state S; waits)")
    assert verdict.signature == "hang at train.py:88 load"
    assert story.now_s == pytest.approx(7.0, abs=0.6), "5 s of silence, and a second look 2 s later"


def test_a_lock_on_a_file_is_proof_only_if_the_rank_that_holds_it_waits_for_the_one_that_is_locked_out() -> (
    None
):
    why = "in flock() of cache.lock, which rank 0 holds"
    locked_out = entered(2, 9654, doing=BLOCKED, where="train.py:85 cache", why=why, holder=0)
    verdict = judged(gang_of(), entered(0, 9655), entered(1, 9655), locked_out, entered(3, 9655))
    assert verdict.culprit == "rank 2 on n2: in flock() of cache.lock, which rank 0 holds, train.py:85 cache"
    assert verdict.ranks == (2,)
    saves = entered(0, 9654, doing=BLOCKED, where="train.py:70 save")
    found = [saves, entered(1, 9655), locked_out, entered(3, 9655)]
    assert none_of(silence(gang_of(), *found, for_s=50.0), d.Judge)
    other = entered(0, 9654, doing=BLOCKED, where="train.py:86 cache", why="in flock() of b.lock", holder=2)
    assert judged(gang_of(), other, entered(1, 9655), locked_out, entered(3, 9655)).ranks == (0, 2)
    unknown = entered(2, 9654, doing=BLOCKED, where="train.py:85 cache")
    found = [entered(0, 9655), entered(1, 9655), unknown, entered(3, 9655)]
    assert none_of(silence(gang_of(), *found, for_s=50.0), d.Judge)


def test_a_rank_without_steps_among_ranks_with_steps_serves_them_and_is_not_judged() -> None:
    def served() -> Story:
        story = gang_of(steps=0)
        story.hear(*(beat(rank, 9) for rank in (0, 1, 2)), beat(3, 0))
        return story

    naps = [look(rank, doing=SLEEPS, where="train.py:61 nap", ends_s=30.0) for rank in (0, 1, 2)]
    serves = look(3, doing=SLEEPS, where="train.py:5 serve", certain=True)
    assert none_of(silence(served(), *naps, serves, for_s=50.0), d.Judge)
    stuck = entered(0, 6, members=(0, 1, 2), doing=BLOCKED, where="train.py:88 load", certain=True)
    waits = [entered(rank, 7, members=(0, 1, 2)) for rank in (1, 2)]
    assert judged(served(), stuck, *waits, serves).ranks == (0,)


@pytest.mark.parametrize(("starved_s", "hangs"), [(0.0, True), (40.0, False)])
def test_time_without_a_processor_is_no_time_in_one_place(starved_s: float, hangs: bool) -> None:
    story = gang_of()
    sorts = entered(2, 9654, doing=BLOCKED, where="train.py:55 sort", why="in C code", starved_s=starved_s)
    found = silence(story, entered(0, 9655), entered(1, 9655), sorts, entered(3, 9655), for_s=80.0)
    assert bool([one for one in found if isinstance(one, d.Judge)]) is hangs


def test_a_busy_machine_is_no_excuse_for_ever() -> None:
    story = gang_of()
    sorts = entered(2, 9654, doing=BLOCKED, where="train.py:55 sort", why="in C code", starved_s=1e6)
    found = [entered(0, 9655), entered(1, 9655), sorts, entered(3, 9655)]
    assert judged(story, *found, for_s=160.0).ranks == (2,)
    assert 100.0 < story.now_s < 150.0, "twice the patience of 60 s"


def test_the_use_of_gpus_is_part_of_the_evidence() -> None:
    found = [entered(rank, 9655, gpu_use=1.0) for rank in (0, 1, 3)]
    stuck = entered(2, 9654, doing=BLOCKED, where="train.py:88 load", certain=True, gpu_use=0.0)
    verdict = judged(gang_of(), *found, stuck)
    assert verdict.evidence[0].endswith("collective sequence numbers · /proc state · GPU use")
    assert "GPU use: ranks 0,1,3 100%, rank 2 0%" in verdict.evidence


def test_one_look_is_not_enough_however_certain_it_is() -> None:
    story = gang_of()
    found = [entered(rank, 7) for rank in (0, 1, 3)] + [entered(2, 6, doing=BLOCKED, certain=True)]
    assert none_of(silence(story, *found, for_s=6.5), d.Judge)


def test_nobody_is_judged_while_any_rank_moves() -> None:
    story = gang_of()
    found = [
        entered(0, 7),
        entered(1, 7),
        entered(2, 6, doing=BLOCKED, certain=True),
        entered(3, 6, doing=WORKS),
    ]
    assert none_of(silence(story, *found, for_s=590.0), d.Judge)


def test_a_rank_that_enters_further_collectives_moves() -> None:
    story = gang_of()
    for number in range(7, 40):
        story.wait(2.5)
        story.hear(*story.looked(*(entered(rank, number, still_s=20.0) for rank in ALL)))
    assert none_of(story.said, d.Judge) and not none_of(story.said, d.Look)


def test_a_long_sleep_is_a_proof_and_a_short_one_is_not() -> None:
    waiting = [entered(0, 7), entered(1, 7), entered(3, 7)]
    story = gang_of()
    nap = entered(2, 6, doing=SLEEPS, why="in a sleep that ends in 3,590 s", certain=True, ends_s=3590.0)
    assert judged(story, *waiting, nap).ranks == (2,)
    story = gang_of()
    nap = entered(2, 6, doing=SLEEPS, certain=True, ends_s=18.0)
    assert none_of(silence(story, *waiting, nap, for_s=50.0), d.Judge)


def test_who_waits_elsewhere_never_enters_what_the_others_wait_in() -> None:
    story = gang_of()
    others = [entered(rank, 7) for rank in (0, 1, 3)]
    store = look(2, WAITS, why="in a wait for a key of the store", where="train.py:40 sync", stack=("train.py:40 sync",),
                 collectives=(e.Collective("0", "default group", ALL, 6, "barrier", "", 30.0),))  # fmt: skip
    verdict = judged(story, *others, store)
    assert verdict.ranks == (2,) and verdict.waiting.endswith("rank 2 never entered it")
    assert "train.py:40 sync" in verdict.culprit


def test_different_collectives_are_shown_side_by_side_and_the_odd_one_is_the_culprit() -> None:
    story = gang_of()
    verdict = judged(
        story,
        entered(0, 7),
        entered(1, 7),
        entered(2, 7, "broadcast", where="train.py:20 odd"),
        entered(3, 7),
    )
    assert verdict.ranks == (2,)
    assert verdict.culprit == "rank 2 on n2: in broadcast #7 of float32[10] (default group), train.py:20 odd"
    assert verdict.evidence[0] == "rank 2: broadcast #7 of float32[10] (default group) at train.py:20 odd"
    assert (
        verdict.evidence[1] == "ranks 0,1,3: all_reduce #7 of float32[10] (default group) at train.py:9 step"
    )


def test_different_shapes_are_a_mismatch_except_where_they_may_differ() -> None:
    verdict = judged(
        gang_of(), entered(0, 7), entered(1, 7), entered(2, 7, shape="float32[11]"), entered(3, 7)
    )
    assert verdict.ranks == (2,) and "float32[11]" in verdict.culprit
    uneven = [entered(rank, 7, "all_to_all", shape=f"float32[{rank}]") for rank in ALL]
    assert judged(gang_of(), *uneven).ranks == ()


def test_a_whole_gang_that_waits_with_nobody_missing_is_the_networks_fault() -> None:
    verdict = judged(gang_of(), *(entered(rank, 7) for rank in ALL))
    assert (
        verdict.ranks == () and verdict.culprit == "nobody is missing: nothing flows between n0, n1, n2, n3"
    )
    assert verdict.waiting == "ranks 0-3 in all_reduce #7 (default group), entered 5 s ago"
    assert verdict.signature == "hang network"


def test_where_a_cut_falls_into_a_collective_who_did_not_come_through_it_is_not_missing() -> None:
    """All have entered #7; what the network still carried let some of them out."""
    inside = "in all_reduce"
    found = [entered(rank, 7 if rank == 2 else 8, why=inside) for rank in ALL]
    assert judged(gang_of(), *found).ranks == ()
    elsewhere = entered(2, 7, why="in a wait for the store")
    assert judged(gang_of(), *(elsewhere if one.rank == 2 else one for one in found)).ranks == (2,)


def test_who_burns_processor_time_in_a_collective_may_be_sending() -> None:
    story = gang_of()
    found = [entered(rank, 7) for rank in ALL]
    for second in range(1, 40):
        beats(story, 9, cpu_s=second * 0.9)
        story.wait(1.0)
        story.hear(*story.looked(*(stood(one, float(second)) for one in found)))
    assert none_of(story.said, d.Judge)


def test_a_rank_that_ended_well_while_others_wait_for_it_has_left_too_early() -> None:
    story = gang_of()
    story.hear(story.exited(0, 0, None, count=9))
    verdict = judged(story, *(entered(rank, 7) for rank in (1, 2, 3)), for_s=14.0)
    assert verdict.ranks == (0,) and verdict.culprit == "rank 0 on n0: ended with code 0 after 9 steps"
    assert verdict.waiting.endswith("rank 0 never entered it")
    story = gang_of()
    story.hear(story.exited(0, 0, None, count=9))
    assert judged(story, *(look(rank, WAITS) for rank in (1, 2, 3)), for_s=14.0).ranks == (0,)


def test_victims_of_one_group_are_not_the_culprits_of_another() -> None:
    """Ranks 0 and 1 wait for 2 in one group, 2 waits for 3 in another, and 3 reads for ever."""
    both = (0, 1, 2)
    other = e.Collective("1", "pair", (2, 3), 5, "all_gather", "", 4.0)
    two = look(
        2,
        WAITS,
        where="t.py:5 b",
        collectives=(e.Collective("2", "", both, 8, "all_reduce", "", 40.0), other),
    )
    three = look(3, WAITS, where="t.py:7 c", why="in a wait for the store",
                 collectives=(e.Collective("1", "pair", (2, 3), 4, "all_gather", "", 60.0),))  # fmt: skip
    first = [entered(rank, 9, members=both, group="2") for rank in (0, 1)]
    assert judged(gang_of(), *first, two, three).ranks == (3,)


def test_ranks_that_wait_for_each_other_in_two_groups_are_both_shown() -> None:
    def _crossed(rank: int, mine: str, other: str) -> e.RankLook:
        entered = e.Collective(mine, mine, ALL, 5, "all_reduce", "", 4.0)
        return look(rank, WAITS, where=f"t.py:{rank} f", collectives=(
            entered, e.Collective(other, other, ALL, 4, "all_reduce", "", 60.0)))  # fmt: skip

    verdict = judged(
        gang_of(), _crossed(0, "a", "b"), _crossed(1, "a", "b"), _crossed(2, "b", "a"), _crossed(3, "b", "a")
    )
    assert (verdict.ranks, verdict.node) == (ALL, ""), "where sides are equal nobody knows which one is wrong"
    assert len([line for line in verdict.evidence if "all_reduce #5" in line]) == 2


def test_a_debugger_that_holds_a_rank_is_a_proof() -> None:
    held = entered(2, 6, doing=e.Doing.STOPPED, state="t", why="held by a debugger", certain=True)
    found = (entered(0, 7), entered(1, 7), held, entered(3, 7))
    assert none_of(silence(gang_of(), *found), d.Judge), "what was seen for 2 s may as well go on"
    story = gang_of()
    story.hear(beat(2, 9, "t"))
    assert "held by a debugger" in judged(story, *found).culprit


# Patience


@pytest.mark.parametrize("doing", [BLOCKED, SLEEPS])
def test_who_merely_stands_in_one_place_has_a_minute(doing: e.Doing) -> None:
    waiting = [entered(0, 7), entered(1, 7), entered(3, 7)]
    odd = entered(2, 6, doing=doing, where="train.py:50 odd")
    story = gang_of()
    assert none_of(silence(story, *waiting, odd, for_s=55.0), d.Judge)
    story = gang_of()
    assert judged(story, *waiting, odd, for_s=120.0).culprit.startswith("rank 2 on n2")
    assert 60.0 <= story.now_s <= 100.0


@pytest.mark.parametrize(("doing", "phase"), [(BLOCKED, "evaluate"), (SPINS, "save"), (SPINS, "train")])
def test_an_evaluation_or_a_checkpoint_has_five_and_so_has_who_computes(doing: e.Doing, phase: str) -> None:
    waiting = [entered(0, 7), entered(1, 7), entered(3, 7)]
    odd = entered(2, 6, doing=doing, phase=phase, where="train.py:50 odd")
    story = gang_of()
    assert none_of(silence(story, *waiting, odd, for_s=290.0), d.Judge)
    story = gang_of()
    assert judged(story, *waiting, odd, for_s=400.0).culprit.startswith("rank 2 on n2")


def test_before_the_first_step_patience_lasts_up_to_the_ceiling() -> None:
    story = gang_of(steps=0)
    found = [look(rank, BLOCKED, phase="import") for rank in ALL]
    assert none_of(silence(story, *found, for_s=550.0), d.Judge)
    assert not none_of(silence(gang_of(steps=0), *found, for_s=700.0), d.Judge)


def test_processor_time_alone_does_not_hide_a_hang_before_the_first_step_for_ever() -> None:
    for waits, is_judged in ((WAITS, True), (SPINS, False)):
        story = gang_of(2, steps=0, hang_s_ceiling=100.0)
        found = [look(0, waits), look(1, SPINS, phase="train", where="train.py:2 build")]
        for second in range(1, 300):
            story.hear(beat(1, 0, cpu_s=second * 0.9), beat(0, 0, cpu_s=0.0))
            story.wait(1.0)
            orders = [one for one in story.said if isinstance(one, d.Look)]
            if orders and none_of(story.said, d.Judge):
                story.hear(*story.looked(*(stood(one, story.now_s - orders[0].at) for one in found)))
        assert none_of(story.said, d.Judge) is not is_judged


def test_log_lines_stay_the_verdict_without_a_proof_and_not_one_with_it() -> None:
    waiting = [entered(0, 7), entered(1, 7), entered(3, 7)]
    for odd, is_judged in (
        (entered(2, 6, doing=BLOCKED), False),
        (entered(2, 6, doing=BLOCKED, certain=True), True),
    ):
        story = gang_of()
        for second in range(1, 200):
            story.hear(beat(0, 9, log_bytes=second))
            silence(story, *waiting, odd, for_s=1.0)
            orders = [one for one in story.said if isinstance(one, d.Look)]
            if orders:
                story.hear(
                    *story.looked(*(stood(one, story.now_s - orders[0].at) for one in (*waiting, odd)))
                )
        assert none_of(story.said, d.Judge) is not is_judged


def test_who_works_while_others_wait_without_any_sign_has_the_ceiling() -> None:
    story = gang_of(hang_s_ceiling=100.0)
    found = [
        entered(0, 7),
        entered(1, 7),
        entered(2, 6, doing=WORKS, where="train.py:60 loop"),
        entered(3, 7),
    ]
    assert none_of(silence(story, *found, for_s=95.0), d.Judge)
    assert judged(story, *found, for_s=100.0).ranks == (2,)


def test_a_whole_gang_that_works_in_silence_is_never_judged() -> None:
    story = gang_of(hang_s_ceiling=100.0)
    assert none_of(silence(story, *(entered(rank, 6, doing=WORKS) for rank in ALL), for_s=2000.0), d.Judge)


def test_what_cannot_be_seen_has_the_ceiling() -> None:
    story = gang_of(hang_s_ceiling=100.0)
    for _ in range(190):
        if any(isinstance(one, d.Look) for one in story.wait(0.5)):
            story.hear(*story.looked(*(look(rank) for rank in ALL)))
    assert none_of(story.said, d.Judge)


# A silence that the user has fixed


def test_after_a_silence_that_the_user_has_fixed_still_ranks_have_no_more_patience() -> None:
    story = gang_of(2, hang_s_max=10.0)
    story.hear(beat(0, 10))
    verdict = judged(story, look(0, WAITS), look(1, BLOCKED, where="train.py:5 f"), for_s=15.0)
    assert verdict.ranks == (1,) and story.now_s == pytest.approx(12.0, abs=1.0)


def test_after_a_fixed_silence_whoever_moves_is_still_not_judged() -> None:
    story = gang_of(2, hang_s_max=10.0)
    assert none_of(silence(story, look(0, WAITS), look(1, WORKS), for_s=100.0), d.Judge)


def test_a_fixed_hang_takes_two_looks_before_its_verdict_even_where_looks_see_nothing() -> None:
    story = Story(2, hang_s_max=10.0)
    story.run()
    story.hear(beat(0, 4), beat(1, 3))
    orders = story.wait(10.0)
    assert [type(decision) for decision in orders] == [d.Look, d.Look]
    assert none_of(
        story.hear(*story.looked(look(0, stack=("all_reduce",)), look(1, stack=("all_reduce",)))), d.Judge
    )
    assert not none_of(story.wait(2.0), d.Look)
    taken = story.looked(look(0, stack=("all_reduce",)), look(1, stack=("all_reduce",)))
    verdict = only(story.hear(*taken), d.Judge).verdict
    assert (verdict.kind, verdict.ranks) == (d.Kind.HANG, (1,))
    assert any("all_reduce" in line for line in verdict.evidence)


def test_a_hang_is_not_judged_by_a_node_that_was_not_heard_since() -> None:
    story = Story(2, hang_s_max=10.0, node_silent_s_max=500.0)
    story.run()
    story.hear(beat(0, 4), beat(1, 4))
    for _ in range(40):
        if not none_of(story.wait(1.0), d.Look):
            story.hear(*story.looked(look(0)))
    assert none_of(story.said, d.Judge), "n1 has not spoken after the time was over"
    story.wait(7.0)
    story.hear(*story.looked(look(0)))
    judged = story.hear(beat(1, 4)) + story.wait(7.0)
    assert "no answer to the last look from n1" in only(judged, d.Judge).verdict.evidence
