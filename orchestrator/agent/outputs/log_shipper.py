"""What of this node's files is not at home yet, and what goes next? The agent's side of log shipping.

Files are only ever appended to, and every chunk names its offset: so the sizes that the supervisor names on each new
connection (`Have`) are all that is needed to lose nothing and to send nothing twice, after a break and after a restart
of either side. Nothing goes before they are named. What is on its way is limited, and less is let onto a slow line,
so that heartbeats never queue for long behind logs. Ranks write to their files and know nothing of this.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.core.jobdir import shipped_files
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m
from orchestrator.core.wire.connection import RAW_BYTES_MAX

SHIP_WINDOW_BYTES = 1 << 20
"""How much may be on its way, unconfirmed, on a line that is fast."""

WINDOW_BYTES_MIN = 32 << 10

SLOW_S = 1.0
"""A chunk that is confirmed later than this halves the window, one that comes in half the time doubles it."""

LAST_WINDOWS = 4
"""How many windows at once may precede the word that an attempt is over: 4 MiB on a fast line."""

FULL_CHUNK_BYTES = 64 << 10
SHIP_S = 1.0
"""A file that grows slowly, by less than a full chunk, is sent at once when it was quiet, else so often."""

INDEX_RECORD_BYTES = 16
"""A log's index travels in whole records: a torn last one may still be cut away here."""


@dataclass(slots=True)
class _File:
    """One file: how much of it there is, how much was sent, and until when a little more of it can wait."""

    path: str
    sent_bytes: int
    size_bytes: int = 0
    due_s: float = 0.0

    @property
    def unsent_bytes(self) -> int:
        return max(0, self.size_bytes - self.sent_bytes)


