"""Where do a node's files go at home? The supervisor's side of log shipping: chunks into the job folder.

Rules: a node may write only files of the kinds that travel (`wire/travel`), and only beyond what is there: nothing at
home is ever overwritten or cut. A disk that is full here costs nothing but time: chunks wait, no more come than fit
the agent's window, and they are written when there is room again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from orchestrator.core.jobdir import shipped_files
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m

FILES_OPEN_MAX = 128
WAITING_BYTES_MAX = 8 << 20
"""What one node may leave waiting for room on the disk; its agent's window is smaller."""

RETRY_S = 2.0
"""How often the disk is tried again when it was full."""

PATHS_TOLD_MAX = 1000

_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR})
"""Something else than a file stands in its place: waiting would not help."""


class LogReceiveError(Exception):
    """A chunk does not follow what is here: the node must be asked to begin again."""


@dataclass(slots=True)
class _Node:
    """What has come from one node since its connection began, and what waits for room."""

    got_bytes: int = 0
    said_bytes: int = 0
    waiting: deque[tuple[m.Chunk, bytes]] = field(default_factory=deque)
    waiting_bytes: int = 0


class LogReceiver:
    """Takes the files of all nodes of a job into its folder at home."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._nodes: dict[str, _Node] = {}
        self._fds: OrderedDict[str, int] = OrderedDict()
        self._told: set[str] = set()
        self._is_full = False
        self._retry_due_s = 0.0

    def have(self, node: str) -> m.ResumeOffsets:
        """Return what is here of the node's files; to be said once, right after its `Hello`."""
        self._nodes[node] = _Node()
        names = [shipped_files.agent_log(node)]
        for attempt in shipped_files.attempts(self._job, node):
            names += shipped_files.files(self._job, node, attempt)
        return m.ResumeOffsets({name: size for name in names if (size := self._size_bytes(name))})

    def take(self, node: str, chunk: m.Chunk, raw: bytes) -> None:
        """Take one chunk. Raises LogReceiveError when bytes before it are missing: drop the node's connection then."""
        one = self._nodes.setdefault(node, _Node())
        if not shipped_files.may_send(node, chunk.path) or chunk.offset < 0:
            self._tell(
                chunk.path, f"{node} sent bytes of {chunk.path[:200]!r}, which is no file of its own: refused"
            )
            one.got_bytes += len(raw)
            return
        if one.waiting or not self._write(node, one, chunk, raw):
            self._wait(one, chunk, raw)

    def retry(self) -> None:
        """Write what waits for room on the disk, as far as there is room."""
        for node, one in self._nodes.items():
            self._retry(node, one)
        if self._is_full and not any(one.waiting for one in self._nodes.values()):
            self._is_full = False
            print("there is room on the disk again: logs from the nodes are written", flush=True)

    def _retry(self, node: str, one: _Node) -> None:
        while one.waiting:
            chunk, raw = one.waiting[0]
            # A gap cannot be mended from here: the next connection begins with the true sizes.
            with contextlib.suppress(LogReceiveError):
                if not self._write(node, one, chunk, raw):
                    return
            one.waiting.popleft()
            one.waiting_bytes -= len(raw)

    def owed(self) -> list[tuple[str, m.ChunkAck]]:
        """Return what is to be confirmed, by node, and count it as confirmed; try again what waits for room."""
        if self._is_full and time.monotonic() >= self._retry_due_s:
            self._retry_due_s = time.monotonic() + RETRY_S
            self.retry()
        found = []
        for node, one in self._nodes.items():
            if one.got_bytes != one.said_bytes:
                one.said_bytes = one.got_bytes
                found.append((node, m.ChunkAck(one.got_bytes)))
        return found

    @property
    def is_full(self) -> bool:
        """Tell whether chunks wait for room on the disk."""
        return self._is_full

    def close(self) -> None:
        """Give the files back."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _wait(self, one: _Node, chunk: m.Chunk, raw: bytes) -> None:
        if one.waiting_bytes + len(raw) > WAITING_BYTES_MAX:
            raise LogReceiveError(f"more than {WAITING_BYTES_MAX} bytes wait for room on the disk")
        one.waiting.append((chunk, raw))
        one.waiting_bytes += len(raw)

    def _write(self, node: str, one: _Node, chunk: m.Chunk, raw: bytes) -> bool:
        """Write what of a chunk is not here yet; False when it has to wait. Raises LogReceiveError at a gap."""
        try:
            self._append(node, chunk, raw)
        except OSError as err:
            if err.errno not in _NO_FILE:
                if not self._is_full:
                    self._is_full = True
                    print(
                        f"logs from the nodes wait: {chunk.path} cannot be written: {err.strerror}",
                        flush=True,
                    )
                return False
            self._tell(chunk.path, f"{chunk.path} cannot be written, it is not taken: {err.strerror}")
        one.got_bytes += len(raw)
        return True

    def _append(self, node: str, chunk: m.Chunk, raw: bytes) -> None:
        fd = self._open(node, chunk.path)
        found = os.fstat(fd)
        if not found.st_nlink:
            os.close(self._fds.pop(chunk.path))
            raise LogReceiveError(f"{chunk.path} was deleted here")
        if chunk.offset > found.st_size:
            raise LogReceiveError(
                f"{chunk.path} has {found.st_size} bytes here, and bytes from {chunk.offset} on came"
            )
        rest = memoryview(raw)[found.st_size - chunk.offset :]
        while rest:
            rest = rest[os.pwrite(fd, rest, chunk.offset + len(raw) - len(rest)) :]

    def _open(self, node: str, path: str) -> int:
        """Return the open file; the one used longest ago is closed for it when there are too many."""
        if path in self._fds:
            self._fds.move_to_end(path)
            return self._fds[path]
        while len(self._fds) >= FILES_OPEN_MAX:
            os.close(self._fds.popitem(last=False)[1])
        full = self._job.root / path
        self._job.root.stat()  # a job that was deleted does not come back
        full.parent.mkdir(parents=True, exist_ok=True)
        rank = shipped_files.rank_of(path)
        if rank is not None:  # so that `have` knows whose it is, after a restart too
            self._job.rank_run(node, *rank).mkdir(parents=True, exist_ok=True)
        fd = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        self._fds[path] = fd
        return fd

    def _size_bytes(self, path: str) -> int:
        try:
            found = os.lstat(self._job.root / path)
        except OSError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def _tell(self, path: str, text: str) -> None:
        """Print something once for each path, and not without bound."""
        if path not in self._told and len(self._told) < PATHS_TOLD_MAX:
            self._told.add(path)
            print(text, flush=True)
