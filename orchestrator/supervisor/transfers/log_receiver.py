"""Log receiver, the supervisor's side of log transfer: chunks of nodes' files go into the job folder.

Rules: a node may write only files of the kinds that are shipped (`core/wire/shipped_files`), and only beyond the end
of the file here: nothing in the job folder is ever overwritten or cut. A full disk costs only time.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from dataclasses import dataclass

from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.durable import make_subfolders
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import orders, reports, shipped_files

FILES_OPEN_MAX = 128
PATHS_PRINTED_MAX = 1000


class LogReceiveError(Exception):
    """A chunk does not follow the bytes that are here: the node must send again from the offset that it gets."""


@dataclass(slots=True)
class _Node:
    """How much has come from one node since its connection began."""

    received_bytes: int = 0
    acknowledged_bytes: int = 0


class LogReceiver:
    """Writes the files of all nodes of a job into its folder."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._nodes: dict[str, _Node] = {}
        self._fds: OrderedDict[str, int] = OrderedDict()
        self._printed_paths: set[str] = set()

    def resume_offsets(self, node: str) -> orders.ResumeOffsets:
        """Return the sizes of the node's files here. Must be sent once, right after its `Hello`."""
        self._nodes[node] = _Node()
        names = [shipped_files.agent_log(node)]
        for attempt in shipped_files.list_attempts(self._job, node):
            names += shipped_files.list_files(self._job, node, attempt)
        return orders.ResumeOffsets({name: size for name in names if (size := self._size_bytes(name))})

    def receive(self, node: str, chunk: reports.Chunk, raw: bytes) -> None:
        """Write one chunk. Raises LogReceiveError when bytes before it are missing: drop the node's connection then."""
        state = self._nodes.setdefault(node, _Node())
        if not shipped_files.may_send(node, chunk.path) or chunk.offset < 0:
            self._print_once(
                chunk.path,
                f"{node} sent bytes of {chunk.path[:200]!r}, which is not a file of that node: refused",
            )
        else:
            try:
                full_disk.retry_while_full(lambda: self._append(node, chunk, raw))
            except OSError as err:
                self._print_once(chunk.path, f"{chunk.path} cannot be written and is skipped: {err.strerror}")
        state.received_bytes += len(raw)

    def take_due_acks(self) -> list[tuple[str, orders.ChunkAck]]:
        """Return the acknowledgements that are due, by node, and count them as sent."""
        acks = []
        for node, state in self._nodes.items():
            if state.received_bytes != state.acknowledged_bytes:
                state.acknowledged_bytes = state.received_bytes
                acks.append((node, orders.ChunkAck(state.received_bytes)))
        return acks

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _append(self, node: str, chunk: reports.Chunk, raw: bytes) -> None:
        fd = self._open(node, chunk.path)
        info = os.fstat(fd)
        if not info.st_nlink:
            os.close(self._fds.pop(chunk.path))
            raise LogReceiveError(f"{chunk.path} was deleted here")
        if chunk.offset > info.st_size:
            raise LogReceiveError(
                f"{chunk.path} has {info.st_size} bytes here, but the node sent bytes from {chunk.offset} on"
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
        make_subfolders(self._job.root, full.parent)
        rank = shipped_files.rank_of(path)
        if rank is not None:  # so that `have` knows the node of the file, also after a restart
            make_subfolders(self._job.root, self._job.rank_run(node, *rank))
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
