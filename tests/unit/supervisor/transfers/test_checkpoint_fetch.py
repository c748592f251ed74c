"""Fetched checkpoints are whole and unmixed, whatever the hosts do, and every announcement to the brain gets its end."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from orchestrator.backends.api import Copied, Direction
from orchestrator.brain.model import events as e
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir.layout import JobDir
from tests.support.fake_carrier import ALONE, GANG, World
from tests.support.saved_files import metadata, zipped


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(JobDir(tmp_path / "job"))


# Coming home


def test_a_checkpoint_is_coming_at_once_and_found_when_its_files_are_at_home(world: World) -> None:
    (coming,) = world.save("n0", "step_10.pt", 10, b"ten", placed=ALONE)
    assert coming == e.CheckpointFetchStarted(1.0, "n0", 1, world.path("step_10.pt"))
    assert world.home("step_10.pt") == {}
    (found,) = world.arrive("n0")
    assert found == e.CheckpointFound(1.0, "n0", 1, world.path("step_10.pt"), 10, stated=10)
    assert world.home("step_10.pt") == {"step_10.pt": b"ten"}
    assert world.waits() == ()


def test_one_that_is_a_single_file_is_whole_without_a_word_of_the_other_nodes(world: World) -> None:
    world.save("n0", "a.pt", 10, b"ten")
    world.carry.lost(1.0, "n1", 1)
    world.take()
    world.arrive_all()
    assert world.kinds() == ["FetchStarted", "Found"]
    world.save("n1", "a.pt", 10, b"of another host that saves it too")
    assert world.copies == {}


def test_it_is_fetched_when_every_host_has_told_all_up_to_later_steps(world: World) -> None:
    world.save_in("n0", "a-1", 10, b"ten")
    world.tell_all(count=10)
    world.tell_all("n0", "n1", count=11)
    assert world.copies == {} and world.kinds() == ["FetchStarted"]
    world.scanned("n2", 11)
    world.arrive_all()
    assert world.kinds() == ["FetchStarted", "Found"]


def test_a_node_that_has_stopped_the_attempt_has_told_all(world: World) -> None:
    world.stopped("n0")
    world.scanned("n1", 11)
    world.save_in("n0", "a-1", 10, b"ten")
    assert world.copies == {}
    world.stopped("n2")
    assert len(world.arrive("n0")) == 1


def test_parts_of_several_hosts_gather_in_one_folder(world: World) -> None:
    for n, node in enumerate(GANG):  # written in the background, and so complete at different steps
        world.found(node, "step_5", 5 + n, world.write(node, {f"step_5/rank{n}.pt": node.encode()}))
    world.tell_all()
    world.arrive_all()
    assert world.kinds() == ["FetchStarted", "Found"]
    assert world.home("step_5") == {f"step_5/rank{n}.pt": f"n{n}".encode() for n in range(3)}


def test_a_file_that_several_hosts_wrote_is_fetched_from_the_first_to_report(world: World) -> None:
    for node in GANG:
        files = {"step_5/model.pt": node.encode(), f"step_5/{node}.pt": b"rng"}
        world.found(node, "step_5", 5, world.write(node, files))
    world.tell_all()
    world.arrive_all()
    assert world.home("step_5")["step_5/model.pt"] == b"n0" and len(world.home("step_5")) == 4


@pytest.mark.parametrize("later", [(0, 0), (1, 0), (0, 1), (-1, 3)])
@pytest.mark.parametrize("name", ["snapshot.pt", "step_{}.pt"])
def test_one_file_that_every_host_writes_comes_from_one_of_them(
    world: World, name: str, later: tuple[int, int]
) -> None:
    for count in (100, 200, 300):
        for node, n in zip(GANG, (0, *later), strict=True):
            world.save(node, name.format(count), count + n, f"{node} at {count}".encode())
        world.arrive_all()
        (data,) = world.home(name.format(count)).values()
        assert data.decode().endswith(f"at {count}")
    assert set(world.kinds()) == {"FetchStarted", "Found"} and world.notes == [] and world.waits() == ()


def test_pieces_of_torch_wait_for_their_metadata_and_count_with_all_that_it_names(world: World) -> None:
    saved = metadata("__0_0.distcp", "__1_0.distcp")
    pieces = {
        node: world.write(node, {f"s-5/__{n}_0.distcp": zipped()}) for n, node in enumerate(("n0", "n1"))
    }
    for count, node in enumerate(pieces):
        world.found(node, "s-5", 5 + count, pieces[node])
    world.tell_all()
    assert world.copies == {}
    world.found("n0", "s-5", 8, (*pieces["n0"], *world.write("n0", {"s-5/.metadata": saved})))
    world.arrive_all()
    assert world.kinds() == ["FetchStarted", "Found"] and len(world.home("s-5")) == 3
    world.found("n0", "s-6", 9, world.write("n0", {"s-6/__0_0.distcp": zipped(), "s-6/.metadata": saved}))
    world.arrive_all()
    assert world.kinds()[2:] == ["FetchStarted", "Invalidated"] and "pieces that it names" in world.notes[-1]
    world.found("n0", "s-7", 9, world.write("n0", {"s-7/__0_0.distcp": zipped()}))
    for node in GANG:
        world.stopped(node)
    assert world.kinds()[4:] == ["FetchStarted", "Invalidated"] and "before its .metadata" in world.notes[-1]


def test_the_same_report_again_changes_nothing(world: World) -> None:
    pieces = world.write("n0", {"a.pt": b"ten"})
    world.found("n0", "a.pt", 10, pieces, placed=ALONE)
    assert world.found("n0", "a.pt", 10, pieces, placed=ALONE) == ()
    world.arrive_all()
    assert world.found("n0", "a.pt", 10, pieces, placed=ALONE) == () and world.copies == {}


def test_a_part_that_was_not_expected_any_more_makes_it_whole_again(world: World) -> None:
    world.save_in("n0", "s-50", 50, b"0")
    world.tell_all(count=51)
    world.arrive_all()
    assert world.kinds() == ["FetchStarted", "Found"]
    world.save_in("n1", "s-50", 55, b"1")
    assert (
        world.kinds() == ["FetchStarted", "Found", "Invalidated", "FetchStarted"] and world.home("s-50") == {}
    )
    world.tell_all()
    world.arrive_all()
    assert world.kinds()[4:] == ["Found"]
    assert world.home("s-50") == {"s-50/n0.pt": b"0", "s-50/n1.pt": b"1"}


# Names that are written again


def test_a_name_that_is_written_again_is_at_home_in_its_old_version_until_the_new_one_is(
    world: World,
) -> None:
    for count in (1, 2):
        pieces = world.write("n0", {"last/a.pt": b"%d" % count, f"last/{count}.pt": b""})
        world.found("n0", "last", count * 10, pieces, placed=ALONE)
        before = world.home("last")
        assert before == ({} if count == 1 else {"last/a.pt": b"1", "last/1.pt": b""})
        world.arrive_all()
    assert world.home("last") == {"last/a.pt": b"2", "last/2.pt": b""}
    assert world.kinds() == ["FetchStarted", "Found"] * 2
    assert [path.name for path in world.job.checkpoints.rglob("*") if path.is_file()] == ["a.pt", "2.pt"]


def test_the_newest_version_follows_the_one_on_its_way(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    (first,) = world.copies.values()
    for count in (20, 30):
        assert world.save("n0", "last.pt", count, b"%d" % count, placed=ALONE) == ()
    assert list(world.copies.values()) == [first]
    world.files["n0"]["last.pt"] = b"1"  # its copy had begun, and reads the old file
    found, coming = world.arrive(first.key)
    assert isinstance(found, e.CheckpointFound) and found.steps == 10
    assert isinstance(coming, e.CheckpointFetchStarted)
    world.files["n0"]["last.pt"] = b"30"
    world.arrive_all()
    assert world.home("last.pt") == {"last.pt": b"30"} and world.kinds()[-1] == "Found"


def test_a_version_that_was_written_over_is_given_up_for_the_one_that_follows(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    world.save("n0", "last.pt", 20, b"2", placed=ALONE)
    world.arrive_all()
    assert world.kinds() == ["FetchStarted", "Invalidated", "FetchStarted", "Found"]
    assert world.home("last.pt") == {"last.pt": b"2"}


def test_a_script_without_steps_has_versions_too(world: World) -> None:
    for data in (b"1", b"2"):
        world.save("n0", "last.pt", 0, data, placed=ALONE)
        world.arrive_all()
    assert world.home("last.pt") == {"last.pt": b"2"}


@pytest.mark.parametrize("name", ["last", "epoch-1"])
def test_of_a_name_that_is_written_again_only_parts_of_the_same_step_are_one_version(
    world: World, name: str
) -> None:
    for node in GANG:
        world.save_in(node, name, 100, b"v1")
    world.save_in("n0", name, 200, b"v2")
    world.tell_all(count=150)
    assert world.copies == {}
    world.save_in("n1", name, 203, b"v2")  # in the background, or the one after
    world.save_in("n2", name, 200, b"v2")
    world.tell_all(count=250)
    assert world.kinds() == ["FetchStarted", "Invalidated"] and "different steps" in world.notes[-1]
    for node in GANG:
        world.save_in(node, name, 300, b"v3")
    world.tell_all()
    world.arrive_all()
    assert world.kinds()[2:] == ["FetchStarted", "Found"]
    assert world.home(name) == {f"{name}/{node}.pt": b"v3" for node in GANG}


def test_without_steps_the_versions_of_a_name_in_parts_cannot_be_told_apart(world: World) -> None:
    for node in GANG:
        world.save_in(node, "last", 0, b"v1")
        world.save_in(node, "step-1", 0, b"v1")
        world.stopped(node)
    world.arrive_all()
    assert world.home("last") == {} and len(world.home("step-1")) == len(GANG)


def test_a_late_word_of_an_older_attempt_does_not_replace_a_newer_checkpoint(world: World) -> None:
    world.save("n0", "last.pt", 5, b"new", attempt=2, placed=ALONE)
    world.arrive_all()
    assert world.save("n0", "last.pt", 50, b"old", attempt=1, placed=ALONE) == ()
    assert world.home("last.pt") == {"last.pt": b"new"}


# A supervisor that is revived


def test_a_revived_supervisor_goes_on_with_what_was_on_its_way(world: World) -> None:
    world.save_in("n0", "a-1", 10, b"ten")
    world.stopped("n1")
    world.revive()
    world.carry.begin(2.0, (world.path("a-1"),), {"n1": 1, "n2": 1})
    world.take()
    world.stopped("n0")
    world.arrive_all()
    assert world.kinds() == ["FetchStarted", "Found"]


def test_a_revived_supervisor_ends_what_the_brain_still_waits_for(world: World) -> None:
    world.save("n0", "a.pt", 10, b"ten", placed=ALONE)
    world.arrive_all()
    world.revive()
    world.news.clear()
    world.carry.begin(2.0, (world.path("a.pt"), world.path("b.pt")), {})
    world.take()
    assert world.news == [
        e.CheckpointFound(2.0, "n0", 1, world.path("a.pt"), 10),
        e.CheckpointInvalidated(2.0, "", 0, world.path("b.pt")),
    ]


def test_what_was_said_last_outlives_the_supervisor(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    world.save("n0", "last.pt", 20, b"2", placed=ALONE)
    world.revive()
    world.carry.begin(2.0, (world.path("last.pt"),), {})
    world.take()
    world.arrive_all()
    assert world.home("last.pt") == {"last.pt": b"2"} and world.kinds()[-1] == "Found"


def test_an_exchange_of_folders_that_was_cut_off_is_undone(world: World) -> None:
    world.found("n0", "last", 10, world.write("n0", {"last/a.pt": b"1"}), placed=ALONE)
    world.arrive_all()
    world.found("n0", "last", 20, world.write("n0", {"last/a.pt": b"2"}), placed=ALONE)
    (copy,) = world.copies.values()
    (copy.local_dir / ".old").mkdir(parents=True)
    (world.job.checkpoints / "last").rename(copy.local_dir / ".old" / "last")
    world.revive()
    assert world.home("last") == {"last/a.pt": b"1"}


def test_a_manifest_that_cannot_be_read_counts_as_none(world: World) -> None:
    world.save("n0", "a.pt", 10, b"ten", placed=ALONE)
    for path in (world.job.root / "carried").iterdir():
        path.write_text("{}")
    world.revive()
    world.carry.begin(2.0, world.waits(), {})
    world.take()
    assert world.kinds() == ["FetchStarted", "Invalidated"]


# What stays at home


def test_the_newest_stay_at_home_and_always_the_one_to_resume_from(tmp_path: Path) -> None:
    world = World(JobDir(tmp_path / "job"), keep=2)
    world.resume = world.path("1.pt")
    for n in range(1, 6):
        world.save("n0", f"{n}.pt", n, b"x", placed=ALONE)
        world.save("n0", "last.pt", n, b"%d" % n, placed=ALONE)
        world.arrive_all()
    world.carry.tidy(2.0)
    world.take()
    left = sorted(path.name for path in world.job.checkpoints.glob("*.pt"))
    assert left == ["1.pt", "4.pt", "5.pt", "last.pt"]
    spoiled = [event.path for event in world.news if isinstance(event, e.CheckpointInvalidated)]
    assert spoiled == [world.path("2.pt"), world.path("3.pt")]


def test_an_old_one_stays_until_the_brain_has_been_told_of_the_new_one(tmp_path: Path) -> None:
    world = World(JobDir(tmp_path / "job"), keep=1)
    for n in (1, 2):
        world.save("n0", f"{n}.pt", n, b"x", placed=ALONE)
        if n == 1:
            world.arrive_all()
    (copy,) = world.copies.values()
    copy.local_dir.mkdir(parents=True)
    (copy.local_dir / "2.pt").write_bytes(b"x")
    world.carry.copied(2.0, Copied(copy, ""))
    world.carry.tidy(2.0)
    assert len(world.home("1.pt")) == len(world.home("2.pt")) == 1
    world.take()
    world.carry.tidy(3.0)
    assert world.home("1.pt") == {}


# To hosts


def test_a_checkpoint_is_sent_with_all_its_files_and_known_by_its_manifest(world: World) -> None:
    pieces = world.write("n0", {"s/a.pt": b"a", "s/d/b.pt": b"b"})
    world.found("n0", "s", 10, pieces, placed=ALONE)
    world.arrive_all()
    path = world.path("s")
    copy = world.carry.send(3.0, path, "n1", "/far/n1")
    assert copy.names == ("s/a.pt", "s/d/b.pt") and copy.local_dir == world.job.checkpoints
    assert copy.remote_dir == "/far/n1/checkpoints" and copy.direction is Direction.SEND
    assert world.carry.pieces(path) == pieces
    assert world.carry.resume_path(path, "/far/n1") == "/far/n1/checkpoints/s"


def test_a_checkpoint_from_elsewhere_is_sent_under_its_own_name(world: World, tmp_path: Path) -> None:
    other = tmp_path / "other" / "last.pt"
    other.parent.mkdir()
    other.write_bytes(b"data")
    copy = world.carry.send(3.0, str(other), "n1", "/far/n1")
    assert (copy.local_dir, copy.names) == (other.parent, ("last.pt",))
    (piece,) = world.carry.pieces(str(other))
    assert (piece.name, piece.sha256) == ("last.pt", hashlib.sha256(b"data").hexdigest())
    assert world.carry.resume_path(str(other), "/far/n1") == "/far/n1/checkpoints/last.pt"


def test_a_checkpoint_that_was_changed_at_home_is_read_anew(world: World) -> None:
    world.save("n0", "a.pt", 10, b"ten", placed=ALONE)
    world.arrive_all()
    (world.job.checkpoints / "a.pt").write_bytes(b"other")
    assert world.carry.pieces(world.path("a.pt"))[0].sha256 == hashlib.sha256(b"other").hexdigest()


def test_a_checkpoint_that_is_not_there_is_told(world: World) -> None:
    with pytest.raises(ClusterError, match="no checkpoint"):
        world.carry.send(3.0, world.path("none.pt"), "n1", "/far/n1")
    with pytest.raises(ClusterError, match="no checkpoint"):
        world.carry.pieces(world.path("none.pt"))


def test_nothing_is_put_in_the_place_of_what_is_being_sent(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    world.arrive_all()
    copy = world.carry.send(3.0, world.path("last.pt"), "n1", "/far/n1")
    world.save("n0", "last.pt", 20, b"2", placed=ALONE)
    world.arrive("n0")
    assert world.home("last.pt") == {"last.pt": b"1"}
    world.carry.copied(1.0, Copied(copy, ""))
    (found,) = world.take()
    assert isinstance(found, e.CheckpointFound) and world.home("last.pt") == {"last.pt": b"2"}


def test_what_is_sent_to_a_node_that_is_lost_holds_nothing_up(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    world.arrive_all()
    copy = world.carry.send(3.0, world.path("last.pt"), "n1", "/far/n1")
    world.save("n0", "last.pt", 20, b"2", placed=ALONE)
    world.arrive("n0")
    world.carry.lost(1.0, "n1", 1)
    assert world.dropped == [copy.key] and world.home("last.pt") == {"last.pt": b"2"}
