"""Files of saves on a disk: what a comparison finds, and that nothing else is ever moved, written over or deleted."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointFile,
    CheckpointState,
    FileLocation,
)
from tests.support.saved_files import SAVED_NS, Model, S, adam, saved, torch_save, write
from tests.support.unprivileged import unprivileged

FILES = {
    "run/step_5/model.pt": torch_save({"model": Model()}, data=b"weights" * 50),
    "run/step_5/optim.pt": torch_save({"optimizer": adam()}),
    "run/step_5/extra.h5": b"\x89HDF and what it has",
}


def save_of(root: Path, main: str, *names: str, hashed: bool = True) -> Checkpoint:
    """Return a save of the files as they are now."""
    pieces = []
    for name in names:
        about = (root / name).stat()
        digest = hashlib.sha256((root / name).read_bytes()).hexdigest() if hashed else ""
        pieces.append(CheckpointFile(name, about.st_size, about.st_mtime_ns, digest))
    return saved(1, key=main, main=main, files=tuple(pieces), locations=(FileLocation("", str(root)),))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A place with one save of three files."""
    folder = tmp_path / "checkpoints"
    for name, data in FILES.items():
        write(folder / name, data, SAVED_NS + 123_456_789)
    return folder


def listing(root: Path) -> dict[str, bytes]:
    """Return all files and links below a folder."""
    return {
        str(path.relative_to(root)): os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


# Compared


class Case(NamedTuple):
    """What happens to `model.pt`, and the fault that a look, and a reading, of it must find: with a sha256 in the ledger,
    and without."""

    harm: Callable[[Path], object]
    look: str
    read: str
    look_without: str
    read_without: str


def flip(path: Path) -> None:
    """Change a bit, as an old disk does."""
    data, about = path.read_bytes(), path.stat()
    at = data.index(b"weights")
    path.write_bytes(data[:at] + b"v" + data[at + 1 :])
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def of_another_step(path: Path, at_ns: int) -> None:
    write(path, torch_save({"model": Model()}, data=b"WEIGHTS" * 50), at_ns)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


OTHER, AGAIN = (
    "differs from what was saved (sha256)",
    "was rewritten, and its original checksum is unknown",
)
CASES = {
    "nothing": Case(lambda path: None, "", "", "", ""),
    "touch": Case(os.utime, "", "", AGAIN, AGAIN),
    "cp": Case(lambda path: write(path, path.read_bytes(), SAVED_NS + 9 * S), "", "", AGAIN, AGAIN),
    "rsync -a": Case(lambda path: write(path, path.read_bytes(), SAVED_NS + 123_456_789), "", "", "", ""),
    "sftp": Case(lambda path: os.utime(path, ns=(SAVED_NS, SAVED_NS)), "", "", "", ""),
    "cp -p of another step": Case(lambda path: of_another_step(path, SAVED_NS + 9 * S), OTHER, OTHER, AGAIN, AGAIN),
    "of another step in disguise": Case(lambda path: of_another_step(path, SAVED_NS + 123_456_789), "", OTHER, "", ""),
    "flipped bit": Case(flip, "", OTHER, "", "has a wrong CRC-32"),
    "emptied": Case(lambda path: path.write_bytes(b""), *["is empty"] * 4),
    "cut off": Case(lambda path: os.truncate(path, 100), *["has 100 bytes instead of "] * 4),
    "deleted": Case(lambda path: path.unlink(), *["is gone"] * 4),
    "a folder": Case(as_folder, *["bytes instead of "] * 4),
    "a pipe": Case(as_pipe, *["is empty"] * 4),
    "a circle": Case(as_circle, *["is gone"] * 4),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("hashed", [True, False], ids=["sha256", "no sha256"])
@pytest.mark.parametrize("deep", [True, False], ids=["read", "look"])
def test_comparison_names_first_differing_file(root: Path, case: Case, hashed: bool, deep: bool) -> None:
    save = save_of(root, "run/step_5", *FILES, hashed=hashed)
    case.harm(root / "run/step_5/model.pt")
    found = disk.compare(save, deep=deep)
    wanted = (case.read if deep else case.look) if hashed else (case.read_without if deep else case.look_without)
    assert wanted in found.fault and bool(wanted) == bool(found.fault)
    assert found.fault.startswith("run/step_5/model.pt ") == bool(wanted)
    if wanted:
        assert (found.pieces, found.compared) == (save.files, "")
    else:
        assert [piece.name for piece in found.pieces] == [piece.name for piece in save.files]
        assert all(disk.matches_record(root, piece) for piece in found.pieces), "what was only touched has its new time"


@pytest.mark.parametrize(
    ("hashed", "deep", "by"),
    [
        (True, False, "size and time of 3 files"), (True, True, "sha256 of 3 files"),
        (False, True, "CRC-32 and size and time, its format has no check sum of 3 files"),
    ],
)  # fmt: skip
def test_comparison_reports_what_was_compared(root: Path, hashed: bool, deep: bool, by: str) -> None:
    assert disk.compare(save_of(root, "run/step_5", *FILES, hashed=hashed), deep=deep).compared == by


@pytest.mark.parametrize("hashed", [True, False])
def test_unreadable_data_is_no_proof_of_damage(root: Path, hashed: bool) -> None:
    save = save_of(root, "run/step_5", *FILES, hashed=hashed)
    with unprivileged(root):
        (root / "run/step_5/model.pt").chmod(0)
        found = [disk.compare(save, deep=True)]
        (root / "run/step_5").chmod(0)
        found += [disk.compare(save, deep=deep) for deep in (True, False)]
        (root / "run/step_5").chmod(0o755)
    for one in found:
        assert (one.fault, one.is_unsure) == ("run/step_5/model.pt cannot be read: Permission denied", True)


# Hashed


def test_digests_are_only_of_unchanged_files(root: Path) -> None:
    save = save_of(root, "run/step_5", *FILES, hashed=False)
    known = (dataclasses.replace(save.files[0], sha256="known"), *save.files[1:])
    found = disk.hash_files(root, known)
    assert found is not None
    digests = [hashlib.sha256(data).hexdigest() for data in FILES.values()]
    assert [piece.sha256 for piece in found] == ["known", *digests[1:]]
    os.utime(root / "run/step_5/extra.h5")
    assert disk.hash_files(root, save.files) is None


def test_hashing_can_be_paced_and_cancelled(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "BLOCK_BYTES", 100)
    counts: list[int] = []
    path = root / "run/step_5/model.pt"
    assert disk.sha256(path, counts.append) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sum(counts) == path.stat().st_size and max(counts) == 100

    def give_up(_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        disk.sha256(path, give_up)


# Set aside


def test_leftovers_of_torn_checkpoint_are_hidden(root: Path) -> None:
    save = dataclasses.replace(save_of(root, "run/step_5", *FILES), state=CheckpointState.TORN, attempt=3)
    write(root / "run/step_5/more.txt")
    assert disk.quarantine(root, save) == [("run/step_5", ".step_5.torn-attempt-3")]
    assert sorted(listing(root)) == sorted(
        f".step_5.torn-attempt-3/{name}" for name in ("extra.h5", "model.pt", "more.txt", "optim.pt")
    )
    for name, data in FILES.items():
        write(root / name, data)
    assert disk.quarantine(root, save_again := save_of(root, "run/step_5", *FILES)) == [
        ("run/step_5", f".step_5.torn-attempt-{save_again.attempt}")
    ]


def test_loose_torn_files_are_renamed_individually(root: Path) -> None:
    for name in ("a/x.pt", "b/x.pt", "y.pt"):
        write(root / name)
    save = save_of(root, "y.pt", "a/x.pt", "b/x.pt", "y.pt")
    assert disk.quarantine(root, save) == [
        ("a/x.pt", ".x.pt.torn-attempt-1"), ("b/x.pt", ".x.pt.torn-attempt-1.2"), ("y.pt", ".y.pt.torn-attempt-1"),
    ]  # fmt: skip


def test_changed_linked_or_root_path_is_not_renamed(root: Path) -> None:
    save = save_of(root, "run/step_5", *FILES)
    os.utime(root / "run/step_5/optim.pt")
    (root / "link").symlink_to("run/step_5/model.pt")
    write(root / ".metadata")
    before = listing(root)
    assert disk.quarantine(root, save) == []
    assert disk.quarantine(root, save_of(root, "link", "link")) == []
    assert disk.quarantine(root, dataclasses.replace(save, files=())) == []
    assert listing(root) == before
    assert disk.quarantine(root, save_of(root, ".", ".metadata")) == [(".metadata", "..metadata.torn-attempt-1")]


# Kept, and put back


def in_place(path: Path) -> None:
    """Write over a file as `open(path, "wb")` does: its links change, too."""
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(b"the next one")


@pytest.mark.parametrize("copies", [True, False])
def test_kept_copy_survives_script_and_can_be_restored(root: Path, copies: bool) -> None:
    save, kept = save_of(root, "run/step_5", *FILES), root / ".kept" / "1"
    assert disk.keep_copy(save, kept, copies=copies)
    assert [(kept / name).samefile(root / name) for name in FILES] == [not copies] * 3
    if copies:
        in_place(root / "run/step_5/model.pt")
    shutil.rmtree(root / "run")
    assert disk.compare(dataclasses.replace(save, locations=(FileLocation("", str(kept)),)), deep=True).fault == ""
    assert disk.restore(save, kept, root)
    assert (
        disk.compare(save, deep=True).fault == ""
        and disk.compare(save, deep=False).compared == "size and time of 3 files"
    )
    assert not (kept / "run/step_5/model.pt").samefile(root / "run/step_5/model.pt")
    assert disk.restore(save, kept, root), "it is there"


def test_restore_overwrites_nothing(root: Path) -> None:
    save, kept = save_of(root, "run/step_5", *FILES), root / ".kept" / "1"
    assert disk.keep_copy(save, kept, copies=True)
    (root / "run/step_5/optim.pt").unlink()
    in_place(root / "run/step_5/model.pt")
    before = listing(root)
    assert not disk.restore(save, kept, root)
    assert listing(root) == before


def test_file_rewritten_while_kept_is_not_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, kept = save_of(root, "run/step_5", *FILES), root / ".kept" / "1"
    in_place(root / "run/step_5/optim.pt")
    for copies in (True, False):
        assert not disk.keep_copy(save, kept, copies=copies)
    (root / "run/step_5/optim.pt").unlink()
    with pytest.raises(FileNotFoundError):
        disk.keep_copy(save, kept, copies=True)
    assert list((root / ".kept").iterdir()) == []


def test_copies_leave_half_of_free_space(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, kept, older = save_of(root, "run/step_5", *FILES), root / ".kept" / "2", root / ".kept" / "1"
    size, usage = save.size_bytes, shutil.disk_usage(root)

    def keep(free_bytes: int, *older: Path) -> bool:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free_bytes))
        try:
            return disk.keep_copy(save, kept, copies=True, older=older)
        except OSError as err:
            assert err.errno == errno.ENOSPC and not kept.exists()
            return False

    assert not keep(2 * size - 1)
    assert disk.keep_copy(save, kept, copies=False), "links take none"
    kept.rename(older)
    assert not keep(2 * size - 1, older), "what has another name frees nothing"
    for name in FILES:
        (root / name).unlink()
        disk.copy_file(older / name, root / name)
    assert not keep(size, older), "both must fit for a while"
    assert keep(2 * size - 1, older) and older.exists()


@pytest.mark.parametrize("can_clone", [True, False])
def test_copy_has_bytes_and_time_of_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_clone: bool) -> None:
    if not can_clone:

        def refused(*_: object) -> int:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "copy_file_range", refused)
    for data in (b"", os.urandom(1_000_000)):
        source = write(tmp_path / "a", data)
        disk.copy_file(source, tmp_path / "b")
        assert (tmp_path / "b").read_bytes() == data and (tmp_path / "b").stat().st_mtime_ns == SAVED_NS


