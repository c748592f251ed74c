"""Log shipper, the agent's side of log transfer: sends this node's files to the job folder, in chunks.

Files are only ever appended to, and every chunk names its offset. So the sizes that the supervisor has, sent on each new
connection (`ResumeOffsets`), are enough to lose nothing and to send nothing twice, after a break and after a restart of
either side. Nothing is sent before they come. A window limits the unacknowledged bytes and shrinks on a slow connection,
so that heartbeats never queue for long behind logs. Ranks only write their files; none of this concerns them.

A truncated file continues from its new beginning: in the job folder its bytes follow those that were sent before.
A program of a rank truncates its log by `> /dev/stderr`, which opens the log again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import orders, reports, shipped_files
from orchestrator.core.wire.connection import RAW_BYTES_MAX

SHIP_WINDOW_BYTES = 1 << 20
"""The largest window: unacknowledged bytes on a fast connection."""

WINDOW_BYTES_MIN = 32 << 10

SLOW_S = 1.0
"""A chunk acknowledged later than this halves the window; one acknowledged in half the time doubles it."""

LAST_WINDOWS = 4
"""How many windows at once may go before the report that an attempt is over: 4 MiB on a fast connection."""

DRAIN_S_MAX = 60.0
"""A dismissed agent stays until its logs have arrived, unless nothing has arrived for this time."""

DRAIN_DISCONNECTED_S_MAX = 10.0
"""It does not stay after this time without a connection either: `orch collect` fetches the rest later."""

FULL_CHUNK_BYTES = 64 << 10
SHIP_S = 1.0
"""A file that grows by less than a full chunk is sent at once after a pause, else this often."""

INDEX_RECORD_BYTES = 16
"""A log's index is sent in complete records: an incomplete last one may still be truncated here."""


@dataclass(slots=True)
class _ShippedFile:
    """One file, with its size, the bytes sent, and the time until which less than a full chunk may wait."""

    path: str
    sent_bytes: int
    size_bytes: int = 0
    due_s: float = 0.0

    @property
    def unsent_bytes(self) -> int:
        return max(0, self.size_bytes - self.sent_bytes)


