"""The end of checkpoints in memory: all that is left is stored, and folders of dead agents are deleted, no others."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.outputs import checkpoint_memory, memory_folders, peer_files
from orchestrator.agent.process import agent_monitor
from orchestrator.core.checkpoints import disk, memory
from orchestrator.core.checkpoints.checkpoint import CopyTarget, FileLocation
from orchestrator.core.jobdir import locks
from orchestrator.core.wire import orders
from tests.support import fake_host, jobs
from tests.support.memory_bench import memory_bench, pieces
from tests.support.saved_files import Model, S, torch_save, write


def test_everything_left_is_stored(tmp_path: Path) -> None:
    """Also files that are no checkpoint, quarantined ones, and those that a rank was writing; a copy that waits is done before."""
    with memory_bench(tmp_path) as bench:
        bench.memory.open(None)
        whole = torch_save(Model())
        for name, data in {
            "step_1.pt": whole, "step_2/a.pt": whole[:99], ".step_0.pt.torn-attempt-1": b"t", "notes.txt": b"n",
            "ckpt.pt": b"unknown format", "waits.pt": b"unknown format, too",
        }.items():  # fmt: skip
            bench.save(name, data, 5 * S)
        bench.store(1, "step_1.pt")
        for name in ("ckpt.pt", "waits.pt"):
            write(bench.disk / name, b"old", 2 * S)
        files = pieces(bench.memory.folder, "waits.pt")
        bench.memory.copy(orders.CopyCheckpoint(7, files, CopyTarget.DISK, is_overwritten=True))
        done = bench.drain()
        assert (done.number, done.target, done.root, done.error) == (0, CopyTarget.DISK, str(bench.disk), "")
        assert bench.told[-2].number == 7  # type: ignore[union-attr]
        there = {piece.name: (bench.disk / piece.name).read_bytes() for piece in disk.list_files(bench.disk)}
        assert there == {
            "step_1.pt": whole, "step_2/a.pt": whole[:99], ".step_0.pt.torn-attempt-1": b"t", "notes.txt": b"n",
            "ckpt.pt": b"old", f".ckpt.pt.unfinished-{5 * S}": b"unknown format", "waits.pt": b"unknown format, too",
        }  # fmt: skip
        assert bench.memory.drain() and bench.told[-1] is done, "it is told once"


def test_proved_version_replaces_the_stored_one(tmp_path: Path) -> None:
    with memory_bench(tmp_path) as bench:
        whole = torch_save(Model())
        for name, data in (("ckpt.pt", whole), ("torn.pt", whole[:-9]), ("latest", b"x")):
            write(bench.disk / name, b"old", 2 * S)
            bench.save(name, data, 5 * S)
        bench.drain()
        texts = [(bench.disk / name).read_bytes() for name in ("ckpt.pt", "torn.pt", "latest")]
        assert texts == [whole, b"old", b"x"]


def test_node_that_only_read_does_not_replace_newer_version(tmp_path: Path) -> None:
    """Two nodes share a disk: one has written since, the other has the copy that it began with."""
    shared, whole = tmp_path / "shared", torch_save(Model())
    with (
        memory_bench(tmp_path, "node-0", job_home=shared) as writer,
        memory_bench(tmp_path, "node-1", job_home=shared) as reader,
    ):
        write(writer.disk / "ckpt.pt", whole, 5 * S)
        writer.memory.open(None)
        reader.memory.open(None)
        writer.save("ckpt.pt", whole + b"new", 9 * S)
        assert writer.store(2, "ckpt.pt", is_overwritten=True).error == ""
        reader.drain()
        assert (writer.disk / "ckpt.pt").read_bytes() == whole + b"new"


def test_failed_drain_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_bench(tmp_path) as bench:
        bench.save("step_1.pt")
        bench.save("step_2.pt")
        copy_file = disk.copy_file

        def fill(source: Path, target: Path) -> None:
            if source.name == "step_1.pt":
                target.write_bytes(b"d")
                raise OSError(28, "No space left on device")
            copy_file(source, target)

        monkeypatch.setattr(disk, "copy_file", fill)
        bench.drain_in_vain()
        why = "step_1.pt: No space left on device"
        assert bench.notes == [f"not all checkpoints in memory could be stored: {why}"]
        assert [piece.name for piece in disk.list_files(bench.disk)] == ["step_2.pt"]


def test_drain_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    with memory_bench(tmp_path) as bench:
        bench.save("step_1.pt")
        monkeypatch.setattr(disk, "copy_file", lambda source, target: hangs.wait(10))
        monkeypatch.setattr(checkpoint_memory, "DRAIN_S_MAX", 0.0)
        assert bench.memory.drain() and bench.memory.drain() and bench.told == []
        assert bench.notes == ["not all checkpoints in memory could be stored within 0 s"]
        hangs.set()


def test_closed_memory_leaves_nothing_but_the_disk(tmp_path: Path) -> None:
    with memory_bench(tmp_path) as bench:
        bench.memory.open(None)
        bench.save("step_1.pt")
        bench.store(1, "step_1.pt")
    assert list((tmp_path / "memory").iterdir()) == []
    assert (bench.disk / "step_1.pt").exists()


# Folders of dead agents


def leave(folder: Path, pid: int = 4711) -> Path:
    """Leave a folder as an agent does that is killed."""
    write(folder / "checkpoints/step_1.pt")
    (folder / "lock").write_text(f"{pid} here\n")
    return folder


def test_folder_of_dead_agent_is_deleted(tmp_path: Path) -> None:
    other = leave(tmp_path / "orch-other-node-0")
    own = leave(memory.memory_folder(str(tmp_path), jobs.ID, "node-0"))
    memory_folders.clean_up(str(tmp_path), jobs.ID, "node-0")
    assert not own.exists() and other.exists()
    memory_folders.clean_up(str(tmp_path), jobs.ID, "node-0")
    memory_folders.clean_up(str(tmp_path / "missing"), jobs.ID, "node-0")


def test_symbolic_link_stays(tmp_path: Path) -> None:
    target = leave(tmp_path / "elsewhere")
    own = memory.memory_folder(str(tmp_path), jobs.ID, "node-0")
    own.symlink_to(target)
    memory_folders.clean_up(str(tmp_path), jobs.ID, "node-0")
    memory_folders.clean_abandoned(str(tmp_path))
    assert own.is_symlink() and (target / "checkpoints/step_1.pt").exists()


def test_folder_of_other_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = leave(memory.memory_folder(str(tmp_path), jobs.ID, "node-0"))
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    memory_folders.clean_up(str(tmp_path), jobs.ID, "node-0")
    memory_folders.clean_abandoned(str(tmp_path))
    assert (own / "checkpoints/step_1.pt").exists()


def test_abandoned_folders_are_deleted_and_no_others(tmp_path: Path) -> None:
    dead, living, named_alike = (leave(tmp_path / f"orch-{name}") for name in ("dead-n", "living-n", "data"))
    (named_alike / "lock").write_text("")
    leave(tmp_path / "mine")
    with locks.hold(living / "lock") as is_mine:
        assert is_mine
        memory_folders.clean_abandoned(str(tmp_path))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "orch-data", "orch-living-n"]
    memory_folders.clean_abandoned(str(tmp_path))
    assert not living.exists() and not dead.exists()


def test_abandoned_folder_is_deleted_beside_living_ones(tmp_path: Path) -> None:
    dead = leave(tmp_path / "memory/orch-dead-n")
    with memory_bench(tmp_path) as bench, memory_bench(tmp_path, "node-1") as other:
        memory_folders.clean_abandoned(str(tmp_path / "memory"))
        assert not dead.exists() and bench.memory.fault == other.memory.fault == ""
        assert bench.memory.folder.exists()


def test_files_of_dead_agent_on_disk_stay(tmp_path: Path) -> None:
    with memory_bench(tmp_path) as bench:
        left = write(bench.job.node("node-0") / "checkpoint-staging/checkpoints/step_1.pt")
    stages = [write(bench.disk / f".coming/memory-{node}/step_1.pt") for node in ("node-0", "other-node-0")]
    with memory_bench(tmp_path) as again:
        again.drain()
        assert [stage.exists() for stage in stages] == [False, True]
        found = list(again.job.node("node-0").glob("checkpoint-staging-*/checkpoints/step_1.pt"))
    assert not left.exists() and len(found) == 1


def test_monitor_cleans_up_memory_of_dead_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_monitor, "clean_up_processes", lambda tag, is_monitor=False: [])
    own = leave(memory.memory_folder(str(tmp_path), jobs.ID, "node-0"))
    monkeypatch.setattr(memory, "DEFAULT_DIR", str(tmp_path / "shm"))
    of_other_job = leave(tmp_path / "shm/orch-other-node-0")
    config = fake_host.config(root=str(tmp_path), tag="t")
    agent_monitor._clean_up(config)
    assert not of_other_job.exists(), "also where the job itself keeps nothing in memory"
    assert own.exists()
    agent_monitor._clean_up(dataclasses.replace(config, memory_dir=str(tmp_path), memory_bytes=1))
    assert not own.exists()


def test_clean_finds_folder_of_a_node(tmp_path: Path) -> None:
    with memory_bench(tmp_path) as bench:
        base = bench.memory.folder.parent
        assert agent_monitor.clean_up_node(bench.job, "node-0") == [] and base.exists(), "its agent lives"
    leave(base)
    agent_monitor.clean_up_node(bench.job, "node-1")
    assert base.exists()
    agent_monitor.clean_up_node(bench.job, "node-0")
    assert not base.exists()


def test_copy_under_way_leaves_nothing_behind_when_the_agent_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that comes from another host just then is not written to a folder that was deleted."""
    is_asked = threading.Event()

    def fetch(*given: Any) -> str:
        (*_, stage, pace) = given
        is_asked.set()
        time.sleep(1.5)
        write(stage / "a_1.pt", b"data", 5 * S)
        pace(4)
        return ""

    monkeypatch.setattr(peer_files, "fetch", fetch)
    with memory_bench(tmp_path) as bench:
        bench.memory.open(None)
        bench.save("a_1.pt")
        files, source = pieces(bench.memory.folder, "a_1.pt"), FileLocation("node-1", "/there", is_memory=True)
        bench.memory.copy(orders.CopyCheckpoint(1, files, CopyTarget.NEIGHBOUR, (source,), {}))
        assert is_asked.wait(5.0)
    time.sleep(1.7)
    assert not bench.memory.folder.parent.exists()


def test_nothing_is_copied_into_memory_that_is_about_to_be_deleted(tmp_path: Path) -> None:
    with memory_bench(tmp_path) as bench:
        bench.save("step_1.pt")
        files = pieces(bench.memory.folder, "step_1.pt")
        bench.drain()
        bench.memory.copy(orders.CopyCheckpoint(1, files, CopyTarget.NEIGHBOUR, (bench.location(),), {}))
        assert bench.memory._copies == []
