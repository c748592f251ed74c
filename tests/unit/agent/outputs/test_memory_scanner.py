"""The scanner of an agent whose ranks write checkpoints to memory: it scans its own folder, and links to the disk change nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.agent.outputs.checkpoint_folders import CheckpointFolders
from orchestrator.agent.outputs.checkpoint_scanner import LOCK_FILE
from orchestrator.agent.ranks.hook.layout import FILES_FILE
from orchestrator.core.checkpoints.checkpoint import CheckpointFile, FileLocation
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import reports
from tests.support.fake_memory import FakeMemory, fake_memory
from tests.support.save_bench import Bench, play
from tests.support.saved_files import SAVED_NS, S, saved, torch_save, write

MEMORY_JOB = {"memory_bytes": 1 << 30, "memory_dir": "/dev/shm"}


def _play(folder: Path, act: object, memory: FakeMemory, **change: object) -> Bench:
    return play(folder, act, memory=memory, **{**MEMORY_JOB, **change})  # type: ignore[arg-type]


def _evict(memory: FakeMemory, *names: str, whole_seconds: bool = False) -> None:
    """Replace files in memory by links to the disk, one after the other."""
    for name in names:
        path, target = memory.folder / name, memory.on_disk / name
        time_ns = path.stat().st_mtime_ns
        write(target, path.read_bytes(), time_ns // S * S if whole_seconds else time_ns)
        path.unlink()
        path.symlink_to(target)


@pytest.mark.parametrize("whole_seconds", [False, True])
def test_evicted_checkpoints_are_not_reported_again(tmp_path: Path, whole_seconds: bool) -> None:
    """Also where the disk keeps the times of files in whole seconds, and while some files of a folder are links."""
    memory = fake_memory(tmp_path / "job")

    async def act(bench: Bench) -> None:
        await bench.look()
        for name in ("step_5/a.pt", "step_5/b.pt", "top_5.pt"):
            bench.save(name, 11.25)
        bench.step(6, 12.0)
        await bench.look(3)
        assert sorted(bench.mains) == ["step_5", "top_5.pt"]
        assert {one.part.root for one in bench.seen} == {str(memory.folder)}
        for name in ("step_5/a.pt", "step_5/b.pt", "top_5.pt"):
            _evict(memory, name, whole_seconds=whole_seconds)
            await bench.look(2)
        assert len(bench.mains) == 2 and not bench.scanner.is_unfinished
        write(memory.on_disk / "step_5/b.pt", torch_save({"step": 2}), bench.at(50.0))  # through the link
        await bench.look(3)
        assert bench.mains[2:] == ["step_5"]

    (tmp_path / "job").mkdir(exist_ok=True)
    _play(tmp_path / "job", act, memory)


def test_linked_checkpoints_belong_to_earlier_attempts(tmp_path: Path) -> None:
    memory = fake_memory(tmp_path / "job")
    for name in ("step_5/a.pt", "old_5.pt"):
        write(memory.on_disk / name)
    memory.open(None)

    async def act(bench: Bench) -> None:
        await bench.look()
        bench.save("step_6/a.pt", 11.0)
        bench.step(6, 12.0)
        await bench.look(3)
        assert bench.mains == ["step_6"]

    _play(tmp_path / "job", act, memory)


@pytest.mark.parametrize(("finds", "scans_here", "keys"), [(True, True, ["./b.pt", "a.pt"]), (False, True, ["a.pt"]), (True, False, ["a.pt"])])  # fmt: skip
def test_each_agent_scans_its_memory_and_one_the_shared_disk(
    tmp_path: Path, finds: bool, scans_here: bool, keys: list[str]
) -> None:
    memory = fake_memory(tmp_path / "job")
    (tmp_path / "job/code").mkdir()

    async def act(bench: Bench) -> None:
        await bench.look()
        assert bench.scanner.scan_count >= 0
        bench.save("a.pt", 11.0)
        write(tmp_path / "job/code/b.pt", torch_save({"step": 1}), bench.at(11.0))
        bench.step(6, 12.0)
        await bench.look(3)
        assert sorted(one.key for one in bench.seen) == keys
        assert (memory.folder.parent / LOCK_FILE).exists() and not (tmp_path / "job" / LOCK_FILE).exists()

    play(tmp_path / "job", act, scans_here, memory=memory, finds_checkpoints=finds, **MEMORY_JOB)


def test_next_attempt_is_scanned_where_memory_is_then(tmp_path: Path) -> None:
    memory = fake_memory(tmp_path / "job")

    async def act(bench: Bench) -> None:
        await bench.look()
        await bench.finish()
        memory.next_folder = tmp_path / "job/nodes/node-0/checkpoint-staging/checkpoints", "too little memory"
        memory.open(None)
        bench.scanner.begin(1)
        await bench.look()
        write(memory.folder / "step_7.pt", torch_save({"step": 7}), bench.at(11.0))
        bench.step(8, 12.0)
        await bench.look(3)
        assert [(one.main, one.part.root) for one in bench.seen] == [("step_7.pt", str(memory.folder))]

    _play(tmp_path / "job", act, memory)


def test_checkpoint_has_same_name_in_memory_and_on_disk(tmp_path: Path) -> None:
    places = CheckpointFolders(JobDir(tmp_path / "job"), "*")
    places.use_memory(tmp_path / "memory")
    for folder in ("memory", "job/checkpoints"):
        assert places.checkpoint_name(f"{tmp_path}/{folder}/ckpt_100.pt") == "ckpt_100.pt"
    assert places.checkpoint_name(f"{tmp_path}/job/code/a.pt") == "./a.pt"
    (own, files), *_ = places.assign_files({f"{tmp_path}/memory/ckpt_100.pt": 7}, 1, finds_more=True)
    assert (own.root, own.prefix, files) == (tmp_path / "memory", "", {"ckpt_100.pt": 7})


def test_reads_in_memory_are_reported_by_their_names(tmp_path: Path) -> None:
    memory = fake_memory(tmp_path / "job")

    async def act(bench: Bench) -> None:
        files = bench.ranks.processes[0].folder / FILES_FILE
        files.write_text(f"pid 1 0 'x'\nread 0 0 {str(memory.folder / 'ckpt_100.pt')!r}\n")
        bench.ranks.processes[0].exit_code = 0
        await bench.finish()
        assert bench.beginnings == [reports.CheckpointsRead(1, ("ckpt_100.pt",), False)]

    _play(tmp_path / "job", act, memory)


def test_discard_goes_where_files_are(tmp_path: Path) -> None:
    memory = fake_memory(tmp_path / "job")
    path = write(memory.on_disk / "a.pt")
    in_memory = replace(saved(1, main="a.pt"), locations=(FileLocation("node-0", str(memory.folder), (), True),))
    piece = CheckpointFile("a.pt", path.stat().st_size, SAVED_NS)
    on_disk = replace(in_memory, files=(piece,), locations=(FileLocation("node-0", str(memory.on_disk)),))

    async def act(bench: Bench) -> None:
        bench.scanner.discard(in_memory)
        assert memory.asked == [("discard", in_memory)] and path.exists()
        bench.scanner.discard(on_disk)
        bench.scanner._thread.submit(os.getpid).result()
        assert not path.exists() and len(memory.asked) == 1

    _play(tmp_path / "job", act, memory)
