"""Which tests are quick? Those of `unit`, `sim` and `wiring` that bear no mark, and they are held to it.

A quick test starts no process and computes for no more than a second or two. The other directories start processes by
nature, so all of their tests are slow.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.pythons import wrong_install

QUICK_FOLDERS = ("unit", "sim", "wiring")
MARKS = ("slow", "quiet", "soak")
CPU_S_MAX = 5.0
STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
"""What Python's audit events call the ways to start a process."""

REPOSITORY = Path(__file__).parents[1]

settings.register_profile("no deadline", deadline=None)  # another process may have the processor
settings.register_profile("same each time", settings.get_profile("no deadline"), derandomize=True)
settings.load_profile("no deadline")
if "ORCH_FUZZ" not in os.environ:  # `make soak` sets it, and looks where no run has looked before
    settings.load_profile("same each time")

_BEFORE = pytest.StashKey[tuple[int, float]]()
_started: list[str] = []
os.umask(os.umask(0o022) | 0o022)  # jobs work in no folder that others can write to, and tests lay many out by hand
sys.addaudithook(lambda event, _: _started.append(event) if event in STARTS else None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of the other directories, and see that what these start is the code that they lie with."""
    slow = []
    for item in items:
        if item.path.relative_to(REPOSITORY / "tests").parts[0] not in QUICK_FOLDERS:
            item.add_marker("slow")
            slow.append(item)
        elif item.get_closest_marker("quiet"):
            raise pytest.UsageError(f"{item.nodeid}: no run looks for quiet tests in {QUICK_FOLDERS}")
    wrong = wrong_install(sys.executable, REPOSITORY) if slow else None
    if wrong:
        raise pytest.UsageError(wrong)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note what there was before a test and its fixtures."""
    item.stash[_BEFORE] = (len(_started), time.process_time())
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail an unmarked test that has started a process, or has computed for too long."""
    if any(item.get_closest_marker(mark) for mark in MARKS):
        return
    count, began_s = item.stash[_BEFORE]
    cpu_s = time.process_time() - began_s
    assert not _started[count:], f"it starts a process ({_started[count]}): mark it slow"
    assert cpu_s < CPU_S_MAX, f"it computes for {cpu_s:.1f} s: mark it slow"
