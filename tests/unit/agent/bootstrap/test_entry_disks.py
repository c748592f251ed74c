"""Does a host whose disk will not do say so, and does nothing that is damaged on the way run? Real disks, real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.backends.ssh.launch import CodeArchive, launch_agent
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.observations import Retryable
from tests.support import fake_host, jobs
from tests.support.fake_host import FakeHost

pytestmark = pytest.mark.slow

GZIP = b"\x1f\x8b"


def test_full_disk_reports_free_and_needed_bytes(host: FakeHost, code: CodeArchive, tmp_path: Path) -> None:
    """A disk without room is reported with how much is free and how much is needed."""
    with fake_host.disk(tmp_path / "small", "size=1m") as small:
        failure = fake_host.failure(host, code, fake_host.config(root=f"{small}/jobs/{jobs.ID}"))
        assert (failure.stage, failure.retryable) == ("folder", Retryable.PERMANENT)
        assert "1.0 MB free" in failure.reason and "MB needed" in failure.reason and "ssh.remote_dir" in failure.fix
        assert list(small.iterdir()) == []


def test_read_only_disk_is_reported(host: FakeHost, code: CodeArchive, tmp_path: Path) -> None:
    with fake_host.disk(tmp_path / "small", "size=40m,ro") as small:
        failure = fake_host.failure(host, code, fake_host.config(root=f"{small}/jobs/{jobs.ID}"))
        assert failure.stage == "folder" and f"{small}/jobs: read-only file system" in failure.reason


def test_disk_out_of_inodes_is_reported(host: FakeHost, code: CodeArchive, tmp_path: Path) -> None:
    with fake_host.disk(tmp_path / "small", "size=40m,nr_inodes=7") as small:
        failure = fake_host.failure(host, code, fake_host.config(root=f"{small}/jobs/{jobs.ID}"))
        assert failure.stage == "folder" and failure.retryable is Retryable.PERMANENT
        assert "no space left on device" in failure.reason or "inodes" in failure.reason


def test_disk_filling_during_copy_is_reported_without_leftovers(host: FakeHost, tmp_path: Path) -> None:
    """A disk that fills during the copy is reported, and no part of the copy stays."""
    code = fake_host.archive(tmp_path / "large.tar.gz", {"weights": bytes(6_000_000)})
    with fake_host.disk(tmp_path / "small", "size=32m") as small:
        filler = small / "filler"

        def fill(data: bytes) -> None:
            if data.startswith(GZIP) and not filler.exists():
                filler.write_bytes(bytes(30_000_000))

        host.before_send = fill
        failure = fake_host.failure(host, code, fake_host.config(root=f"{small}/jobs/{jobs.ID}"))
        assert (failure.stage, failure.retryable) == ("copy", Retryable.PERMANENT)
        assert "no space left on device" in failure.reason and "ssh.remote_dir" in failure.fix
        job = JobDir(small / "jobs" / jobs.ID)
        assert [path.name for path in job.root.iterdir() if "code" in path.name] == []
        filler.unlink()
        host.before_send = len
        assert not launch_agent(host, fake_host.launch(code, fake_host.config(root=str(job.root)))).was_up


def test_uncreatable_folder_is_reported(host: FakeHost, code: CodeArchive) -> None:
    """A place where no folder can be made is reported."""
    (host.home / ".orch").write_text("a file")
    failure = fake_host.failure(host, code)
    assert (failure.stage, failure.retryable) == ("folder", Retryable.PERMANENT)
    assert str(host.home / ".orch") in failure.reason and "ssh.remote_dir" in failure.fix


def test_unknown_user_is_reported(host: FakeHost, code: CodeArchive) -> None:
    """A user that the host does not know is reported."""
    failure = fake_host.failure(host, code, fake_host.config(root="~nobody-at-all/.orch/jobs/x"))
    assert failure.stage == "folder" and "~nobody-at-all" in failure.reason
    assert list(host.home.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")
def test_unwritable_folder_is_reported(host: FakeHost, code: CodeArchive) -> None:
    """A folder that the user may not write is reported."""
    host.env["PATH"], host.user = "/usr/bin:/bin", "nobody"
    closed = [(folder, folder.stat().st_mode) for folder in (host.home, *host.home.parents[:-2])]
    try:
        for folder, mode in closed:
            folder.chmod(mode | 0o055)
        failure = fake_host.failure(host, code)
    finally:
        for folder, mode in closed:
            folder.chmod(mode)
    assert (failure.stage, failure.retryable) == ("folder", Retryable.PERMANENT)
    assert f"{host.home}/.orch: permission denied" in failure.reason and "make it writable for" in failure.fix


# What is damaged on the way


def test_bundle_damaged_in_transit_is_not_run(host: FakeHost, code: CodeArchive) -> None:
    host.damages = fake_host.BUNDLE[:4]
    failure = fake_host.failure(host, code)
    assert (failure.stage, failure.retryable) == ("copy", Retryable.TRANSIENT) and "bundle" in failure.reason
    assert list(host.home.iterdir()) == []


def test_code_damaged_in_transit_is_not_unpacked(host: FakeHost, code: CodeArchive) -> None:
    host.damages = GZIP
    failure = fake_host.failure(host, code)
    assert failure.stage == "copy" and "code archive" in failure.reason
    assert not host.job.code.exists() and not (host.job.root / "code.tar.gz").exists()
