"""Does a full disk cost nothing but time, and is everything else still an error?"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.core.jobdir import full_disk
from tests.support.fake_disk import FakeDisk

PRINTS = """
import os, sys
from orchestrator.core.jobdir import full_disk

full_disk.buffer_output()
print("said", 1)
print("and to whom it may concern", file=sys.stderr)
if os.fork() == 0:
    raise SystemExit(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
full = os.dup(1)
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o644), 1)
print("said", 2)
"""


@pytest.mark.slow
def test_output_refused_by_full_disk_is_printed_later(
    tmp_path: Path,
) -> None:
    """Output that a full disk refuses is printed before the next line, and the exit code is 0."""
    log = tmp_path / "log"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS, str(log)],
            stdout=full, stderr=full, timeout=30, cwd=Path(full_disk.__file__).parents[3],
        )  # fmt: skip
    assert done.returncode == 0
    assert log.read_text() == "said 1\nsaid 2\n"


def test_torn_line_is_completed_and_buffer_is_limited(disk: FakeDisk, tmp_path: Path) -> None:
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    log = full_disk.BufferedLog(fd)
    disk.room_bytes = 4
    assert log.write(b"one line\n") == 9
    assert path.read_bytes() == b"one "
    log.write(b"x" * full_disk.KEPT_BYTES_MAX)
    log.write(b"two\n")
    disk.room_bytes = None
    log.flush()
    os.close(fd)
    assert path.read_bytes() == b"one line\ntwo\n"


def test_error_unrelated_to_space_is_raised() -> None:
    """An error that more space would not fix is raised."""
    reading, writing = os.pipe()
    os.close(reading)
    log = full_disk.BufferedLog(writing)
    with pytest.raises(BrokenPipeError):
        log.write(b"word\n")
    log.flush()
    os.close(writing)


def test_action_is_retried_until_space_and_noted_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An action is retried until there is space, which is reported once; other errors are raised."""
    monkeypatch.setattr(full_disk, "RETRY_S", 0.0)
    refusals = [errno.ENOSPC, errno.EDQUOT]

    def deed() -> str:
        if refusals:
            raise OSError(refusals.pop(), "no room")
        return "done"

    assert full_disk.retry_while_full(deed) == full_disk.retry_while_full(deed) == "done"
    said = capsys.readouterr().err
    assert said.count("the disk is full") == said.count("the disk has free space again") == 1
    refusals.append(errno.EACCES)
    with pytest.raises(OSError, match="no room"):
        full_disk.retry_while_full(deed)


@pytest.mark.parametrize(
    ("free", "inodes", "full"), [(1000, 9, False), (1, 9, True), (1000, 0, True), (None, 0, False)]
)
def test_disk_without_bytes_or_inodes_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int | None, inodes: int, full: bool
) -> None:
    if free is None:
        assert not full_disk.is_disk_full(tmp_path / "nowhere")
        return
    told = (4096, 4096, 5000, free, free, 100, inodes, inodes, 0, 255)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(told))
    assert full_disk.is_disk_full(tmp_path) is full


def test_work_without_descriptor_waits_and_is_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    patience = full_disk.DeferExhaustion()
    for number in (errno.EMFILE, errno.ENFILE):
        with patience:
            raise OSError(number, os.strerror(number))
    assert (
        capsys.readouterr().out
        == f"some work waits until it can be tried again, see `ulimit -n`: {os.strerror(errno.EMFILE)}\n"
    )
    with patience:
        pass
    with pytest.raises(OSError, match="Input/output"), patience:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.slow
def test_unencodable_text_is_printed_escaped(tmp_path: Path) -> None:
    """Text that no encoding has is still printed."""
    program = "from orchestrator.core.jobdir import full_disk; full_disk.buffer_output(); print('a\\ud800b')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=60.0)
    assert (done.returncode, done.stdout) == (0, b"a\\ud800b\n"), done.stderr
