"""The queue of a job home: first come, first served, and dead tickets do not count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.core.jobdir.layout import JobDir
from orchestrator.supervisor.host_queue import POLL_S, HostQueue


class Waiting:
    """A job that waits for hosts, as its supervisor sees the queue; the first look draws its ticket."""

    def __init__(self, home: Path, job_id: str, hosts: str, at: float) -> None:
        self.queue = HostQueue(JobDir(home / "jobs" / job_id), hosts.split(), at)
        self.now_s = 0.0
        self.ahead()

    def ahead(self) -> tuple[str, ...]:
        """Return who is before it now."""
        self.now_s += POLL_S
        return self.queue.jobs_ahead(self.now_s)

    def die(self) -> None:
        """Let its supervisor die."""
        assert self.queue._fd is not None
        os.close(self.queue._fd)


def test_earlier_submit_comes_first_in_any_order(tmp_path: Path) -> None:
    """The earlier submit comes first, whichever ticket was drawn first."""
    late, early = Waiting(tmp_path, "late", "a b", 20.0), Waiting(tmp_path, "early", "b c", 10.0)
    assert (late.ahead(), early.ahead()) == (("early",), ())
    assert Waiting(tmp_path, "last", "a c", 30.0).ahead() == ("early", "late")


def test_jobs_for_other_hosts_do_not_wait(tmp_path: Path) -> None:
    Waiting(tmp_path, "one", "a b", 1.0)
    assert Waiting(tmp_path, "two", "c d", 2.0).ahead() == ()


def test_given_up_ticket_frees_the_next(tmp_path: Path) -> None:
    """A ticket that is given up lets the next one continue."""
    first, second = Waiting(tmp_path, "first", "a", 1.0), Waiting(tmp_path, "second", "a", 2.0)
    assert second.ahead() == ("first",)
    first.queue.leave()
    first.queue.leave()
    assert second.ahead() == ()
    assert len(list((tmp_path / "queue").iterdir())) == 1


def test_dead_supervisor_is_skipped_and_regains_place(tmp_path: Path) -> None:
    """A dead supervisor is not waited for and gets its place back with other hosts."""
    first, second = Waiting(tmp_path, "first", "a b c", 1.0), Waiting(tmp_path, "second", "a", 2.0)
    third = Waiting(tmp_path, "third", "b", 3.0)
    first.die()
    assert (second.ahead(), third.ahead()) == ((), ())
    again = Waiting(tmp_path, "first", "a", 1.0)
    assert (second.ahead(), third.ahead(), again.ahead()) == (("first",), (), ())


def test_queue_is_read_once_a_second(tmp_path: Path) -> None:
    second = Waiting(tmp_path, "second", "a", 2.0)
    Waiting(tmp_path, "first", "a", 1.0)
    assert second.queue.jobs_ahead(second.now_s + POLL_S / 2) == ()
    assert second.queue.jobs_ahead(second.now_s + POLL_S) == ("first",)


def test_unwritable_queue_blocks_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A queue that cannot be kept blocks no job."""
    (tmp_path / "queue").touch()
    assert Waiting(tmp_path, "one", "a", 1.0).ahead() == ()
    assert "cannot queue for hosts: " in capsys.readouterr().out


def test_other_file_is_left_alone(tmp_path: Path) -> None:
    one = Waiting(tmp_path, "one", "a", 1.0)
    (tmp_path / "queue" / "notes.txt").write_text("a")
    assert one.ahead() == ()
    assert len(list((tmp_path / "queue").iterdir())) == 2
