"""Queue of bulk copies: a few at once, in threads; each is retried after its connection broke.

Rules: one copy at a time for each host and direction, the newest first, since older checkpoints are soon deleted on
their hosts. With a speed limit only one copy moves at a time, so that the limit holds for all together. Fetched bytes are
compared on their way: rsync compares its own check sum of each file, after which the host is asked whether the files are
still as they were; SFTP's are hashed as they come. They are synced to the disk before the copy is reported. A broken copy
is restarted while it is needed; a copy that cannot succeed is reported with the reason.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable

from orchestrator.backends.api import Copy, CopyResult, Direction, LaunchError, Wake
from orchestrator.backends.ssh.connect.connection import Connection
from orchestrator.backends.ssh.copy import rsync, sftp
from orchestrator.backends.ssh.copy.copy_task import (
    ConnectionBroken,
    CopyTask,
    RateLimit,
    UnsupportedTool,
    is_same_file,
)
from orchestrator.core.backoff import Backoff
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import CheckpointFile
from orchestrator.core.errors import Cancelled, HostError
from orchestrator.core.jobdir.durable import sync_folder
from orchestrator.core.observations import Retryable

COPIES_MAX = 4
"""How many copies move bytes at once; a handful fills a line, and encryption costs this machine's processors."""

THREADS_MAX = 16
"""How many copies may be in hand at once, including those that wait for a connection."""

RETRIES = Backoff(first_s=1.0, factor=2.0, max_s=30.0)
"""Between tries."""

TRIES_MAX = 8
"""A copy from a reachable host is given up after this many broken tries in a row without progress."""

UNREACHABLE_S_MAX = 3600.0
"""How long a host may be out of reach before its copies are given up."""

CLOSE_S_MAX = 5.0
ROUNDED_NS = 10_000_000
"""Times of one file that differ by no more were rounded by a disk; nothing is written twice so fast."""

SPARE_BYTES = 16 << 20
"""How much of this machine's disk a copy leaves free."""


