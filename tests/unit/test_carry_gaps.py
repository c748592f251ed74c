"""Does a checkpoint in parts never pass for whole where a host's part may be missing?"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.wire.paths import JobDir
from tests.support.fake_carrier import GANG, World

ALL_STOPPED = dict.fromkeys(GANG, 1)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(JobDir(tmp_path / "job"))


@pytest.mark.parametrize("revived", [False, True])
def test_what_a_lost_node_tells_later_does_not_pass_for_all_of_it(world: World, revived: bool) -> None:
    world.save_in("n0", "step-10", 10, b"zero")
    world.save_in("n1", "step-10", 10, b"one")
    world.take(world.carry.lost(1.0, "n2", 1))
    for node in GANG[:2]:
        world.stopped(node)
    if revived:
        world.revive()
        world.take(world.carry.begin(2.0, (), ALL_STOPPED))
    world.save_in("n2", "step-10", 10, b"two")
    world.arrive_all()
    assert world.kinds() == ["Coming", "Spoiled"]
    assert world.home("step-10") == {}


def test_a_lost_node_that_has_stopped_meanwhile_has_not_told_all(world: World) -> None:
    world.take(world.carry.lost(1.0, "n2", 1))
    world.revive()
    world.take(world.carry.begin(2.0, (), ALL_STOPPED))
    world.save_in("n0", "step-10", 10, b"zero")
    world.arrive_all()
    assert world.kinds() == ["Coming", "Spoiled"]


def test_a_node_that_was_lost_before_an_attempt_takes_part_in_it(world: World) -> None:
    world.take(world.carry.lost(1.0, "n2", 0))
    for node in GANG:
        world.save_in(node, "step-10", 10, b"its part")
    world.arrive_all()
    assert world.kinds() == ["Coming", "Found"]
    assert len(world.home("step-10")) == len(GANG)


@pytest.mark.parametrize("revived", [False, True])
def test_a_silent_node_that_comes_back_tells_all(world: World, revived: bool) -> None:
    for node in GANG[:2]:
        world.save_in(node, "step-10", 10, b"ten")
    world.take(world.carry.silent(1.0, "n2", 1))
    assert world.kinds() == ["Coming", "Spoiled"]
    if revived:
        world.revive()
        world.take(world.carry.begin(2.0, (), {}))
    for node in GANG[:2]:
        world.save_in(node, "step-20", 20, b"twenty")
        world.stopped(node)
    assert world.kinds() == ["Coming", "Spoiled"] * 2
    world.carry.back("n2")
    for count in (10, 20, 30):
        world.save_in("n2", f"step-{count}", count, b"late")
    world.save_in("n0", "step-30", 30, b"late")
    world.stopped("n2")
    world.arrive_all()
    assert [len(world.home(f"step-{count}")) for count in (10, 20, 30)] == [0, 0, 2]


@pytest.mark.parametrize("revived", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_one_that_a_host_is_not_sure_of_is_given_up(world: World, is_first: bool, revived: bool) -> None:
    for node in GANG:
        world.save_in(node, "step-10", 10, b"ten")
    world.arrive_all()
    if is_first:
        world.found("n2", "step-20", 20, ())
    for node in GANG[:2]:
        world.save_in(node, "step-20", 20, b"twenty")
    if not is_first:
        world.found("n2", "step-20", 20, ())
    for node in GANG:
        world.stopped(node)
    if revived:
        world.revive()
        world.take(world.carry.begin(2.0, (), ALL_STOPPED))
        world.save_in("n0", "step-20", 20, b"twenty")
    world.arrive_all()
    assert world.home("step-20") == {}
    assert len(world.home("step-10")) == len(GANG)
    assert any("ended before their part" in note for note in world.notes)


def test_a_doubt_about_the_newest_version_leaves_the_one_before(world: World) -> None:
    for node in GANG:
        world.save_in(node, "last", 10, b"ten")
    world.arrive_all()
    world.found("n2", "last", 20, ())
    for node in GANG[:2]:
        world.save_in(node, "last", 20, b"twenty")
    world.arrive_all()
    assert world.home("last") == {f"last/{node}.pt": b"ten" for node in GANG}
    assert world.kinds() == ["Coming", "Found", "Coming", "Spoiled"]
