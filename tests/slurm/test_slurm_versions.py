"""All tests on Slurm hold on newer ones: those of other suites of Debian, each on a machine of its own with that suite's root."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import machine, needs

pytestmark = pytest.mark.soak  # twenty minutes each

SUITES = ("trixie", "sid")
"""Of Slurm 24.11 and, in November 2026, 26.05."""

ROOT_S_MAX, TESTS_S_MAX = 1200.0, 2 * 3600.0


@pytest.fixture(params=SUITES)
def root(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Give the root folder of a suite; skip, with one line that says what is missing, where there can be none."""
    missing = needs.missing() or machine.missing()
    if missing:
        pytest.skip(missing)
    with tempfile.TemporaryDirectory(prefix="orch-root-", dir="/var/tmp") as folder:
        failed = machine.make_root(request.param, Path(folder), ROOT_S_MAX)
        if failed:
            pytest.skip(failed)
        yield Path(folder)


def test_all_tests_pass_on_another_slurm(root: Path) -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak and not quiet", "tests/slurm")
    done = machine.run(root, (sys.executable, *words), TESTS_S_MAX)
    print(done.stdout[-20_000:])
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout[-2000:]
