"""What the tests of whole jobs on this machine share: a desk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Give a desk with a home of its own; afterwards nothing of its jobs may be left."""
    environ = {**os.environ, "ORCH_HOME": str(tmp_path / "a home")}
    one = Desk(tmp_path, environ)
    yield one
    left = one.clear_up()
    assert not left, "processes of ended jobs were left:\n" + "\n".join(left)
