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


def test_hashed_checkpoint_is_fetched_then_complete(
    world: DeskWorld,
) -> None:
    """A checkpoint is in transfer once it is closed and hashed, and complete when it was fetched."""
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


def test_nothing_is_fetched_before_hashing(world: DeskWorld) -> None:
    world.write({"step_10.pt": state(10)})
    seen = world.seen("step_10.pt")
    world.desk.enter_report(world.at, "n0", seen, world.gang)
    world.go_on()
    assert world.copier is not None and world.copier.begun == {}
    world.hash(seen)
    assert list(world.copier.begun) == ["fetch 1 n0"]


def test_parts_of_several_hosts_share_one_folder(world: DeskWorld) -> None:
    save_parts(world, "step_10", 10)
    world.arrive("n1")
    assert world.home() == {} or all(name.startswith(".coming/") for name in world.home())
    world.arrive("n0")
    assert world.states() == [WHOLE]
    assert world.home() == {**_own("step_10", "n0", 10), **_own("step_10", "n1", 10)}


def test_torch_files_wait_for_host_of_metadata(world: DeskWorld) -> None:
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


def test_late_part_is_not_the_whole_checkpoint(world: DeskWorld) -> None:
    """A rank that saves in the background may begin when the others have gone on."""
    save_parts(world, "step_10", 10, "n0")
    save_parts(world, "step_10", 10, "n1")
    world.arrive()
    assert world.states() == [WHOLE]
    assert world.home() == {**_own("step_10", "n0", 10), **_own("step_10", "n1", 10)}


def test_part_after_fetch_reopens_until_it_is_fetched(
    world: DeskWorld,
) -> None:
    """A part that appears when the rest has been fetched makes it open until it is fetched too."""
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


def test_nothing_is_fetched_if_host_sees_job_folder(world: DeskWorld) -> None:
    world.desk.is_remote = lambda node: node != "n0"
    shutil.rmtree(world.far, ignore_errors=True)
    (world.far / "n0").mkdir(parents=True)
    (world.far / "n0" / "checkpoints").symlink_to(world.job.checkpoints)
    save = world.save({"step_10.pt": state(10)})
    assert world.copier is not None and world.copier.begun == {}
    assert (save.state, save.locations) == (WHOLE, (FileLocation("", str(world.job.checkpoints)),))
    assert world.kept() == ["1"]


# Names that are written again


def test_previous_local_checkpoint_stays_until_next_is_fetched(world: DeskWorld) -> None:
    """The previous checkpoint stays in the job folder until the next of its name has been fetched."""
    for step in (10, 20):
        world.save({"last/a.pt": state(step), f"last/{step}.json": b"{}"}, steps=step)
        (world.place("n0") / f"last/{step}.json").unlink()
        world.arrive() if step == 10 else None
    assert world.states() == [WHOLE, OPEN] and world.home()["last/a.pt"] == state(10)


def test_fetched_checkpoint_replaces_previous_completely(world: DeskWorld) -> None:
    for step in (10, 20):
        save_parts(world, "last", step)
        world.arrive()
    assert world.states() == [GONE, WHOLE] and world.told(1)[-1] is GONE
    assert world.home() == {**_own("last", "n0", 20), **_own("last", "n1", 20)}


def test_checkpoint_overwritten_before_fetch_is_gone_local_stays(world: DeskWorld) -> None:
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


def test_checkpoint_overwritten_before_hash_is_not_awaited(world: DeskWorld) -> None:
    """One that was overwritten before it was hashed is gone and not waited for."""
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


def test_dead_agents_unhashed_files_are_fetched_later(world: DeskWorld) -> None:
    """Files that a dead agent had not hashed are fetched once the attempt is over."""
    world.write({"step_10.pt": state(10)})
    world.desk.enter_report(world.at, "n0", world.seen("step_10.pt"), world.gang)
    world.go_on()
    world.stop()
    world.arrive()
    assert world.states() == [WHOLE] and world.home() == {"step_10.pt": state(10)}


def test_parts_of_different_steps_are_never_one_checkpoint(world: DeskWorld) -> None:
    """Parts of a name that were written at different steps are never one checkpoint."""
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


def test_late_older_checkpoint_does_not_replace_newer(world: DeskWorld) -> None:
    """An older checkpoint of a name that arrives late does not replace a newer one."""
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


