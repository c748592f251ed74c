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


def test_one_that_dies_is_started_again_within_seconds_and_one_that_is_done_is_not(job: JobDir) -> None:
    lives = Lives(job, KILLED, CODE_1, DONE)
    assert (lives.keep(), lives.starts) == (0, 3)
    assert sum(lives.pauses_s) < 2.0


def test_one_that_finds_the_folder_unfit_is_not_followed(job: JobDir) -> None:
    lives = Lives(job, KILLED, supervisor_watchdog.EXIT_UNFIT_FOLDER << 8)
    assert (lives.keep(), lives.starts) == (1, 2)


def test_one_that_dies_again_and_again_is_given_up_until_another_guard_begins(
    job: JobDir, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = Lives(job, *[KILLED] * supervisor_watchdog.DEATHS_MAX)
    assert (lives.keep(), lives.starts) == (1, supervisor_watchdog.DEATHS_MAX)
    assert lives.pauses_s == sorted(lives.pauses_s) and sum(lives.pauses_s) < supervisor_watchdog.DEATHS_S / 4
    why = "the supervisor was killed by signal 9, 5 deaths within 60 s: given up"
    assert capsys.readouterr().err.endswith(f" watchdog: {why}\n")
    assert supervisor_watchdog.read_given_up_reason(job) == why
    assert Lives(job, DONE).keep() == 0
    assert supervisor_watchdog.read_given_up_reason(job) == ""


def test_one_that_dies_now_and_then_is_never_given_up(job: JobDir) -> None:
    lives = Lives(job, *[KILLED] * 30, DONE, each_s=supervisor_watchdog.DEATHS_S / 3)
    assert (lives.keep(), lives.starts) == (0, 31)


def test_one_that_cannot_be_started_for_want_of_memory_is_tried_again_and_is_no_death(job: JobDir) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    lives = Lives(job, *[refuse] * 20, KILLED, DONE)
    assert (lives.keep(), lives.starts) == (0, 22)
    lives = Lives(job, *[refuse] * (supervisor_watchdog.START_RETRIES_MAX + 1))
    assert lives.keep() == 1


def test_a_first_one_that_never_came_up_is_not_followed(job: JobDir) -> None:
    job.endpoint.write_text("of an earlier one")
    lives = Lives(job, CODE_1)
    lives.comes_up = False
    assert (lives.keep(), lives.starts) == (1, 1)


def test_none_is_started_for_a_job_that_has_ended_or_was_deleted(job: JobDir) -> None:
    def after(act: Callable[[], None]) -> Lives:
        def die() -> int:
            act()
            return KILLED

        return Lives(job, die)

    assert after(job.ended.touch).keep() == 0
    job.ended.unlink()
    assert after(job.plan.unlink).keep() == 0
