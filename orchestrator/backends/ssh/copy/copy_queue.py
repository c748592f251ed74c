"""Which copies are under way, and what came of them? A few at once, in threads; each again when its line was broken.

Rules: one copy at a time for each host and direction; the newest first, since older checkpoints are soon deleted on
their hosts; with a limit of speed, one at a time, so that the limit is that of all together. What came home is read
again and compared with what the host said of it, and is on the disk before it is told. What broke is begun again for
as long as it is wanted; what cannot be copied is told in words for a person.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.backends.api import Copied, Copy, Direction, LaunchError, Wake
from orchestrator.backends.ssh.connect.connection import Connection
from orchestrator.backends.ssh.copy import rsync, sftp
from orchestrator.backends.ssh.copy.copy_task import Broken, CopyTask, Failed, GivenUp, Unfit, fits, mark
from orchestrator.core.jobdir.durable import sync_folder
from orchestrator.core.observations import Retryable
from orchestrator.core.wire.messages import ManifestEntry

COPIES_MAX = 4
"""How many copies move bytes at once; a handful fills a line, and encryption costs this machine's processors."""

THREADS_MAX = 16
"""How many copies may be looked after at once, those included that wait for a connection."""

RETRY_S = 1.0
RETRY_S_MAX = 30.0
"""Between tries: doubling from the one to the other."""

TRIES_MAX = 8
"""So many tries in a row that broke without a byte more are enough, when the host can be reached."""

LINE_S_MAX = 3600.0
"""So long a host may be out of reach until its copies are given up."""

CLOSE_S_MAX = 5.0
READ_BYTES = 1 << 20
SPARE_BYTES = 16 << 20
"""What a copy leaves free of this machine's disk."""


@dataclass(slots=True, eq=False)
class _Job:
    """A copy that is wanted, and how it has gone so far."""

    load: CopyTask
    due_s: float
    tries: int = 0
    best_bytes: int = 0
    unreached_s: float | None = None  # since when there is no connection
    began: bool = False
    reread: list[str] = field(default_factory=list)  # what came damaged once already

    @property
    def lane(self) -> tuple[str, Direction]:
        return self.load.copy.node, self.load.copy.direction


