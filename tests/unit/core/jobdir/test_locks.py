"""File locks of a job: whose they are, who holds them, and a disk that keeps none."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.agent.process import agent_monitor
from orchestrator.client.job import Job
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.submission.supervisor_process import restart_supervisor
from orchestrator.supervisor.host_queue import HostQueue
from tests.support import folders, jobs


@pytest.fixture
def _umask_of_a_careless_user() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def _queue(job: JobDir) -> None:
    HostQueue(job, ("a",), 1.0).jobs_ahead(0.0)


TAKERS: dict[str, Callable[[JobDir], object]] = {
    "supervisor.lock": lambda job: locks.hold(job.lock).__enter__(),
    "resume.lock": lambda job: locks.hold(job.resume_lock, locks.RESUME_S_MAX).__enter__(),
    "agent.lock": lambda job: agent_monitor._acquire_lock(job.root / "agent.lock"),
    "queue": _queue,
}


@pytest.mark.usefixtures("_umask_of_a_careless_user")
@pytest.mark.parametrize("name", TAKERS)
def test_lock_is_readable_and_holdable_by_owner_only(tmp_path: Path, name: str) -> None:
    """A lock can be read, and so be held, by its owner alone."""
    job = JobDir(tmp_path / "jobs" / "one")
    job.root.mkdir(parents=True)
    TAKERS[name](job)
    path = next((tmp_path / "queue").iterdir()) if name == "queue" else job.root / name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_world_readable_lock_is_closed_and_link_refused(tmp_path: Path) -> None:
    """A lock that others can read is closed to them, and a link is not a lock."""
    lock = tmp_path / "lock"
    lock.touch(0o666)
    with locks.hold(lock, 0.0):
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(lock)
    for look in (locks.open_file, locks.is_held):
        with pytest.raises(OSError) as told:
            look(tmp_path / "link")
        assert told.value.errno == errno.ELOOP


def test_holder_of_lock_is_known_until_the_next(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert (locks.is_held(lock), locks.holder_text(lock)) == (False, "")
    with locks.hold(lock, 0.0) as mine, locks.hold(lock, 0.0) as other:
        assert (mine, other, locks.is_held(lock)) == (True, False, True)
        assert locks.holder_text(lock) == f" (pid {os.getpid()} on {os.uname().nodename})"
    assert not locks.is_held(lock)
    for words in (b"", b"7", b"x host", b"\xff\xfe 1 2"):
        lock.write_bytes(words)
        assert locks.read_holder(lock) is None


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_disk_without_locks_gives_no_answer(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk without locks answers no question about them."""
    job = folders.make(tmp_path, [*jobs.submitted(), *jobs.running(1, 1.0, 7)])
    job.lock.touch()

    def refuse(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    askers: dict[str, Callable[[], object]] = {
        "held": lambda: locks.is_held(job.lock),
        "supervisor": lambda: locks.hold(job.lock).__enter__(),
        "agent": lambda: agent_monitor._acquire_lock(job.lock),
        "revival": lambda: restart_supervisor(job),
        "resume": lambda: Job(job).resume(),
    }
    told = {}
    for name, ask in askers.items():
        with pytest.raises(Exception, match="this file system does not support file locks") as caught:
            ask()
        told[name] = str(caught.value)
    assert all(str(job.root) in text for text in told.values()), told
    assert HostQueue(job, ("a",), 1.0).jobs_ahead(0.0) == ()
    assert "cannot queue for hosts: " in capsys.readouterr().out
