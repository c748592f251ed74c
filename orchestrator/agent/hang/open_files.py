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
class OpenFile:
    """Description of an open file; for a TCP connection also the port at its other end."""

    text: str
    port: int = 0


def describe_fd(pid: int, fd: int) -> OpenFile:
    """Return what a process has open at `fd`; files below its working folder are relative to that."""
    link = _link(f"/proc/{pid}/fd/{fd}")
    if not link:
        return OpenFile(f"descriptor {fd}")
    if link.startswith("socket:["):
        return _describe_socket(pid, link[8:-1])
    if link.startswith("pipe:["):
        return OpenFile("standard input, a pipe" if fd == 0 else f"a pipe (descriptor {fd})")
    return OpenFile(relative_path(pid, link))


def relative_path(pid: int, path: str) -> str:
    """Return a path relative to the process's working folder, when it lies below that."""
    folder = _link(f"/proc/{pid}/cwd").rstrip("/") + "/"
    return path[len(folder) :] if path.startswith(folder) else path


def uses_gpu(pid: int) -> bool:
    """Return whether a process has a GPU's device open."""
    return any(_link(f"/proc/{pid}/fd/{fd}").startswith(_DEVICE_PREFIXES) for fd in _fds(pid))


def _fds(pid: int) -> list[int]:
    return sorted(map(int, procfs.list_names(procfs.PROC / str(pid) / "fd")))[:FDS_MAX]


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 -- thousands of them
    except OSError:
        return ""


def _describe_socket(pid: int, inode: str) -> OpenFile:
    """Return the other end of a TCP connection by its socket's inode (`man 5 proc`, /proc/net/tcp)."""
    for name in ("tcp", "tcp6"):
        for line in procfs.read_text(Path(f"/proc/{pid}/net/{name}")).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[9] == inode:
                if fields[3] == "0A":  # it listens
                    return OpenFile(f"port {_port(fields[1])}")
                return OpenFile(f"the connection to {_address(fields[2])}", _port(fields[2]))
    return OpenFile("a socket")


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
