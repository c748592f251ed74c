"""The guard of a supervisor: wait statuses in; restarts, pauses and an exit code out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.core.jobdir.layout import JobDir
from orchestrator.supervisor import supervisor_watchdog

KILLED, CODE_1, DONE = 9, 1 << 8, 0


class Lives:
    """Supervisors of one job that come up and end as told, each after `each_s`; and the clock."""

    def __init__(self, job: JobDir, *ends: int | Callable[[], int], each_s: float = 0.0) -> None:
        self.job, self.ends, self.each_s = job, list(ends), each_s
        self.now_s, self.starts = 100.0, 0
        self.pauses_s: list[float] = []
        self.comes_up = True

    def run(self) -> int:
        self.now_s += self.each_s
        self.starts += 1
        if self.comes_up:
            self.job.endpoint.write_text(str(self.starts))
        end = self.ends.pop(0)
        return end if isinstance(end, int) else end()

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.pauses_s.append(pause_s)

    def keep(self) -> int:
        return supervisor_watchdog.keep_running(self.job, self.run, lambda: self.now_s, self.sleep)


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    job = JobDir(tmp_path)
    job.plan.touch()
    return job


def test_dead_supervisor_is_restarted_unless_finished(job: JobDir) -> None:
    """A supervisor that dies is started again within seconds, and one that is finished is not."""
    lives = Lives(job, KILLED, CODE_1, DONE)
    assert (lives.keep(), lives.starts) == (0, 3)
    assert sum(lives.pauses_s) < 2.0


def test_supervisor_with_unusable_folder_is_not_restarted(job: JobDir) -> None:
    lives = Lives(job, KILLED, supervisor_watchdog.EXIT_UNFIT_FOLDER << 8)
    assert (lives.keep(), lives.starts) == (1, 2)


def test_repeatedly_dying_supervisor_waits_for_next_watchdog(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    """A supervisor that dies again and again is given up until another watchdog begins."""
    lives = Lives(job, *[KILLED] * supervisor_watchdog.DEATHS_MAX)
    assert (lives.keep(), lives.starts) == (1, supervisor_watchdog.DEATHS_MAX)
    assert lives.pauses_s == sorted(lives.pauses_s) and sum(lives.pauses_s) < supervisor_watchdog.DEATHS_S / 4
    why = "the supervisor was killed by signal 9, 5 deaths within 60 s: given up"
    assert capsys.readouterr().err.endswith(f" watchdog: {why}\n")
    assert supervisor_watchdog.read_given_up_reason(job) == why
    assert Lives(job, DONE).keep() == 0
    assert supervisor_watchdog.read_given_up_reason(job) == ""


def test_occasionally_dying_supervisor_is_never_given_up(job: JobDir) -> None:
    """A supervisor that dies now and then is never given up."""
    lives = Lives(job, *[KILLED] * 30, DONE, each_s=supervisor_watchdog.DEATHS_S / 3)
    assert (lives.keep(), lives.starts) == (0, 31)


def test_start_without_memory_is_retried_and_no_death(job: JobDir) -> None:
    """A supervisor that cannot be started for want of memory is retried, and this is no death."""

    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    lives = Lives(job, *[refuse] * 20, KILLED, DONE)
    assert (lives.keep(), lives.starts) == (0, 22)
    lives = Lives(job, *[refuse] * (supervisor_watchdog.START_RETRIES_MAX + 1))
    assert lives.keep() == 1


def test_first_supervisor_that_never_started_is_not_restarted(job: JobDir) -> None:
    job.endpoint.write_text("of an earlier one")
    lives = Lives(job, CODE_1)
    lives.comes_up = False
    assert (lives.keep(), lives.starts) == (1, 1)


def test_ended_or_deleted_job_gets_no_supervisor(job: JobDir) -> None:
    def after(act: Callable[[], None]) -> Lives:
        def die() -> int:
            act()
            return KILLED

        return Lives(job, die)

    assert after(job.ended.touch).keep() == 0
    job.ended.unlink()
    assert after(job.plan.unlink).keep() == 0
