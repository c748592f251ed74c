"""What unit tests share: a host at hand, and code to bring there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.ssh.launch import CodeArchive
from orchestrator.client import job_source
from tests.support import fake_disk, fake_host
from tests.support.fake_host import FakeHost
from tests.support.fake_slurm import FakeSlurm, installed


@pytest.fixture(autouse=True)
def nobody_writes_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch no status that looks late: no supervisor lives here that would write it again."""
    monkeypatch.setattr(job_source, "REWRITE_S_MAX", 0.0)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> fake_disk.FakeDisk:
    """A disk below this process that can be full."""
    return fake_disk.install(monkeypatch)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    """A host of the test's own; nothing that was started on it stays."""
    with fake_host.host(tmp_path / "there") as here:
        yield here


@pytest.fixture
def code(tmp_path: Path) -> CodeArchive:
    """The archive of `fake_host.FILES`."""
    return fake_host.archive(tmp_path / "code.tar.gz", fake_host.FILES)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Return the Slurm of this machine, of which this process knows nothing yet."""
    return installed(tmp_path, monkeypatch)
