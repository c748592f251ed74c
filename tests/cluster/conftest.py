"""What do the tests on the cluster in a box share? The box itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import needs
from tests.support.cluster.box import Box
from tests.support.cluster.desk import Desk

HOSTS = 8


@pytest.fixture(scope="session")
def can_have_hosts() -> None:
    """Skip, with one line that says what is missing, where hosts cannot be made."""
    missing = needs.missing()
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def session_box(can_have_hosts: None) -> Iterator[Box]:
    """Give login and 8 hosts for all tests of the session."""
    with Box(HOSTS) as one:
        yield one


@pytest.fixture
def box(session_box: Box) -> Iterator[Box]:
    """Give the session's box; afterwards every fault is undone."""
    yield session_box
    session_box.heal()


@pytest.fixture
def desk(box: Box) -> Iterator[Desk]:
    """Give a desk on login; afterwards nothing of its jobs may be left running on any host."""
    one = Desk(box, loads=False)
    yield one
    for job in one.jobs:
        print(job.story())  # pytest shows it when the test has failed
    left = one.clear_up()
    assert not left, "processes of ended jobs were left:\n" + "\n".join(left)
