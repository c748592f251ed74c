"""Checkpoint scanner of an agent: finds checkpoints, reports them, and hashes them when it is idle.

It scans `checkpoint.path`, the ranks' working folder, and other folders in which a rank's hook has seen writes. Scans and the
reading of formats run in a thread, so neither heartbeats nor orders wait for a slow disk or 100,000 files. Slow scans are
rarer. Of the agents that share a disk only one scans: the one that holds the lock. Its state is in the lock's file, so that
the next agent can report what the last one has not finished. Checkpoints in memory are scanned by each agent in its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from orchestrator.agent.outputs import checkpoint_folders
from orchestrator.agent.outputs.checkpoint_folders import CheckpointFolders
from orchestrator.agent.outputs.checkpoint_watch import CheckpointWatch, GroupChange, ScanContext
from orchestrator.agent.outputs.rank_files import RankFiles
from orchestrator.agent.ranks import step_counter
from orchestrator.agent.ranks.processes import NodeRanks
from orchestrator.core import codec
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointFile, HostPart
from orchestrator.core.errors import Cancelled
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import locks, ownership
from orchestrator.core.jobdir.durable import LINE_BYTES_MAX
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import reports
from orchestrator.core.wire.agent_config import AgentConfig

if TYPE_CHECKING:
    from orchestrator.agent.outputs.checkpoint_memory import CheckpointMemory

SCAN_S = 1.0
SCAN_SHARE_MAX = 0.05
"""How often the folders are scanned, and which share of its time a node spends on scans at most."""

LAST_SCAN_S_MAX = 600.0
"""How long the end of an attempt waits for the last scan."""

HASH_BYTES_PER_S = 200e6
"""How fast checkpoints are hashed during the training."""

SHA256_BYTES = 100
"""How much longer a message about a checkpoint becomes with the sha256 of a file."""

READS_REPORTED_MAX = 100
"""How many of the checkpoints that ranks had read are reported, the last ones."""

LOCK_FILE = "checkpoints.lock"


_WatchChange: TypeAlias = tuple[CheckpointWatch, GroupChange]
_Hashed: TypeAlias = tuple[CheckpointFile, ...] | None
T = TypeVar("T")


class Hasher:
    """Thread of the lowest priority that hashes files, one after the other."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "hash", procfs.lower_thread_priority)
        self._ahead_s = 0.0
        self.is_unthrottled = False

    def run(self, read: Callable[[disk.Pace], T]) -> concurrent.futures.Future[T]:
        """Begin `read`, which is called with what paces it."""
        return self._thread.submit(read, self._pace)

    def close(self) -> None:
        """Cancel all hashing."""
        self._cancelled.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _pace(self, size_bytes: int) -> None:
        now_s = time.monotonic()
        self._ahead_s = max(self._ahead_s, now_s) + size_bytes / HASH_BYTES_PER_S
        if self._cancelled.wait(0.0 if self.is_unthrottled else self._ahead_s - now_s):
            raise Cancelled


