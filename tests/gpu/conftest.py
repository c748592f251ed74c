"""A desk for the jobs, and the lines that tests have to say, shown at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu import machine
from tests.support.local import Desk, desk_at

_LINES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session", autouse=True)
def device_is_there() -> None:
    if why := machine.missing():
        pytest.skip(f"needs a GPU: {why}")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with desk_at(tmp_path) as one:
        yield one


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Give what notes a line that is shown after all tests."""
    return request.config.stash.setdefault(_LINES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show what was noted."""
    if lines := config.stash.get(_LINES, []):
        terminalreporter.section("what was found")
        for line in lines:
            terminalreporter.write_line(line)
