"""What unit tests share: a host at hand, and code to bring there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from orchestrator.backends.ssh.launch import Code
from tests.unit import disks, hosts
from tests.unit.hosts import Host
from tests.unit.queue_world import FakeSlurm, installed

settings.register_profile(
    "orch", deadline=None
)  # of an example: a machine that is busy for 0.2 s is no finding
settings.load_profile("orch")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> disks.Disk:
    """A disk below this process that can be full."""
    return disks.install(monkeypatch)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host of the test's own; nothing that was started on it stays."""
    with hosts.host(tmp_path / "there") as here:
        yield here


@pytest.fixture
def code(tmp_path: Path) -> Code:
    """The archive of `hosts.FILES`."""
    return hosts.archive(tmp_path / "code.tar.gz", hosts.FILES)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Return the Slurm of this machine, of which this process knows nothing yet."""
    return installed(tmp_path, monkeypatch)
