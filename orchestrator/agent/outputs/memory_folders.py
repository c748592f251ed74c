"""Folders in memory for the checkpoints of nodes: the room in them, and the deletion of those that no living agent uses.

A folder is deleted only if it is this user's, an agent has made it, as its signed lock shows, and no process holds that lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from orchestrator.core.checkpoints import disk, memory
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import locks, ownership
from orchestrator.core.jobdir.layout import JobDir

LOCK_FILE, RECORD_FILE = "lock", "checkpoint-memory"
_CGROUP_FILES = {
    True: ("memory.max", "memory.current", "active_file", "inactive_file"),
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"),
}


def used_bytes(folder: Path) -> int:
    """Return the size of the files below a folder."""
    return sum(piece.size_bytes for piece in disk.list_files(folder))


def find_rooms(folder: Path) -> list[int]:
    """Return how many bytes may still be written to a folder in memory: by the host's memory, its cgroups, and the folder's disk."""
    about = os.statvfs(folder)
    disk_bytes = about.f_bavail * about.f_frsize if about.f_blocks else 1 << 60
    rooms = [_read_numbers(Path("/proc/meminfo")).get("MemAvailable", 0) << 10, disk_bytes]
    for group, is_v2 in procfs.cgroups("memory"):
        limit, used, *caches = _CGROUP_FILES[is_v2]
        text, counts = procfs.read_text(group / limit).strip(), _read_numbers(group / "memory.stat")
        if text.isdigit():
            cached_bytes = sum(counts.get(name, 0) for name in caches)
            rooms.append(int(text) - int(procfs.read_text(group / used) or 0) + cached_bytes)
    return rooms


def _read_numbers(path: Path) -> dict[str, int]:
    lines = [line.split() for line in procfs.read_text(path).splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def clean_up(memory_dir: str, job: str, node: str) -> None:
    """Delete the folder in memory of a job's node, if it is this user's and no agent uses it."""
    _delete_unused(memory.memory_folder(memory_dir, job, node))


def clean_up_recorded(job: JobDir, node: str) -> None:
    """The same on this host, if the node's agent has noted where its folder is."""
    with contextlib.suppress(OSError, ValueError):
        clean_up(ownership.read_regular(job.node(node) / RECORD_FILE).decode(), job.id, node)


def clean_abandoned(memory_dir: str) -> None:
    """Delete the folders in memory that agents of this user have left when they and their monitors were killed."""
    for folder in Path(memory_dir).glob("orch-*"):
        _delete_unused(folder)


def _delete_unused(folder: Path) -> None:
    """Delete a folder that an agent of this user has made, as its signed lock shows, if no process holds the lock."""
    if ownership.belongs_to_caller(folder) and locks.read_holder(folder / LOCK_FILE) is not None:
        with contextlib.suppress(OSError), locks.hold(folder / LOCK_FILE, 0.0) as is_free:
            if is_free:
                shutil.rmtree(folder, ignore_errors=True)
