"""Inspections in, verdicts out: the rules of `hang.py` and `collectives.py` in `brain/diagnosis/`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.core import observations
from orchestrator.core.status_types import Frame
from orchestrator.core.wire import orders
from orchestrator.journal.journal_file import unwrap_message
from tests.support.brain_story import Story, look, none_of, only
from tests.support.hang_story import (
    ALL,
    BLOCKED,
    SLEEPS,
    SPINS,
    STOPPED,
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


def test_stopped_rank_is_named_with_waits_of_others() -> None:
    story = gang_of()
    read = entered(2, 9654, activity=STOPPED, where="train.py:88 load", why="stopped (state T)", state="T")
    verdict = judged(story, entered(0, 9655), entered(1, 9655), read, entered(3, 9655))
    assert (verdict.kind, verdict.ranks, verdict.node, verdict.step) == (d.VerdictKind.HANG, (2,), "n2", 9)
    assert verdict.culprit == "rank 2 on n2: stopped (state T), train.py:88 load"
    assert verdict.waiting == (
        "ranks 0-1,3 in all_reduce #9,655 (default group), entered 5 s ago, time limit 600 s; rank 2 never entered it"
    )
    assert (
        verdict.evidence[0]
        == "stacks of 4 ranks, 3 times in 6 s, unchanged · collective sequence numbers · /proc state"
    )
    assert verdict.evidence[1].startswith("rank 2 (state T; stopped): train.py:88 load")
    assert verdict.evidence[2].startswith("ranks 0-1,3 (state S; waiting for ranks)")
    place = (Frame("train.py", 88, "load"),)
    assert verdict.signature == d.FailureSignature(d.VerdictKind.HANG, d.FailureCause.STANDSTILL, frames=place)
    assert story.now_s == pytest.approx(11.0, abs=0.6), "5 s of silence, and looks until it has stood for 5 s"


def test_different_collectives_prove_nothing_if_thread_may_enter() -> None:
    """Ranks in different collectives are no proof where a thread may enter the missing one."""
    others = [entered(rank, 7) for rank in (0, 1, 3)]
    saving = entered(2, 5, "barrier", members=(2, 3), group="1", where="train.py:44 sync")
    assert judged(gang_of(), *others, odd := entered(2, 7, "barrier")).ranks == (2,)
    assert none_of(silence(gang_of(), *others, replace(odd, others_act=True), for_s=280.0), d.Judge)
    assert none_of(silence(gang_of(), *others, replace(saving, others_act=True), for_s=280.0), d.Judge)


def test_stepless_rank_among_stepping_ones_is_not_judged() -> None:
    """A rank without steps among ranks with steps serves them and is not judged."""

    def served() -> Story:
        story = gang_of(steps=0)
        story.hear(*(beat(rank, 9) for rank in (0, 1, 2)), beat(3, 0))
        return story

    naps = [look(rank, activity=SLEEPS, where="train.py:61 nap") for rank in (0, 1, 2)]
    serves = look(3, activity=SLEEPS, where="train.py:5 serve")
    assert none_of(silence(served(), *naps, serves, for_s=500.0), d.Judge)
    stuck = entered(0, 6, members=(0, 1, 2), activity=STOPPED, where="train.py:88 load", state="T")
    waits = [entered(rank, 7, members=(0, 1, 2)) for rank in (1, 2)]
    assert judged(served(), stuck, *waits, serves).ranks == (0,)


def test_gpu_use_is_part_of_evidence() -> None:
    found = [entered(rank, 9655, gpu_use=1.0) for rank in (0, 1, 3)]
    stuck = entered(2, 9654, activity=STOPPED, where="train.py:88 load", state="T", gpu_use=0.0)
    verdict = judged(gang_of(), *found, stuck)
    assert verdict.evidence[0].endswith("collective sequence numbers · /proc state · GPU use")
    assert "GPU use: ranks 0-1,3 100%, rank 2 0%" in verdict.evidence


def test_one_inspection_is_never_enough() -> None:
    story = gang_of()
    found = [entered(rank, 7) for rank in (0, 1, 3)] + [entered(2, 7, "broadcast")]
    assert none_of(silence(story, *found, for_s=6.5), d.Judge)


def test_no_rank_is_judged_while_any_moves() -> None:
    story = gang_of()
    found = [
        entered(0, 7),
        entered(1, 7),
        entered(2, 6, activity=STOPPED, state="T"),
        entered(3, 6, activity=WORKS),
    ]
    assert none_of(silence(story, *found, for_s=590.0), d.Judge)


def test_rank_entering_more_collectives_moves() -> None:
    story = gang_of()
    for number in range(7, 40):
        story.wait(2.5)
        story.hear(*story.looked(*(entered(rank, number, still_s=20.0) for rank in ALL)))
    assert none_of(story.said, d.Judge) and not none_of(story.said, orders.Inspect)


def test_rank_in_store_or_recv_is_only_named() -> None:
    """A rank that waits in the store or for one rank may yet continue and is only named."""
    others = [entered(rank, 7) for rank in (0, 1, 3)]
    store = look(2, WAITS, why="in the store", where="train.py:40 sync", stack=("train.py:40 sync",),
                 collectives=(observations.Collective("0", "default group", ALL, 6, "barrier", "", 30.0),))  # fmt: skip
    for where in (store, replace(store, why="in recv"), replace(store, collectives=())):
        story = gang_of()
        assert none_of(silence(story, *others, where, for_s=400.0), d.Judge)
    barrier = observations.Collective("1", "pair", (2, 3), 1, "barrier", "", 4.0)
    both = replace(store, why="in barrier", collectives=(barrier, *store.collectives))
    verdict = judged(gang_of(), *others, both)
    assert verdict.ranks == (2,)
    assert "train.py:40 sync" in verdict.culprit and verdict.stall_timeout_s == 0.0


def test_rank_in_different_collective_is_culprit() -> None:
    """Different collectives are shown side by side, and the outlier is the culprit."""
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
    assert verdict.evidence[1] == "ranks 0-1,3: all_reduce #7 of float32[10] (default group) at train.py:9 step"


def test_different_shapes_mismatch_unless_allowed() -> None:
    verdict = judged(gang_of(), entered(0, 7), entered(1, 7), entered(2, 7, shape="float32[11]"), entered(3, 7))
    assert verdict.ranks == (2,) and "float32[11]" in verdict.culprit
    uneven = [entered(rank, 7, "all_to_all", shape=f"float32[{rank}]") for rank in ALL]
    assert none_of(silence(gang_of(), *uneven, for_s=500.0), d.Judge)


def test_whole_gang_waiting_is_network_fault_after_limit() -> None:
    """A gang that waits with no rank missing is a network fault after ten minutes."""
    found = [entered(rank, 7) for rank in ALL]
    assert none_of(silence(gang_of(), *found, for_s=590.0), d.Judge), "the network may come back"
    verdict = judged(gang_of(), *found, for_s=640.0)
    assert verdict.ranks == () and verdict.culprit == "no rank is missing: no data flows between n0, n1, n2, n3"
    assert verdict.waiting == "ranks 0-3 in all_reduce #7 (default group), entered 5 s ago, time limit 600 s"
    assert verdict.signature == d.FailureSignature(d.VerdictKind.HANG, d.FailureCause.NETWORK)


def test_rank_cut_off_in_collective_is_not_missing() -> None:
    """All have entered #7; what the network still carried let some of them out."""
    inside = "in all_reduce"
    found = [entered(rank, 7 if rank == 2 else 8, why=inside) for rank in ALL]
    assert judged(gang_of(), *found, for_s=640.0).ranks == ()


