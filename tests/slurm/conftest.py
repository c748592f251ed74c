"""What do the tests on a real Slurm share? One box with a Slurm over it, and a desk on its login.

Rules: after each test no job is in the queue, every node is idle, and nothing of the user runs anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import needs
from tests.support.cluster.desk import Desk
from tests.support.cluster.slurm import SlurmBox

NODES = 4


@pytest.fixture(scope="session")
def can_have_slurm() -> None:
    """Skip, with one line that says what is missing, where there can be no Slurm."""
    missing = needs.missing_slurm()
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def can_have_accounting() -> None:
    """Skip, with one line that says what is missing, where Slurm can have no accounting."""
    missing = needs.missing_slurm(accounting=True)
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def session_slurm(can_have_slurm: None) -> Iterator[SlurmBox]:
    """Give login and 4 nodes with a Slurm for all tests of the session."""
    with SlurmBox(NODES) as one:
        yield one


@pytest.fixture(scope="session")
def accounting_slurm(can_have_accounting: None) -> Iterator[SlurmBox]:
    """Give a Slurm on which sacct works, of three nodes that are not called as their hosts are; tests clear up themselves."""
    names = {f"node{number}": f"gpu-{number:02}" for number in range(1, 4)}
    with SlurmBox(3, accounting=True, names=names) as one:
        yield one


@pytest.fixture
def slurm(session_slurm: SlurmBox, request: pytest.FixtureRequest) -> Iterator[SlurmBox]:
    """Give the session's Slurm; afterwards it is as it was."""
    yield session_slurm
    if "desk" not in request.fixturenames:  # a desk has cleared it already
        session_slurm.clear()


@pytest.fixture
def desk(slurm: SlurmBox) -> Iterator[Desk]:
    """Give a desk on login whose jobs go to Slurm; afterwards nothing of them may be left."""
    yield from using(slurm)


def using(box: SlurmBox) -> Iterator[Desk]:
    """Give a desk for a fixture to yield from; afterwards nothing of its jobs may be left."""
    one = Desk(box, loads=False)
    yield one
    for job in one.jobs:
        print(job.story())  # pytest shows it when the test has failed
        print((job.folder.logs / "slurm.log").read_text() if (job.folder.logs / "slurm.log").exists() else "")
    left = one.clear_up()
    assert not left, "jobs that had ended left something behind:\n" + "\n".join(left)