# Deleted


def test_files_of_checkpoint_are_deleted_with_folder(root: Path) -> None:
    write(root / "run/step_6/model.pt")
    (root / "run/step_5/empty/folder").mkdir(parents=True)
    checkpoint = save_of(root, "run/step_5", *FILES)
    assert disk.delete_checkpoint(checkpoint, root) == ""
    assert list(listing(root)) == ["run/step_6/model.pt"] and not (root / "run/step_5").exists()
    assert disk.delete_checkpoint(checkpoint, root) == "", "its caller may have died before it could note that"


@pytest.mark.parametrize("left", [3, 2, 1])
@pytest.mark.parametrize("mine", [{}, {"run/step_5/notes.txt": b"mine"}])
def test_next_deletion_removes_leftovers_of_killed_one(
    root: Path, monkeypatch: pytest.MonkeyPatch, left: int, mine: dict[str, bytes]
) -> None:
    save = save_of(root, "run/step_5", *FILES)
    for name, data in mine.items():
        write(root / name, data)
    with monkeypatch.context() as killed, pytest.raises(AttributeError):
        killed.delattr(shutil, "rmtree")
        disk.delete_checkpoint(save, root)
    for name in [name for name in listing(root) if name not in mine][left:]:
        (root / name).unlink()
    assert disk.delete_checkpoint(save, root) == "" and listing(root) == mine


