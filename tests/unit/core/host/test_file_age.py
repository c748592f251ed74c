"""Times of files are compared with times of files: the clock of a file server is another one than that of this machine."""

from __future__ import annotations

import ast
import os
import time
from pathlib import Path

import pytest

import orchestrator
from orchestrator.core.host import file_age
from tests.support.unprivileged import unprivileged

FOLDER = Path(orchestrator.__file__).parent

READERS = {
    "agent/ranks/stack_dump.py": "whether the line of a frame is shown: a file that looks younger than its process is not",
    "backends/ssh/copy/sftp.py": "whether a file is as it was at its last look, to the second",
    "client/logs/trackers.py": "which runs of a tracker are shown",
    "client/host_listing.py": "whether a file is as it was at its last look, to the second",
    "core/host/file_age.py": "",
    "core/jobdir/requests.py": "shown, and its age is by `file_age`",
    "programs/prometheus.py": "its age is by `file_age`",
}
"""The files that read a time of a file in seconds, and why. All others read it in nanoseconds, to tell a file from itself."""


@pytest.mark.parametrize("late_s", [-3600.0, -2.0, 2.0, 3600.0])
def test_age_uses_clock_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    path = tmp_path / "plan.json"
    path.touch()
    now_s = path.stat().st_mtime
    monkeypatch.setattr(time, "time", lambda: now_s + late_s)
    assert 0 <= file_age.age_s(path) < 60
    os.utime(path, (now_s - 500, now_s - 500))
    assert 500 <= file_age.age_s(path) < 560
    assert list(tmp_path.iterdir()) == [path]


def test_age_uses_local_clock_if_unwritable(tmp_path: Path) -> None:
    """Where nothing can be written, the age is by the clock of this machine."""
    tmp_path.chmod(0o500)
    with unprivileged(tmp_path):
        assert abs(file_age.now_s(tmp_path) - time.time()) < 60


def test_no_other_code_reads_file_time_in_seconds() -> None:
    found = {
        str(path.relative_to(FOLDER))
        for path in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Attribute) and node.attr in ("st_mtime", "st_ctime", "getmtime", "getctime")
    }
    assert found == set(READERS)


def test_nanosecond_file_time_meets_no_clock() -> None:
    """A time of a file in nanoseconds is never compared with a clock."""
    for path in FOLDER.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_bytes())):
            found = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
            reads = any(node.attr in ("st_mtime_ns", "mtime_ns") for node in found)
            asks = any(isinstance(node.value, ast.Name) and node.value.id == "time" for node in found)
            is_both = isinstance(function, ast.FunctionDef) and reads and asks
            assert not is_both, f"{path}: {function.name}"  # type: ignore[attr-defined]
