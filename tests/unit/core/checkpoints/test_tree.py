"""Looks below a checkpoint place: what is seen, what is left alone, and that a look ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.core.checkpoints import tree
from tests.support.saved_files import SAVED_NS, write
from tests.support.unprivileged import unprivileged


def seen(root: Path, glob: str = "*") -> list[str]:
    return sorted(tree.scan(root, glob).files)


@pytest.mark.parametrize(
    ("glob", "files"),
    [
        ("*", ["a.pt", "run-1/ckpt.pt", "run-1/deep/er/x.pt", "run-2/ckpt.pt", "step-1/.metadata"]),
        ("*.pt", ["a.pt"]),
        ("run-*", ["run-1/ckpt.pt", "run-1/deep/er/x.pt", "run-2/ckpt.pt"]),
        ("run-1/", ["run-1/ckpt.pt", "run-1/deep/er/x.pt"]),
        ("./run-1/*.pt", ["run-1/ckpt.pt"]),
        ("run-[12]//ckpt.*", ["run-1/ckpt.pt", "run-2/ckpt.pt"]),
        (".hidden/*", [".hidden/x.pt"]),
        ("none-*", []),
        ("*/ckpt.pt", ["run-1/ckpt.pt", "run-2/ckpt.pt"]),
        ("**/x.pt", ["run-1/deep/er/x.pt"]),
        ("**/*.pt", ["a.pt", "run-1/ckpt.pt", "run-1/deep/er/x.pt", "run-2/ckpt.pt"]),
        ("run-1/**/er", ["run-1/deep/er/x.pt"]),
        ("run-1/**", ["run-1/ckpt.pt", "run-1/deep/er/x.pt"]),
        ("*.jsonl", []),
        ("**/*.jsonl", []),
    ],
)
def test_glob_matches_are_seen_with_everything_below(tmp_path: Path, glob: str, files: list[str]) -> None:
    for name in (
        "a.pt", "run-1/ckpt.pt", "run-1/deep/er/x.pt", "run-1/.tmp/x.pt", "run-2/ckpt.pt", "step-1/.metadata", ".hidden/x.pt",
        ".step-9.torn-attempt-1", "ledger.jsonl",
    ):  # fmt: skip
        write(tmp_path / name)
    assert seen(tmp_path, glob) == files
    assert [name for name in files if not tree.matches_glob(name, glob)] == []


def test_file_has_size_and_time(tmp_path: Path) -> None:
    write(tmp_path / "a/b.pt", b"12345")
    piece = tree.scan(tmp_path).files["a/b.pt"]
    assert (piece.name, piece.size_bytes, piece.mtime_ns, piece.sha256) == ("a/b.pt", 5, SAVED_NS, "")


@pytest.mark.parametrize(
    ("glob", "place"),
    [
        ("*", ("/job/checkpoints", "*")),
        ("run-*/x", ("/job/checkpoints", "run-*/x")),
        ("/data/run", ("/data", "run")),
        ("/data/run-*/ckpt.pt", ("/data", "run-*/ckpt.pt")),
        ("/data/a[[]1]/x.pt", ("/data", "a[[]1]/x.pt")),
        ("/*", ("/", "*")),
    ],
)
def test_place_is_folder_above_first_wildcard(glob: str, place: tuple[str, str]) -> None:
    folder, rest = tree.split_glob(Path("/job/checkpoints"), glob)
    assert (str(folder), rest) == place


def test_place_named_like_pattern_and_missing_place(tmp_path: Path) -> None:
    """A place whose name is a pattern, and one that does not exist."""
    folder = tmp_path / "runs [old] *"
    write(folder / "step-1.pt")
    assert seen(folder, "step-*.pt") == ["step-1.pt"]
    assert tree.scan(tmp_path / "none") == tree.Tree(tmp_path / "none")


# Links


def test_link_is_followed_only_out_at_top(tmp_path: Path) -> None:
    """A link is noted and never followed, except one at the top that leads out."""
    place, other = tmp_path / "place", tmp_path / "other"
    write(place / "step-1.pt")
    write(other / "x.pt")
    write(other / "data/y.pt")
    (place / "last.pt").symlink_to("step-1.pt")
    (place / "sub").mkdir()
    (place / "sub/data").symlink_to(other)
    (place / "sub/newest").symlink_to("../step-1.pt")
    (place / "out").symlink_to(other)
    (place / "gone.pt").symlink_to("/no/such/file")
    found = tree.scan(place)
    assert sorted(found.files) == ["out/data/y.pt", "out/x.pt", "step-1.pt"]
    assert found.pointed == {"step-1.pt"}


def test_links_from_memory_to_disk_are_followed_at_any_depth(tmp_path: Path) -> None:
    place, disk = tmp_path / "memory", tmp_path / "disk"
    write(disk / "step-1/a.pt")
    (place / "step-1").mkdir(parents=True)
    (place / "step-1/a.pt").symlink_to(disk / "step-1/a.pt")
    (place / "step-1/b.pt").symlink_to(write(tmp_path / "other/b.pt"))
    assert tree.scan(place, disk_folder=disk).files == tree.scan(disk).files
    assert tree.scan(place).files == {}


def test_link_of_a_script_over_one_to_disk_is_a_pointer(tmp_path: Path) -> None:
    place, disk = tmp_path / "memory", tmp_path / "disk"
    write(disk / "step-1.pt")
    place.mkdir()
    (place / "step-1.pt").symlink_to(disk / "step-1.pt")
    (place / "last.pt").symlink_to("step-1.pt")
    found = tree.scan(place, disk_folder=disk)
    assert (sorted(found.files), found.pointed) == (["step-1.pt"], {"step-1.pt"})


def test_place_behind_link_keeps_its_own_names(tmp_path: Path) -> None:
    write(tmp_path / "real/step-1.pt")
    (tmp_path / "real/last.pt").symlink_to("step-1.pt")
    (tmp_path / "link").symlink_to("real")
    found = tree.scan(tmp_path / "link")
    assert (sorted(found.files), found.pointed) == (["step-1.pt"], {"step-1.pt"})


def test_circular_links_are_skipped(tmp_path: Path) -> None:
    place = tmp_path / "above" / "place"
    write(place / "step-7/a.pt")
    for number in range(20):
        (place / f"step-7/here_{number}").symlink_to(".")
        (place / f"step-7/up_{number}").symlink_to("..")
        (place / f"out_{number}").symlink_to("../..")
    (place / "circle").symlink_to("circle")
    (place / "self").symlink_to(".")
    (place / "root").symlink_to("/")
    found = tree.scan(place)
    assert (sorted(found.files), found.cut) == (["step-7/a.pt"], "")


def test_pointers_resolve_to_names_in_place(tmp_path: Path) -> None:
    """Pointer files and links resolve to names in the place."""
    write(tmp_path / "run/latest", b"global_step5\n")
    write(tmp_path / "latest_checkpointed_iteration.txt", b"1000")
    write(tmp_path / "out/last_checkpoint", b"/somewhere/else/model_9.pth")
    write(tmp_path / "odd/latest", b"\xff" * 9000)
    os.mkfifo(tmp_path / "latest")
    assert tree.scan(tmp_path).pointed == {"run/global_step5", "1000", "out/model_9.pth"}


# Limits


def test_scan_stops_at_limits_and_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "ENTRIES_MAX", 20)
    monkeypatch.setattr(tree, "DEPTH_MAX", 3)
    write(tmp_path / "a/b/c/d/e/deep.pt")
    found = tree.scan(tmp_path)
    assert (list(found.files), found.cut) == ([], "more than 3 folders deep")
    for number in range(30):
        write(tmp_path / f"many/{number:02}.pt")
    found = tree.scan(tmp_path)
    assert len(found.files) <= 20 and found.cut == "more than 20 entries"
    write(tmp_path / "a.pt")
    monkeypatch.setattr(tree, "FOLDER_ENTRIES_MAX", 10)
    monkeypatch.setattr(tree, "DEPTH_MAX", 16)
    found = tree.scan(tmp_path)
    assert (sorted(found.files), found.cut) == (
        ["a.pt", "a/b/c/d/e/deep.pt"],
        "many has more than 10 entries",
    )
    monkeypatch.setattr(tree, "SCAN_S_MAX", -1.0)
    found = tree.scan(tmp_path)
    assert (list(found.files), found.cut) == ([], "not all within -1 s")


def test_many_hidden_entries_hide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of hidden entries hides nothing."""
    monkeypatch.setattr(tree, "ENTRIES_MAX", 20)
    for number in range(50):
        write(tmp_path / f".cache/{number}")
        write(tmp_path / f".{number}")
    write(tmp_path / "step-1.pt")
    found = tree.scan(tmp_path)
    assert (list(found.files), found.cut) == (["step-1.pt"], "")


def test_unreadable_folders_are_named_and_others_seen(tmp_path: Path) -> None:
    """Folders that cannot be read are named, and the others are seen."""
    write(tmp_path / "step-1/a.pt")
    write(tmp_path / "step-2/a.pt")
    with unprivileged(tmp_path):
        (tmp_path / "step-1").chmod(0)
        found = tree.scan(tmp_path)
        assert (sorted(found.files), found.unreadable) == (["step-2/a.pt"], ["step-1: Permission denied"])
        (tmp_path / "step-1").chmod(0o755)
    write(tmp_path / "file")
    assert tree.scan(tmp_path / "file").unreadable == [f"{tmp_path / 'file'}: Not a directory"]


def test_pipes_and_sockets_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step-1.pt")
    assert seen(tmp_path) == []
