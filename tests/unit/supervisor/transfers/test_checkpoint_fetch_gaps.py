"""Checkpoints that cannot come: the installed one stays, and none passes for whole where a part may be missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orchestrator.brain.model import events as e
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m
from orchestrator.supervisor.transfers.checkpoint_fetch import COMING_MAX
from tests.support.fake_carrier import ALONE, GANG, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(JobDir(tmp_path / "job"))


def test_what_vanished_before_it_came_is_spoiled_and_the_one_before_stays(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    world.arrive_all()
    world.save("n0", "last.pt", 20, b"2", placed=ALONE)
    del world.files["n0"]["last.pt"]
    world.arrive_all()
    assert world.kinds() == ["FetchStarted", "Found", "FetchStarted", "Invalidated"]
    assert world.home("last.pt") == {"last.pt": b"1"}
    assert "does not come home" in world.notes[0]


def test_a_doubt_about_the_newest_version_leaves_the_one_before(world: World) -> None:
    for node in GANG:
        world.save_in(node, "last", 10, b"ten")
    world.tell_all(count=15)
    world.arrive_all()
    world.found("n2", "last", 20, ())
    for node in GANG[:2]:
        world.save_in(node, "last", 20, b"twenty")
    world.tell_all()
    assert world.home("last") == {f"last/{node}.pt": b"ten" for node in GANG}
    assert world.kinds()[-1] == "Invalidated" and "ended before their part" in world.notes[-1]


@pytest.mark.parametrize("revived", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_one_that_a_host_is_not_sure_of_is_given_up(world: World, is_first: bool, revived: bool) -> None:
    if is_first:
        world.found("n2", "step-20", 20, ())
    for node in GANG[:2]:
        world.save_in(node, "step-20", 20, b"twenty")
    if not is_first:
        world.found("n2", "step-20", 20, ())
    if revived:
        world.revive()
        world.carry.begin(2.0, (), dict.fromkeys(GANG, 1))
        world.take()
    for node in GANG:
        world.stopped(node)
    assert world.home("step-20") == {} and world.copies == {} and world.waits() == ()


@pytest.mark.parametrize("revived", [False, True])
def test_nothing_is_taken_for_whole_of_which_a_lost_node_may_have_had_a_part(
    world: World, revived: bool
) -> None:
    world.save_in("n0", "step-10", 10, b"zero")
    world.save_in("n1", "step-10", 10, b"one")
    world.carry.lost(1.0, "n2", 1)
    world.take()
    assert world.kinds() == ["FetchStarted", "Invalidated"]
    if revived:
        world.revive()
        world.carry.begin(2.0, (), dict.fromkeys(GANG, 1))
        world.take()
    world.save_in("n2", "step-10", 10, b"two, as the agent after it says")
    world.save_in("n0", "step-20", 20, b"zero")
    for node in GANG:
        world.stopped(node)
    world.scanned("n2", 0, attempt=2)
    world.arrive_all()
    assert world.home("step-10") == world.home("step-20") == {} and world.waits() == ()


@pytest.mark.parametrize("revived", [False, True])
def test_a_node_that_was_lost_after_it_had_told_all_or_before_the_attempt_is_no_loss(
    world: World, revived: bool
) -> None:
    world.carry.lost(1.0, "n2", 0)
    for node in GANG:
        world.save_in(node, "step-10", 10, b"ten")
    world.tell_all(count=11)
    for node in GANG:
        world.carry.lost(1.0, node, 1)
    if revived:
        world.revive()
        world.carry.begin(2.0, world.waits(), {})
        world.take()
    world.arrive_all()
    assert world.kinds() == ["FetchStarted", "Found"], "its files may still be there"


def test_a_late_part_of_a_version_that_was_given_up_does_not_pass_for_another_one(world: World) -> None:
    pieces = {node: world.write(node, {f"s-50/{node}.pt": b"1"}) for node in GANG}
    world.found("n0", "s-50", 50, pieces["n0"])
    world.tell_all(count=51)
    world.arrive("n0", "no space")
    world.revive()
    for node in ("n1", "n2"):
        world.found(node, "s-50", 51, pieces[node])
    for node in GANG:
        world.stopped(node)
    assert [copy.node for copy in world.copies.values()] == list(GANG), "all of it, or nothing"
    world.arrive("n0", "no space")
    assert world.copies == {} and world.home("s-50") == {}


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("../x.pt", ["../x.pt"]),
        ("/etc/x.pt", ["/etc/x.pt"]),
        ("a", ["a/../../x"]),
        ("a", ["a//x"]),
        ("a", ["b/x"]),
        ("a", ["a", "a/x"]),
        ("a", ["a/x", "a/x"]),
        ("a\0b", ["a\0b"]),
        ("", [""]),
        (".", ["."]),
        (".coming", [".coming/1/x"]),
        ("n" * 256, ["n" * 256]),
        ("link", ["link/x.pt"]),
        ("link/x.pt", ["link/x.pt"]),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(world: World, name: str, pieces: list[str]) -> None:
    (world.job.checkpoints / "link").symlink_to("/tmp")
    told = tuple(m.ManifestEntry(one, 1, 1, "0" * 64) for one in pieces)
    assert world.found("n0", name, 1, told, placed=ALONE) == ()
    assert world.copies == {} and "not fetched" in world.notes[0]


def test_a_disk_at_home_that_takes_no_manifest_is_told(world: World) -> None:
    (world.job.root / "carried").write_text("no folder")
    world.save("n0", "a.pt", 10, b"ten", placed=ALONE)
    assert world.kinds() == [] and world.copies == {}
    assert "on this machine" in world.notes[0]


def test_more_than_can_be_carried_leaves_the_oldest(world: World) -> None:
    for n in range(COMING_MAX + 1):
        world.save("n0", f"{n}.pt", n, b"x", placed=ALONE)
    assert len(world.waits()) == len(world.copies) == COMING_MAX
    assert world.news[-1] == e.CheckpointInvalidated(1.0, "n0", 1, world.path("0.pt"))


def test_a_late_part_of_a_checkpoint_that_was_deleted_by_hand_is_taken(world: World) -> None:
    world.save_in("n0", "step-10", 10, b"zero")
    world.tell_all()
    world.arrive_all()
    assert world.home("step-10") == {"step-10/n0.pt": b"zero"}
    shutil.rmtree(world.job.checkpoints / "step-10")
    world.revive()
    world.save_in("n1", "step-10", 10, b"one")
    world.tell_all()
    world.arrive_all()
    assert world.home("step-10") == {"step-10/n0.pt": b"zero", "step-10/n1.pt": b"one"}
