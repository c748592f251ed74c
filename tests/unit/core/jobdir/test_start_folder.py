"""What lies where the ranks start: brought by the snapshot, written since, or behind links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.core.jobdir import start_folder
from orchestrator.core.jobdir.layout import JobDir
from tests.support.saved_files import S, write

AT_NS = 1_000 * S


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    """Return a job whose snapshot has brought two files."""
    job = JobDir(tmp_path / "job")
    for name in ("train.py", "data/x.pt"):
        write(job.code / name, b"data", AT_NS)
    start_folder.record_snapshot_files(job, [Path("train.py"), Path("data/x.pt")])
    return job


def _written(job: JobDir) -> list[str]:
    return list(start_folder.find_written_files(job))


def test_submitted_file_is_not_written_by_ranks(job: JobDir) -> None:
    """Files that were copied there at submit were not written by ranks."""
    assert start_folder.find_written_files(job) == {}


def test_new_or_changed_file_was_written(job: JobDir) -> None:
    write(job.code / "out" / "b.pt", b"four")
    write(job.code / "a.csv", b"")
    write(job.code / "train.py", b"data", AT_NS + S)
    write(job.code / "data" / "x.pt", b"more data", AT_NS)
    files = start_folder.find_written_files(job)
    assert files == {"a.csv": 0, "data/x.pt": 9, "out/b.pt": 4, "train.py": 4} and list(files) == sorted(files)


def test_links_pipes_and_bytecode_are_not_written_files(job: JobDir, tmp_path: Path) -> None:
    """Links, pipes and compiled code do not count as written."""
    write(tmp_path / "elsewhere" / "a.pt")
    (job.code / "results").symlink_to(tmp_path / "elsewhere")
    (job.code / "a.pt").symlink_to(tmp_path / "elsewhere" / "a.pt")
    os.mkfifo(job.code / "pipe")
    write(job.code / "pkg" / "__pycache__" / "a.pyc")
    assert _written(job) == []


@pytest.mark.parametrize("text", [None, "", "{", "[1]", '{"train.py": 5}'])
def test_missing_list_of_submitted_files_reports_nothing(job: JobDir, text: str | None) -> None:
    write(job.code / "a.csv")
    job.snapshot_files.unlink()
    if text is not None:
        job.snapshot_files.write_text(text)
    assert _written(job) == []


def test_links_out_of_job_folder_are_reported(job: JobDir, tmp_path: Path) -> None:
    for name in ("runs", "Outputs", "datasets"):
        (tmp_path / name).mkdir()
    (job.code / "exp").mkdir()
    (job.code / "runs").symlink_to(tmp_path / "runs")
    (job.code / "exp" / "Outputs").symlink_to(tmp_path / "Outputs")
    (job.code / "datasets").symlink_to(tmp_path / "datasets")
    (job.code / "out").symlink_to(job.code / "exp")
    (job.code / "gone").symlink_to(tmp_path / "nothing")
    outputs = {"exp/Outputs": str(tmp_path / "Outputs"), "runs": str(tmp_path / "runs")}
    assert start_folder.find_links(job) == {**outputs, "datasets": str(tmp_path / "datasets")}
    assert start_folder.find_output_links(job) == outputs
