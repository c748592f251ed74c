"""How much has a rank read and written? Added up over its processes, cheaply enough for every beat.

The kernel's counters (/proc/<pid>/io, `man 5 proc`) hold what went through read and write, to disks, pipes and sockets.
Those of a process that ended are lost unless its parent has waited for it, so what is added up is what each has grown.
"""

from __future__ import annotations

import itertools
from pathlib import Path

PROCESSES_MAX = 64
FAMILY_S = 10.0
"""How often a rank's processes are looked for; in between, those of the last time count."""


class IoCounter:
    """One rank's bytes so far."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen_bytes: dict[int, int] = {}
        self._total_bytes = 0
        self._family_due_s = 0.0

    def bytes(self, now_s: float) -> int:
        """Return what the rank's processes have read and written since the first call."""
        if now_s >= self._family_due_s:
            self._family_due_s = now_s + FAMILY_S
            family = _family(self._pid)
            self._seen_bytes = {pid: self._seen_bytes.get(pid, -1) for pid in family}
        for pid, before in self._seen_bytes.items():
            now = io_bytes(pid)
            if now is not None:
                self._total_bytes += max(0, now - before) if before >= 0 else 0
                self._seen_bytes[pid] = now
        return self._total_bytes


def io_bytes(pid: int) -> int | None:
    """Return the bytes one process has read and written, None when it is gone or not ours to look at."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:  # noqa: PTH123 -- half the time
            lines = file.read(4096).split()
    except OSError:
        return None
    return int(lines[1]) + int(lines[3]) if lines[:3:2] == [b"rchar:", b"wchar:"] else None


def _family(pid: int) -> list[int]:
    """Return a process and its descendants, as far as the kernel tells them (CONFIG_PROC_CHILDREN), 64 at most."""
    found = [pid]
    for one in found:  # grows while it is walked
        if len(found) >= PROCESSES_MAX:
            break
        found.extend(itertools.islice(_children(one), PROCESSES_MAX - len(found)))
    return found


def _children(pid: int) -> list[int]:
    words: list[str] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            words += (task / "children").read_text().split()
    except OSError:
        pass  # it has just ended
    return [int(word) for word in words]
