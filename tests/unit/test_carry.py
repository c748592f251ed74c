"""Do checkpoints come home whole and unmixed, whatever the hosts do, and is every promise to the brain kept?"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from orchestrator.backends import Copied, Direction
from orchestrator.brain import events as e
from orchestrator.carry import COMING_MAX
from orchestrator.errors import ClusterError
from orchestrator.wire import messages as m
from orchestrator.wire.paths import JobDir
from tests.support.fake_carrier import ALONE, GANG, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(JobDir(tmp_path / "job"))


# Coming home


def test_a_checkpoint_is_coming_at_once_and_found_when_its_files_are_at_home(world: World) -> None:
    (coming,) = world.save("n0", "step_10.pt", 10, b"ten", placed=ALONE)
    assert coming == e.CheckpointComing(1.0, "n0", 1, world.path("step_10.pt"))
    assert world.home("step_10.pt") == {}
    (found,) = world.arrive("fetch 1 n0")
    assert found == e.CheckpointFound(1.0, "n0", 1, world.path("step_10.pt"), 10)
    assert world.home("step_10.pt") == {"step_10.pt": b"ten"}
    assert world.carry.coming == ()


def test_one_that_is_a_single_file_is_whole_without_a_word_of_the_other_nodes(world: World) -> None:
    world.save("n0", "a.pt", 10, b"ten")
    world.take(world.carry.lost(1.0, "n1"))
    world.arrive_all()
    assert world.kinds() == ["Coming", "Found"]


def test_it_is_not_whole_before_the_other_nodes_have_told_that_they_have_no_part(world: World) -> None:
    world.save_in("n0", "a", 10, b"ten")
    world.arrive_all()
    assert world.scanned("n1", 11) == () and world.scanned("n2", 10) == ()
    (found,) = world.scanned("n2", 11)
    assert isinstance(found, e.CheckpointFound)


def test_a_node_that_has_stopped_the_attempt_has_told_all(world: World) -> None:
    world.save_in("n0", "a", 10, b"ten")
    world.arrive_all()
    assert world.stopped("n1") == ()
    assert len(world.stopped("n2")) == 1


def test_what_nodes_told_before_the_report_counts_too(world: World) -> None:
    world.scanned("n1", 11)
    world.stopped("n2")
    world.save("n0", "a.pt", 10, b"ten")
    assert len(world.arrive("fetch 1 n0")) == 1


def test_parts_of_several_hosts_gather_in_one_folder(world: World) -> None:
    for n, node in enumerate(GANG):
        world.found(node, "step_5", 5, world.write(node, {f"step_5/rank{n}.pt": node.encode()}))
    world.arrive_all()
    assert world.kinds() == ["Coming", "Found"]
    assert world.home("step_5") == {f"step_5/rank{n}.pt": f"n{n}".encode() for n in range(3)}


def test_a_file_that_several_hosts_wrote_is_fetched_from_the_first_to_report(world: World) -> None:
    for node in GANG:
        files = {"step_5/model.pt": node.encode(), f"step_5/{node}.pt": b"rng"}
        world.found(node, "step_5", 5, world.write(node, files))
    world.arrive_all()
    assert world.home("step_5")["step_5/model.pt"] == b"n0" and len(world.home("step_5")) == 4


def test_the_same_report_again_changes_nothing(world: World) -> None:
    pieces = world.write("n0", {"a.pt": b"ten"})
    world.found("n0", "a.pt", 10, pieces, placed=ALONE)
    assert world.found("n0", "a.pt", 10, pieces, placed=ALONE) == ()
    world.arrive_all()
    assert world.found("n0", "a.pt", 10, pieces, placed=ALONE) == () and world.copies == {}


def test_a_part_that_was_not_expected_any_more_makes_it_whole_again(world: World) -> None:
    world.found("n0", "s", 50, world.write("n0", {"s/0.pt": b"0"}), placed=("n0", "n1"))
    world.arrive_all()
    world.scanned("n1", 51)
    assert world.kinds() == ["Coming", "Found"]
    world.found("n1", "s", 55, world.write("n1", {"s/1.pt": b"1"}), placed=("n0", "n1"))
    assert world.kinds() == ["Coming", "Found", "Spoiled", "Coming"]
    world.arrive_all()
    assert world.kinds()[4:] == ["Found"] and world.home("s") == {"s/0.pt": b"0", "s/1.pt": b"1"}


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
    assert world.kinds() == ["Coming", "Found"] * 2
    assert [path.name for path in world.job.checkpoints.rglob("*") if path.is_file()] == ["a.pt", "2.pt"]


def test_the_newest_version_follows_the_one_on_its_way(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    first = world.copies["fetch 1 n0"]
    for count in (20, 30):
        assert world.save("n0", "last.pt", count, b"%d" % count, placed=ALONE) == ()
    assert list(world.copies.values()) == [first]
    world.files["n0"]["last.pt"] = b"1"  # its copy had begun, and reads the old file
    found, coming = world.arrive(first.key)
    assert isinstance(found, e.CheckpointFound) and found.count == 10
    assert isinstance(coming, e.CheckpointComing)
    world.files["n0"]["last.pt"] = b"30"
    world.arrive_all()
    assert world.home("last.pt") == {"last.pt": b"30"} and world.kinds()[-1] == "Found"


def test_a_version_that_was_written_over_is_given_up_for_the_one_that_follows(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    world.save("n0", "last.pt", 20, b"2", placed=ALONE)
    world.arrive_all()
    assert world.kinds() == ["Coming", "Spoiled", "Coming", "Found"]
    assert world.home("last.pt") == {"last.pt": b"2"}


def test_a_script_without_steps_has_versions_too(world: World) -> None:
    for data in (b"1", b"2"):
        world.save("n0", "last.pt", 0, data, placed=ALONE)
        world.arrive_all()
    assert world.home("last.pt") == {"last.pt": b"2"}


def test_a_version_that_a_host_has_written_over_before_it_told_its_part_is_given_up(world: World) -> None:
    two = ("n0", "n1")
    world.found("n0", "last", 100, world.write("n0", {"last/0.pt": b"v1"}), placed=two)
    world.found("n1", "last", 200, world.write("n1", {"last/1.pt": b"v2"}), placed=two)
    assert world.kinds() == ["Coming", "Spoiled", "Coming"]
    world.found("n0", "last", 200, world.write("n0", {"last/0.pt": b"v2"}), placed=two)
    world.arrive_all()
    assert world.home("last") == {"last/0.pt": b"v2", "last/1.pt": b"v2"}


def test_a_part_that_was_taken_for_an_earlier_version_s_goes_to_its_own(world: World) -> None:
    two = ("n0", "n1")
    world.found("n0", "last", 100, world.write("n0", {"last/0.pt": b"v1"}), placed=two)
    world.arrive_all()
    world.found("n1", "last", 120, world.write("n1", {"last/1.pt": b"v2"}), placed=two)
    world.arrive_all()
    world.found("n0", "last", 120, world.write("n0", {"last/0.pt": b"v2"}), placed=two)
    assert world.kinds() == ["Coming", "Found", "Spoiled", "Coming"]
    world.arrive_all()
    assert world.home("last") == {"last/0.pt": b"v2", "last/1.pt": b"v2"}


def test_a_late_word_of_an_older_attempt_does_not_replace_a_newer_checkpoint(world: World) -> None:
    world.save("n0", "last.pt", 5, b"new", attempt=2, placed=ALONE)
    world.arrive_all()
    assert world.save("n0", "last.pt", 50, b"old", attempt=1, placed=ALONE) == ()
    assert world.home("last.pt") == {"last.pt": b"new"}


# What cannot come


def test_what_vanished_before_it_came_is_spoiled_and_the_one_before_stays(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    world.arrive_all()
    world.save("n0", "last.pt", 20, b"2", placed=ALONE)
    del world.files["n0"]["last.pt"]
    world.arrive_all()
    assert world.kinds() == ["Coming", "Found", "Coming", "Spoiled"]
    assert world.home("last.pt") == {"last.pt": b"1"}
    assert "does not come home" in world.notes[0]


def test_a_node_that_was_lost_before_it_told_leaves_nothing_to_be_known(world: World) -> None:
    world.save_in("n0", "a", 10, b"ten", placed=("n0", "n1"))
    world.take(world.carry.lost(1.0, "n1"))
    assert world.kinds() == ["Coming", "Spoiled"] and world.copies == {}
    world.scanned("n1", 0, attempt=2)  # another agent of that node knows nothing of it either
    assert [type(one) for one in world.save_in("n0", "b", 20, b"x", placed=("n0", "n1"))] == [
        e.CheckpointComing,
        e.CheckpointSpoiled,
    ]


def test_a_node_that_was_lost_after_it_told_all_is_no_loss(world: World) -> None:
    world.save("n0", "a.pt", 10, b"ten", placed=("n0", "n1"))
    world.stopped("n1")
    assert world.take(world.carry.lost(1.0, "n1")) == ()
    assert world.take(world.carry.lost(1.0, "n0")) == (), "its files may still be there"
    world.arrive_all()
    assert world.kinds() == ["Coming", "Found"]


def test_a_late_part_of_a_version_that_was_given_up_does_not_pass_for_another_one(world: World) -> None:
    pieces = {node: world.write(node, {f"s/{node}.pt": b"1"}) for node in GANG}
    world.found("n0", "s", 50, pieces["n0"])
    world.arrive("fetch 1 n0", "no space")
    world.revive()
    for node in ("n1", "n2"):
        assert world.found(node, "s", 51, pieces[node]) == ()
        world.stopped(node)
    world.stopped("n0")
    assert world.copies == {} and world.home("s") == {}


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
    told = tuple(m.Piece(one, 1, 1, "0" * 64) for one in pieces)
    assert world.found("n0", name, 1, told, placed=ALONE) == ()
    assert world.copies == {} and "not fetched" in world.notes[0]


def test_a_disk_at_home_that_takes_no_manifest_is_told(world: World) -> None:
    (world.job.root / "carried").write_text("no folder")
    world.save("n0", "a.pt", 10, b"ten", placed=ALONE)
    assert world.kinds() == ["Coming", "Spoiled"] and world.copies == {}
    assert "on this machine" in world.notes[0]


def test_more_than_can_be_carried_leaves_the_oldest(world: World) -> None:
    for n in range(COMING_MAX + 1):
        world.save("n0", f"{n}.pt", n, b"x", placed=ALONE)
    assert len(world.carry.coming) == COMING_MAX
    assert world.news[-2] == e.CheckpointSpoiled(1.0, "n0", 1, world.path("0.pt"))


# A supervisor that is revived


def test_a_revived_supervisor_goes_on_with_what_was_on_its_way(world: World) -> None:
    world.save("n0", "a.pt", 10, b"ten")
    world.stopped("n1")
    world.revive()
    world.take(world.carry.begin(2.0, (world.path("a.pt"),), {"n2": 1}))
    world.arrive_all()
    assert world.kinds() == ["Coming", "Found"]


def test_a_revived_supervisor_ends_what_the_brain_still_waits_for(world: World) -> None:
    world.save("n0", "a.pt", 10, b"ten", placed=ALONE)
    world.arrive_all()
    world.revive()
    world.news.clear()
    world.take(world.carry.begin(2.0, (world.path("a.pt"), world.path("b.pt")), {}))
    assert world.news == [
        e.CheckpointFound(2.0, "n0", 1, world.path("a.pt"), 10),
        e.CheckpointSpoiled(2.0, "", 0, world.path("b.pt")),
    ]


def test_the_version_that_follows_outlives_the_supervisor(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    world.save("n0", "last.pt", 20, b"2", placed=ALONE)
    world.revive()
    world.take(world.carry.begin(2.0, (world.path("last.pt"),), {}))
    world.arrive_all()
    assert world.home("last.pt") == {"last.pt": b"2"} and world.kinds()[-1] == "Found"


def test_an_exchange_of_folders_that_was_cut_off_is_undone(world: World) -> None:
    world.found("n0", "last", 10, world.write("n0", {"last/a.pt": b"1"}), placed=ALONE)
    world.arrive_all()
    world.found("n0", "last", 20, world.write("n0", {"last/a.pt": b"2"}), placed=ALONE)
    stage = world.copies["fetch 2 n0"].here
    stage.mkdir(parents=True)
    (world.job.checkpoints / "last").rename(stage / ".old")
    world.revive()
    assert world.home("last") == {"last/a.pt": b"1"}


def test_a_manifest_that_cannot_be_read_counts_as_none(world: World) -> None:
    world.save("n0", "a.pt", 10, b"ten", placed=ALONE)
    for path in (world.job.root / "carried").iterdir():
        path.write_text("{}")
    world.revive()
    assert world.carry.coming == ()


# What stays at home


def test_the_newest_stay_at_home_and_always_the_one_to_resume_from(tmp_path: Path) -> None:
    world = World(JobDir(tmp_path / "job"), keep=2)
    world.resume = world.path("1.pt")
    for n in range(1, 6):
        world.save("n0", f"{n}.pt", n, b"x", placed=ALONE)
        world.arrive_all()
    world.scanned("n0", 6)
    assert sorted(path.name for path in world.job.checkpoints.glob("*.pt")) == ["1.pt", "4.pt", "5.pt"]
    spoiled = [event.path for event in world.news if isinstance(event, e.CheckpointSpoiled)]
    assert spoiled == [world.path("2.pt"), world.path("3.pt")]


# To hosts


def test_a_checkpoint_is_sent_with_all_its_files_and_known_by_its_manifest(world: World) -> None:
    pieces = world.write("n0", {"s/a.pt": b"a", "s/d/b.pt": b"b"})
    world.found("n0", "s", 10, pieces, placed=ALONE)
    world.arrive_all()
    path = world.path("s")
    copy = world.carry.send(path, "n1", "/far/n1")
    assert copy.names == ("s/a.pt", "s/d/b.pt") and copy.here == world.job.checkpoints
    assert copy.there == "/far/n1/checkpoints" and copy.direction is Direction.SEND
    assert world.carry.pieces(path) == pieces
    assert world.carry.resume_path(path, "/far/n1") == "/far/n1/checkpoints/s"


def test_a_checkpoint_from_elsewhere_is_sent_under_its_own_name(world: World, tmp_path: Path) -> None:
    other = tmp_path / "other" / "last.pt"
    other.parent.mkdir()
    other.write_bytes(b"data")
    copy = world.carry.send(str(other), "n1", "/far/n1")
    assert (copy.here, copy.names) == (other.parent, ("last.pt",))
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
        world.carry.send(world.path("none.pt"), "n1", "/far/n1")
    with pytest.raises(ClusterError, match="no checkpoint"):
        world.carry.pieces(world.path("none.pt"))


def test_nothing_is_put_in_the_place_of_what_is_being_sent(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    world.arrive_all()
    copy = world.carry.send(world.path("last.pt"), "n1", "/far/n1")
    world.save("n0", "last.pt", 20, b"2", placed=ALONE)
    world.arrive_all()
    assert world.home("last.pt") == {"last.pt": b"1"}
    (found,) = world.take(world.carry.copied(1.0, Copied(copy, "")))
    assert isinstance(found, e.CheckpointFound) and world.home("last.pt") == {"last.pt": b"2"}


def test_what_is_sent_to_a_node_that_is_lost_holds_nothing_up(world: World) -> None:
    world.save("n0", "last.pt", 10, b"1", placed=ALONE)
    world.arrive_all()
    copy = world.carry.send(world.path("last.pt"), "n1", "/far/n1")
    world.save("n0", "last.pt", 20, b"2", placed=ALONE)
    world.arrive_all()
    turn = world.carry.lost(1.0, "n1")
    assert turn.drop == (copy.key,) and world.home("last.pt") == {"last.pt": b"2"}


def test_status_tells_what_travels(world: World) -> None:
    world.save("n0", "a.pt", 10, b"ten", placed=ALONE)
    (travel,) = world.carry.status({"fetch 1 n0": 2})
    assert (travel.name, travel.node, travel.size_bytes, travel.done_bytes) == ("a.pt", "n0", 3, 2)