class LogShipper:
    """The files of one node, and how much of each was sent."""

    def __init__(
        self,
        job: JobDir,
        node: str,
        send: Callable[[reports.Chunk, bytes], bool],
        note: Callable[[str], None],
    ) -> None:
        """`send` sends a chunk and returns whether there is a connection; `note` writes to the node's log."""
        self._job = job
        self._node = node
        self._send = send
        self._note = note
        # Bytes of each file that the supervisor has; None until it has sent them.
        self._received_bytes: dict[str, int] | None = None
        self._files: dict[str, _ShippedFile] = {}
        self._dropped: set[str] = set()
        # Offset in the job folder's file of the first byte of each file measured so far: not 0 once it was truncated.
        self._start_offsets: dict[str, int] = {}
        self._window_bytes = SHIP_WINDOW_BYTES
        self._sent_bytes = self._acked_bytes = 0
        # (bytes sent in all up to the end of a chunk, when it was sent)
        self._unacked: deque[tuple[int, float]] = deque()
        self._progress_at = time.monotonic()  # when bytes were last acknowledged

    def pause(self) -> None:
        """Send nothing until `begin`: on a new connection the supervisor's sizes are unknown."""
        if self._unacked and time.monotonic() - self._unacked[0][1] > SLOW_S:
            self._resize(slow=True)
        self._received_bytes = None

    def begin(self, offsets: orders.ResumeOffsets) -> None:
        """Continue from what the supervisor has. All files of this node are measured once."""
        self._received_bytes = dict(offsets.files)
        # What was truncated before it had arrived is lost.
        self._start_offsets = {path: min(at, offsets.files.get(path, 0)) for path, at in self._start_offsets.items()}
        self._sent_bytes = self._acked_bytes = 0
        self._unacked.clear()
        self._files.clear()
        self.poll(tuple(shipped_files.list_attempts(self._job, self._node)))

    def acknowledge(self, ack: orders.ChunkAck) -> None:
        """Take an acknowledgement of all bytes since `begin`, and send more."""
        if self._received_bytes is None or ack.bytes <= self._acked_bytes:
            return
        self._progress_at = time.monotonic()
        self._acked_bytes = min(ack.bytes, self._sent_bytes)
        sent_s = self._progress_at
        while self._unacked and self._unacked[0][0] <= self._acked_bytes:
            sent_s = self._unacked.popleft()[1]
        took_s = self._progress_at - sent_s
        if took_s > SLOW_S or took_s < SLOW_S / 2:
            self._resize(slow=took_s > SLOW_S)
        self._send_due(self._room_bytes)

    def poll(self, attempts: tuple[int, ...]) -> None:
        """Measure the files of `attempts`, and others until they have arrived; send what the window allows."""
        if self._received_bytes is not None:
            self._measure(attempts)
            self._send_due(self._room_bytes)

    def send_last(self, attempts: tuple[int, ...]) -> None:
        """Send up to `LAST_WINDOWS` at once: the report that the attempt is over follows."""
        if self._received_bytes is not None:
            self._measure(attempts)
            self._make_all_due()
            self._send_due(LAST_WINDOWS * self._window_bytes)

    def has_arrived(self, attempts: tuple[int, ...]) -> bool:
        """Return whether all files of this node have arrived; send what is not sent yet."""
        if self._received_bytes is None:
            return False
        self._measure(attempts)
        self._make_all_due()
        self._send_due(self._room_bytes)
        unsent_bytes = sum(file.unsent_bytes for file in self._files.values())
        return self._acked_bytes == self._sent_bytes and not unsent_bytes

    def is_done(self, attempts: tuple[int, ...], dismissed_at: float, disconnected_s: float) -> bool:
        """Return whether a dismissed agent may leave: its logs have arrived, or cannot be sent."""
        if self.has_arrived(attempts):
            return True
        is_stuck = time.monotonic() - max(dismissed_at, self._progress_at) > DRAIN_S_MAX
        return is_stuck or disconnected_s > DRAIN_DISCONNECTED_S_MAX

    @property
    def _room_bytes(self) -> int:
        return self._window_bytes - (self._sent_bytes - self._acked_bytes)

    def _resize(self, slow: bool) -> None:
        window_bytes = self._window_bytes // 2 if slow else self._window_bytes * 2
        self._window_bytes = min(max(window_bytes, WINDOW_BYTES_MIN), SHIP_WINDOW_BYTES)

    def _make_all_due(self) -> None:
        for file in self._files.values():
            file.due_s = 0.0

    def _measure(self, attempts: tuple[int, ...]) -> None:
        """Measure all watched files; forget older ones that are sent or gone."""
        assert self._received_bytes is not None, "measured before it began"
        watched = {shipped_files.agent_log(self._node): None}
        for attempt in attempts:
            watched.update(dict.fromkeys(shipped_files.list_files(self._job, self._node, attempt)))
        for path in watched:
            if path not in self._files and path not in self._dropped:
                self._files[path] = _ShippedFile(path, self._received_bytes.get(path, 0))
        for file in list(self._files.values()):
            exists = self._measure_one(file)
            if file.path not in watched and not (exists and file.unsent_bytes):
                self._files.pop(file.path, None)
                self._received_bytes[file.path] = file.sent_bytes

    def _measure_one(self, file: _ShippedFile) -> bool:
        """Note the size of a file; return whether it exists."""
        try:
            size_bytes = os.stat(self._job.root / file.path).st_size  # noqa: PTH116 -- five times a second each
        except (FileNotFoundError, NotADirectoryError):
            if file.sent_bytes:
                self._stop_sending(file, "is gone")
            return False
        except OSError:
            return True  # such as a stale file of NFS: the next poll finds out
        if file.path.endswith(".idx"):
            size_bytes -= size_bytes % INDEX_RECORD_BYTES
        file.size_bytes = self._start_offsets.get(file.path, 0) + size_bytes
        if file.size_bytes < file.sent_bytes:
            self._restart_truncated(file, size_bytes)
        else:
            self._start_offsets.setdefault(file.path, 0)
        return True

    def _restart_truncated(self, file: _ShippedFile, size_bytes: int) -> None:
        """Continue from the beginning of a truncated file, if this agent has measured it before: of another file it is
        unknown which bytes were sent. The index of a log ends here, since it holds offsets in the log."""
        index = file.path.removesuffix(".log") + ".idx"
        self._dropped.add(index)
        self._files.pop(index, None)
        what = f"has {size_bytes} bytes, but {file.sent_bytes - self._start_offsets.get(file.path, 0)} were sent"
        if file.path not in self._start_offsets or file.path.endswith(".idx"):
            self._stop_sending(file, what)
            return
        self._note(f"{file.path} {what}: it was truncated, and shipping continues from its new beginning")
        self._start_offsets[file.path] = file.sent_bytes
        file.size_bytes = file.sent_bytes + size_bytes

    def _stop_sending(self, file: _ShippedFile, what: str) -> None:
        """Stop sending a file that did not only grow: the bytes in the job folder would not be its bytes."""
        self._note(f"{file.path} {what}: shipping it stops")
        self._dropped.add(file.path)
        self._files.pop(file.path, None)

    def _send_due(self, room_bytes: int) -> None:
        """Send up to `room_bytes`, one chunk of each file in turn: one rank's flood never delays another's lines."""
        now_s = time.monotonic()
        due = deque(file for file in self._files.values() if self._is_due(file, now_s))
        while due and room_bytes > 0:
            file = due.popleft()
            sent_bytes = self._send_some(file, min(room_bytes, RAW_BYTES_MAX))
            if not sent_bytes:
                continue
            room_bytes -= sent_bytes
            file.due_s = now_s + SHIP_S
            self._files[file.path] = self._files.pop(file.path)  # to the end of the queue
            if self._is_due(file, now_s):
                due.append(file)

    def _is_due(self, file: _ShippedFile, now_s: float) -> bool:
        unsent_bytes = file.unsent_bytes
        return unsent_bytes >= FULL_CHUNK_BYTES or (unsent_bytes > 0 and now_s >= file.due_s)

    def _send_some(self, file: _ShippedFile, bytes_max: int) -> int:
        """Send one chunk; return its size."""
        wanted_bytes = min(file.unsent_bytes, bytes_max)
        if file.path.endswith(".idx"):
            wanted_bytes -= wanted_bytes % INDEX_RECORD_BYTES
        raw = self._read(file, wanted_bytes)
        if not raw or not self._send(reports.Chunk(file.path, file.sent_bytes), raw):
            return 0
        file.sent_bytes += len(raw)
        self._sent_bytes += len(raw)
        self._unacked.append((self._sent_bytes, time.monotonic()))
        return len(raw)

    def _read(self, file: _ShippedFile, wanted_bytes: int) -> bytes:
        try:
            fd = ownership.open_regular(self._job.root / file.path)
        except OSError:
            return b""  # the next poll sees what became of it
        try:
            return os.pread(fd, wanted_bytes, file.sent_bytes - self._start_offsets.get(file.path, 0))
        except OSError:
            return b""
        finally:
            os.close(fd)
