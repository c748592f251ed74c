"""Is the queue first come, first served, and does nothing dead stand in its way?"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.tickets import Ticket
from orchestrator.wire.paths import JobDir


class Queue:
    """A job home in which this process holds the locks of the jobs that live."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.locks: dict[str, int] = {}

    def job(self, job_id: str) -> JobDir:
        """Return a job's folder, made."""
        job = JobDir(self.home / "jobs" / job_id)
        job.root.mkdir(parents=True, exist_ok=True)
        return job

    def enter(self, job_id: str, hosts: str, at: float) -> Ticket:
        """Start a job's supervisor, which draws a ticket for these hosts."""
        lock = os.open(self.job(job_id).lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.locks[job_id] = lock
        return Ticket.take(self.home, job_id, hosts.split(), at)

    def die(self, job_id: str) -> None:
        """Let a supervisor die."""
        os.close(self.locks.pop(job_id))


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    made = Queue(tmp_path)
    yield made
    for job_id in list(made.locks):
        made.die(job_id)


def test_the_earlier_submit_comes_first_whoever_draws_first(queue: Queue) -> None:
    late, early = queue.enter("late", "a b", 20.0), queue.enter("early", "b c", 10.0)
    assert (late.ahead(), early.ahead()) == (("early",), ())
    last = queue.enter("last", "a c", 30.0)
    assert last.ahead() == ("early", "late")


def test_jobs_that_want_other_hosts_are_in_nobodys_way(queue: Queue) -> None:
    queue.enter("one", "a b", 1.0)
    assert queue.enter("two", "c d", 2.0).ahead() == ()


def test_a_ticket_that_is_given_up_lets_the_next_one_go(queue: Queue) -> None:
    first, second = queue.enter("first", "a", 1.0), queue.enter("second", "a", 2.0)
    assert second.ahead() == ("first",)
    first.drop()
    first.drop()
    assert second.ahead() == ()


def test_a_dead_supervisor_stands_in_nobodys_way_and_gets_its_place_back(queue: Queue) -> None:
    queue.enter("first", "a", 1.0)
    second = queue.enter("second", "a", 2.0)
    queue.die("first")
    assert second.ahead() == ()
    again = queue.enter("first", "a", 1.0)
    assert (second.ahead(), again.ahead()) == (("first",), ())


@pytest.mark.parametrize("is_gone", [True, False])
def test_the_ticket_of_a_job_that_is_over_is_swept(queue: Queue, is_gone: bool) -> None:
    first = queue.enter("first", "a", 1.0)
    queue.die("first")
    job = queue.job("first")
    if is_gone:
        job.lock.unlink()
        job.root.rmdir()
    else:
        job.ended.touch()
    assert queue.enter("second", "a", 2.0).ahead() == ()
    assert not first.path.exists()


def test_a_ticket_that_somebody_took_away_is_drawn_again(queue: Queue) -> None:
    first, second = queue.enter("first", "a", 1.0), queue.enter("second", "a", 2.0)
    first.path.unlink()
    assert first.ahead() == ()
    assert second.ahead() == ("first",)


def test_a_changed_list_of_hosts_replaces_the_ticket(queue: Queue) -> None:
    queue.enter("first", "a", 1.0)
    queue.die("first")
    queue.enter("first", "b", 1.0)
    assert queue.enter("second", "a", 2.0).ahead() == ()
    assert queue.enter("third", "b", 3.0).ahead() == ("first",)


def test_what_is_no_ticket_is_left_alone(queue: Queue) -> None:
    ticket = queue.enter("one", "a", 1.0)
    (queue.home / "queue" / "notes.txt").write_text("a")
    (queue.home / "queue" / ".half-written").write_text("a")
    assert ticket.ahead() == ()
    assert len(list((queue.home / "queue").iterdir())) == 3
