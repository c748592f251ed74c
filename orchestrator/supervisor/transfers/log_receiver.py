"""The supervisor's side of log shipping: chunks of nodes' files go into the job folder.

Rules: a node may write only files of the kinds that are shipped (`core/jobdir/shipped_files`), and only beyond the end
of the file here: nothing in the job folder is ever overwritten or cut. A full disk costs only time: chunks wait, no
more come than fit into the agent's window, and they are written when there is room again.
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
"""How much of one node may wait for room on the disk; its agent's window is smaller."""

RETRY_S = 2.0
"""How often a full disk is tried again."""

PATHS_PRINTED_MAX = 1000

_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR})
"""Errors of a path at which something other than a file stands: waiting would not help."""


class LogReceiveError(Exception):
    """A chunk does not follow what is here: the node must be asked to begin again."""


@dataclass(slots=True)
class _Node:
    """What has come from one node since its connection began, and what waits for room."""

    received_bytes: int = 0
    acknowledged_bytes: int = 0
    waiting: deque[tuple[m.Chunk, bytes]] = field(default_factory=deque)
    waiting_bytes: int = 0


class LogReceiver:
    """Writes the files of all nodes of a job into its folder."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._nodes: dict[str, _Node] = {}
        self._fds: OrderedDict[str, int] = OrderedDict()
        self._printed_paths: set[str] = set()
        self._is_full = False
        self._retry_due_s = 0.0

    def have(self, node: str) -> m.ResumeOffsets:
        """Return the sizes of the node's files here. Must be sent once, right after its `Hello`."""
        self._nodes[node] = _Node()
        names = [shipped_files.agent_log(node)]
        for attempt in shipped_files.attempts(self._job, node):
            names += shipped_files.files(self._job, node, attempt)
        return m.ResumeOffsets({name: size for name in names if (size := self._size_bytes(name))})

    def take(self, node: str, chunk: m.Chunk, raw: bytes) -> None:
        """Take one chunk. Raises LogReceiveError when bytes before it are missing: drop the node's connection then."""
        state = self._nodes.setdefault(node, _Node())
        if not shipped_files.may_send(node, chunk.path) or chunk.offset < 0:
            self._print_once(
                chunk.path, f"{node} sent bytes of {chunk.path[:200]!r}, which is no file of its own: refused"
            )
            state.received_bytes += len(raw)
            return
        if state.waiting or not self._write(node, state, chunk, raw):
            self._wait(state, chunk, raw)

    def retry(self) -> None:
        """Write what waits for room on the disk, as far as there is room."""
        for node, state in self._nodes.items():
            self._retry(node, state)
        if self._is_full and not any(state.waiting for state in self._nodes.values()):
            self._is_full = False
            print("there is room on the disk again: logs from the nodes are written", flush=True)

    def _retry(self, node: str, state: _Node) -> None:
        while state.waiting:
            chunk, raw = state.waiting[0]
            # A gap cannot be mended from here: the next connection begins with the true sizes.
            with contextlib.suppress(LogReceiveError):
                if not self._write(node, state, chunk, raw):
                    return
            state.waiting.popleft()
            state.waiting_bytes -= len(raw)

    def owed(self) -> list[tuple[str, m.ChunkAck]]:
        """Return the acknowledgements that are due, by node, and count them as sent; try again what waits for room."""
        if self._is_full and time.monotonic() >= self._retry_due_s:
            self._retry_due_s = time.monotonic() + RETRY_S
            self.retry()
        acks = []
        for node, state in self._nodes.items():
            if state.received_bytes != state.acknowledged_bytes:
                state.acknowledged_bytes = state.received_bytes
                acks.append((node, m.ChunkAck(state.received_bytes)))
        return acks

    @property
    def is_full(self) -> bool:
        """Tell whether chunks wait for room on the disk."""
        return self._is_full

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _wait(self, state: _Node, chunk: m.Chunk, raw: bytes) -> None:
        if state.waiting_bytes + len(raw) > WAITING_BYTES_MAX:
            raise LogReceiveError(f"more than {WAITING_BYTES_MAX} bytes wait for room on the disk")
        state.waiting.append((chunk, raw))
        state.waiting_bytes += len(raw)

    def _write(self, node: str, state: _Node, chunk: m.Chunk, raw: bytes) -> bool:
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
            self._print_once(chunk.path, f"{chunk.path} cannot be written, it is not taken: {err.strerror}")
        state.received_bytes += len(raw)
        return True

    def _append(self, node: str, chunk: m.Chunk, raw: bytes) -> None:
        fd = self._open(node, chunk.path)
        info = os.fstat(fd)
        if not info.st_nlink:
            os.close(self._fds.pop(chunk.path))
            raise LogReceiveError(f"{chunk.path} was deleted here")
        if chunk.offset > info.st_size:
            raise LogReceiveError(
                f"{chunk.path} has {info.st_size} bytes here, and bytes from {chunk.offset} on came"
            )
        rest = memoryview(raw)[info.st_size - chunk.offset :]
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
            info = os.lstat(self._job.root / path)
        except OSError:
            return 0
        return info.st_size if stat.S_ISREG(info.st_mode) else 0

    def _print_once(self, path: str, text: str) -> None:
        """Print something once for each path, and not without bound."""
        if path not in self._printed_paths and len(self._printed_paths) < PATHS_PRINTED_MAX:
            self._printed_paths.add(path)
            print(text, flush=True)