def test_cpu_use_in_collective_may_be_sending() -> None:
    story = gang_of()
    found = [entered(rank, 7) for rank in ALL]
    for second in range(1, 40):
        beats(story, 9, cpu_s=second * 0.9)
        story.wait(1.0)
        story.hear(*story.looked(*(stood(one, float(second)) for one in found)))
    assert none_of(story.said, d.Judge)


def test_rank_that_exited_before_others_left_too_early() -> None:
    """A rank that exited with code 0 while others wait for it has left too early."""
    story = gang_of()
    story.hear(story.exited(0, 0, None, count=9))
    verdict = judged(story, *(entered(rank, 7) for rank in (1, 2, 3)))
    assert verdict.ranks == (0,) and verdict.culprit == "rank 0 on n0: ended with code 0 after 9 steps"
    assert verdict.waiting.endswith("rank 0 never entered it")
    assert verdict.evidence[0].startswith("rank 0 ended after 9 steps, and ranks 1-3 did not")
    story = gang_of()
    story.hear(story.exited(0, 0, None, count=9))
    assert none_of(silence(story, *(look(rank, WAITS) for rank in (1, 2, 3)), for_s=400.0), d.Judge)


def test_victims_in_one_group_are_not_culprits() -> None:
    """Ranks 0 and 1 wait for 2 in one group, 2 waits for 3 in another, and 3 reads for ever."""
    both = (0, 1, 2)
    other = observations.Collective("1", "pair", (2, 3), 5, "all_gather", "", 4.0)
    two = look(
        2,
        WAITS,
        where="t.py:5 b",
        collectives=(observations.Collective("2", "", both, 8, "all_reduce", "", 40.0), other),
    )
    three = look(3, BLOCKED, where="t.py:7 c", why="stopped (state T)", state="T",
                 collectives=(observations.Collective("1", "pair", (2, 3), 4, "all_gather", "", 60.0),))  # fmt: skip
    first = [entered(rank, 9, members=both, group="2") for rank in (0, 1)]
    assert judged(gang_of(), *first, two, three).ranks == (3,)


