"""What the tests of whole jobs and ranks on this machine share: a desk, and a process of which ranks of torch are forked."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked import Forge, forge
from tests.support.local import Desk, desk_at, wait_until


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Give a desk with a home of its own; afterwards nothing of its jobs may be left."""
    with desk_at(tmp_path, "a home") as one:
        yield one


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """Give a folder in memory; in the end nothing of a job may be left in it."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="orch-test-memory-"))
    try:
        yield folder
        wait_until(lambda: not list(folder.iterdir()), "the end of what is in memory")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def torch_forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Give what forks ranks of torch: it has imported all that their scripts take seconds to import."""
    more = ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "accelerate")
    with forge(tmp_path_factory.mktemp("forge"), *more) as one:
        yield one
