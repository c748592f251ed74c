"""Events in, inspections out: the rules of `suspicion.py` and `inspections.py` in `brain/diagnosis/`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.brain.diagnosis import inspections, suspects, suspicion
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import observations
from orchestrator.core.status_types import NextAction
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from tests.support.brain_story import Story, given, look, names, none_of, notices, only

WAITS = observations.Activity.WAITING_FOR_RANKS


def _auto(nodes: int = 2, **limits: object) -> Story:
    """Return a running job whose silence is judged by what it has shown."""
    story = Story(nodes, **{"hang_timeout_s": 0.0, "node_timeout_s": 5000.0, **limits})  # type: ignore[arg-type]
    story.run()
    return story


def _beat(rank: int, count: int = 0, **more: Any) -> e.FromNode:
    fields: dict[str, Any] = {"log_bytes": 0, "cpu_s": 0.0, **more}
    return e.FromNode(0.0, f"n{rank}", reports.Heartbeat(1, (RankHeartbeat(rank, count, "S", **fields),)))


def _step(story: Story, count: int, median_step_s: float | None = 0.1) -> None:
    story.hear(*(_beat(rank, count, median_step_s=median_step_s) for rank in range(len(story.brain.facts.nodes))))


def _looks(decisions: list[d.Decision]) -> list[d.To]:
    return [one for one in decisions if isinstance(one, d.To) and isinstance(one.order, orders.Inspect)]


def _first_look_s(story: Story, until_s: float = 1000.0) -> float | None:
    """Return after how long a silence the first look comes."""
    began_s = story.now_s
    while story.now_s < began_s + until_s:
        if _looks(story.wait(0.5)):
            return story.now_s - began_s
    return None


@pytest.mark.parametrize(("median_step_s", "wanted_s"), [(0.01, 5.0), (1.0, 5.0), (4.0, 12.0), (1000.0, 600.0)])
def test_three_usual_steps_of_silence_are_suspicious(median_step_s: float, wanted_s: float) -> None:
    """Three usual steps of silence are suspicious, within floor and ceiling."""
    story = _auto()
    _step(story, 9, median_step_s)
    assert _first_look_s(story) == pytest.approx(wanted_s, abs=0.5)


def test_short_hang_timeout_is_suspicious_silence() -> None:
    """A hang timeout below the suspicious silence replaces it."""
    story = _auto(hang_timeout_s=9.0)
    _step(story, 9, median_step_s=60.0)
    assert _first_look_s(story) == pytest.approx(9.0, abs=0.5)
    story = _auto(hang_timeout_s=3600.0)
    _step(story, 9)
    assert _first_look_s(story) == pytest.approx(5.0, abs=0.5), "it ends later, and is named as soon"


def test_slowest_rank_sets_usual_step_time() -> None:
    story = _auto()
    story.hear(_beat(0, 9, median_step_s=0.1), _beat(1, 9, median_step_s=10.0))
    assert _first_look_s(story) == pytest.approx(30.0, abs=0.5)


def test_half_minute_is_suspicious_without_step_times() -> None:
    """Before step times are known half a minute of silence is suspicious."""
    assert _first_look_s(_auto()) == pytest.approx(30.0, abs=0.5)


def test_cpu_time_counts_only_before_first_step() -> None:
    story = _auto()
    for second in range(35):
        story.now_s += 1.0
        assert not story.hear(_beat(0, cpu_s=float(second)), _beat(1, cpu_s=float(second)))
    story = _auto()
    _step(story, 9)
    looked: list[d.To] = []
    for second in range(10):
        story.now_s += 1.0
        looked += _looks(
            story.hear(_beat(0, 9, cpu_s=float(second), median_step_s=0.1), _beat(1, 9, median_step_s=0.1))
        )
    assert looked


def test_remaining_ranks_have_five_seconds_after_exits() -> None:
    """When some ranks have ended well, the others have five seconds."""
    story = _auto()
    _step(story, 9, median_step_s=30.0)
    story.hear(story.exited(1, 0, None, count=9))
    assert _first_look_s(story) == pytest.approx(5.0, abs=0.5)


@pytest.mark.parametrize("sign", ["log_bytes", "io_bytes"])
@pytest.mark.parametrize(("median_step_s", "look_s"), [(0.1, 0.2 * 5.0 + 5.0), (None, 0.2 * 30.0 + 30.0)])
def test_sign_of_one_rank_delays_inspection_within_limit(sign: str, median_step_s: float | None, look_s: float) -> None:
    story = _auto()
    _step(story, 9, median_step_s)
    began_s, first_s = story.now_s, 0.0
    for second in range(1, 300):
        story.now_s += 1.0
        beats = (
            _beat(0, 9, median_step_s=median_step_s, **{sign: second * 100_000}),
            _beat(1, 9, median_step_s=median_step_s),
        )
        if _looks(story.hear(*beats)):
            first_s = first_s or story.now_s - began_s
    assert first_s == pytest.approx(look_s, abs=1.0)


def test_little_io_is_no_sign_of_life() -> None:
    """A little input and output is not a sign of life."""
    story = _auto()
    _step(story, 9)
    looked: list[d.To] = []
    for second in range(1, 8):
        story.now_s += 1.0
        looked += _looks(
            story.hear(_beat(0, 9, median_step_s=0.1, io_bytes=second * 10_000), _beat(1, 9, median_step_s=0.1))
        )
    assert looked


def test_inspections_follow_with_growing_pauses() -> None:
    """After the first inspection the next ones follow with growing pauses."""
    story = _auto()
    _step(story, 9)
    times: list[float] = []
    for _ in range(400):
        if _looks(story.wait(0.5)):
            times.append(story.now_s)
            still_s = story.now_s - times[0]
            story.hear(*story.looked(*(look(rank, WAITS, still_s=still_s) for rank in (0, 1))))
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses[:5] == pytest.approx([2.0, 4.0, 8.0, 16.0, 30.0], abs=0.6)
    assert pauses[5:] == pytest.approx([30.0] * len(pauses[5:]), abs=0.6)


def test_newly_stuck_rank_is_inspected_again_soon() -> None:
    """A rank that has just become stuck is inspected again soon."""
    story = _auto()
    _step(story, 9)
    times: list[float] = []
    for _ in range(200):
        if _looks(story.wait(0.5)):
            times.append(story.now_s)
            activity, still_s = (observations.Activity.PROGRESSING, 0.0) if len(times) < 6 else (WAITS, 0.0)
            story.hear(*story.looked(look(0, activity, still_s=still_s), look(1, WAITS, still_s=50.0)))
    assert times[5] - times[4] == pytest.approx(30.0, abs=0.6) and times[6] - times[5] == pytest.approx(2.0, abs=0.6)


def test_step_voids_previous_findings() -> None:
    """A step voids what was found before."""
    story = _auto()
    _step(story, 9)
    story.wait(8.0)
    assert len(_looks(story.said)) == 2 and "inspection 2" not in _looks(story.said)[0].why
    story.said.clear()
    _step(story, 10)
    story.wait(4.0)
    assert none_of(story.said, orders.Inspect)
    story.wait(2.0)
    assert "look 2" not in _looks(story.said)[0].why


def test_no_inspection_while_previous_one_is_pending() -> None:
    """No inspection is ordered while the last one is still to be answered."""
    story = _auto()
    _step(story, 9)
    story.wait(5.0 + inspections.ANSWER_S_MAX - 0.5)
    assert {one.inspection for _, one in given(story.said, orders.Inspect)} == {1}
    story.wait(1.0)
    assert {one.inspection for _, one in given(story.said, orders.Inspect)} == {1, 2}


def test_silent_node_is_not_inspected() -> None:
    story = _auto()
    _step(story, 9)
    story.hear(e.AgentDisconnected(0.0, "n1"))
    assert _first_look_s(story, 60.0) is None


def test_off_means_no_silence_is_suspicious() -> None:
    story = _auto(hang_timeout_s=None)
    _step(story, 9)
    assert _first_look_s(story, 60.0) is None and suspects.current_suspicion(story.brain.facts, story.now_s) is None


def test_user_requested_inspection_reaches_all_nodes_without_effect() -> None:
    """An inspection that the user requests goes to all nodes once and changes nothing."""
    story = _auto()
    _step(story, 9)
    asked = story.hear(e.InspectRequested(0.0, 1))
    assert names(asked, orders.Inspect) == ["n0", "n1"]
    assert story.brain.facts.inspect_answered == 1
    assert not story.hear(*story.looked(look(0, WAITS, still_s=99.0), look(1, observations.Activity.BLOCKED)))
    assert not story.hear(_beat(0, 10), _beat(1, 10))


def test_new_supervisor_ignores_unwatched_silence() -> None:
    """A supervisor that comes back ignores what happened unwatched."""
    story = _auto()
    _step(story, 9)
    story.wait(8.0)
    story.said.clear()
    story.hear(e.SupervisorStarted(0.0, 7), *(story.up(node, running=1) for node in (0, 1)))
    assert _first_look_s(story) == pytest.approx(5.0, abs=0.5)
    assert "look 2" not in _looks(story.said)[0].why


def _said(story: Story, after_s: float = 0.0) -> tuple[str, NextAction, float | None]:
    """Return what is suspected, what follows, and in how many seconds."""
    seen = suspects.current_suspicion(story.brain.facts, story.now_s + after_s)
    assert seen is not None
    return seen.what, seen.follows, seen.in_s


def test_suspicion_is_described_in_one_line() -> None:
    story = _auto()
    _step(story, 9, median_step_s=0.3)
    assert suspects.current_suspicion(story.brain.facts, story.now_s) is None
    story.now_s += 2.0
    story.hear(story.beat(1, 9, "T"))
    assert _said(story, 2.0) == ("rank 1 on n1 is stopped (state T) for 2 s", NextAction.ENDS, 3.0)
    story.hear(_beat(1, 9, median_step_s=0.3))
    story.wait(10.0)
    assert _said(story) == ("no step for 12 s (usual: 0.3 s): inspecting", NextAction.UNKNOWN, None)
    asleep = look(1, observations.Activity.SLEEPING, where="train.py:7 load", why="in sleep(), 9 s to go")
    story.hear(*story.looked(look(0, WAITS, why="in all_reduce"), asleep))
    said, follows, in_s = _said(story)
    assert said.endswith(": rank 1 on n1: in sleep(), 9 s to go, train.py:7 load; rank 0 in all_reduce")
    assert follows is NextAction.ENDS and in_s is not None
    works = look(1, observations.Activity.PROGRESSING, where="train.py:7 load", why="its stack moves")
    story.hear(*story.looked(look(0, WAITS), works))
    said, follows, _ = _said(story)
    assert ": rank 1 on n1: its stack moves, train.py:7 load; rank 0 " in said and follows is NextAction.MOVES


def test_unmoved_location_is_reported_once() -> None:
    """A location that two inspections found unmoved is reported once, without any action."""
    story = _auto(hang_timeout_s=5000.0)
    told = []
    # A place that was named is named again only when the silence is longer than any before it.
    for count, (where, looks_taken) in enumerate((("a.py:1 f", 4), ("a.py:1 f", 2), ("b.py:2 g", 2), ("a.py:1 f", 6))):
        _step(story, 9 + count)
        story.said.clear()
        for looked in range(looks_taken):
            while none_of(story.wait(0.5), orders.Inspect):
                pass
            stood = look(1, observations.Activity.BLOCKED, where=where, why="in read()", still_s=3.0 * looked)
            story.hear(*story.looked(look(0, WAITS, why="in all_reduce", still_s=3.0 * looked), stood))
            assert looked or not notices(story.said, d.NoticeTopic.SUSPECT), "one look is not enough"
        told.append(notices(story.said, d.NoticeTopic.SUSPECT))
        assert none_of(story.said, d.Judge)
        assert all(f"rank 1 on n1: in read(), {where}; rank 0 in all_reduce" in one.why for one in told[-1])
    assert [len(one) for one in told] == [1, 0, 1, 1]


def test_next_action_is_shown_with_its_time() -> None:
    story = _auto()
    _step(story, 9)
    asleep = look(1, observations.Activity.SLEEPING, where="train.py:7 load", why="in sleep()")
    due_s = 0.0
    while none_of(story.said, d.Judge):
        if _looks(story.wait(0.5)):
            still_s = max(0.0, story.now_s - 8.0)
            story.hear(_beat(0, 9), _beat(1, 9))
            story.hear(*story.looked(*(replace(one, still_s=still_s) for one in (look(0, WAITS), asleep))))
            seen = suspects.current_suspicion(story.brain.facts, story.now_s)
            due_s = story.now_s + (seen.in_s or 0.0) if seen is not None else due_s
    assert due_s <= story.now_s <= due_s + inspections.PAUSES_S[-1]


def test_silent_node_is_named_with_deadline_and_replacement() -> None:
    """A silent node is named with the time at which it is lost and the node that takes over."""
    story = Story(hosts=3, spares=1)
    story.hear(*(story.up(node) for node in range(3)))
    story.run_on(0, 1)
    story.hear(story.beat(0, 9), story.beat(1, 9))
    story.hear(e.AgentDisconnected(0.0, "n1"))
    story.wait(8.0)
    seen = suspects.current_suspicion(story.brain.facts, story.now_s)
    assert seen is not None and (seen.node, seen.ranks, seen.spare) == ("n1", [1], "n2")
    assert seen.follows is NextAction.LOST and seen.in_s is not None
    for node in (0, 2):
        story.hear(story.beat(node, 9))
    assert none_of(story.wait(seen.in_s - 0.5), d.Judge)
    assert only(story.wait(1.0), d.Judge).verdict.node == "n1"


def test_suspicion_before_first_step_says_so() -> None:
    story = _auto()
    story.wait(31.0)
    assert _said(story)[0] == "no step yet for 31 s: inspecting"


def test_every_sign_has_a_name_and_a_weight() -> None:
    assert len({sign.name for sign in suspicion.SIGNS}) == len(suspicion.SIGNS) >= 6
    told_by_looks = [sign.name for sign in suspicion.SIGNS if sign.shows is None]
    assert told_by_looks == ["collective", "stack", "data", "GPU"]
