"""A folder with much else in it: which files count as checkpoints of this attempt, and what a look at it costs."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.outputs import written_folders
from orchestrator.agent.outputs.checkpoint_watch import CheckpointWatch, ScanContext
from orchestrator.agent.outputs.written_folders import DATA_FILES_MIN, WrittenFolders
from tests.support.saved_files import SAVED_NS, S, torch_save, write


class Place:
    """A folder in which files are written at chosen moments, a second each: so a look sees each change of a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders = WrittenFolders(root)
        self._at_ns = SAVED_NS

    def write(self, *names: str, data: bytes = b"x") -> None:
        for name in names:
            self._at_ns += S
            is_new = not (self.root / name).exists()
            path = write(self.root / name, data, self._at_ns)
            for folder in path.parents if is_new else ():
                if folder.is_relative_to(self.root):
                    os.utime(folder, ns=(self._at_ns, self._at_ns))

    def look(self, *written: str) -> list[str]:
        """Return the files that count."""
        return sorted(self.folders.scan(written)[0].files)

    def shown(self, *written: str) -> list[str]:
        """Return those that come into sight only now."""
        return sorted(self.folders.scan(written)[1])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "start").mkdir()
    return Place(tmp_path / "start")


def test_copied_files_count_only_if_checkpoint_like(place: Place) -> None:
    place.write("train.py", "pretrained.pt", "data/x.jpg", "conf/a.yaml")
    assert sorted(place.folders.begin().files) == ["pretrained.pt"]
    place.write("ckpt.pt", "notes.txt")
    assert place.look() == ["ckpt.pt", "pretrained.pt"]


def test_folder_created_by_ranks_counts_entirely(place: Place) -> None:
    place.folders.begin()
    place.write("out/step_5/a.pt", "out/step_5/config.json")
    assert place.look() == ["out/step_5/a.pt", "out/step_5/config.json"]


def test_copied_data_folder_is_skipped_until_written(place: Place) -> None:
    """A data folder that was copied there is skipped until a rank writes in it."""
    data = [f"data/{number}.npy" for number in range(DATA_FILES_MIN + 1)]
    place.write(*data)
    assert place.folders.begin().files == {} and place.look() == []
    place.write("data/new.pt")
    assert place.look() == []
    assert place.look("data/new.pt") == sorted([*data, "data/new.pt"])


def test_other_files_seen_with_first_write_are_old(place: Place) -> None:
    """Other files that come into sight with the first write in a folder are old."""
    data = [f"data/{number}.npy" for number in range(DATA_FILES_MIN + 1)]
    place.write(*data)
    place.folders.begin()
    place.write("data/new.pt")
    assert place.shown("data/new.pt") == sorted(data)
    assert place.shown("data/new.pt") == [], "it is told once"


def test_linked_folder_counts_after_write_behind_it(place: Place, tmp_path: Path) -> None:
    """A linked folder counts once a rank wrote behind it."""
    (place.root / "results").symlink_to(tmp_path / "results")
    write(tmp_path / "results" / "old.pt")
    assert place.folders.begin().files == {} and place.look() == []
    write(tmp_path / "results" / "new.pt")
    found, shown = place.folders.scan(["results/new.pt"])
    assert (sorted(found.files), shown) == (["results/new.pt", "results/old.pt"], {"results/old.pt"})


def test_files_behind_link_before_attempt_do_not_count(place: Place, tmp_path: Path) -> None:
    (place.root / "results").symlink_to(tmp_path / "results")
    write(tmp_path / "results" / "old_1.pt", torch_save({"step": 1}))
    watch = CheckpointWatch(place.root, "*", folders=place.folders)
    watch.begin(1)
    write(tmp_path / "results" / "new_2.pt", torch_save({"step": 2}))
    looks = [watch.scan(ScanContext(steps, {0: steps}.copy), {"results/new_2.pt": 7}) for steps in (8, 9, 10)]
    changes = [change for look in looks for change in look]
    assert [(change.group.main, change.steps) for change in changes] == [("results/new_2.pt", 7)]


def test_next_agent_attributes_no_copied_file_to_attempt(place: Place, tmp_path: Path) -> None:
    place.write(*(f"data/{number}.npy" for number in range(DATA_FILES_MIN + 1)))
    (place.root / "results").symlink_to(tmp_path / "results")
    write(tmp_path / "results" / "old_1.pt", torch_save({"step": 1}))
    first, second = (CheckpointWatch(place.root, "*", folders=WrittenFolders(place.root)) for _ in range(2))
    first.begin(1)
    write(tmp_path / "results" / "new_2.pt", torch_save({"step": 2}))
    running, over = ScanContext(1.0, lambda: {0: 9}), ScanContext(60.0, lambda: {0: 9}, ended=True)
    assert first.scan(running, {"results/new_2.pt": 7}) == []
    second.load(json.loads(json.dumps(first.dump())))
    assert [change.group.main for change in second.scan(over)] == ["results/new_2.pt"]


