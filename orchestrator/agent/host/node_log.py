"""Node log of an attempt: one line for each thing that the agent does.

A line for which a full disk has no room waits, within a limit, and is written before the next one.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.durable import make_subfolders
from orchestrator.core.jobdir.layout import JobDir

WAITING_MAX = 1000
"""How many lines wait for room on the disk; past it the newest are dropped, since the first ones name the cause."""


class NodeLog:
    """Writer of one node's logs."""

    def __init__(self, job: JobDir, node: str) -> None:
        self._job = job
        self._node = node
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._lock = threading.Lock()

    def add(self, attempt: int, text: str) -> None:
        """Write a line to the log of an attempt, now or when the disk has room. Any thread may call this."""
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
            make_subfolders(self._job.root, self._job.attempt_logs(attempt))
            with ownership.open_for_append(self._job.node_log(attempt, self._node)) as file:
                written_bytes = file.write(line)
            if written_bytes < len(line):  # the rest waits for room
                self._waiting[0] = (attempt, line[written_bytes:])
            else:
                self._waiting.popleft()
