"""Who comes first? Jobs of one job home that want the same hosts draw tickets: first come, first served.

Rules: a ticket is a file `queue/<time of submit>-<job id>` in the job home, which names the hosts; only its job's
supervisor writes it, and takes it away when the job has its hosts. It counts while that supervisor holds its job's
lock, so one that died stands in nobody's way; drawn again, it has its old place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.wire.durable import replace_text
from orchestrator.wire.paths import JobDir

TICKETS_MAX = 10_000
"""More than this in one queue are not looked at."""

TICKET_BYTES_MAX = 4096 * 256

LOOK_S = 1.0
"""How often a job that waits looks who is before it."""


@dataclass(slots=True)
class Ticket:
    """A job's place in the queue of its job home."""

    path: Path
    job_id: str
    hosts: frozenset[str]
    _wants: dict[str, frozenset[str]] = field(default_factory=dict)
    """The hosts of the tickets that were read already; what a ticket says never changes."""

    @classmethod
    def take(cls, home: Path, job_id: str, hosts: Iterable[str], created_at: float) -> Ticket:
        """Draw a job's ticket, or find its old one. Raises OSError when the job home cannot be written to."""
        path = home / "queue" / f"{int(created_at * 1e9):020d}-{job_id}"
        ticket = cls(path, job_id, frozenset(hosts))
        path.parent.mkdir(exist_ok=True)
        ticket._write()
        return ticket

    def ahead(self) -> tuple[str, ...]:
        """Return the jobs, earliest first, that came before and still wait for one of these hosts."""
        found: list[str] = []
        names = self._names()
        for name in names:
            if name >= self.path.name:
                break
            job_id = name.partition("-")[2]
            if self.hosts & self._hosts_of(name):
                if self._is_alive(job_id):
                    found.append(job_id)
                else:
                    self._sweep(name, job_id)
        if self.path.name not in names:
            with contextlib.suppress(
                OSError
            ):  # swept by somebody who looked while no supervisor held this job
                self._write()
        return tuple(found)

    def drop(self) -> None:
        """Give the place up: the job has its hosts, or needs none any more."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _write(self) -> None:
        replace_text(self.path, "\n".join(sorted(self.hosts)), durable=False)

    def _names(self) -> list[str]:
        """Return the tickets, earliest first."""
        try:
            with os.scandir(self.path.parent) as entries:
                names = [entry.name for entry in entries if entry.name[:20].isdigit()]
        except OSError:
            return []
        return sorted(names)[:TICKETS_MAX]

    def _hosts_of(self, name: str) -> frozenset[str]:
        """Return the hosts that a ticket names; none when it has just been given up."""
        known = self._wants.get(name)
        if known is None:
            try:
                with (self.path.parent / name).open("rb") as file:
                    raw = file.read(TICKET_BYTES_MAX)
            except OSError:
                return frozenset()
            known = self._wants[name] = frozenset(raw.decode(errors="replace").split("\n"))
        return known

    def _is_alive(self, job_id: str) -> bool:
        """Tell whether a supervisor holds the job's lock. Looking holds it for an instant, which a supervisor that
        starts at that instant knows to wait for."""
        try:
            fd = os.open(self._job(job_id).lock, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # a disk without locks: then nobody can hold one
        finally:
            os.close(fd)
        return False

    def _sweep(self, name: str, job_id: str) -> None:
        """Remove the ticket of a job that is over; that of a dead supervisor stays, since it will be drawn again."""
        job = self._job(job_id)
        if job.ended.exists() or not job.root.exists():
            with contextlib.suppress(OSError):
                (self.path.parent / name).unlink()
        self._wants.pop(name, None)

    def _job(self, job_id: str) -> JobDir:
        return JobDir(self.path.parent.parent / "jobs" / job_id)


class Queue:
    """The queue as the supervisor of one job sees it: it draws its ticket when it first looks."""

    def __init__(self, job: JobDir, hosts: Iterable[str], created_at: float) -> None:
        self._job = job
        self._hosts = tuple(hosts)
        self._created_at = created_at
        self._ticket: Ticket | None = None
        self._ahead: tuple[str, ...] = ()
        self._due_s = float("-inf")

    def ahead(self, now_s: float) -> tuple[str, ...]:
        """Return the jobs that came before, as of at most `LOOK_S` ago. A queue that cannot be kept holds nobody up."""
        if now_s < self._due_s:
            return self._ahead
        self._due_s = now_s + LOOK_S
        try:
            if self._ticket is None:
                home = self._job.root.parent.parent
                self._ticket = Ticket.take(home, self._job.id, self._hosts, self._created_at)
            self._ahead = self._ticket.ahead()
        except OSError as err:
            print(f"no place in the queue: {err}", flush=True)
        return self._ahead

    def leave(self) -> None:
        """The job has its hosts, or needs none any more."""
        if self._ticket is not None:
            self._ticket.drop()
            self._ticket = None
