"""What does an agent write into the node's log of an attempt? A line for each thing it does, see `Notes.add`.

A line that a full disk has no room for waits, within a limit, and is written before the next.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from orchestrator.core.jobdir.layout import JobDir

WAITING_MAX = 1000
"""How many lines wait for room on the disk; past it the newest are lost, since the cause was said first."""


class NodeLog:
    """The notes of one agent."""

    def __init__(self, job: JobDir, node: str) -> None:
        self._job = job
        self._node = node
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._lock = threading.Lock()

    def add(self, attempt: int, text: str) -> None:
        """Write a line into the log of an attempt, now or when that can be. Any thread may call this."""
        line = f"{time.strftime('%H:%M:%S')} agent: {text}\n".encode(errors="replace")
        with self._lock:
            if len(self._waiting) < WAITING_MAX:
                self._waiting.append((attempt, line))
            try:
                self._write()
            except OSError:
                return

    def _write(self) -> None:
        while self._waiting:
            attempt, line = self._waiting[0]
            self._job.attempt_logs(attempt).mkdir(parents=True, exist_ok=True)
            with self._job.node_log(attempt, self._node).open("ab", buffering=0) as file:
                written_bytes = file.write(line)
            if written_bytes < len(line):  # the rest of it, some day
                self._waiting[0] = (attempt, line[written_bytes:])
            else:
                self._waiting.popleft()
