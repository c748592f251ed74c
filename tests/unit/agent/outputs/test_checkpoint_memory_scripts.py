"""Checkpoints in memory as scripts see them that find their newest checkpoint and delete their oldest by themselves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.checkpoints import disk
from tests.support.memory_bench import MemoryBench, memory_bench
from tests.support.saved_files import S, write

pytestmark = pytest.mark.usefixtures("rooms")


def _link(bench: MemoryBench, name: str, to: str) -> Path:
    """Make a link as scripts do."""
    path = bench.memory.folder / name
    path.unlink(missing_ok=True)
    path.symlink_to(to)
    return path


def _times(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns // S for path in root.glob("step_*")}


def test_folders_keep_their_times(bench: MemoryBench, tmp_path: Path) -> None:
    """transformers' Trainer, and many scripts, delete the folders that were changed first."""
    for number in (9, 10, 11, 12):
        bench.save(f"step_{number}/part/a.pt", at_ns=number * S)
        bench.store(number, f"step_{number}/part/a.pt")
    assert (bench.memory.folder / "step_10/part/a.pt").is_symlink()
    now = _times(bench.memory.folder)
    assert (now["step_9"], now["step_10"]) == (9, 10) and min(now["step_11"], now["step_12"]) > 10
    assert _times(bench.disk) == {"step_9": 9, "step_10": 10, "step_11": 11, "step_12": 12}
    with memory_bench(tmp_path, "node-1", job_home=tmp_path / "node-0") as other:
        other.memory.open(None)
        assert _times(other.memory.folder) == _times(bench.disk)


def test_links_and_pointer_files_follow_their_checkpoint_to_the_disk(bench: MemoryBench) -> None:
    bench.save("step_1.pt", b"1")
    _link(bench, "up", "..")
    _link(bench, "here", ".")
    os.mkfifo(bench.memory.folder / "latest_step.txt")
    bench.save("last_checkpoint", b"\xff\0" * 5000)
    link = _link(bench, "last.pt", "step_1.pt")
    absolute = _link(bench, "newest.pt", str(bench.memory.folder / "step_1.pt"))
    bench.save("latest", b"step_1.pt\n")
    bench.store(1, "step_1.pt")
    assert [(bench.disk / name).readlink() for name in ("last.pt", "newest.pt")] == [Path("step_1.pt")] * 2
    assert (bench.disk / "latest").read_bytes() == b"step_1.pt\n"
    bench.save("step_2.pt", b"2")
    bench.save("step_3.pt", b"3")
    _link(bench, link.name, "step_3.pt")
    _link(bench, absolute.name, "/etc/hostname")
    bench.save("latest", b"step_3.pt", 2_000 * S)
    bench.store(2, "step_2.pt")
    assert (bench.disk / "last.pt").read_bytes() == b"1", "what it names is not there yet"
    assert (bench.disk / "latest").read_bytes() == b"step_1.pt\n"
    bench.drain()
    assert (bench.disk / "last.pt").readlink() == Path("step_3.pt")
    assert (bench.disk / "newest.pt").readlink() == Path("step_1.pt"), "it leads elsewhere now"
    assert (bench.disk / "latest").read_bytes() == b"step_3.pt"


def test_number_of_megatron_is_a_pointer(bench: MemoryBench) -> None:
    bench.save("iter_0000018/a.pt")
    bench.save("latest_checkpointed_iteration.txt", b"8")
    bench.store(1, "iter_0000018/a.pt")
    assert not (bench.disk / "latest_checkpointed_iteration.txt").exists()
    bench.save("iter_0000008/a.pt")
    bench.store(2, "iter_0000008/a.pt")
    assert (bench.disk / "latest_checkpointed_iteration.txt").read_bytes() == b"8"


def test_link_that_changes_while_it_is_copied_is_copied_again(
    bench: MemoryBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file = disk.put_file

    def put(source: Path, target: Path, **how: Any) -> None:
        put_file(source, target, **how)
        if target.name == "last.pt" and source.name == "step_1.pt":
            _link(bench, "last.pt", "step_2.pt")

    monkeypatch.setattr(disk, "put_file", put)
    _link(bench, "last.pt", "step_1.pt")
    for number in (1, 2):
        bench.save(f"step_{number}.pt")
        bench.store(number, f"step_{number}.pt")
    assert (bench.disk / "last.pt").readlink() == Path("step_2.pt")


def test_next_attempt_has_marks_of_another_node_and_keeps_its_own(bench: MemoryBench) -> None:
    folder = bench.memory.folder
    for number in (1, 2):
        write(bench.disk / f"step_{number}.pt")
        write(bench.disk / "latest", b"step_%d.pt" % number, number * S)
        (bench.disk / "last.pt").unlink(missing_ok=True)
        (bench.disk / "last.pt").symlink_to(f"step_{number}.pt")
        bench.memory.open(None)
        assert (folder / "latest").read_bytes() == b"step_%d.pt" % number
        assert (folder / "last.pt").readlink() == Path(f"step_{number}.pt")
    bench.save("latest", b"step_1.pt")
    _link(bench, "last.pt", "step_1.pt")
    bench.memory.open(None)
    assert (folder / "latest").read_bytes() == b"step_1.pt"
    assert (folder / "last.pt").readlink() == Path("step_1.pt")


def test_links_to_what_was_deleted_on_disk_go(bench: MemoryBench) -> None:
    """A script that sorts by time would fail at them."""
    for name in ("step_1/a.pt", "step_2.pt"):
        write(bench.disk / name)
    bench.memory.open(None)
    link = _link(bench, "mine.pt", "nowhere.pt")
    shutil.rmtree(bench.disk / "step_1")
    (bench.disk / "step_2.pt").unlink()
    bench.memory.drop_links()
    assert list(bench.memory.folder.iterdir()) == [link]
    link.unlink()
    bench.memory.drop_links()
    assert bench.memory.folder.is_dir()


def test_folder_that_a_script_deletes_meanwhile_does_not_come_back(
    bench: MemoryBench, monkeypatch: pytest.MonkeyPatch, rooms: list[int]
) -> None:
    put_file = disk.put_file

    def put(source: Path, target: Path, *, is_link: bool = False, is_hard: bool = False) -> None:
        if is_link:
            shutil.rmtree(bench.memory.folder / "step_1", ignore_errors=True)
        put_file(source, target, is_link=is_link, is_hard=is_hard)

    monkeypatch.setattr(disk, "put_file", put)
    bench.save("step_1/a.pt")
    rooms[0] = 0  # under pressure
    assert (bench.store(1, "step_1/a.pt").error, list(bench.memory.folder.iterdir())) == ("", [])
    assert (bench.disk / "step_1/a.pt").is_file()