class CheckpointScanner:
    """Scanner for the checkpoints of the attempt that runs here."""

    def __init__(
        self,
        config: AgentConfig,
        hasher: Hasher,
        report: Callable[[reports.ReliableReport], None],
        note: Callable[[str], None],
        wake: asyncio.Event,
        memory: CheckpointMemory | None = None,
    ) -> None:
        """`wake` is set when a thread has found or hashed something."""
        self._memory = memory
        self._job = JobDir.at(config.root)
        self._node = config.node
        self._report = report
        self._note = note
        self._wake = wake
        self._hasher = hasher
        self._folders = CheckpointFolders(self._job, config.checkpoint_glob, ships=config.ships)
        self._rank_files = RankFiles(self._folders.resolve_link)
        self._has_reported_reads = False
        # Hosts that share nothing but an absolute path: there the host of rank 0 scans.
        self._is_absolute_path = config.ships and Path(config.checkpoint_glob).is_absolute()
        self._may_scan = self._scans = self._scans_disk = config.finds_checkpoints or config.ships
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "looks")
        if memory is not None:
            memory.between_scans = lambda work: self._thread.submit(work).result()
        self._begin_future: concurrent.futures.Future[None] | None = None
        self._scan_future: concurrent.futures.Future[list[_WatchChange]] | None = None
        self._is_last = False
        self._began_s = self._due_s = 0.0
        self._finish_by_s: float | None = None
        self._lock_fd: int | None = None
        self._hash_futures: list[tuple[reports.CheckpointSeen, concurrent.futures.Future[_Hashed]]] = []
        self._noted_fault = ""
        self._dump_future: concurrent.futures.Future[None] | None = None
        self.scans_done = 0

    @property
    def is_unfinished(self) -> bool:
        """Whether something that may be a checkpoint has changed and is not reported."""
        return self._scan_future is not None or any(watch.is_unfinished for watch in self._folders.watches)

    @property
    def scan_count(self) -> int:
        """How many scans have ended in this attempt; -1 where another agent scans."""
        return self.scans_done if self._lock_fd is not None else -1

    async def recover(self) -> None:
        """Report what an earlier agent, which has died, had not reported: it is complete by now."""
        if not self._may_scan or not self._acquire():
            return
        scanning = asyncio.wrap_future(self._thread.submit(self._find_unreported))
        with contextlib.suppress(asyncio.TimeoutError):
            for watch, change in await asyncio.wait_for(scanning, LAST_SCAN_S_MAX):
                self._report_change(watch, change)
        self._release()

    def _find_unreported(self) -> list[_WatchChange]:
        if not self._load():
            return []
        changes = list[_WatchChange]()
        for watch in self._folders.watches:
            moment = ScanContext(
                time.monotonic(),
                functools.partial(step_counter.read_last_steps, self._job, watch.attempt),
                ended=True,
            )
            changes += [(watch, change) for change in watch.scan(moment)]
        return changes

    def _load(self) -> bool:
        """Continue where the last agent of this disk stopped; return whether its state was found."""
        with contextlib.suppress(OSError, codec.CodecError, ValueError, KeyError, TypeError):
            self._folders.load(ownership.read_regular(self._lock_file))
            return True
        return False

    def begin(self, attempt: int, scans: bool = True) -> None:
        """Begin an attempt. `scans`: whether this agent scans for its checkpoints."""
        self._rank_files, self._has_reported_reads = RankFiles(self._folders.resolve_link), False
        self._scans = self._scans_disk = self._may_scan and scans
        if self._memory is not None:
            self._folders.use_memory(self._memory.folder)
            self._scans = True
        self._finish_by_s, self._is_last, self.scans_done = None, False, 0
        self._hasher.is_unthrottled = False
        if self._scans and self._acquire():
            self._begin_watch(attempt)

    def scan(self, ranks: NodeRanks, now_s: float) -> None:
        """Report what a scan has found, and begin the next when it is due."""
        self.poll()
        self._report_reads(ranks, is_over=False)
        if self._scan_future is not None:
            self._end_scan(ranks, now_s)
        elif now_s >= self._due_s and self._is_scanner(ranks):
            self._begin_scan(ranks, now_s, ended=False)

    def finish(self, ranks: NodeRanks, now_s: float) -> bool:
        """Scan a last time, after all ranks have ended; return True when everything found is reported."""
        if self._finish_by_s is None:
            self._finish_by_s = now_s + LAST_SCAN_S_MAX
            self._hasher.is_unthrottled = True
            self._report_reads(ranks, is_over=True)
        if self._scan_future is not None:
            self._end_scan(ranks, now_s)
        if self._scan_future is None and not self._is_last and self._is_scanner(ranks):
            self._begin_scan(ranks, now_s, ended=True)
        is_saving = self._dump_future is not None and not self._dump_future.done()
        if (self._scan_future is not None or not self._is_last or is_saving) and self._lock_fd is not None:
            if now_s < self._finish_by_s:
                return False
            self._note(f"the disk of the checkpoints did not answer for {LAST_SCAN_S_MAX:g} s")
        self._finish_by_s = None
        self._release()
        return True

    @property
    def is_finishing(self) -> bool:
        """Whether the attempt is over here except for its last scan."""
        return self._finish_by_s is not None

    def discard(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint that the supervisor does not keep."""
        root = Path(checkpoint.locations[0].root)
        if self._memory is not None and root.is_relative_to(self._memory.folder.parent):
            self._memory.discard(checkpoint)
        else:
            self._thread.submit(disk.delete_checkpoint, checkpoint, root)

    def memory_full_text(self) -> str:
        """Return how full the folder for checkpoints in memory is, in a phrase; empty where it has room, or there is none."""
        return self._memory.full_text() if self._memory is not None else ""

    def close(self) -> None:
        """End the threads."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._hasher.close()

    def _report_reads(self, ranks: NodeRanks, *, is_over: bool) -> None:
        """Report once which checkpoints the ranks here had read when all of them had made a step, or have ended."""
        if self._has_reported_reads or not ranks.processes:
            return
        if not is_over and not all(process.steps or process.exited for process in ranks.processes):
            return
        self._has_reported_reads = True
        self._rank_files.read_notes(process.folder for process in ranks.processes)
        names = tuple(self._folders.checkpoint_name(path) for path in self._rank_files.read)[-READS_REPORTED_MAX:]
        trainers = {last.pid for process in ranks.processes if (last := process.counter.read()).step}
        self._report(reports.CheckpointsRead(ranks.attempt, names, self._rank_files.has_reads_of(trainers)))

    def _begin_scan(self, ranks: NodeRanks, now_s: float, *, ended: bool) -> None:
        moment = ScanContext(time.monotonic(), ranks.steps, ended, ranks.all_ended_well)
        self._is_last, self._began_s = ended, now_s
        self._rank_files.read_notes(process.folder for process in ranks.processes)
        has_first = any(process.rank == 0 for process in ranks.processes)
        watches = self._folders.assign_files(self._rank_files.written, ranks.attempt, finds_more=has_first)
        if self._is_absolute_path and not has_first:
            watches = [(watch, own) for watch, own in watches if watch.prefix]
        if not self._scans_disk:
            watches = watches[:1]
        if self._memory is not None:
            self._thread.submit(self._memory.drop_links)
        self._scan_future = self._thread.submit(_scan_watches, watches, moment)
        self._wake_after(self._scan_future)

    def _end_scan(self, ranks: NodeRanks, now_s: float) -> None:
        assert self._scan_future is not None
        if not self._scan_future.done():
            return
        seen, self._scan_future = self._scan_future.result(), None
        self._due_s = now_s + max(SCAN_S, (now_s - self._began_s) / SCAN_SHARE_MAX)
        self.scans_done += 1
        for watch, change in seen:
            self._report_change(watch, change, self._stall_s(ranks, change.noted_step))
        if seen or any(watch.has_changed for watch in self._folders.watches):
            self._dump_future = self._thread.submit(self._dump_watches)
            self._wake_after(self._dump_future)
        cuts = [
            f"{watch.root}: {watch.incomplete_reason}" for watch in self._folders.watches if watch.incomplete_reason
        ]
        fault = f"not all checkpoints are seen: {'; '.join(cuts)}" if cuts else ""
        if fault and fault != self._noted_fault:
            self._note(fault)
        self._noted_fault = fault

    def _stall_s(self, ranks: NodeRanks, step: int) -> float | None:
        """Return for how long ranks here made no steps because a checkpoint was written at a step; None where no hook has seen at
        which, or where the steps around it are not known."""
        stalls = (process.counter.stall_s(step, self._rank_files.write_steps) for process in ranks.processes)
        return max((stall_s for stall_s in stalls if stall_s is not None), default=None)

    def _report_change(self, watch: CheckpointWatch, change: GroupChange, stall_s: float | None = None) -> None:
        group, root = change.group, watch.root
        part = HostPart(
            self._node,
            str(root),
            change.steps,
            change.pieces,
            change.reading,
            change.closed_by,
            change.stale,
            self._rank_files.created.issuperset(str(root / piece.name) for piece in change.pieces),
            stall_s,
        )
        key, series = f"{watch.prefix}{group.key}", f"{watch.prefix}{group.series}"
        seen = reports.CheckpointSeen(watch.attempt, key, series, group.main, part)
        if len(change.pieces) * SHA256_BYTES > LINE_BYTES_MAX or _message_bytes(seen) > LINE_BYTES_MAX:
            count = len(change.pieces)
            self._note(f"{group.main} has {count:,} files, too many to report: no restart can resume from it")
            return
        self._report(seen)
        self._hash_futures.append((seen, self._hasher.run(lambda pace: disk.hash_files(root, change.pieces, pace))))
        self._wake_after(self._hash_futures[-1][1])

    def _wake_after(self, future: concurrent.futures.Future[Any]) -> None:
        loop = asyncio.get_running_loop()

        def wake(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._wake.set)

        future.add_done_callback(wake)

    def poll(self) -> None:
        """Report what was hashed."""
        done = [pair for pair in self._hash_futures if pair[1].done()]
        if done:
            self._hash_futures = [pair for pair in self._hash_futures if not pair[1].done()]
        for seen, future in done:
            with contextlib.suppress(OSError, Cancelled, concurrent.futures.CancelledError):
                pieces = future.result()
                if pieces is not None:
                    self._report(reports.CheckpointHashed(seen.attempt, seen.key, pieces))

    def _is_scanner(self, ranks: NodeRanks) -> bool:
        if not self._scans:
            return False
        if self._lock_fd is None and self._acquire():
            self._begin_watch(ranks.attempt)
        if self._begin_future is not None and self._begin_future.done():
            self._begin_future = None
            self._dump_watches()
        return self._lock_fd is not None and self._begin_future is None

    def _begin_watch(self, attempt: int) -> None:
        """Note what exists; continue where an agent stopped whose ranks of this attempt have ended before."""

        def begin() -> None:
            if not self._load() or any(watch.attempt != attempt for watch in self._folders.watches):
                self._folders.begin(attempt)

        self._begin_future = self._thread.submit(begin)
        self._wake_after(self._begin_future)

    @property
    def _lock_file(self) -> Path:
        return (self._memory.folder.parent if self._memory is not None else self._job.root) / LOCK_FILE

    def _acquire(self) -> bool:
        if self._lock_fd is None:
            with contextlib.suppress(OSError):
                fd = locks.open_file(self._lock_file)
                if locks.acquire(fd, 0.0):
                    self._lock_fd = fd
                else:
                    os.close(fd)
        return self._lock_fd is not None

    def _dump_watches(self) -> None:
        if self._lock_fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock_fd, 0)
                os.pwrite(self._lock_fd, self._folders.dump(), 0)

    def _release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _scan_watches(watches: Iterable[checkpoint_folders.WatchedFiles], moment: ScanContext) -> list[_WatchChange]:
    return [(watch, change) for watch, written in watches for change in watch.scan(moment, written)]


def _message_bytes(seen: reports.CheckpointSeen) -> int:
    """Return how long a message about a checkpoint can become, with the names and the sha256 of its files."""
    hashed = sum(SHA256_BYTES + len(codec.dumps_plain(piece.name)) for piece in seen.part.files)
    return len(codec.dumps_kind(seen)) + hashed