def test_file_outside_ledger_is_never_deleted(root: Path) -> None:
    save = save_of(root, "run/step_5", *FILES)
    write(root / "run/step_5/notes.txt", b"mine")
    (root / "run/step_5/data").symlink_to("/etc")
    (root / "run/step_5/inner").mkdir()
    assert disk.delete_checkpoint(save, root) == ""
    assert listing(root) == {"run/step_5/notes.txt": b"mine", "run/step_5/data": b"/etc"}


def test_changed_checkpoint_stays_with_reason(root: Path) -> None:
    save = save_of(root, "run/step_5", *FILES)
    os.utime(root / "run/step_5/optim.pt")
    before = listing(root)
    assert disk.delete_checkpoint(save, root) == "run/step_5/optim.pt has changed since it was saved"
    assert disk.delete_checkpoint(dataclasses.replace(save, files=()), root).startswith("run/step_5 has changed since")
    assert listing(root) == before


def test_link_in_place_of_checkpoint_stays_with_target(root: Path) -> None:
    (root / "elsewhere").mkdir()
    (root / "run/step_5").rename(root / "elsewhere/step_5")
    (root / "run/step_5").symlink_to(root / "elsewhere/step_5")
    before = listing(root)
    assert disk.delete_checkpoint(save_of(root, "run/step_5", *FILES), root) == "run/step_5 is a symbolic link"
    assert listing(root) == before


def test_checkpoint_root_is_never_deleted(root: Path) -> None:
    shutil.rmtree(root / "run")
    write(root / ".metadata")
    assert disk.delete_checkpoint(save_of(root, ".", ".metadata"), root) == ""
    assert root.is_dir() and listing(root) == {}


def test_undeletable_checkpoint_stays_complete_or_hidden(root: Path) -> None:
    save = save_of(root, "run/step_5", *FILES)
    with unprivileged(root):
        (root / "run").chmod(0o555)
        assert disk.delete_checkpoint(save, root) == "step_5 cannot be deleted"
        assert set(listing(root)) == set(FILES)
        (root / "run").chmod(0o755)
        (root / "run/step_5").chmod(0o555)
        assert disk.delete_checkpoint(save, root) == ""
        assert all(name.startswith("run/.step_5.deleted/") for name in listing(root)) and listing(root)
        (root / "run/.step_5.deleted").chmod(0o755)
    disk.remove_folder(root / "run")
    assert listing(root) == {}