def test_ranks_waiting_for_each_other_are_both_shown() -> None:

    def _crossed(rank: int, mine: str, other: str) -> observations.RankInspection:
        entered = observations.Collective(mine, mine, ALL, 5, "all_reduce", "", 4.0)
        return look(rank, WAITS, where=f"t.py:{rank} f", collectives=(
            entered, observations.Collective(other, other, ALL, 4, "all_reduce", "", 60.0)))  # fmt: skip

    verdict = judged(
        gang_of(), _crossed(0, "a", "b"), _crossed(1, "a", "b"), _crossed(2, "b", "a"), _crossed(3, "b", "a")
    )
    assert (verdict.ranks, verdict.node) == (ALL, ""), "where sides are equal nobody knows which one is wrong"
    assert len([line for line in verdict.evidence if "all_reduce #5" in line]) == 2


def test_rank_held_by_debugger_is_not_judged() -> None:
    """A rank that a debugger holds is not judged, since it is released again."""
    held = entered(2, 6, activity=observations.Activity.STOPPED, state="t", why="held by a debugger")
    story = gang_of()
    story.hear(beat(2, 9, "t"))
    assert none_of(silence(story, entered(0, 7), entered(1, 7), held, entered(3, 7), for_s=290.0), d.Judge)


# The stall timeout


@pytest.mark.parametrize("activity", [BLOCKED, SPINS, SLEEPS])
@pytest.mark.parametrize(
    ("waiting", "limit_s"),
    [
        ({}, 600.0),
        ({"limit_s": 7200.0}, 7200.0),
        ({"limit_s": None}, 1800.0),
        ({"limit_s": None, "gpu_use": 1.0}, 600.0),
        ({"limit_s": None, "why": "in the store"}, 1800.0),
    ],
)
def test_stall_timeout_is_process_group_timeout(
    activity: observations.Activity, waiting: dict[str, Any], limit_s: float
) -> None:
    """Ranks wait for a stuck one as long as their process group lets them."""
    found = [*(entered(rank, 7, **waiting) for rank in (0, 1, 3)), entered(2, 6, activity=activity)]
    assert none_of(silence(gang_of(), *found, for_s=limit_s - 5.0), d.Judge)
    story = gang_of()
    verdict = judged(story, *found, for_s=limit_s + 150.0)
    assert (verdict.ranks, verdict.stall_timeout_s) == ((2,), limit_s)
    assert verdict.evidence[0] == f"no process state proves it; the timeout was {limit_s:.0f} s (of the process group)"
    assert story.now_s < limit_s + 10.0, "an inspection comes when the limit is over"
    story = gang_of(hang_timeout_s=20.0)
    chosen = judged(story, *found, for_s=25.0)
    assert chosen.stall_timeout_s == 20.0 and "(monitor.hang_timeout)" in chosen.evidence[0]