@pytest.mark.parametrize("written", [(), ("cache/a.pt",)])
def test_tagged_cache_never_counts(place: Place, written: tuple[str, ...]) -> None:
    place.folders.begin()
    place.write("cache/CACHEDIR.TAG", "cache/a.pt", "cache/models/b.pt")
    assert place.look(*written) == []


@pytest.mark.parametrize("name", ["__pycache__", "node_modules", "site-packages", "wandb", ".cache"])
def test_code_and_tracker_folders_never_count(place: Place, name: str) -> None:
    place.folders.begin()
    place.write(f"{name}/a.pt", f"out/{name}/b.pt")
    assert place.look() == []


def test_file_overwritten_in_place_is_seen(place: Place) -> None:
    place.write("out/last.pt")
    place.folders.begin()
    assert [place.look() for _ in range(3)] == [["out/last.pt"]] * 3
    before = place.folders.scan(())[0].files["out/last.pt"]
    place.write("out/last.pt", data=b"longer")
    after = place.folders.scan(())[0].files["out/last.pt"]
    assert (before.size_bytes, after.size_bytes) == (1, 6) and after.mtime_ns > before.mtime_ns


def test_deleted_file_is_gone(place: Place) -> None:
    place.folders.begin()
    place.write("out/step_1/a.pt", "out/step_2/a.pt")
    assert len(place.look()) == 2
    (place.root / "out/step_1/a.pt").unlink()
    assert place.look() == ["out/step_2/a.pt"]
    (place.root / "out/step_2/a.pt").unlink()
    (place.root / "out/step_2").rmdir()
    assert place.look() == []


def test_too_many_created_files_are_left_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many files that a rank made are reported as left out."""
    monkeypatch.setattr(written_folders, "MADE_FILES_MAX", 3)
    place.folders.begin()
    place.write(
        *(f"samples/{number}.bin" for number in range(4)),
        *(f"dcp/__{number}_0.distcp" for number in range(4)),
    )
    found, _ = place.folders.scan(())
    assert (len(found.files), found.cut) == (4, "samples has more than 3 files")
    assert all(name.startswith("dcp/") for name in found.files), "a sharded checkpoint may have many"


def test_unwalked_place_counts_only_written_folders(place: Place) -> None:
    place.folders.walks = False
    place.write("other/a.pt", "run/deep/b.pt", "run/c.pt")
    assert place.look() == []
    assert place.look("run/c.pt") == ["run/c.pt"]


def _counted(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> Counter[str]:
    """Put a function in place of one of `os`, and count its calls by their paths."""
    calls = Counter[str]()

    def counted(path: Any, *args: Any, **options: Any) -> Any:
        calls[str(path)] += 1
        return function(path, *args, **options)

    monkeypatch.setattr(os, name, counted)
    return calls


@dataclass(frozen=True, slots=True)
class _DataFile:
    """An entry of a folder, as `os.scandir` gives it."""

    name: str

    def is_symlink(self) -> bool:
        return False

    def is_dir(self, *, follow_symlinks: bool) -> bool:
        return follow_symlinks and self.is_symlink()


@pytest.mark.parametrize("ending", ["jpg", "npy"])
def test_copied_data_costs_nothing_per_scan(place: Place, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Copied data costs neither a stat per file nor a listing at each scan."""
    place.write("last.pt", f"data/0.{ending}")
    data, plain = f"{place.root}/data", os.scandir

    def listed(path: str) -> Any:
        if path != data:
            return plain(path)
        return contextlib.nullcontext([_DataFile(f"{number}.{ending}") for number in range(20_000)])

    stats, listings = _counted(monkeypatch, "stat", os.stat), _counted(monkeypatch, "scandir", listed)
    assert sorted(place.folders.begin().files) == ["last.pt"]
    place.look()  # a second listing shows that nothing was added in the same tick of the clock
    assert listings == {str(place.root): 2, data: 2}
    stats.clear()
    assert [place.look() for _ in range(2)] == [["last.pt"]] * 2
    assert listings.total() == 4, "nothing is listed again"
    assert stats == {str(place.root): 2, data: 2, f"{place.root}/last.pt": 2}
