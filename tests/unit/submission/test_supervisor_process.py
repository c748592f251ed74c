"""Is a job of a machine that is gone taken over only when nothing in its folder says that it lives?"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from orchestrator.core.jobdir.layout import JobDir
from orchestrator.submission import supervisor_process
from tests.support import folders, jobs

pytestmark = pytest.mark.usefixtures("_short_watch")

LONG_S = supervisor_process.LEFT_S_MIN + 1


def _job(tmp_path: Path, host: str = "elsewhere") -> JobDir:
    job = folders.make(tmp_path, [*jobs.submitted(), *jobs.running(1, 1.0, 7)])
    job.lock.write_text(f"17 {host}\n")
    (job.root / "nodes" / "node-0").mkdir(parents=True)
    (job.root / "nodes" / "node-0" / "agent.lock").touch()
    return job


@pytest.fixture
def _short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_process, "WATCH_S", 0.3)
    monkeypatch.setattr(supervisor_process, "WATCH_POLL_S", 0.02)


def test_a_status_that_changes_is_a_living_job_whatever_its_clock_says(tmp_path: Path) -> None:
    job = _job(tmp_path)
    written = threading.Timer(0.1, job.state.write_text, ["{}"])
    written.start()
    assert supervisor_process.left_behind_by(job, LONG_S) == ""
    written.join()


def test_a_silent_job_without_a_held_lock_was_left_behind_by_its_machine(tmp_path: Path) -> None:
    assert supervisor_process.left_behind_by(_job(tmp_path), LONG_S) == "elsewhere"


def test_a_job_that_was_heard_of_lately_is_left_alone(tmp_path: Path) -> None:
    assert supervisor_process.left_behind_by(_job(tmp_path), supervisor_process.LEFT_S_MIN - 1) == ""


def test_a_job_of_this_machine_is_revived_and_not_taken_over(tmp_path: Path) -> None:
    assert supervisor_process.left_behind_by(_job(tmp_path, os.uname().nodename), LONG_S) == ""


def test_a_held_lock_of_the_supervisor_or_an_agent_is_a_living_job(tmp_path: Path) -> None:
    job = _job(tmp_path)
    for lock in (job.lock, job.root / "nodes" / "node-0" / "agent.lock"):
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert supervisor_process.left_behind_by(job, LONG_S) == ""
    assert supervisor_process.left_behind_by(job, LONG_S)


def test_an_ended_job_needs_nothing(tmp_path: Path) -> None:
    job = _job(tmp_path)
    job.ended.touch()
    assert supervisor_process.left_behind_by(job, LONG_S) == ""
