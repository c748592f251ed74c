"""Checkpoints in a node's memory: where ranks write them, copied from there to the disk and to other nodes' memory.

Rules: a file gets its name when it is complete, here and on the disk. On the disk nothing is deleted, and a version is replaced only by
one that an order names, or that its format proves. Numbered files that are on the disk become links to it. A folder in memory is
deleted only if it is this user's and no living agent holds its lock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from orchestrator.agent.outputs import peer_files
from orchestrator.agent.outputs.memory_folders import (
    LOCK_FILE,
    RECORD_FILE,
    find_rooms,
    used_bytes,
)
from orchestrator.core import host_facts
from orchestrator.core.checkpoints import disk, file_groups, memory, tree, validation
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CopyTarget, FileLocation
from orchestrator.core.errors import Cancelled
from orchestrator.core.host import interfaces, procfs
from orchestrator.core.jobdir import locks, ownership
from orchestrator.core.jobdir.durable import make_subfolders, replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.agent_config import AgentConfig

DRAIN_S_MAX = 1800.0
"""How long the end of an agent waits until everything in memory is on the disk."""

CLOSE_S_MAX = 5.0
"""How long the copy that is under way then may take to end."""

NUMBERS_KEPT = 2
"""How many checkpoints stay in memory after they are on the disk, and how many of another node."""

PRESSURE_SHARE, FULL_SHARE = 0.1, 0.01
"""The share of the host's memory that must be left for them to stay, and that of the folder without which it is full."""

STAGING, INCOMING = "checkpoint-staging", ".coming"


