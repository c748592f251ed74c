"""Network interfaces of this machine: their IPv4 addresses, and which process listens on a port."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import socket
import struct
import sys
from pathlib import Path

from orchestrator.core.host import procfs
from orchestrator.core.observations import Address

ADDRESSES_MAX = 256

_SYS_NET = Path("/sys/class/net")

_LAST = re.compile(r"docker|br-|virbr|veth|tun|tap|cni|flannel|cali|cilium|lxc|lxd|podman|vmnet|vboxnet|kube|dummy")
"""Interfaces that lead to containers, virtual machines or tunnels of this host, seldom to another host."""

_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913  # linux/sockios.h
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8  # linux/if.h
_IFREQ_BYTES = 40 if sys.maxsize > 1 << 32 else 32
_LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp


def list_addresses() -> tuple[Address, ...]:
    """Return the IPv4 addresses of this host's interfaces that are up, likely ways to other hosts first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        usable = [address for address in _all_addresses(sock) if _may_lead_away(sock, address)]
    return tuple(sorted(dict.fromkeys(usable), key=_rank))


def _all_addresses(sock: socket.socket) -> list[Address]:
    """Ask the kernel for all IPv4 addresses (`man 7 netdevice`, SIOCGIFCONF)."""
    buffer = array.array("B", bytes(ADDRESSES_MAX * _IFREQ_BYTES))
    start, _ = buffer.buffer_info()
    answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iP", len(buffer), start))
    filled_bytes = int(struct.unpack("iP", answer)[0])
    data = buffer.tobytes()[:filled_bytes]
    entries = (data[at : at + _IFREQ_BYTES] for at in range(0, len(data), _IFREQ_BYTES))
    return [
        Address(socket.inet_ntoa(entry[20:24]), entry[:16].split(b"\0", 1)[0].decode(errors="replace"))
        for entry in entries
    ]


def _may_lead_away(sock: socket.socket, address: Address) -> bool:
    try:
        name = address.interface.encode()[:15]
        answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sh22x", name, 0))
    except OSError:
        return False  # gone in the meantime
    (flags,) = struct.unpack_from("h", answer, 16)
    return bool(flags & _IFF_UP) and not flags & _IFF_LOOPBACK and not address.ip.startswith("127.")


def _rank(address: Address) -> int:
    """Return the order of an address: 0 for a physical interface, 1 for bond, bridge and VLAN, 2 for `_LAST`."""
    name = address.interface.partition(":")[0]
    if _LAST.match(name) or address.ip.startswith("169.254."):
        return 2
    return 0 if (_SYS_NET / name / "device").exists() else 1


def describe_listener(port: int) -> str:
    """Return the process that listens on a TCP port of this host, as text; empty when /proc does not show it."""
    inodes = _listening(port)
    if not inodes:
        return ""
    for pid in procfs.pids():
        if _has_socket(pid, inodes):
            command = procfs.read_text(procfs.PROC / str(pid) / "cmdline").replace("\0", " ").strip()
            return f"pid {pid} ({command[:200] or procfs.read_text(procfs.PROC / str(pid) / 'comm').strip()})"
    return "a process of another user"


def _listening(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port (`man 5 proc`, /proc/net/tcp)."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in procfs.read_text(procfs.PROC / "net" / table).splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{words[9]}]")
    return inodes


def _has_socket(pid: int, inodes: set[str]) -> bool:
    folder = procfs.PROC / str(pid) / "fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208 -- every process's descriptors
    except OSError:
        return False
    for name in names:
        with contextlib.suppress(OSError):
            if os.readlink(folder / name) in inodes:  # noqa: PTH115
                return True
    return False