def test_half_hour_without_movement_if_no_rank_waits() -> None:
    blocked = [look(rank, BLOCKED, where="train.py:5 read") for rank in ALL]
    assert none_of(silence(gang_of(), *blocked, for_s=1750.0), d.Judge)
    verdict = judged(gang_of(), *blocked, for_s=1900.0)
    assert verdict.evidence[0] == "no process state proves it; the timeout was 1800 s (nothing moved in any process)"
    for at_work in (look(0, SPINS), look(0, SLEEPS), look(0, BLOCKED, gpu_use=0.4)):
        all_at_work = [replace(at_work, rank=rank) for rank in ALL]
        assert none_of(silence(gang_of(), *all_at_work, for_s=4000.0), d.Judge)
        assert not none_of(silence(gang_of(hang_timeout_s=60.0), *all_at_work, for_s=70.0), d.Judge)
    assert not none_of(silence(gang_of(), *blocked[:3], look(3, SLEEPS), for_s=1900.0), d.Judge)


@pytest.mark.parametrize("sign", ["log_bytes", "io_bytes", "cpu_s"])
def test_sign_of_life_restarts_limit_without_waiters(sign: str) -> None:
    blocked = [look(rank, BLOCKED, where="train.py:5 read") for rank in ALL]
    story = gang_of()
    while none_of(story.said, d.Judge) and story.now_s < 5000.0:
        told: dict[str, Any] = {sign: 2_000_000} if story.now_s > 1000.0 else {}
        story.hear(beat(1, 9, **told))
        if not none_of(story.wait(0.5), orders.Inspect):
            story.hear(*story.looked(*(stood(one, max(story.now_s - 5.0, 0.0)) for one in blocked)))
    assert story.now_s == pytest.approx(2800.0, abs=5.0)


def test_rank_that_moved_gets_whole_stall_timeout() -> None:
    works, stands = entered(2, 6, activity=WORKS), entered(2, 6, activity=BLOCKED)
    waiting = [entered(rank, 7, limit_s=60.0) for rank in (0, 1, 3)]
    story = gang_of()
    assert none_of(silence(story, *waiting, works, for_s=100.0), d.Judge)
    assert none_of(silence(story, *waiting, stands, for_s=50.0), d.Judge)
    assert not none_of(silence(story, *waiting, stands, for_s=60.0), d.Judge)


def test_same_limits_hold_before_first_step() -> None:
    imports = [look(rank, BLOCKED, phase="import") for rank in ALL]
    assert none_of(silence(gang_of(steps=0), *imports, for_s=1750.0), d.Judge)
    assert not none_of(silence(gang_of(steps=0), *imports, for_s=1900.0), d.Judge)


def test_cpu_time_hides_no_hang_if_rank_waits() -> None:
    """Processor time does not hide a hang before the first step where a rank waits."""
    for waits, is_judged in ((entered(0, 7, limit_s=100.0), True), (look(0, SPINS), False)):
        story = gang_of(2, steps=0)
        found = [waits, look(1, SPINS, phase="train", where="train.py:2 build")]
        for second in range(1, 300):
            story.hear(beat(1, 0, cpu_s=second * 0.9), beat(0, 0, cpu_s=0.0))
            story.wait(1.0)
            asked = [one for one in story.said if isinstance(unwrap_message(one), orders.Inspect)]
            if asked and none_of(story.said, d.Judge):
                story.hear(*story.looked(*(stood(one, story.now_s - asked[0].at) for one in found)))
        assert none_of(story.said, d.Judge) is not is_judged