class CopyQueue:
    """Copies bulk between hosts and this machine; a `BulkCopier`."""

    def __init__(
        self,
        connection_of: Callable[[str], Connection | None],
        has_rsync: Callable[[str], bool],
        wake: Wake,
        copy_mb_s: float | None,
    ) -> None:
        """`connection_of` may open a connection, and wait for it; `has_rsync` tells of hosts; `wake` is called from
        threads when a copy has ended; `copy_mb_s` is the limit of all copies together, in 10^6 bytes a second."""
        self._connection_of = connection_of
        self._has_rsync = has_rsync
        self._wake = wake
        self._bytes_per_s = None if copy_mb_s is None else copy_mb_s * 1e6
        self._moving = threading.BoundedSemaphore(COPIES_MAX if copy_mb_s is None else 1)
        self._news = threading.Condition()
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._ended: list[Copied] = []
        self._threads: list[threading.Thread] = []
        self._unfit: dict[str, str] = {}  # hosts with which rsync does not work, and why
        self._closing = False

    # For the supervisor: nothing here waits

    def copy(self, copy: Copy) -> None:
        """Begin a copy."""
        with self._news:
            assert not self._closing
            self._waiting.append(_Job(CopyTask(copy, self._bytes_per_s), time.monotonic()))
            if len(self._threads) < min(THREADS_MAX, len(self._waiting) + len(self._running)):
                thread = threading.Thread(target=self._work, name="copying", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._news.notify_all()

    def drop(self, key: str) -> None:
        """Give up a copy; one that is over, or was never begun, is no matter."""
        with self._news:
            for job in [*self._waiting, *self._running]:
                if job.load.copy.key == key:
                    job.load.give_up()
            self._waiting = [job for job in self._waiting if not job.load.is_given_up]
            self._ended = [done for done in self._ended if done.copy.key != key]

    def copied(self) -> list[Copied]:
        """Return the copies that ended since the last call."""
        with self._news:
            ended, self._ended = self._ended, []
            return ended

    def progress(self) -> dict[str, int]:
        """Return how many bytes of each copy under way have been copied."""
        with self._news:
            return {job.load.copy.key: job.load.done_bytes for job in self._running}

    def busy(self, node: str) -> bool:
        """Tell whether anything is, or will be, copied from or to a host."""
        with self._news:
            return any(job.load.copy.node == node for job in [*self._waiting, *self._running])

    def close(self) -> None:
        """Give up all copies, and wait until nothing of them is left."""
        with self._news:
            self._closing = True
            self._waiting.clear()
            for job in self._running:
                job.load.give_up()
            self._news.notify_all()
        deadline_s = time.monotonic() + CLOSE_S_MAX
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    # In the threads

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                error = self._try(job)
            except GivenUp:
                error = None
            except Exception as err:  # a fault of ours must not leave the supervisor waiting for this copy
                error = f"{type(err).__name__}: {err}"
            with self._news:
                self._running.remove(job)
                if error is not None and not job.load.is_given_up and not self._closing:
                    self._ended.append(Copied(job.load.copy, error))
                self._news.notify_all()
            if error is not None:
                self._wake()

    def _next(self) -> _Job | None:
        """Wait for the newest copy that may be tried now; None at the end."""
        with self._news:
            while not self._closing:
                now_s = time.monotonic()
                lanes = [job.lane for job in self._running]
                free = [job for job in self._waiting if job.lane not in lanes]
                ready = [job for job in free if job.due_s <= now_s]
                if ready:
                    self._waiting.remove(ready[-1])
                    self._running.append(ready[-1])
                    return ready[-1]
                wait_s = min((job.due_s - now_s for job in free), default=None)
                self._news.wait(wait_s)
            return None

    def _try(self, job: _Job) -> str | None:
        """Try a copy once; return how it ended, None when it is to be tried again. Raises GivenUp."""
        try:
            connection = self._connection(job)
            if connection is None:
                return self._out_of_reach(job)
            with self._moving:
                job.load.check()
                self._copy(job, connection)
        except (Broken, LaunchError) as err:
            if not isinstance(err, LaunchError):
                return self._again(job, str(err))
            if err.trouble is not Retryable.PERMANENT:
                return self._again(job, err.reason)
            return f"{err.reason}; fix: {err.fix}" if err.fix else err.reason
        except Failed as err:
            return str(err)
        return ""

    def _connection(self, job: _Job) -> Connection | None:
        """Return the way to the host of a copy, None while there is none. Raises LaunchError if there never will be."""
        try:
            connection = self._connection_of(job.load.copy.node)
        except LaunchError as err:
            if err.trouble is Retryable.PERMANENT:
                raise
            return None
        if connection is None or not connection.is_open:
            return None
        job.unreached_s = None
        return connection

    def _out_of_reach(self, job: _Job) -> str | None:
        now_s = time.monotonic()
        job.unreached_s = now_s if job.unreached_s is None else job.unreached_s
        if now_s - job.unreached_s > LINE_S_MAX:
            return f"{job.load.copy.node} was out of reach for {LINE_S_MAX / 60:.0f} min"
        self._put_back(job)
        return None

    def _again(self, job: _Job, why: str) -> str | None:
        if job.load.done_bytes > job.best_bytes:
            job.tries = 0
        job.best_bytes = max(job.best_bytes, job.load.done_bytes)
        job.tries += 1
        if job.tries >= TRIES_MAX:
            return f"given up after {TRIES_MAX} tries: {why}"
        self._put_back(job)
        return None

    def _put_back(self, job: _Job) -> None:
        with self._news:
            if not self._closing and not job.load.is_given_up:
                pause_s = min(RETRY_S_MAX, RETRY_S * 2 ** max(0, job.tries - 1))
                job.due_s = time.monotonic() + pause_s
                self._waiting.insert(0, job)

    def _copy(self, job: _Job, connection: Connection) -> None:
        """Copy, and see that what came is what was wanted."""
        load, copy = job.load, job.load.copy
        if copy.direction is Direction.FETCH:
            _make_room(copy)
        self._move(job, connection)
        if copy.direction is Direction.SEND:
            return
        for piece in copy.wanted:
            if not _take_in(load, piece):
                if piece.name in job.reread:
                    raise Failed(f"{piece.name} came damaged from {copy.node} twice")
                job.reread.append(piece.name)
                (copy.here / piece.name).unlink()
                raise Broken(f"{piece.name} was damaged on its way")
        for folder in dict.fromkeys((copy.here / name).parent for name in copy.names):
            sync_folder(folder)

    def _move(self, job: _Job, connection: Connection) -> None:
        """Move the bytes in the best way that there is."""
        node, host = job.load.copy.node, connection.target.host
        again, job.began = job.began, True
        ssh = connection.openssh() if self._may_rsync(node) else None
        if ssh is not None:
            try:
                rsync.copy(job.load, ssh, host, again)
                return
            except Unfit as err:
                why = str(err)
        sftp.copy(job.load, connection)
        if ssh is not None:  # it is rsync's fault, not the line's
            self._unfit[node] = why

    def _may_rsync(self, node: str) -> bool:
        return node not in self._unfit and shutil.which("rsync") is not None and self._has_rsync(node)


def _make_room(copy: Copy) -> None:
    """Make the folder that files come to, and see that they have room there."""
    try:
        copy.here.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(copy.here).free
    except OSError as err:
        raise Failed(f"{copy.here} on this machine: {err.strerror}") from err
    missing = [piece for piece in copy.wanted if not fits(copy.here / piece.name, piece)]
    needed_bytes = sum(piece.size_bytes for piece in missing) + SPARE_BYTES
    if missing and needed_bytes > free_bytes:
        there = f"{needed_bytes / 1e6:.0f} MB are needed, {free_bytes / 1e6:.0f} MB are free"
        raise Failed(f"no space is left for it in {copy.here} on this machine: {there}")


def _take_in(load: CopyTask, piece: ManifestEntry) -> bool:
    """Make a file that came sure, and tell whether it is what was wanted. Raises Failed when it is another one."""
    path = load.copy.here / piece.name
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                load.check()
                digest.update(block)
            os.fsync(file.fileno())
            seen = os.fstat(file.fileno())
        if digest.hexdigest() == piece.sha256:
            mark(path, piece)
            return True
    except FileNotFoundError as err:
        raise Failed(f"{piece.name} is no file any more on {load.copy.node}") from err
    except OSError as err:
        raise Failed(f"{path} on this machine: {err.strerror}") from err
    if seen.st_size != piece.size_bytes or _is_later(seen.st_mtime_ns, piece.mtime_ns):
        raise Failed(f"{piece.name} was written again on {load.copy.node} before it was copied")
    return False


def _is_later(mtime_ns: int, than_ns: int) -> bool:
    """Tell whether two times differ, where the first may have lost all below a second on its way."""
    return mtime_ns != than_ns and mtime_ns != than_ns // 10**9 * 10**9
