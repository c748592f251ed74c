"""Resources of this node: kernel, memory, shared memory, limits of a process, folders, and names that resolve.

Reads only from the kernel, and resolves names within `RESOLVE_S_MAX`; a folder is written to and left unchanged.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import socket
import tempfile
import threading
from pathlib import Path

from orchestrator.core.host import procfs
from orchestrator.core.host_facts import UNKNOWN, UNLIMITED, FolderFacts

RESOLVE_S_MAX = 3.0
"""How long the resolution of all names together may take."""

WRITE_TEST_BYTES = 4096

_SHM = Path("/dev/shm")
_V1_UNLIMITED = 1 << 60
"""Version 1 writes a limit that is none as the largest number of pages."""


def memory_bytes() -> int:
    """Return the size of this host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Return how much memory new programs have here at most, UNKNOWN if the kernel does not say."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", procfs.read_text(Path("/proc/meminfo")), re.MULTILINE)
    known = [int(match[1]) << 10] if match else []
    return min((one for one in (*known, cgroup_bytes()) if one != UNKNOWN), default=UNKNOWN)


def cgroup_bytes() -> int:
    """Return the smallest memory limit of the cgroups around this process, UNKNOWN without one."""
    names = {True: "memory.max", False: "memory.limit_in_bytes"}
    texts = [procfs.read_text(folder / names[is_v2]).strip() for folder, is_v2 in procfs.cgroups("memory")]
    smallest = min((int(text) for text in texts if text.isdigit()), default=UNLIMITED)
    return smallest if smallest < _V1_UNLIMITED else UNKNOWN


def shm_sizes() -> tuple[int, int]:
    """Return the size of /dev/shm and what is free of it; UNKNOWN where there is none."""
    try:
        disk = os.statvfs(_SHM)
    except OSError:
        return UNKNOWN, UNKNOWN
    return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize


def soft_limit(kind: int) -> int:
    """Return a soft limit of this process, which the ranks inherit."""
    limit = resource.getrlimit(kind)[0]
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def has_infiniband() -> bool:
    """Return whether this host has an InfiniBand or RoCE device."""
    with contextlib.suppress(OSError):
        return any(Path("/sys/class/infiniband").iterdir())
    return False


def inspect_folder(folder: str) -> FolderFacts:
    """Return a folder's disk, and why it cannot be written to. `folder` may begin with `~`, and need not exist."""
    path = Path(folder).expanduser().absolute()
    nearest = next(part for part in (path, *path.parents) if part.exists() or part == part.parent)
    try:
        disk = os.statvfs(nearest)
    except OSError as err:
        return FolderFacts(str(path), f"{nearest}: {err.strerror}", UNKNOWN, UNKNOWN)
    fault = ""
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(WRITE_TEST_BYTES))
    except OSError as err:
        fault = f"{nearest}: {(err.strerror or str(err)).lower()}"
    inodes = disk.f_favail if disk.f_files else UNKNOWN
    device, mounts = nearest.stat().st_dev, procfs.read_text(Path("/proc/self/mountinfo")).splitlines()
    kinds = {words[2]: words[words.index("-") + 1] for words in map(str.split, mounts)}
    may_be_memory = kinds.get(f"{os.major(device)}:{os.minor(device)}", "tmpfs") in ("tmpfs", "ramfs")
    return FolderFacts(str(path), fault, disk.f_bavail * disk.f_frsize, inodes, may_be_memory)


def external_folders(glob: str) -> tuple[str, ...]:
    """Return the folder of checkpoints that a `checkpoint.path` names outside the job's own, up to the first pattern."""
    path = Path(glob)
    if not path.is_absolute():
        return ()
    parts = list(itertools.takewhile(lambda part: not set(part) & set("*?["), path.parts[:-1]))
    return (str(Path(*parts)),)


def find_unresolved(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that cannot be resolved in time, each with the reason."""
    failures: dict[str, str] = dict.fromkeys(names, f"no answer within {RESOLVE_S_MAX:g} s")

    def resolve(name: str) -> None:
        try:
            socket.getaddrinfo(name, None)
        except OSError as err:
            failures[name] = err.strerror or str(err)
        else:
            del failures[name]

    threads = [threading.Thread(target=resolve, args=(name,), daemon=True) for name in failures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(RESOLVE_S_MAX / len(threads))
    return tuple(f"{name}: {why}" for name, why in dict(failures).items())
