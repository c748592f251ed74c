"""Open files of a process: descriptors in words, and the processes at the other end of a pipe or a connection.

Only links are read, and no file is stat'ed: a file on a dead file system would block the caller.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from orchestrator.core.host import procfs

FDS_MAX = 4096
SCAN_S_MAX = 0.5
"""How long the search of the host's processes for the other end of a pipe may take."""

DOORKEEPERS = ("sshd", "sshd-session", "(sd-pam)", "ssh-agent", "gpg-agent")
"""Programs of every login that hide their descriptors even from their own user, and are never part of a job."""

_O_ACCMODE = 0o3
_DEVICE_PREFIXES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")


def link_of(pid: int, fd: int) -> str:
    """Return what is open at `fd` by the kernel's link; empty when nothing is, or when it may not be read."""
    return _link(f"/proc/{pid}/fd/{fd}")


def described(pid: int, fd: int) -> str:
    """Return what a process has open at `fd`, in words; files below its working folder are relative to that."""
    target = link_of(pid, fd)
    if not target:
        return f"descriptor {fd}"
    if target.startswith("socket:["):
        return _peer(pid, target[8:-1])
    if target.startswith("pipe:["):
        return "standard input, a pipe" if fd == 0 else f"a pipe (descriptor {fd})"
    return shortened(pid, target)


def shortened(pid: int, path: str) -> str:
    """Return a path relative to the process's working folder, when it lies below that."""
    folder = _link(f"/proc/{pid}/cwd").rstrip("/") + "/"
    return path[len(folder) :] if path.startswith(folder) else path


def uses_gpu(pid: int) -> bool:
    """Tell whether a process has a GPU's device open."""
    return any(_link(f"/proc/{pid}/fd/{fd}").startswith(_DEVICE_PREFIXES) for fd in _fds(pid))


def writers(target: str) -> tuple[int, ...] | None:
    """Return the processes that have a pipe (`pipe:[N]`) open for writing, or the other side of a terminal
    (`/dev/pts/N`).

    None when that is not known: the search took too long, or a process of this user hides its descriptors. Processes of
    other users and `DOORKEEPERS` are passed over: they cannot be read and are never part of a job.
    """
    deadline_s = time.monotonic() + SCAN_S_MAX
    pids = []
    for pid in procfs.pids():
        if time.monotonic() > deadline_s:
            return None
        try:
            fds = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 -- many processes, and half the time
        except PermissionError:
            if _is_ours(pid) and procfs.text(Path(f"/proc/{pid}/comm")).rstrip("\n") not in DOORKEEPERS:
                return None
            continue
        except OSError:
            continue
        if any(_is_written_by(target, pid, fd) for fd in fds[:FDS_MAX]):
            pids.append(pid)
    return tuple(pids)


def _is_written_by(target: str, pid: int, fd: str) -> bool:
    link = _link(f"/proc/{pid}/fd/{fd}")
    if target.startswith("pipe:["):
        flags = _info(pid, fd, "flags:") if link == target else ""
        return bool(flags) and int(flags, 8) & _O_ACCMODE != os.O_RDONLY
    return link.endswith("/ptmx") and _info(pid, fd, "tty-index:") == target.rpartition("/")[2]


def _info(pid: int, fd: str, key: str) -> str:
    """Return the value of a key in a descriptor's fdinfo; empty when it is missing."""
    lines = procfs.text(Path(f"/proc/{pid}/fdinfo/{fd}")).splitlines()
    return next((line.split()[1] for line in lines if line.startswith(key)), "")


def _is_ours(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
    except OSError:
        return False


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


def _peer(pid: int, inode: str) -> str:
    """Return the other end of a TCP connection by its socket's inode (`man 5 proc`, /proc/net/tcp), in words."""
    for name in ("tcp", "tcp6"):
        for line in procfs.text(Path(f"/proc/{pid}/net/{name}")).splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[9] == inode:
                listens = words[3] == "0A"
                return f"port {_port(words[1])}" if listens else f"the connection to {_address(words[2])}"
    return "a socket"


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