def test_log_lines_delay_verdict_only_without_proof() -> None:
    waiting = [entered(0, 7), entered(1, 7), entered(3, 7)]
    blocked, elsewhere = entered(2, 6, activity=BLOCKED), entered(2, 7, "broadcast")
    for odd, steps, is_judged in ((blocked, 9, False), (elsewhere, 9, True), (elsewhere, 0, True)):
        story = gang_of(steps=steps)
        for second in range(1, 400):
            story.hear(beat(0, steps, log_bytes=second))
            silence(story, *waiting, odd, for_s=1.0)
            asked = [one for one in story.said if isinstance(unwrap_message(one), orders.Inspect)]
            if asked:
                story.hear(*story.looked(*(stood(one, story.now_s - asked[0].at) for one in (*waiting, odd))))
        assert none_of(story.said, d.Judge) is not is_judged


def test_working_rank_is_never_judged() -> None:
    works = entered(2, 6, activity=WORKS, where="train.py:60 loop")
    found = [entered(0, 7), entered(1, 7), works, entered(3, 7)]
    assert none_of(silence(gang_of(hang_timeout_s=100.0), *found, for_s=2000.0), d.Judge)


def test_silently_working_gang_is_never_judged() -> None:
    story = gang_of(hang_timeout_s=100.0)
    assert none_of(silence(story, *(entered(rank, 6, activity=WORKS) for rank in ALL), for_s=2000.0), d.Judge)


def test_unseen_state_has_the_upper_limit() -> None:
    story = gang_of(hang_timeout_s=100.0)
    for _ in range(190):
        if any(isinstance(unwrap_message(one), orders.Inspect) for one in story.wait(0.5)):
            story.hear(*story.looked(*(look(rank) for rank in ALL)))
    assert none_of(story.said, d.Judge)


# A time that the user has set


def test_hang_timeout_ends_stuck_ranks() -> None:
    story = gang_of(2, hang_timeout_s=10.0)
    story.hear(beat(0, 10))
    verdict = judged(story, look(0, WAITS), look(1, BLOCKED, where="train.py:5 f"), for_s=15.0)
    assert verdict.ranks == (1,) and story.now_s == pytest.approx(10.0, abs=1.0)


def test_hang_timeout_spares_moving_ranks() -> None:
    story = gang_of(2, hang_timeout_s=10.0)
    assert none_of(silence(story, look(0, WAITS), look(1, WORKS), for_s=100.0), d.Judge)


def test_hang_timeout_needs_two_inspections_even_if_empty() -> None:
    """A hang timeout takes two inspections before its verdict, even if they see nothing."""
    story = Story(2, hang_timeout_s=10.0)
    story.run()
    story.hear(beat(0, 4), beat(1, 3))
    assert [type(unwrap_message(one)) for one in story.wait(10.0)] == [orders.Inspect, orders.Inspect]
    again = story.hear(*story.looked(look(0, stack=("all_reduce",)), look(1, stack=("all_reduce",))))
    assert none_of(again, d.Judge) and not none_of(again, orders.Inspect)
    taken = story.looked(look(0, stack=("all_reduce",)), look(1, stack=("all_reduce",)))
    verdict = only(story.hear(*taken), d.Judge).verdict
    assert (verdict.kind, verdict.ranks) == (d.VerdictKind.HANG, (1,))
    assert any("all_reduce" in line for line in verdict.evidence)


def test_node_not_heard_since_judges_no_hang() -> None:
    story = Story(2, hang_timeout_s=10.0, node_timeout_s=500.0)
    story.run()
    story.hear(beat(0, 4), beat(1, 4))
    for _ in range(40):
        if not none_of(story.wait(1.0), orders.Inspect):
            story.hear(*story.looked(look(0)))
    assert none_of(story.said, d.Judge), "n1 has not spoken after the time was over"
    story.wait(7.0)
    story.hear(*story.looked(look(0)))
    judged = story.hear(beat(1, 4)) + story.wait(7.0)
    assert "no answer to the last inspection from n1" in only(judged, d.Judge).verdict.evidence
