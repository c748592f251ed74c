"""What the hooks of ranks note of the files that they open, as the agent takes it up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.agent.outputs import rank_files
from orchestrator.agent.outputs.rank_files import RankFiles
from orchestrator.agent.ranks.hook.layout import FILES_FILE
from orchestrator.core.jobdir.layout import JobDir
from tests.support.save_bench import Bench, bench


@pytest.fixture
def ranks(tmp_path: Path) -> Bench:
    """Return a rank that has made a step."""
    made = bench(tmp_path)
    made.step(1, 1.0)
    return made


def _followed(ranks: Bench, files: RankFiles, *notes: str) -> RankFiles:
    """Let the hook note this, and the agent follow."""
    with (ranks.ranks.processes[0].folder / FILES_FILE).open("a") as file:
        file.write("".join(notes))
    files.read_notes(process.folder for process in ranks.ranks.processes)
    return files


def test_rank_without_notes_has_no_files(ranks: Bench) -> None:
    files = RankFiles()
    files.read_notes(process.folder for process in ranks.ranks.processes)
    assert (files.written, files.created, files.read, files.has_reads_of({os.getpid()})) == (
        {},
        set(),
        {},
        False,
    )


def test_file_carries_step_of_last_write(ranks: Bench) -> None:
    files = _followed(ranks, RankFiles(), "written 3 1 '/out/a.pt'\n", "written 3 0 '/out/b.pt'\n")
    _followed(ranks, files, "written 8 0 '/out/a.pt'\n")
    assert (files.written, files.created) == ({"/out/a.pt": 8, "/out/b.pt": 3}, {"/out/a.pt"})


def test_read_files_are_ordered_by_last_read(ranks: Bench) -> None:
    files = _followed(ranks, RankFiles(), "read 0 0 '/a.pt'\n", "read 0 0 '/b.pt'\n", "read 0 0 '/a.pt'\n")
    assert list(files.read) == ["/b.pt", "/a.pt"]


def test_half_line_is_read_once_complete(ranks: Bench) -> None:
    files = _followed(ranks, RankFiles(), "written 3 1 '/a.pt'\nwritten 4 1 '/b")
    assert list(files.written) == ["/a.pt"]
    assert list(_followed(ranks, files, ".pt'\n").written) == ["/a.pt", "/b.pt"]


def test_unreadable_line_hides_no_other(ranks: Bench) -> None:
    """A line that cannot be read hides no other."""
    odd = (
        "\n",
        "written\n",
        "written x 1 '/a.pt'\n",
        "written 3 1 /a.pt\n",
        "written 3 1 '/a.pt\n",
        "\x80\n",
    )
    assert list(_followed(ranks, RankFiles(), *odd, "written 3 1 '/b.pt'\n").written) == ["/b.pt"]


@pytest.mark.parametrize("name", ["/a b/c d.pt", "/a\nb.pt", "/é/✓.pt", "/'\".pt", "/\udcff.pt"])
def test_any_file_name_is_preserved(ranks: Bench, name: str) -> None:
    assert list(_followed(ranks, RankFiles(), f"written 3 1 {name!a}\n").written) == [name]


def test_long_file_is_read_in_chunks(ranks: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "BLOCK_BYTES_MAX", 50)
    files = _followed(ranks, RankFiles(), *(f"written {number} 1 '/{number}.pt'\n" for number in range(9)))
    assert len(files.written) == 2
    for _ in range(4):
        files.read_notes(process.folder for process in ranks.ranks.processes)
    assert files.written == {f"/{number}.pt": number for number in range(9)}


def test_start_is_known_after_stepping_process_notes_reads(ranks: Bench) -> None:
    """The checkpoint that a run started from is known once the stepping process notes its reads."""
    files = _followed(ranks, RankFiles(), "pid 1 0 ''\n")
    assert not files.has_reads_of({os.getpid()}), "another process steps"
    assert _followed(ranks, files, f"pid {os.getpid()} 0 ''\n").has_reads_of({os.getpid()})


def _job(home: Path, name: str, *written: Path) -> JobDir:
    """Return a job that runs, in whose folder its rank is noted to have written these files."""
    job = JobDir(home / "jobs" / f"{name}-20261128-120000000-k3")
    noted = job.rank_run("node-0", 1, 0) / FILES_FILE
    noted.parent.mkdir(parents=True)
    noted.write_text("".join(f"written 3 1 {str(path)!a}\n" for path in written))
    job.plan.touch()
    return job


def test_file_written_by_two_running_jobs_is_reported(tmp_path: Path) -> None:
    """A file that two jobs write is reported while both run."""
    outputs = tmp_path / "work" / "outputs"
    outputs.mkdir(parents=True)
    one = _job(tmp_path, "one", outputs / "last.pt", tmp_path / "own.pt")
    (one.root / "code").mkdir()
    (one.root / "code" / "outputs").symlink_to(outputs)
    two = _job(tmp_path, "two", one.root / "code" / "outputs" / "last.pt")
    fix = "fix: give each job a folder of its own"
    assert rank_files.find_shared_files(two) == (
        f"{one.id} is running, too, and writes the same file, {outputs}/last.pt; {fix}",
    )
    assert len(rank_files.find_shared_files(one)) == 1
    one.ended.touch()
    assert rank_files.find_shared_files(two) == ()


def test_own_and_unrelated_files_are_not_shared(tmp_path: Path) -> None:
    """Files of other names, and those in a job's own folder, are not shared."""
    one, two = _job(tmp_path, "one", tmp_path / "a.pt"), _job(tmp_path, "two", tmp_path / "b.pt")
    third = _job(tmp_path, "third", one.code / "out.pt")
    (one.root / "nodes").rename(one.root / "was")
    (third.root / "nodes").rename(one.root / "nodes")
    assert [rank_files.find_shared_files(job) for job in (one, two)] == [(), ()]
