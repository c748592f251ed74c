"""Open files of a process: descriptions of its descriptors, with the other end of a connection.

Only links are read, and no file is stat'ed: a file on a dead file system would block the caller.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.host import procfs

FDS_MAX = 4096
_DEVICE_PREFIXES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")


@dataclass(frozen=True, slots=True)
class Target:
    """Description of an open file; for a TCP connection also the port at its other end."""

    text: str
    port: int = 0


def target(pid: int, fd: int) -> Target:
    """Return what a process has open at `fd`; files below its working folder are relative to that."""
    link = _link(f"/proc/{pid}/fd/{fd}")
    if not link:
        return Target(f"descriptor {fd}")
    if link.startswith("socket:["):
        return _peer(pid, link[8:-1])
    if link.startswith("pipe:["):
        return Target("standard input, a pipe" if fd == 0 else f"a pipe (descriptor {fd})")
    return Target(shortened(pid, link))


def shortened(pid: int, path: str) -> str:
    """Return a path relative to the process's working folder, when it lies below that."""
    folder = _link(f"/proc/{pid}/cwd").rstrip("/") + "/"
    return path[len(folder) :] if path.startswith(folder) else path


def uses_gpu(pid: int) -> bool:
    """Return whether a process has a GPU's device open."""
    return any(_link(f"/proc/{pid}/fd/{fd}").startswith(_DEVICE_PREFIXES) for fd in _fds(pid))


def _fds(pid: int) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/fd"))[:FDS_MAX]  # noqa: PTH208
    except OSError:
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 -- thousands of them
    except OSError:
        return ""


def _peer(pid: int, inode: str) -> Target:
    """Return the other end of a TCP connection by its socket's inode (`man 5 proc`, /proc/net/tcp)."""
    for name in ("tcp", "tcp6"):
        for line in procfs.text(Path(f"/proc/{pid}/net/{name}")).splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[9] == inode:
                if words[3] == "0A":  # it listens
                    return Target(f"port {_port(words[1])}")
                return Target(f"the connection to {_address(words[2])}", _port(words[2]))
    return Target("a socket")


def _port(word: str) -> int:
    return int(word.rpartition(":")[2], 16)


def _address(word: str) -> str:
    """Return `127.0.0.1:80` for `0100007F:0050`: words of 32 bits in the host's order (little-endian)."""
    raw = bytes.fromhex(word.rpartition(":")[0])
    ip = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    ip = ip[12:] if len(ip) == 16 and ip[:12] == bytes(10) + b"\xff\xff" else ip
    if len(ip) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, ip)}:{_port(word)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, ip)}]:{_port(word)}"
