"""Saves of hosts that do not see the job folder: each counts once it is at home, whole and of one writing."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from orchestrator.backends.api import Direction
from orchestrator.brain.model import events as e
from orchestrator.core.checkpoints.checkpoint import CheckpointState, CompletionReason, FileLocation
from orchestrator.core.wire import reports
from tests.support.desk_world import DeskWorld, Files
from tests.support.saved_files import Model, adam, distributed, torch_save

OPEN, WHOLE, TORN, GONE, PRUNED, DISTRUSTED = (
    CheckpointState.OPEN, CheckpointState.WHOLE, CheckpointState.TORN, CheckpointState.GONE, CheckpointState.PRUNED, CheckpointState.DISTRUSTED,
)  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> DeskWorld:
    return DeskWorld(tmp_path, "n0", "n1", has_hosts=True)


def state(step: int) -> bytes:
    return torch_save({"model": Model(), "optimizer": adam(), "step": step}, data=bytes([step % 256]) * 256)


def _own(name: str, node: str, step: int) -> Files:
    """Return the file of a node in a folder in which each has one, whose format names none of the others."""
    return {f"{name}/rank_{node[1:]}.pt": torch_save(Model(), data=bytes([step]) * 256)}


def save_parts(world: DeskWorld, name: str, step: int, *nodes: str) -> None:
    """Let each node write its part of a save and report it, and all go on."""
    for node in nodes or world.nodes:
        world.write(_own(name, node, step), node)
    for node in nodes or world.nodes:
        report_part(world, name, node, step)
    world.go_on()


def report_part(world: DeskWorld, name: str, node: str, step: int, **part: object) -> None:
    """Let the agent of a node report its part of a save."""
    world.report(next(iter(_own(name, node, step))), node, step, **part)


# Coming home


def test_a_save_is_on_its_way_once_it_is_closed_and_hashed_and_whole_when_it_is_at_home(
    world: DeskWorld,
) -> None:
    world.save({"step_10.pt": state(10)})
    assert (world.latest().state, world.latest().is_in_transit) == (OPEN, True)
    assert world.facts.checkpoints[1].is_in_transit and world.told(1) == [OPEN, OPEN]
    assert world.home() == {}
    world.arrive("n0")
    save = world.latest()
    assert (save.state, save.is_in_transit, save.closed_by) == (WHOLE, False, CompletionReason.STEPS)
    assert save.path == str(world.job.checkpoints / "step_10.pt")
    assert save.locations == (
        FileLocation("", str(world.job.checkpoints)), FileLocation("n0", str(world.place("n0")), ("step_10.pt",)),
    )  # fmt: skip
    assert world.home() == {"step_10.pt": state(10)}


def test_nothing_is_fetched_before_it_is_hashed(world: DeskWorld) -> None:
    world.write({"step_10.pt": state(10)})
    seen = world.seen("step_10.pt")
    world.desk.enter_report(world.at, "n0", seen, world.gang)
    world.go_on()
    assert world.copier is not None and world.copier.begun == {}
    world.hash(seen)
    assert list(world.copier.begun) == ["fetch 1 n0"]


def test_parts_of_several_hosts_gather_in_one_folder(world: DeskWorld) -> None:
    save_parts(world, "step_10", 10)
    world.arrive("n1")
    assert world.home() == {} or all(name.startswith(".coming/") for name in world.home())
    world.arrive("n0")
    assert world.states() == [WHOLE]
    assert world.home() == {**_own("step_10", "n0", 10), **_own("step_10", "n1", 10)}


def test_pieces_of_torch_wait_for_the_host_whose_metadata_names_them(world: DeskWorld) -> None:
    files = distributed("step_10")
    mine = {name: data for name, data in files.items() if "__0_0" in name}
    other = {name: data for name, data in files.items() if "__1_0" in name}
    world.write(other, "n1")
    world.report("step_10", "n1")
    world.go_on()
    assert world.latest().why == "step_10/.metadata is missing"
    world.write({**mine, "step_10/.metadata": files["step_10/.metadata"]}, "n0")
    world.report("step_10", "n0")
    world.go_on()
    world.arrive()
    assert world.states() == [WHOLE] and world.home() == files


def test_a_part_that_comes_late_does_not_stand_for_the_whole(world: DeskWorld) -> None:
    """A rank that saves in the background may begin when the others have gone on."""
    save_parts(world, "step_10", 10, "n0")
    save_parts(world, "step_10", 10, "n1")
    world.arrive()
    assert world.states() == [WHOLE]
    assert world.home() == {**_own("step_10", "n0", 10), **_own("step_10", "n1", 10)}


def test_a_part_that_comes_when_the_rest_is_at_home_makes_it_open_until_it_is_there_too(
    world: DeskWorld,
) -> None:
    save_parts(world, "step_10", 10, "n0")
    world.arrive()
    assert world.states() == [WHOLE]
    world.write(_own("step_10", "n1", 10), "n1")
    world.report("step_10", "n1")
    assert world.states() == [OPEN] and world.facts.checkpoints[1].state is OPEN
    world.restart()
    world.go_on()
    world.arrive()
    assert world.states() == [WHOLE]
    assert world.home() == {**_own("step_10", "n0", 10), **_own("step_10", "n1", 10)}


def test_where_a_host_sees_the_job_folder_nothing_is_fetched(world: DeskWorld) -> None:
    world.desk.is_remote = lambda node: node != "n0"
    shutil.rmtree(world.far, ignore_errors=True)
    (world.far / "n0").mkdir(parents=True)
    (world.far / "n0" / "checkpoints").symlink_to(world.job.checkpoints)
    save = world.save({"step_10.pt": state(10)})
    assert world.copier is not None and world.copier.begun == {}
    assert (save.state, save.locations) == (WHOLE, (FileLocation("", str(world.job.checkpoints)),))
    assert world.kept() == ["1"]


# Names that are written again


def test_the_save_before_stays_at_home_until_the_next_of_its_name_has_come(world: DeskWorld) -> None:
    for step in (10, 20):
        world.save({"last/a.pt": state(step), f"last/{step}.json": b"{}"}, steps=step)
        (world.place("n0") / f"last/{step}.json").unlink()
        world.arrive() if step == 10 else None
    assert world.states() == [WHOLE, OPEN] and world.home()["last/a.pt"] == state(10)


def test_what_comes_home_takes_the_place_of_the_save_before_whole(world: DeskWorld) -> None:
    for step in (10, 20):
        save_parts(world, "last", step)
        world.arrive()
    assert world.states() == [GONE, WHOLE] and world.told(1)[-1] is GONE
    assert world.home() == {**_own("last", "n0", 20), **_own("last", "n1", 20)}


def test_one_that_was_written_over_before_it_came_is_gone_and_the_one_at_home_stays(world: DeskWorld) -> None:
    save_parts(world, "last", 10)
    world.arrive()
    save_parts(world, "last", 20)
    world.write(_own("last", "n1", 30), "n1")
    world.arrive()
    assert world.states() == [WHOLE, GONE]
    assert world.home() == {**_own("last", "n0", 10), **_own("last", "n1", 10)}
    why = "last/rank_1.pt was written again on n1 before it was copied"
    assert world.saves[2].why == why
    assert world.notes == [f"checkpoint last/rank_0.pt of attempt 1 was not copied: {why}"]


def test_one_that_was_written_over_before_it_was_hashed_is_gone_and_not_waited_for(world: DeskWorld) -> None:
    world.write({"last.pt": state(10)})
    seen = world.seen("last.pt")
    world.desk.enter_report(world.at, "n0", seen, world.gang)
    world.go_on()
    assert world.latest().is_in_transit
    world.save({"last.pt": state(20)}, steps=20)
    assert (world.saves[1].state, world.saves[1].is_in_transit) == (GONE, False)
    assert world.facts.checkpoints[1].state is GONE
    world.arrive()
    assert world.states() == [GONE, WHOLE] and world.home() == {"last.pt": state(20)}


def test_what_an_agent_that_died_had_not_hashed_comes_home_once_the_attempt_is_over(world: DeskWorld) -> None:
    world.write({"step_10.pt": state(10)})
    world.desk.enter_report(world.at, "n0", world.seen("step_10.pt"), world.gang)
    world.go_on()
    world.stop()
    world.arrive()
    assert world.states() == [WHOLE] and world.home() == {"step_10.pt": state(10)}


def test_parts_of_a_name_that_were_written_at_different_steps_are_never_one_save(world: DeskWorld) -> None:
    for node, steps in (("n0", 20), ("n1", 10)):
        world.write(_own("last", node, steps), node)
        report_part(world, "last", node, steps)
    world.go_on()
    assert world.states() == [OPEN] and world.latest().why == "its parts were written at different steps"
    world.write(_own("last", "n1", 20), "n1")
    report_part(world, "last", "n1", 20)
    world.go_on()
    world.arrive()
    assert world.states() == [WHOLE]


def test_an_older_save_of_a_name_that_comes_late_does_not_replace_a_newer_one(world: DeskWorld) -> None:
    world.save({"last.pt": state(10)}, node="n1")
    world.stop()
    world.attempt(2, "n0")
    world.save({"last.pt": state(20)}, steps=20)
    world.arrive("n0")
    assert world.home() == {"last.pt": state(20)}
    if world.copier is not None and world.copier.begun:
        world.arrive("n1")
    assert world.states() == [GONE, WHOLE] and world.home() == {"last.pt": state(20)}


# Hosts that are lost


def test_a_save_of_which_a_lost_host_may_have_had_a_part_is_torn_and_stays_torn(world: DeskWorld) -> None:
    world.write(_own("step_10", "n0", 10), "n0")
    world.report("step_10", "n0", closed_by=CompletionReason.NONE)
    world.lose("n1")
    world.stop("n0")
    assert world.states() == [TORN] and world.latest().why.startswith("n1 was lost before it reported")
    assert world.home() == {}


def test_what_a_host_that_is_lost_had_on_its_way_does_not_hold_up_the_next_attempt_and_may_come_later(
    world: DeskWorld,
) -> None:
    world.save({"step_10.pt": state(10)}, node="n1")
    world.arrive()
    world.save({"step_20.pt": state(20)}, steps=20, node="n1")
    world.lose("n1")
    world.stop("n0")
    assert world.compare(1) == ""
    world.attempt(2, "n0")
    world.arrive("n1")
    assert world.states() == [WHOLE, WHOLE]


def test_a_copy_that_fails_leaves_its_save_gone_with_the_reason(world: DeskWorld) -> None:
    world.save({"step_10.pt": state(10)})
    world.arrive("n0", "n0 was unreachable for 60 min")
    assert (world.latest().state, world.latest().why) == (GONE, "n0 was unreachable for 60 min")
    assert not world.facts.checkpoints[1].is_in_transit


def test_a_new_supervisor_fetches_what_was_on_its_way_and_hashed(world: DeskWorld) -> None:
    save_parts(world, "step_10", 10)
    world.arrive("n0")
    world.restart()
    assert world.copier is not None and sorted(world.copier.begun) == ["fetch 1 n0", "fetch 1 n1"]
    world.arrive()
    assert world.states() == [WHOLE]


# What is torn, and what is deleted


def test_hosts_move_what_is_torn_and_nothing_at_home_is_moved(world: DeskWorld) -> None:
    save_parts(world, "last", 10)
    world.arrive()
    world.write(_own("last", "n0", 20), "n0")
    report_part(world, "last", "n0", 20)
    world.write({"last/rank_1.pt": b"cut off"}, "n1")
    report_part(world, "last", "n1", 20, closed_by=CompletionReason.NONE)
    world.compare(1)
    assert world.states() == [WHOLE, TORN]
    assert world.home() == {**_own("last", "n0", 10), **_own("last", "n1", 10)}
    (own,) = world.desk.find_torn_on_host("n1", 2)
    assert [piece.name for piece in own.files] == ["last/rank_1.pt"]
    assert own.locations == (FileLocation("n1", str(world.place("n1")), ("last/rank_1.pt",)),)
    assert world.desk.find_torn_on_host("n2", 2) == () and world.desk.find_torn_on_host("n1", 3) == ()


def test_what_checkpoint_keep_deletes_at_home_is_deleted_on_the_hosts_that_wrote_it(tmp_path: Path) -> None:
    world = DeskWorld(tmp_path, "n0", "n1", has_hosts=True, checkpoint_keep=1)
    for step in (10, 20):
        save_parts(world, f"step_{step}", step)
        world.arrive()
        world.settle()
    assert world.states() == [PRUNED, WHOLE] and sorted(world.home()) == [
        "step_20/rank_0.pt",
        "step_20/rank_1.pt",
    ]
    discards = world.desk.copies.discards
    assert [(node, [piece.name for piece in save.files]) for node, save in discards] == [
        ("n0", ["step_10/rank_0.pt"]), ("n1", ["step_10/rank_1.pt"]),
    ]  # fmt: skip


def test_what_is_on_its_way_is_not_deleted_by_checkpoint_keep(tmp_path: Path) -> None:
    world = DeskWorld(tmp_path, "n0", has_hosts=True, checkpoint_keep=1)
    for step in (10, 20, 30):
        world.save({f"step_{step}.pt": state(step)}, steps=step)
    assert world.states() == [OPEN] * 3
    world.arrive()
    world.settle()
    assert world.states() == [PRUNED, PRUNED, WHOLE]


def test_the_save_of_an_absolute_place_that_all_see_is_not_copied(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    world = DeskWorld(tmp_path, "n0", has_hosts=True, checkpoint_glob=f"{shared}/*")
    (world.far / "n0").mkdir(parents=True)
    shared.mkdir()
    (world.far / "n0" / "checkpoints").symlink_to(shared)
    save = world.save({"step_10.pt": state(10)})
    assert (save.state, save.path) == (WHOLE, str(shared / "step_10.pt"))
    assert world.copier is not None and not world.copier.begun


def test_a_resume_with_an_absolute_place_leaves_a_save_that_has_not_come_home_where_it_is(
    world: DeskWorld,
) -> None:
    world.save({"step_10.pt": state(10)})
    world.plan = dataclasses.replace(world.plan, checkpoint_glob=f"{world.far}/shared/*")
    world.restart()
    assert world.copier is not None and not world.copier.begun
    assert (world.latest().state, world.latest().is_in_transit) == (OPEN, True)


def test_a_place_in_the_working_folder_comes_home_and_goes_back_there(tmp_path: Path) -> None:
    world = DeskWorld(tmp_path, "n0", has_hosts=True, checkpoint_glob="{job_dir}/code/out/*.pt")
    world.write({"out/a.pt": state(10)})
    world.report("out/a.pt")
    world.arrive()
    assert world.latest().path == str(world.job.checkpoints / "out/a.pt")
    assert world.copier is not None
    world.desk.copies.send(world.latest(), "n1", "/far/n1")
    copy = world.copier.of("n1")
    assert (copy.direction, copy.remote_dir) == (Direction.SEND, "/far/n1/code")
    assert world.desk.copies.locate_on_host(world.latest(), "n1", "/far/n1").path == "/far/n1/code/out/a.pt"


# Where hosts save outside of the job's folder


def save_outside(world: DeskWorld, name: str, step: int, *, is_torn: bool = False) -> None:
    """Let the first node write a save at an absolute path on its own disk, which this machine does not see."""
    data = state(step)
    world.write({name: data[: len(data) // 2] if is_torn else data})
    seen = world.seen(name, steps=step, is_new=True)
    root = seen.part.root
    (Path(root) / name).unlink()
    seen = dataclasses.replace(seen, key=f"{root}/{seen.key}", series=f"{root}/{seen.series}")
    world.desk.enter_report(world.at, "n0", seen, world.gang)
    world.go_on()


@pytest.mark.parametrize(("node", "expected"), [("n2", [DISTRUSTED, DISTRUSTED]), ("n0", [WHOLE, WHOLE])])
def test_what_a_host_wrote_on_its_own_disk_is_given_up_where_another_one_lacks_it(
    world: DeskWorld, node: str, expected: list[CheckpointState]
) -> None:
    for step in (10, 20):
        save_outside(world, f"step_{step}.pt", step)
    assert (world.states(), world.latest().host) == ([WHOLE, WHOLE], "n0")
    world.desk.give_up_invisible(e.FromNode(1.0, node, reports.PrepareFailed(2, "step_20.pt is gone", "", 2)))
    world.learn()
    assert [save.state for save in world.facts.checkpoints.values()] == world.states() == expected


def test_a_torn_save_outside_is_moved_where_it_lies(world: DeskWorld) -> None:
    save_outside(world, "step_10.pt", 10)
    save_outside(world, "step_20.pt", 20, is_torn=True)
    world.stop()
    world.compare(1)
    (torn,) = world.desk.find_torn_on_host("n0", 2)
    assert (world.states(), torn.number, torn.locations) == (
        [WHOLE, TORN],
        2,
        (FileLocation("", str(world.place())),),
    )
