"""Checkpoints in memory: where ranks write, what is stored and evicted, and what is made visible for the next attempt."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.agent.outputs import checkpoint_memory, memory_folders
from orchestrator.core.checkpoints import disk, memory, tree
from orchestrator.core.checkpoints.checkpoint import CopyTarget, FileLocation
from orchestrator.core.host import procfs
from tests.support import jobs
from tests.support.memory_bench import MEMORY_BYTES, ROOMY, MemoryBench, memory_bench, pieces
from tests.support.saved_files import S, saved, write

pytestmark = pytest.mark.usefixtures("rooms")


def test_ranks_write_to_private_folder_in_memory(bench: MemoryBench, tmp_path: Path) -> None:
    base = memory.memory_folder(str(tmp_path / "memory"), jobs.ID, "node-0")
    assert bench.memory.folder == base / "checkpoints" and base.stat().st_mode & 0o777 == 0o700
    assert (bench.memory.fault, bench.memory.is_empty) == ("", False)
    assert all(address.rpartition(":")[2].isdigit() for address in bench.memory.addresses)
    assert not [path for path in base.iterdir() if path.is_file() and path.name != "lock"], "the key stays on no disk"


def test_checkpoint_is_stored_with_its_times(bench: MemoryBench) -> None:
    bench.save("step_5/a.pt", b"a" * 1000, 7 * S)
    bench.save("step_5/.metadata", b"m", 8 * S)
    done = bench.store(3, "step_5/a.pt", "step_5/.metadata")
    assert (done.number, done.target, done.root, done.error) == (3, CopyTarget.DISK, str(bench.disk), "")
    assert done.names == ("step_5/a.pt", "step_5/.metadata") and done.evicted == ()
    assert (bench.disk / "step_5/a.pt").read_bytes() == b"a" * 1000
    assert (bench.disk / "step_5/a.pt").stat().st_mtime_ns == 7 * S
    assert list((bench.disk / ".coming").iterdir()) == []


def test_file_that_changes_during_copy_is_not_stored(bench: MemoryBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.save("a_1.pt")
    bench.save("b_1.pt")
    files, copy_file = pieces(bench.memory.folder, "a_1.pt", "b_1.pt"), disk.copy_file

    def change(source: Path, target: Path) -> None:
        copy_file(source, target)
        if source.name == "b_1.pt":
            write(source, b"new", 9 * S)

    monkeypatch.setattr(disk, "copy_file", change)
    done = bench.copy(1, files)
    assert (done.error, done.names) == ("b_1.pt has changed since it was saved", ())
    assert tree.scan(bench.disk).files == {}, "neither file stands under its name"


def test_file_with_other_bytes_is_not_stored(bench: MemoryBench) -> None:
    bench.save("a_1.pt")
    (piece,) = pieces(bench.memory.folder, "a_1.pt")
    bench.save("a_1.pt", b"atad")
    assert "has changed" in bench.copy(1, (piece,)).error and not (bench.disk / "a_1.pt").exists()
    assert "a_2.pt" in bench.copy(2, (dataclasses.replace(piece, name="a_2.pt"),)).error


def test_full_disk_leaves_no_part(bench: MemoryBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.save("a_1.pt")

    def fill(source: Path, target: Path) -> None:
        target.write_bytes(b"d")
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(disk, "copy_file", fill)
    assert "No space left on device" in bench.store(1, "a_1.pt").error
    assert list((bench.disk / ".coming").iterdir()) == []


def test_older_stored_checkpoints_become_links(bench: MemoryBench) -> None:
    for number in range(1, 5):
        bench.save(f"step_{number}.pt", b"%d" % number, number * S)
    evicted = [bench.store(number, f"step_{number}.pt").evicted for number in range(1, 5)]
    assert evicted == [(), (), (1,), (2,)]
    links = [path.name for path in sorted(bench.memory.folder.iterdir()) if path.is_symlink()]
    assert links == ["step_1.pt", "step_2.pt"]
    assert (bench.memory.folder / "step_1.pt").read_bytes() == b"1"
    found = tree.scan(bench.memory.folder).files
    assert found["step_1.pt"].mtime_ns == 1 * S, "a scan sees the same version"
    os.remove(bench.memory.folder / "step_1.pt")  # noqa: PTH107 -- as a script does that keeps its last three
    assert (bench.disk / "step_1.pt").read_bytes() == b"1"


def test_overwritten_files_are_never_links(bench: MemoryBench, rooms: list[int]) -> None:
    rooms[0] = 0  # under pressure
    for number in range(1, 5):
        bench.save("ckpt.pt", b"%d" % number, number * S)
        assert bench.store(number, "ckpt.pt", is_overwritten=True).evicted == ()
    assert not (bench.memory.folder / "ckpt.pt").is_symlink()
    write(bench.disk / "last.pt", b"from before")
    bench.memory.open(None)
    assert not (bench.memory.folder / "last.pt").is_symlink()
    bench.save("last.pt", b"new")
    assert (bench.disk / "last.pt").read_bytes() == b"from before"


def test_under_pressure_newest_is_evicted_between_scans(bench: MemoryBench, rooms: list[int]) -> None:
    rooms[0], calls = 0, list[bool]()
    bench.save("step_1/a.pt")
    bench.save("step_1/b.pt")
    folder = bench.memory.folder

    def act(work: Callable[[], None]) -> None:
        calls.append((folder / "step_1/a.pt").is_symlink())
        work()
        calls.append((folder / "step_1/b.pt").is_symlink())

    with ThreadPoolExecutor(1) as scans:
        bench.memory.between_scans = lambda work: scans.submit(act, work).result()
        assert bench.store(1, "step_1/a.pt", "step_1/b.pt").evicted == (1,)
    assert calls == [False, True]


def test_checkpoint_that_changed_after_it_was_stored_is_not_replaced(bench: MemoryBench, rooms: list[int]) -> None:
    bench.save("step_1.pt")
    bench.store(1, "step_1.pt")
    bench.save("step_1.pt", b"other", 9 * S)
    rooms[0] = 0
    bench.save("step_2.pt")
    assert bench.store(2, "step_2.pt").evicted == (2,)
    assert (bench.memory.folder / "step_1.pt").read_bytes() == b"other"


def test_next_attempt_sees_what_is_on_disk(bench: MemoryBench) -> None:
    for name in ("step_5/a.pt", "step_5/.metadata", "step_6.pt", "ckpt.pt", "latest", "step_7/a.pt.tmp"):
        write(bench.disk / name, b"step_5" if name == "latest" else name.encode())
    bench.memory.open(None)
    folder = bench.memory.folder
    kinds = {
        piece.relative_to(folder).as_posix(): piece.is_symlink() for piece in folder.rglob("*") if not piece.is_dir()
    }
    assert kinds == {
        "step_5/a.pt": True, "step_5/.metadata": True, "step_6.pt": True, "ckpt.pt": False, "latest": False
    }  # fmt: skip
    (bench.disk / "step_6.pt").unlink()
    bench.save("ckpt.pt", b"newer")
    bench.memory.open(None)
    assert not os.path.lexists(folder / "step_6.pt") and (folder / "ckpt.pt").read_bytes() == b"newer"


def test_resumed_version_replaces_a_torn_one(bench: MemoryBench) -> None:
    write(bench.disk / "ckpt.pt", b"whole", 5 * S)
    checkpoint = saved(
        4, main="ckpt.pt", files=pieces(bench.disk, "ckpt.pt"), locations=(FileLocation("", str(bench.disk)),)
    )
    bench.save("ckpt.pt", b"to", 9 * S)
    found = bench.memory.open(checkpoint)
    assert found is not None and found.path == str(bench.memory.folder / "ckpt.pt")
    assert Path(found.path).read_bytes() == b"whole" and not Path(found.path).is_symlink()
    write(bench.disk / "ckpt.pt", b"gone!", 6 * S)
    bench.save("ckpt.pt", b"to", 9 * S)
    assert bench.memory.open(checkpoint) == checkpoint, "it is nowhere: what compares it says so"


def test_disk_is_used_where_memory_has_no_room(bench: MemoryBench, rooms: list[int]) -> None:
    in_memory, data = bench.memory.folder, b"5" * 1000
    bench.save("step_5.pt", data, 5 * S)
    checkpoint = saved(4, main="step_5.pt", files=pieces(in_memory, "step_5.pt"))
    rooms[0] = MEMORY_BYTES - len(data)
    assert bench.memory.open(None) is None and bench.memory.fault == "", "what is there counts as room"
    rooms[0] = MEMORY_BYTES // 2
    found = bench.memory.open(checkpoint)
    assert bench.memory.fault == "checkpoint.memory is 0.00 GB, free memory of the host is 0.00 GB"
    assert bench.memory.folder == bench.job.node("node-0") / "checkpoint-staging/checkpoints"
    assert found is not None and Path(found.path).read_bytes() == data and not in_memory.exists()
    assert (bench.disk / "step_5.pt").read_bytes() == data
    rooms[0] = ROOMY
    bench.memory.open(None)
    assert bench.memory.fault == "" and bench.memory.folder == in_memory


def test_memory_that_was_full_is_not_used_again(bench: MemoryBench) -> None:
    assert bench.memory.full_text() == ""
    bench.save("step_5.pt", bytes(MEMORY_BYTES + 1))
    text = bench.memory.full_text()
    assert text == "0.0 of 0.0 GB used"
    bench.memory.open(None)
    assert bench.memory.fault == text and "checkpoint-staging" in str(bench.memory.folder)
    assert bench.memory.full_text() == ""


def test_foreign_folder_in_memory_is_not_used(tmp_path: Path) -> None:
    base = memory.memory_folder(str(tmp_path / "memory"), jobs.ID, "node-0")
    (tmp_path / "elsewhere").mkdir()
    base.parent.mkdir()
    base.symlink_to(tmp_path / "elsewhere")
    with memory_bench(tmp_path) as bench:
        bench.memory.open(None)
        assert "not this user's alone" in bench.memory.fault and "checkpoint-staging" in str(bench.memory.folder)
        bench.save("step_1.pt")
        assert bench.store(1, "step_1.pt").error == ""
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_discarded_checkpoint_leaves_memory_and_not_disk(bench: MemoryBench) -> None:
    bench.save("step_1/a.pt")
    bench.save("step_1/b.pt")
    bench.save("ckpt.pt", b"old")
    folder, files = bench.memory.folder, pieces(bench.memory.folder, "step_1/a.pt", "step_1/b.pt")
    bench.store(1, "step_1/a.pt", "step_1/b.pt")
    (folder / "step_1/a.pt").unlink()
    (folder / "step_1/a.pt").symlink_to(bench.disk / "step_1/a.pt")
    overwritten = saved(2, main="ckpt.pt", files=pieces(folder, "ckpt.pt"), locations=(FileLocation("", str(folder)),))
    bench.save("ckpt.pt", b"new", 9 * S)
    bench.memory.discard(saved(1, main="step_1", files=files, locations=(FileLocation("", str(folder)),)))
    bench.memory.discard(overwritten)
    bench.memory.discard(saved(1, main="step_1", files=files, locations=(FileLocation("", str(bench.disk)),)))
    bench.save("step_2.pt")
    bench.store(3, "step_2.pt")
    assert sorted(path.name for path in folder.iterdir()) == ["ckpt.pt", "step_2.pt"]
    assert sorted(tree.scan(bench.disk).files) == ["step_1/a.pt", "step_1/b.pt", "step_2.pt"]


def test_rooms_of_this_host_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert all(room > 0 for room in memory_folders.find_rooms(tmp_path))


V2 = {
    "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_71/step_0/user/task_0\n",
    # `--mem=4G`: Slurm limits the job; 1.5 GiB of it are in tmpfs, which `file` counts, and the lists of files do not
    "sys/fs/cgroup/system.slice/slurmstepd.scope/memory.max": "max\n",
    "sys/fs/cgroup/system.slice/slurmstepd.scope/memory.current": "2700000000\n",
    "sys/fs/cgroup/system.slice/slurmstepd.scope/job_71/memory.max": "4294967296\n",
    "sys/fs/cgroup/system.slice/slurmstepd.scope/job_71/memory.current": "2684354560\n",
    "sys/fs/cgroup/system.slice/slurmstepd.scope/job_71/memory.stat": (
        "anon 536870912\nfile 2147483648\nshmem 1610612736\nfile_mapped 8192\nfile_dirty 0\ninactive_anon 1879048192\n"
        "active_anon 268435456\ninactive_file 402653184\nactive_file 134217728\nunevictable 0\n"
    ),
    "sys/fs/cgroup/system.slice/slurmstepd.scope/job_71/step_0/memory.max": "max\n",
}
V1 = {
    "proc/self/cgroup": (
        "11:cpuset:/slurm/uid_2000/job_71/step_0\n9:memory:/slurm/uid_2000/job_71/step_0/task_0\n"
        "1:name=systemd:/system.slice/slurmd.service\n0::/system.slice/slurmd.service\n"
    ),
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "6000000000\n",
    "sys/fs/cgroup/memory/slurm/uid_2000/job_71/memory.limit_in_bytes": "4294967296\n",
    "sys/fs/cgroup/memory/slurm/uid_2000/job_71/memory.usage_in_bytes": "2684354560\n",
    "sys/fs/cgroup/memory/slurm/uid_2000/job_71/memory.stat": (
        "cache 0\nrss 0\ninactive_file 0\nactive_file 0\nhierarchical_memory_limit 4294967296\ntotal_cache 2147483648\n"
        "total_rss 536870912\ntotal_shmem 1610612736\ntotal_inactive_file 402653184\ntotal_active_file 134217728\n"
    ),
}
CONTAINER_V2 = {
    "proc/self/cgroup": "0::/\n",  # a container with a cgroup namespace of its own
    "sys/fs/cgroup/memory.max": "4294967296\n",
    "sys/fs/cgroup/memory.current": "2684354560\n",
    "sys/fs/cgroup/memory.stat": "shmem 1610612736\ninactive_file 402653184\nactive_file 134217728\n",
}


@pytest.mark.parametrize("files", [V2, V1, CONTAINER_V2])
def test_memory_of_the_job_within_its_cgroup_is_found(
    bench: MemoryBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    """Files in memory count for the limit of the job; the cache of files on disks makes room. Checkpoints that are in memory already
    have their room."""
    monkeypatch.undo()
    for name, text in files.items():
        write(tmp_path / "host" / name, text.encode())
    found = list(procfs.cgroups("memory", tmp_path / "host"))
    monkeypatch.setattr(procfs, "cgroups", lambda controller: found)
    rooms = memory_folders.find_rooms(tmp_path)
    assert min(rooms[2:]) == (4 << 30) - (2 << 30), "2.5 GiB are used, of which 0.5 GiB are a cache"
    monkeypatch.setattr(bench.memory, "_config", dataclasses.replace(bench.memory._config, memory_bytes=3 << 30))
    monkeypatch.setattr(checkpoint_memory, "find_rooms", lambda folder: [8 << 30, 8 << 30, *rooms[2:]])
    bench.memory.open(None)
    assert bench.memory.fault == "checkpoint.memory is 3.2 GB, the job's cgroup has room for 2.1 GB"
    assert "checkpoint-staging" in str(bench.memory.folder)


def test_neighbour_copy_of_a_lost_host_is_stored(bench: MemoryBench) -> None:
    place = bench.memory.folder.parent / "neighbours/7"
    write(place / "step-1/rank1.pt", b"its data")
    bench.save("step-1/rank0.pt")
    bench.store(7, "step-1/rank0.pt")
    files, source = pieces(place, "step-1/rank1.pt"), bench.location(root=place)
    assert bench.copy(7, files, CopyTarget.DISK, source).error == ""
    assert (bench.disk / "step-1/rank1.pt").read_bytes() == b"its data"
    assert set(bench.memory._stored[7].files) == set(pieces(bench.memory.folder, "step-1/rank0.pt"))