class CheckpointMemory:
    """The folders of one node, and the copies from and to them. All but `open` is called in the loop's thread, and never blocks."""

    def __init__(
        self,
        config: AgentConfig,
        job: JobDir,
        report: Callable[[reports.ReliableReport], None],
        note: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called from a thread when there is something to `poll`. Raises OSError if the job's folder cannot be written."""
        self._config, self._job, self._report, self._note, self._wake = config, job, report, note, wake
        own, self._memory = job.node(config.node), memory.memory_folder(config.memory_dir, config.job, config.node)
        # For files that come to the disk; what an agent that was killed has left there is overwritten or deleted
        self._staging, self._stage = own / STAGING, job.checkpoints / INCOMING / f"memory-{config.node}"
        replace_text(own / RECORD_FILE, config.memory_dir, durable=False)
        if self._staging.exists():  # of an agent that has died: what it had not stored is for a person
            self._staging.rename(own / f"{STAGING}-{time.time_ns()}")
        self._lock_fd: int | None = None
        # Why the memory is not used any more
        self._unusable = self.fault = self._lock_memory()
        self._enter(self._staging if self.fault else self._memory)
        self.is_empty = True
        # Does something that changes several files between two scans of the folder
        self.between_scans: Callable[[Callable[[], None]], None] = lambda work: work()
        self._stored: dict[int, orders.CopyCheckpoint] = {}
        # Versions of files that no rank has written here
        self._copied_here = set[tuple[str, int, int]]()
        self._evicted, self._dropped = list[int](), list[int]()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "copies", procfs.lower_thread_priority)
        self._copies = list[concurrent.futures.Future[reports.CheckpointCopied]]()
        self._drained: concurrent.futures.Future[reports.CheckpointCopied] | None = None
        self._drain_by_s = self._ahead_s = 0.0
        roots = [
            base / name for base in (self._memory, self._staging) for name in (memory.CHECKPOINTS, memory.NEIGHBOURS)
        ]
        keys = config.token, config.peer_certificate, config.peer_key
        self._server = peer_files.PeerServer(*keys, [*roots, job.checkpoints], self._base)
        ips = [address.ip for address in interfaces.list_addresses()] or ["127.0.0.1"]
        self.addresses = tuple(f"{ip}:{self._server.server_address[1]}" for ip in ips)

    def _lock_memory(self) -> str:
        """Make the folder in memory, and take its lock; return why it cannot be used."""
        with contextlib.suppress(OSError):
            self._memory.mkdir(0o700, exist_ok=True)
            if ownership.is_own(self._memory):
                fd = locks.open_file(self._memory / LOCK_FILE)
                if locks.acquire(fd, locks.LOCK_S_MAX):
                    locks.sign(fd)
                    self._lock_fd = fd
                    return ""
        return f"{self._memory} cannot be made, is not this user's alone, or is in use"

    def _enter(self, base: Path) -> None:
        self._base, self.folder = base, base / memory.CHECKPOINTS
        make_subfolders(base.parent, self.folder)

    def open(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Choose memory or disk for the next attempt, and make there what is on the disk visible; return the checkpoint to resume from as
        it is there. Blocks. Raises OSError."""
        self.fault = self._unusable or self._find_shortage()
        base = self._staging if self.fault else self._memory
        if base != self._base:
            self._thread.submit(self._move, base).result()
        self._fill(checkpoint)
        self.is_empty = False
        if checkpoint is None or not all(disk.matches_record(self.folder, piece) for piece in checkpoint.files):
            return checkpoint
        return replace(checkpoint, locations=(FileLocation("", str(self.folder)),))

    def _find_shortage(self) -> str:
        own_bytes, wanted = used_bytes(self._memory), (self._config.memory_bytes, 1, self._config.memory_dir)
        host_bytes, *rooms = (room + own_bytes for room in find_rooms(self._memory))
        return host_facts.find_memory_shortage(*wanted, rooms[0], host_bytes, *rooms[1:])

    def _move(self, base: Path) -> None:
        """Go on in another folder; what is in this one is stored first. Raises OSError."""
        old = self.folder
        if error := self._store_rest():
            raise OSError(0, error, str(old))
        self._enter(base)
        shutil.rmtree(old, ignore_errors=True)
        self._evicted, self._stored = [*self._evicted, *self._stored], {}

    def _fill(self, checkpoint: Checkpoint | None) -> None:
        """Make the disk's checkpoints visible where ranks look: numbered files are links, those that are overwritten are copies."""
        root, listing, wanted = self._job.checkpoints, tree.scan(self._job.checkpoints), set[str]()
        if checkpoint is not None:
            both = (root, self.folder)
            wanted.update(
                p.name for p in checkpoint.files if [disk.matches_record(at, p) for at in both] == [True, False]
            )
        self.drop_links()
        for group in file_groups.group_files(listing.files).values():
            is_left = group.is_overwritten and any(os.path.lexists(self.folder / name) for name in group.names)
            for name in group.names:
                if name in wanted or not (is_left or group.unfinished_reason or os.path.lexists(self.folder / name)):
                    disk.put_file(root / name, self.folder / name, is_link=not group.is_overwritten)
                    self._copied_here.add(listing.files[name].stamp)
        disk.copy_marks(root, self.folder, self._copied_here, keeps_unknown=True)
        disk.date_folders(self.folder, listing.files)

    def drop_links(self) -> None:
        """Delete links to what `checkpoint.keep` has deleted on the disk: scripts ask for the times of all that they find."""
        for path in disk.walk(self.folder):
            with contextlib.suppress(OSError):
                if not path.exists() and path.readlink().is_relative_to(self._job.checkpoints):
                    path.unlink()
                    if path.parent != self.folder:
                        path.parent.rmdir()

    # Copies

    def copy(self, order: orders.CopyCheckpoint) -> None:
        """Copy files when it is their turn; `poll` reports it. At the end nothing more is copied: it would outlive its folder."""
        if self._drained is None:
            self._begin(functools.partial(self._run, order))

    def _begin(
        self, work: Callable[[], reports.CheckpointCopied]
    ) -> concurrent.futures.Future[reports.CheckpointCopied]:
        self._copies.append(future := self._thread.submit(work))
        future.add_done_callback(lambda _: self._wake())
        return future

    def poll(self) -> None:
        """Report what is done."""
        while self._copies and self._copies[0].done():
            with contextlib.suppress(Cancelled, concurrent.futures.CancelledError):
                self._report(self._copies.pop(0).result())

    def _run(self, order: orders.CopyCheckpoint) -> reports.CheckpointCopied:
        roots = {CopyTarget.DISK: self._job.checkpoints, CopyTarget.MEMORY: self.folder}
        root = roots.get(order.target, self._base / memory.NEIGHBOURS / str(order.number))
        try:
            if any("\0" in p.name or not {"..", "/"}.isdisjoint(PurePosixPath(p.name).parts) for p in order.files):
                raise OSError(0, "a name leads out of the folder")
            error = self._store(order) if order.target is CopyTarget.DISK else self._fetch(order, root)
        except OSError as err:
            error = f"{err.filename or ''}: {err.strerror}".lstrip(": ")
        with contextlib.suppress(OSError, RuntimeError, concurrent.futures.CancelledError):  # the scanner has ended
            self._evict()
        shutil.rmtree(self._stage, ignore_errors=True)
        names = () if error else tuple(piece.name for piece in order.files)
        gone = tuple(self._evicted), tuple(self._dropped)
        self._evicted, self._dropped = [], []
        return reports.CheckpointCopied(order.number, order.target, str(root), names, error, *gone)

    def _store(self, order: orders.CopyCheckpoint) -> str:
        """Copy files to the disk; return why they are not there. Raises OSError."""
        root, stage = self._job.checkpoints, self._stage
        source = Path(order.sources[0].root) if order.sources else self.folder  # a copy of another node's
        todo = [piece for piece in order.files if not disk.matches_record(root, piece)]
        for piece in todo:
            disk.put_file(source / piece.name, stage / piece.name)
            is_same = all(disk.matches_record(place, piece) for place in (source, stage))
            if not is_same or piece.sha256 not in ("", disk.sha256(stage / piece.name)):
                return f"{piece.name} has changed since it was saved"
        disk.install([piece.name for piece in todo], stage, root)
        if source == self.folder:
            self._stored[order.number] = order
            disk.copy_marks(self.folder, root, self._copied_here)
        return ""

    def _fetch(self, order: orders.CopyCheckpoint, root: Path) -> str:
        """Copy files from this host or others into memory; return why they are not there. Raises OSError, Cancelled."""
        stage, failures = self._base / INCOMING, list[str]()
        shutil.rmtree(stage, ignore_errors=True)
        todo = [piece for piece in order.files if not disk.matches_record(root, piece)]
        is_neighbour = order.target is CopyTarget.NEIGHBOUR
        others = [one for one in self._neighbours() if int(one.name) != order.number][: 1 - NUMBERS_KEPT]
        for folder in [one for one in others if int(one.name) != order.safe] if is_neighbour else ():
            shutil.rmtree(folder, ignore_errors=True)  # before this one comes: there may be room for so many only
            self._dropped.append(int(folder.name))
        limit_bytes = self._config.memory_bytes if is_neighbour else 1 << 60
        rooms = [*find_rooms(self._base), limit_bytes - used_bytes(self._base)]
        if (needed_bytes := sum(piece.size_bytes for piece in todo)) > min(rooms):
            return f"{needed_bytes / 1e9:.1f} GB do not fit into {max(min(rooms), 0) / 1e9:.1f} GB"
        for source in order.sources:
            names = {piece.name for piece in todo if not disk.matches_record(stage, piece)}
            wanted = [piece for piece in todo if piece.name in names.intersection(source.names or names)]
            if wanted and source.host not in ("", self._config.node):
                keys = self._config.token, self._config.peer_certificate
                addresses = order.addresses.get(source.host, ())
                failures.append(peer_files.fetch(addresses, *keys, source.root, wanted, stage, self._pace))
            for piece in wanted:
                if source.host in ("", self._config.node) and disk.matches_record(Path(source.root), piece):
                    disk.put_file(Path(source.root, piece.name), stage / piece.name, is_hard=not order.is_overwritten)
        if not all(disk.matches_record(stage, piece) for piece in todo):
            return "; ".join(filter(None, failures)) or "its files are not there any more"
        disk.install([piece.name for piece in todo], stage, root)
        self.is_empty = False
        self._copied_here.update(piece.stamp for piece in todo)
        return ""

    def _pace(self, size_bytes: int) -> None:
        now_s, rate = time.monotonic(), self._config.copy_mb_s
        self._ahead_s = max(self._ahead_s, now_s) + (size_bytes / (rate * 1e6) if rate else 0.0)
        time.sleep(self._ahead_s - now_s)
        if self._drained is not None:
            raise Cancelled

    def _evict(self) -> None:
        """Make room: numbered files that are on the disk become links to it, but for the newest."""
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free_bytes, _, *groups_bytes = find_rooms(self._base)
        is_low = min((free_bytes, *groups_bytes)) < PRESSURE_SHARE * host_bytes
        kept = 0 if is_low or used_bytes(self.folder) > self._config.memory_bytes else NUMBERS_KEPT
        numbers = sorted(number for number, order in self._stored.items() if not order.is_overwritten)
        for number in numbers[: len(numbers) - kept]:
            self.between_scans(functools.partial(self._link, number))

    def _neighbours(self) -> list[Path]:
        return sorted((self._base / memory.NEIGHBOURS).glob("*"), key=lambda folder: int(folder.name))

    def _link(self, number: int) -> None:
        files, root = self._stored.pop(number).files, self._job.checkpoints
        if all(disk.matches_record(place, piece) for piece in files for place in (root, self.folder)):
            for piece in files:
                disk.put_file(root / piece.name, self._base / INCOMING / piece.name, is_link=True)
                # Fails where a script deletes the folder meanwhile
                (self._base / INCOMING / piece.name).replace(self.folder / piece.name)
            disk.date_folders(self.folder, [piece.name for piece in files])
            self._evicted.append(number)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint that the supervisor does not keep, in memory only, when it is its turn."""
        self._thread.submit(lambda: self.between_scans(functools.partial(self._delete, checkpoint)))

    def _delete(self, checkpoint: Checkpoint) -> None:
        root = Path(checkpoint.locations[0].root)
        if self._base not in root.parents:
            return
        self._stored.pop(checkpoint.number, None)
        for piece in checkpoint.files:
            path = root / piece.name
            with contextlib.suppress(OSError):
                if path.is_symlink() or disk.matches_record(root, piece):
                    path.unlink()
                for folder in path.parents[: path.parents.index(self._base)]:
                    if folder != self.folder:
                        folder.rmdir()

    # The end of an attempt, and of the agent

    def full_text(self) -> str:
        """Return how full the memory is, if it is full: then the next attempt writes to the disk; else an empty text."""
        about, used = os.statvfs(self._base), used_bytes(self.folder)
        if self._base != self._memory or (
            used <= self._config.memory_bytes and about.f_bavail >= FULL_SHARE * about.f_blocks
        ):
            return ""
        self._unusable = f"{used / 1e9:.1f} of {self._config.memory_bytes / 1e9:.1f} GB used"
        return self._unusable

    def drain(self) -> bool:
        """Begin to store everything that the disk lacks, and end other copies; return whether that is over."""
        if self._drained is None:
            self._drain_by_s = time.monotonic() + DRAIN_S_MAX
            self._drained = self._begin(self._drain)
        self.poll()
        is_late = time.monotonic() > self._drain_by_s
        if is_late and self._drain_by_s:
            self._note(f"not all checkpoints in memory could be stored within {DRAIN_S_MAX:g} s")
            self._drain_by_s = 0.0  # said
        return is_late or self._drained.done()

    def _drain(self) -> reports.CheckpointCopied:
        if error := self._store_rest():
            self._note(f"not all checkpoints in memory could be stored: {error}")
            raise Cancelled  # nothing is reported
        return reports.CheckpointCopied(0, CopyTarget.DISK, str(self._job.checkpoints), ())

    def _store_rest(self) -> str:
        """Store every file that the disk lacks, or has in another version; return what could not be. A version that no format
        proves replaces none: it comes beside it, under a hidden name."""
        root, stage, error = self._job.checkpoints, self._stage, ""
        files = {piece.name: piece for piece in disk.list_files(self.folder) if not disk.matches_record(root, piece)}
        proved = set[str]()
        for group in file_groups.group_files(files).values():
            if validation.read_group(self.folder, group, files).is_proved:
                proved.update(group.names)
        for piece in files.values():
            path, is_other = PurePosixPath(piece.name), os.path.lexists(root / piece.name)
            if is_other and piece.stamp in self._copied_here:
                continue
            if is_other and piece.name not in proved and path.name not in file_groups.POINTERS:
                path = path.with_name(f".{path.name}.unfinished-{piece.mtime_ns}")
            try:
                disk.put_file(self.folder / piece.name, stage / path)
                disk.install([str(path)], stage, root)
            except OSError as err:
                error = f"{piece.name}: {err.strerror}"
        disk.copy_marks(self.folder, root, self._copied_here)
        shutil.rmtree(stage, ignore_errors=True)
        return error

    def close(self) -> None:
        """End the threads, and delete what is in memory."""
        self._server.close()
        self._drained = self._drained or concurrent.futures.Future()  # ends a copy from another host
        self._thread.shutdown(wait=False, cancel_futures=True)
        concurrent.futures.wait(self._copies, CLOSE_S_MAX)  # or it would make anew what is deleted now
        if self._lock_fd is not None:
            shutil.rmtree(self._memory, ignore_errors=True)
            os.close(self._lock_fd)