class LogShipper:
    """The files of one node on their way home."""

    def __init__(
        self, job: JobDir, node: str, send: Callable[[m.Chunk, bytes], bool], note: Callable[[str], None]
    ) -> None:
        """`send` puts a chunk on the line and tells whether there is one; `note` writes to the node's log."""
        self._job = job
        self._node = node
        self._send = send
        self._note = note
        self._have: dict[str, int] | None = None  # what is at home; None until the supervisor has said so
        self._files: dict[str, _File] = {}
        self._dropped: set[str] = set()
        self._window_bytes = SHIP_WINDOW_BYTES
        self._sent_bytes = self._got_bytes = 0
        self._on_way: deque[tuple[int, float]] = deque()
        self.progress_at = time.monotonic()
        """When bytes were last confirmed (monotonic)."""

    def hold(self) -> None:
        """Send nothing: there is a new connection, and what is at home is not known."""
        if self._on_way and time.monotonic() - self._on_way[0][1] > SLOW_S:
            self._resize(slow=True)
        self._have = None

    def begin(self, have: m.ResumeOffsets) -> None:
        """Go on from what is at home. Everything there is of this node is looked at once."""
        self._have = dict(have.files)
        self._sent_bytes = self._got_bytes = 0
        self._on_way.clear()
        self._files.clear()
        self.look(tuple(shipped_files.attempts(self._job, self._node)))

    def got(self, got: m.ChunkAck) -> None:
        """So much has arrived since `begin`: more may go."""
        if self._have is None or got.bytes <= self._got_bytes:
            return
        self.progress_at = time.monotonic()
        self._got_bytes = min(got.bytes, self._sent_bytes)
        sent_s = self.progress_at
        while self._on_way and self._on_way[0][0] <= self._got_bytes:
            sent_s = self._on_way.popleft()[1]
        took_s = self.progress_at - sent_s
        if took_s > SLOW_S or took_s < SLOW_S / 2:
            self._resize(slow=took_s > SLOW_S)
        self._pump(self._room_bytes)

    def look(self, attempts: tuple[int, ...]) -> None:
        """See how files have grown, those of `attempts` again and again, others until they are home; send some."""
        if self._have is not None:
            self._measure(attempts)
            self._pump(self._room_bytes)

    def push(self, attempts: tuple[int, ...]) -> None:
        """Send what there is at once, some windows of it: the word that the attempt is over comes behind it."""
        if self._have is not None:
            self._measure(attempts)
            self._hurry()
            self._pump(LAST_WINDOWS * self._window_bytes)

    def is_home(self, attempts: tuple[int, ...]) -> bool:
        """Tell whether everything of this node has arrived; sends what has not been sent."""
        if self._have is None:
            return False
        self._measure(attempts)
        self._hurry()
        self._pump(self._room_bytes)
        return self._got_bytes == self._sent_bytes and not any(
            one.unsent_bytes for one in self._files.values()
        )

    @property
    def _room_bytes(self) -> int:
        return self._window_bytes - (self._sent_bytes - self._got_bytes)

    def _resize(self, slow: bool) -> None:
        wanted = self._window_bytes // 2 if slow else self._window_bytes * 2
        self._window_bytes = min(max(wanted, WINDOW_BYTES_MIN), SHIP_WINDOW_BYTES)

    def _hurry(self) -> None:
        for one in self._files.values():
            one.due_s = 0.0

    def _measure(self, attempts: tuple[int, ...]) -> None:
        """Look at the sizes of all files that are watched; forget older ones that are home or never were."""
        assert self._have is not None, "measured before it began"
        watched = {shipped_files.agent_log(self._node): None}
        for attempt in attempts:
            watched.update(dict.fromkeys(shipped_files.files(self._job, self._node, attempt)))
        for path in watched:
            if path not in self._files and path not in self._dropped:
                self._files[path] = _File(path, self._have.get(path, 0))
        for one in list(self._files.values()):
            there = self._measure_one(one)
            if one.path not in watched and not (there and one.unsent_bytes):
                self._files.pop(one.path, None)
                self._have[one.path] = one.sent_bytes

    def _measure_one(self, one: _File) -> bool:
        """Note how big a file is; tell whether it exists."""
        try:
            size_bytes = os.stat(self._job.root / one.path).st_size  # noqa: PTH116 -- five times a second each
        except OSError:
            if one.sent_bytes:
                self._drop(one, "is gone")
            return False
        if one.path.endswith(".idx"):
            size_bytes -= size_bytes % INDEX_RECORD_BYTES
        if size_bytes < one.sent_bytes:
            self._drop(one, f"has {size_bytes} bytes, and {one.sent_bytes} of it are at home")
        one.size_bytes = size_bytes
        return True

    def _drop(self, one: _File, what: str) -> None:
        """Send no more of a file that did not only grow: the bytes at home would not be its bytes."""
        self._note(f"{one.path} {what}: no more of it is sent")
        self._dropped.add(one.path)
        self._files.pop(one.path, None)

    def _pump(self, room_bytes: int) -> None:
        """Send up to `room_bytes`, a chunk of each file in turn: no rank's flood holds up another's last line."""
        now_s = time.monotonic()
        turn = deque(one for one in self._files.values() if self._is_due(one, now_s))
        while turn and room_bytes > 0:
            one = turn.popleft()
            sent_bytes = self._send_some(one, min(room_bytes, RAW_BYTES_MAX))
            if not sent_bytes:
                continue
            room_bytes -= sent_bytes
            one.due_s = now_s + SHIP_S
            self._files[one.path] = self._files.pop(one.path)  # to the end of the queue
            if self._is_due(one, now_s):
                turn.append(one)

    def _is_due(self, one: _File, now_s: float) -> bool:
        unsent_bytes = one.unsent_bytes
        return unsent_bytes >= FULL_CHUNK_BYTES or (unsent_bytes > 0 and now_s >= one.due_s)

    def _send_some(self, one: _File, bytes_max: int) -> int:
        """Send one chunk; return how many bytes went."""
        wanted_bytes = min(one.unsent_bytes, bytes_max)
        if one.path.endswith(".idx"):
            wanted_bytes -= wanted_bytes % INDEX_RECORD_BYTES
        raw = self._read(one, wanted_bytes)
        if not raw or not self._send(m.Chunk(one.path, one.sent_bytes), raw):
            return 0
        one.sent_bytes += len(raw)
        self._sent_bytes += len(raw)
        self._on_way.append((self._sent_bytes, time.monotonic()))
        return len(raw)

    def _read(self, one: _File, wanted_bytes: int) -> bytes:
        try:
            fd = os.open(self._job.root / one.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""  # the next look sees what became of it
        try:
            return os.pread(fd, wanted_bytes, one.sent_bytes)
        except OSError:
            return b""
        finally:
            os.close(fd)
