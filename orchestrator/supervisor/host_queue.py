"""Host queue of a job home: jobs that want the same hosts are served in the order of their submits.

Rules: leases keep jobs apart, but do not order them: without a queue a job of many hosts would wait for as long as
smaller jobs keep coming. A ticket is a file `queue/<time of submit>-<job id>` in the job home, which names the hosts.
The job's supervisor holds a lock on it until the job has its hosts. An unlocked ticket is that of a dead supervisor,
and is ignored; so is another user's, whose lock cannot be seen.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.layout import JobDir

TICKETS_MAX = 10_000
"""The most tickets of a queue that are read."""

TICKET_BYTES_MAX = 4096 * 256

TICKET_LOCK_S_MAX = 1.0
"""How long to wait for the job's own ticket: other processes hold it for an instant, to check whether it is held."""

POLL_S = 1.0
"""How often a waiting job checks which jobs are ahead of it."""


class HostQueue:
    """The queue as the supervisor of one job sees it; the first check draws its ticket."""

    def __init__(self, job: JobDir, hosts: Iterable[str], created_at: float) -> None:
        self._path = job.root.parent.parent / "queue" / f"{int(created_at * 1e9):020d}-{job.id}"
        self._hosts = frozenset(hosts)
        self._fd: int | None = None
        self._ahead: tuple[str, ...] = ()
        self._due_s = float("-inf")

    def poll(self, facts: Facts, now_s: float) -> list[e.QueueSeen]:
        """Return the change of the jobs that come first, while the job has no hosts."""
        if facts.pool is None or facts.run_began_at is not None:
            self.leave()
            return []
        ahead = self.jobs_ahead(now_s)
        return [e.QueueSeen(now_s, ahead)] if ahead != facts.jobs_ahead else []

    def jobs_ahead(self, now_s: float) -> tuple[str, ...]:
        """Return the jobs, earliest first, that came before and still wait for one of these hosts, as of at most
        `POLL_S` ago. A queue that cannot be read or written delays no job."""
        if now_s >= self._due_s:
            self._due_s = now_s + POLL_S
            try:
                self._fd = self._lock() if self._fd is None else self._fd
                self._ahead = tuple(self._find_earlier_jobs())
            except OSError as err:
                print(f"cannot queue for hosts: {err}", flush=True)
        return self._ahead

    def leave(self) -> None:
        """Leave the queue: the job has its hosts, or no longer needs any."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = None

    def _lock(self) -> int:
        """Draw the job's ticket, or take its old one again."""
        self._path.parent.mkdir(mode=0o755, exist_ok=True)
        fd = locks.open_file(self._path)
        try:
            if not locks.acquire(fd, TICKET_LOCK_S_MAX):
                raise BlockingIOError(errno.EAGAIN, "another process holds the job's ticket", str(self._path))
            os.ftruncate(fd, 0)
            os.write(fd, "\n".join(sorted(self._hosts)).encode())
        except OSError:
            os.close(fd)
            raise
        return fd

    def _find_earlier_jobs(self) -> list[str]:
        paths = sorted(path for path in self._path.parent.iterdir() if path.name[:20].isdigit())[:TICKETS_MAX]
        earlier = [path for path in paths if path.name < self._path.name]
        return [path.name.partition("-")[2] for path in earlier if self._hosts & _read_ticket(path)]


def _read_ticket(path: Path) -> frozenset[str]:
    """Return the hosts that a ticket names; none when it has been given up, or its supervisor is dead."""
    try:
        if not locks.is_held(path):
            return frozenset()
        with path.open("rb") as file:
            return frozenset(file.read(TICKET_BYTES_MAX).decode(errors="replace").split("\n"))
    except (FileNotFoundError, PermissionError):
        return frozenset()  # given up in the meantime; or another user's