def test_checkpoint_with_part_on_lost_host_stays_torn(world: DeskWorld) -> None:
    world.write(_own("step_10", "n0", 10), "n0")
    world.report("step_10", "n0", closed_by=CompletionReason.NONE)
    world.lose("n1")
    world.stop("n0")
    assert world.states() == [TORN] and world.latest().why.startswith("n1 was lost before it reported")
    assert world.home() == {}


def test_lost_hosts_transfer_delays_no_attempt(
    world: DeskWorld,
) -> None:
    """A lost host's transfer does not delay the next attempt and may arrive later."""
    world.save({"step_10.pt": state(10)}, node="n1")
    world.arrive()
    world.save({"step_20.pt": state(20)}, steps=20, node="n1")
    world.lose("n1")
    world.stop("n0")
    assert world.compare(1) == ""
    world.attempt(2, "n0")
    world.arrive("n1")
    assert world.states() == [WHOLE, WHOLE]


def test_failed_copy_marks_checkpoint_gone_with_reason(world: DeskWorld) -> None:
    world.save({"step_10.pt": state(10)})
    world.arrive("n0", "n0 was unreachable for 60 min")
    assert (world.latest().state, world.latest().why) == (GONE, "n0 was unreachable for 60 min")
    assert not world.facts.checkpoints[1].is_in_transit


def test_new_supervisor_fetches_pending_hashed_checkpoints(world: DeskWorld) -> None:
    save_parts(world, "step_10", 10)
    world.arrive("n0")
    world.restart()
    assert world.copier is not None and sorted(world.copier.begun) == ["fetch 1 n0", "fetch 1 n1"]
    world.arrive()
    assert world.states() == [WHOLE]


# What is torn, and what is deleted


def test_hosts_move_torn_files_and_local_ones_stay(world: DeskWorld) -> None:
    """Hosts move what is torn, and nothing in the job folder is moved."""
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


def test_checkpoint_keep_deletes_on_writing_hosts_too(tmp_path: Path) -> None:
    """Checkpoints that checkpoint.keep deletes in the job folder are deleted on the writing hosts too."""
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


def test_checkpoint_in_transfer_is_not_pruned(tmp_path: Path) -> None:
    """A checkpoint in transfer is not deleted by checkpoint.keep."""
    world = DeskWorld(tmp_path, "n0", has_hosts=True, checkpoint_keep=1)
    for step in (10, 20, 30):
        world.save({f"step_{step}.pt": state(step)}, steps=step)
    assert world.states() == [OPEN] * 3
    world.arrive()
    world.settle()
    assert world.states() == [PRUNED, PRUNED, WHOLE]


def test_checkpoint_in_shared_absolute_path_is_not_copied(tmp_path: Path) -> None:
    """The checkpoint of an absolute path that all hosts see is not copied."""
    shared = tmp_path / "shared"
    world = DeskWorld(tmp_path, "n0", has_hosts=True, checkpoint_glob=f"{shared}/*")
    (world.far / "n0").mkdir(parents=True)
    shared.mkdir()
    (world.far / "n0" / "checkpoints").symlink_to(shared)
    save = world.save({"step_10.pt": state(10)})
    assert (save.state, save.path) == (WHOLE, str(shared / "step_10.pt"))
    assert world.copier is not None and not world.copier.begun


def test_resume_with_absolute_path_leaves_unfetched_checkpoint(
    world: DeskWorld,
) -> None:
    world.save({"step_10.pt": state(10)})
    world.plan = dataclasses.replace(world.plan, checkpoint_glob=f"{world.far}/shared/*")
    world.restart()
    assert world.copier is not None and not world.copier.begun
    assert (world.latest().state, world.latest().is_in_transit) == (OPEN, True)


def test_working_folder_checkpoint_is_fetched_and_sent_back(tmp_path: Path) -> None:
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
def test_checkpoint_missing_on_other_host_is_given_up(
    world: DeskWorld, node: str, expected: list[CheckpointState]
) -> None:
    """A checkpoint on one host's own disk is given up where another host lacks it."""
    for step in (10, 20):
        save_outside(world, f"step_{step}.pt", step)
    assert (world.states(), world.latest().host) == ([WHOLE, WHOLE], "n0")
    world.desk.enter_event(e.FromNode(1.0, node, reports.PrepareFailed(2, "step_20.pt is gone", "", 2)))
    world.learn()
    assert [save.state for save in world.facts.checkpoints.values()] == world.states() == expected


def test_external_torn_checkpoint_is_moved_in_place(world: DeskWorld) -> None:
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