class CopyQueue:
    """Copies bulk between hosts and this machine; a `BulkCopier`."""

    def __init__(
        self,
        connection_of: Callable[[str], Connection | None],
        has_rsync: Callable[[str], bool],
        wake: Wake,
        copy_mb_s: float | None,
    ) -> None:
        """`connection_of` may open a connection, and wait for it; `has_rsync` returns whether a host has rsync; `wake` is
        called from threads when a copy has ended; `copy_mb_s` limits all copies together, in 10^6 bytes a second."""
        self._connection_of = connection_of
        self._has_rsync = has_rsync
        self._wake = wake
        self._limit = RateLimit(copy_mb_s)
        self._transfer_slots = threading.BoundedSemaphore(COPIES_MAX if copy_mb_s is None else 1)
        self._changed = threading.Condition()
        self._waiting: list[CopyTask] = []
        self._running: list[CopyTask] = []
        self._results: list[CopyResult] = []
        self._threads: list[threading.Thread] = []
        self._rsync_faults: dict[str, str] = {}  # why rsync does not work with a host, by host
        self._closing = False

    # For the supervisor: nothing here waits

    def copy(self, copy: Copy) -> None:
        """Begin a copy."""
        with self._changed:
            assert not self._closing
            self._waiting.append(CopyTask(copy, self._limit))
            if len(self._threads) < min(THREADS_MAX, len(self._waiting) + len(self._running)):
                thread = threading.Thread(target=self._work, name="copying", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def drop(self, key: str) -> None:
        """Give up a copy; does nothing for one that is over or was never begun."""
        with self._changed:
            for task in [*self._waiting, *self._running]:
                if task.copy.key == key:
                    task.cancel()
            self._waiting = [task for task in self._waiting if not task.is_cancelled]
            self._results = [done for done in self._results if done.copy.key != key]

    def copied(self) -> list[CopyResult]:
        """Return the copies that ended since the last call."""
        with self._changed:
            copies, self._results = self._results, []
            return copies

    def progress(self) -> dict[str, int]:
        """Return how many bytes of each copy under way have been copied."""
        with self._changed:
            return {task.copy.key: task.done_bytes for task in self._running}

    def busy(self, node: str) -> bool:
        """Return whether anything is, or will be, copied from or to a host."""
        with self._changed:
            return any(task.copy.node == node for task in [*self._waiting, *self._running])

    def close(self) -> None:
        """Give up all copies, and wait until their threads have ended."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            for task in self._running:
                task.cancel()
            self._changed.notify_all()
        deadline_s = time.monotonic() + CLOSE_S_MAX
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    # In the threads

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                error = self._try(task)
            except Cancelled:
                error = None
            except Exception as err:  # our own fault must not leave the supervisor waiting for this copy
                error = f"{type(err).__name__}: {err}"
            with self._changed:
                self._running.remove(task)
                if error is not None and not task.is_cancelled and not self._closing:
                    self._results.append(CopyResult(task.copy, error))
                self._changed.notify_all()
            if error is not None:
                self._wake()

    def _next(self) -> CopyTask | None:
        """Wait for the newest copy that may be tried now; None at the end."""
        with self._changed:
            while not self._closing:
                now_s = time.monotonic()
                lanes = [task.lane for task in self._running]
                free = [task for task in self._waiting if task.lane not in lanes]
                ready = [task for task in free if task.due_s <= now_s]
                if ready:
                    self._waiting.remove(ready[-1])
                    self._running.append(ready[-1])
                    return ready[-1]
                wait_s = min((task.due_s - now_s for task in free), default=None)
                self._changed.wait(wait_s)
            return None

    def _try(self, task: CopyTask) -> str | None:
        """Try a copy once; return how it ended, None when it is to be tried again. Raises Cancelled."""
        try:
            connection = self._connection(task)
            if connection is None:
                return self._wait_for_host(task)
            with self._transfer_slots:
                task.raise_if_cancelled()
                self._copy(task, connection)
        except (ConnectionBroken, LaunchError) as err:
            if not isinstance(err, LaunchError):
                return self._retry_later(task, str(err))
            if err.retryable is not Retryable.PERMANENT:
                return self._retry_later(task, err.reason)
            return f"{err.reason}; fix: {err.fix}" if err.fix else err.reason
        except HostError as err:
            return str(err)
        return ""

    def _connection(self, task: CopyTask) -> Connection | None:
        """Return a connection to the host, None while there is none. Raises LaunchError if there never will be one."""
        try:
            connection = self._connection_of(task.copy.node)
        except LaunchError as err:
            if err.retryable is Retryable.PERMANENT:
                raise
            return None
        if connection is None or not connection.is_open:
            return None
        task.unreachable_since_s = None
        return connection

    def _wait_for_host(self, task: CopyTask) -> str | None:
        now_s = time.monotonic()
        task.unreachable_since_s = now_s if task.unreachable_since_s is None else task.unreachable_since_s
        if now_s - task.unreachable_since_s > UNREACHABLE_S_MAX:
            return f"{task.copy.node} was unreachable for {UNREACHABLE_S_MAX / 60:.0f} min"
        self._put_back(task)
        return None

    def _retry_later(self, task: CopyTask, why: str) -> str | None:
        if task.done_bytes > task.best_bytes:
            task.tries = 0
        task.best_bytes = max(task.best_bytes, task.done_bytes)
        task.tries += 1
        if task.tries >= TRIES_MAX:
            return f"given up after {TRIES_MAX} tries: {why}"
        self._put_back(task)
        return None

    def _put_back(self, task: CopyTask) -> None:
        with self._changed:
            if not self._closing and not task.is_cancelled:
                task.due_s = time.monotonic() + RETRIES.pause_s(max(1, task.tries))
                self._waiting.insert(0, task)

    def _copy(self, task: CopyTask, connection: Connection) -> None:
        """Copy, and verify that the fetched files are the expected ones."""
        copy = task.copy
        if copy.direction is Direction.FETCH:
            _check_space(copy)
        self._move(task, connection)
        if copy.direction is Direction.SEND:
            return
        for entry in copy.expected:
            _finish_file(task, entry)
        for folder in dict.fromkeys((copy.local_dir / name).parent for name in copy.names):
            sync_folder(folder)

    def _move(self, task: CopyTask, connection: Connection) -> None:
        """Move the bytes by rsync where that works, else by SFTP."""
        node, host = task.copy.node, connection.target.host
        can_rsync = node not in self._rsync_faults and shutil.which("rsync") is not None and self._has_rsync(node)
        ssh = connection.openssh() if can_rsync else None
        if ssh is not None:
            try:
                rsync.copy(task, ssh, host)
                if task.copy.direction is Direction.FETCH:
                    rsync.require_unchanged(task, ssh, host)
                return
            except UnsupportedTool as err:
                why = str(err)
        sftp.copy(task, connection)
        if ssh is not None:  # SFTP succeeded, so the connection is not at fault
            self._rsync_faults[node] = why


def _check_space(copy: Copy) -> None:
    """Make the local folder, and check that the files have room there. Raises HostError."""
    try:
        copy.local_dir.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(copy.local_dir).free
    except OSError as err:
        raise HostError(f"{copy.local_dir} on this machine: {err.strerror}") from err
    missing = [entry for entry in copy.expected if not is_same_file(copy.local_dir / entry.name, entry)]
    needed_bytes = sum(entry.size_bytes for entry in missing) + SPARE_BYTES
    if missing and needed_bytes > free_bytes:
        sizes = f"{needed_bytes / 1e6:.0f} MB are needed, {free_bytes / 1e6:.0f} MB are free"
        raise HostError(f"no space is left for it in {copy.local_dir} on this machine: {sizes}")


def _finish_file(task: CopyTask, entry: CheckpointFile) -> None:
    """Sync a fetched file, and give it the time that it has on its host. Raises HostError when it is not the expected one."""
    path = task.copy.local_dir / entry.name
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            about = os.fstat(file.fileno())
        if about.st_size == entry.size_bytes and not _has_other_time(about.st_mtime_ns, entry.mtime_ns):
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
            return
    except FileNotFoundError as err:
        raise HostError(f"{entry.name} is no longer a file on {task.copy.node}") from err
    except OSError as err:
        raise HostError(f"{path} on this machine: {err.strerror}") from err
    raise HostError(f"{entry.name} was written again on {task.copy.node} before it was copied")


def _has_other_time(mtime_ns: int, expected_ns: int) -> bool:
    """Return whether a file came with another time than that of its piece, as far as tools and disks keep fractions."""
    return not disk.is_same_time(mtime_ns, expected_ns) and abs(mtime_ns - expected_ns) > ROUNDED_NS
