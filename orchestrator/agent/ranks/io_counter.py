"""I/O counter of a rank: bytes read and written by all its processes, cheap enough for every heartbeat.

The kernel's counters (/proc/<pid>/io, `man 5 proc`) count what goes through read and write, to disks, pipes and
sockets. Those of an ended process are lost unless its parent has waited for it, so the counter adds up the growth of
each process.
"""

from __future__ import annotations

import itertools
from pathlib import Path

PROCESSES_MAX = 64
RESCAN_S = 10.0
"""How often a rank's processes are listed; in between, those of the last listing count."""


class IoCounter:
    """The bytes that one rank has read and written so far."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._bytes_by_pid: dict[int, int] = {}
        self._total_bytes = 0
        self._scan_due_s = 0.0

    @property
    def pids(self) -> list[int]:
        """The rank's processes as they were last listed."""
        return list(self._bytes_by_pid)

    def total_bytes(self, now_s: float) -> int:
        """Return the bytes that the rank's processes have read and written since the first call."""
        if now_s >= self._scan_due_s:
            self._scan_due_s = now_s + RESCAN_S
            pids = _process_tree(self._pid)
            self._bytes_by_pid = {pid: self._bytes_by_pid.get(pid, -1) for pid in pids}
        for pid, before in self._bytes_by_pid.items():
            now = io_bytes(pid)
            if now is not None:
                self._total_bytes += max(0, now - before) if before >= 0 else 0
                self._bytes_by_pid[pid] = now
        return self._total_bytes


def io_bytes(pid: int) -> int | None:
    """Return the bytes that one process has read and written, None when it is gone or may not be read."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:  # noqa: PTH123 -- half the time
            lines = file.read(4096).split()
    except OSError:
        return None
    return int(lines[1]) + int(lines[3]) if lines[:3:2] == [b"rchar:", b"wchar:"] else None


def _process_tree(pid: int) -> list[int]:
    """Return a process and its descendants, 64 at most, if the kernel lists them (CONFIG_PROC_CHILDREN)."""
    pids = [pid]
    for parent in pids:  # grows while it is walked
        if len(pids) >= PROCESSES_MAX:
            break
        pids.extend(itertools.islice(_children(parent), PROCESSES_MAX - len(pids)))
    return pids


def _children(pid: int) -> list[int]:
    words: list[str] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            words += (task / "children").read_text().split()
    except OSError:
        pass  # it has just ended
    return [int(word) for word in words]
