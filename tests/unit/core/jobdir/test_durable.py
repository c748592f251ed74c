"""Does a reader see the old text or the new, and a log only whole lines?"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from orchestrator.agent.host.hook_files import install_hook
from orchestrator.agent.host.node_log import NodeLog
from orchestrator.agent.ranks.processes import NodeRanks
from orchestrator.core.jobdir import durable
from orchestrator.core.jobdir.durable import LineLog, read_lines, replace_bytes, replace_text
from orchestrator.core.jobdir.layout import JobDir
from tests.support.fake_disk import FakeDisk


def test_file_is_replaced_whole_without_leftovers(tmp_path: Path) -> None:
    """A file is replaced completely and leaves nothing beside it."""
    path = tmp_path / "state"
    replace_text(path, "old")
    with path.open() as reader:
        replace_text(path, "new \udc80", durable=False)
        assert reader.read() == "old"
    assert path.read_bytes() == b"new \x80"
    assert list(tmp_path.iterdir()) == [path]


def test_private_file_is_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        replace_bytes(tmp_path / "token", b"x", mode=0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_failed_replacement_keeps_old_text(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "file").touch()
    with pytest.raises(OSError, match="directory"):
        replace_text(path, "text")
    assert list(tmp_path.iterdir()) == [path]


def test_lines_are_appended_across_openings(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for word in ("one", "two"):
        log = LineLog(path)
        log.append(word)
        log.close()
    assert list(read_lines(path)) == ["one", "two"]


@pytest.mark.parametrize("block_bytes", [1, 4, durable.LINE_BYTES_MAX])
@pytest.mark.parametrize(("text", "left"), [("one\ntwo\nth", ["one", "two"]), ("no end", []), ("", [])])
def test_torn_last_line_is_cut_at_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, text: str, left: list[str]
) -> None:
    """A torn last line is not read and is cut off at opening."""
    monkeypatch.setattr(durable, "LINE_BYTES_MAX", block_bytes)
    path = tmp_path / "log"
    path.write_text(text)
    assert list(read_lines(path)) == left
    log = LineLog(path)
    log.append("after")
    log.close()
    assert list(read_lines(path)) == [*left, "after"]


def test_a_record_is_one_line(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "log")
    with pytest.raises(AssertionError):
        log.append("two\nlines")
    log.close()


@pytest.mark.parametrize("late", [False, True], ids=["at the write", "at the sync, as NFS does"])
def test_lines_wait_for_disk_space_whole_and_once(disk: FakeDisk, tmp_path: Path, late: bool) -> None:
    """Lines wait for space on the disk, and none is torn or doubled."""
    path = tmp_path / "log"
    log = LineLog(path)
    log.append("one")
    log.sync()
    disk.late, disk.room_bytes = late, 6  # "two" fits, and half of "three"
    seen: list[list[str]] = []
    disk.at_wait = lambda: seen.append(list(read_lines(path)))
    for word in ("two", "three", "four"):
        log.append(word)
    log.sync()
    assert seen == [["one"] if late else ["one", "two"]] * 2, "what is not known to be on disk is cut off"
    log.append("five")
    log.close()
    assert list(read_lines(path)) == ["one", "two", "three", "four", "five"]


def test_log_killed_on_full_disk_leaves_whole_lines(disk: FakeDisk, tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LineLog(path)
    disk.room_bytes = 6

    def die() -> None:
        raise KeyboardInterrupt

    disk.at_wait = die
    log.append("one")
    with pytest.raises(KeyboardInterrupt):
        log.append("two")
    disk.room_bytes = None
    log = LineLog(path)
    log.append("after")
    log.close()
    assert list(read_lines(path)) == ["one", "after"]


def test_failing_disk_is_no_full_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log = LineLog(tmp_path / "log")
    log.append("one")
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output"):
        log.sync()


def test_subfolder_is_created_but_never_job_folder_itself(tmp_path: Path) -> None:
    """A folder of a job is created with its parents, but never the job's own folder."""
    job = tmp_path / "job"
    with pytest.raises(FileNotFoundError):
        durable.make_subfolders(job, job / "logs" / "attempt-001")
    assert not job.exists()
    job.mkdir()
    durable.make_subfolders(job, job / "logs" / "attempt-001")
    durable.make_subfolders(job, job / "logs" / "attempt-001")
    assert (job / "logs" / "attempt-001").is_dir()


def test_agent_creates_no_folder_of_deleted_job(tmp_path: Path) -> None:
    job = JobDir(tmp_path / "job")
    NodeLog(job, "node-0").add(1, "a line")
    with pytest.raises(FileNotFoundError):
        NodeRanks(1, job, "node-0", []).make_files([])
    with pytest.raises(FileNotFoundError):
        install_hook(job.node("node-0"))
    assert not job.root.exists()
