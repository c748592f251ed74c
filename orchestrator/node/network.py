"""Where can nodes meet? This host's addresses, a listener on the port that ranks will use, and tries to reach one.

That a connection comes about proves little: every host has a docker bridge of the same address. So the listener answers
a nonce with HMAC-SHA256 (RFC 2104) of it and the attempt, keyed by the job's token, which only the node meant can do.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import hmac
import os
import re
import secrets
import socket
import struct
import sys
from pathlib import Path

from orchestrator.node import procfs
from orchestrator.wire.accepting import Acceptor, Crowd
from orchestrator.wire.messages import Address, Reached

PROBE_S_MAX = 3.0
"""How long one address may take to answer; all are tried at once."""

ADDRESSES_MAX = 256
PROBERS_MAX = 256
"""How many may be at the listener at once; each of a job's nodes is there for an instant."""

BACKLOG = 1024

ANSWER_S_MAX = 5.0
NONCE_BYTES = 32
_PROOF_BYTES = 32

_SYS_NET = Path("/sys/class/net")
_LAST = re.compile(
    r"docker|br-|virbr|veth|tun|tap|cni|flannel|cali|cilium|lxc|lxd|podman|vmnet|vboxnet|kube|dummy"
)
"""Interfaces that lead to containers, virtual machines or tunnels of this host, seldom to another host."""

_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913  # linux/sockios.h
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8  # linux/if.h
_IFREQ_BYTES = 40 if sys.maxsize > 1 << 32 else 32

_LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp


def addresses() -> tuple[Address, ...]:
    """Return the IPv4 addresses of this host's interfaces that are up, likely ways to other hosts first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        found = [one for one in _all_addresses(sock) if _may_lead_away(sock, one)]
    return tuple(sorted(dict.fromkeys(found), key=_rank))


def _all_addresses(sock: socket.socket) -> list[Address]:
    """Ask the kernel for all IPv4 addresses (`man 7 netdevice`, SIOCGIFCONF)."""
    buffer = array.array("B", bytes(ADDRESSES_MAX * _IFREQ_BYTES))
    start, _ = buffer.buffer_info()
    answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iP", len(buffer), start))
    filled_bytes = int(struct.unpack("iP", answer)[0])
    data = buffer.tobytes()[:filled_bytes]
    entries = (data[at : at + _IFREQ_BYTES] for at in range(0, len(data), _IFREQ_BYTES))
    return [
        Address(socket.inet_ntoa(one[20:24]), one[:16].split(b"\0", 1)[0].decode(errors="replace"))
        for one in entries
    ]


def _may_lead_away(sock: socket.socket, one: Address) -> bool:
    try:
        name = one.interface.encode()[:15]
        answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sh22x", name, 0))
    except OSError:
        return False  # gone meanwhile
    (flags,) = struct.unpack_from("h", answer, 16)
    return bool(flags & _IFF_UP) and not flags & _IFF_LOOPBACK and not one.ip.startswith("127.")


def _rank(one: Address) -> int:
    """Say how likely an address leads to another host: physical, then bond, bridge and VLAN, then what seldom does."""
    name = one.interface.partition(":")[0]
    if _LAST.match(name) or one.ip.startswith("169.254."):
        return 2
    return 0 if (_SYS_NET / name / "device").exists() else 1


def listen(port: int) -> socket.socket:
    """Return a socket that listens on `port` of every address. Raises OSError when the port is taken."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


class Listener:
    """Holds the port of the rendezvous until the ranks start, and answers whoever probes it."""

    def __init__(self, sock: socket.socket, token: str, attempt: int) -> None:
        """`sock` comes from `listen`; there must be a running loop."""
        self._key = token
        self._attempt = attempt
        self._probers: Crowd[asyncio.Task[None]] = Crowd(PROBERS_MAX)
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(sock, self._take)

    def close(self) -> None:
        """Give the port up, at once: a server may take it before this returns to the loop."""
        self._acceptor.close()
        for task in self._probers.everyone():
            task.cancel()

    def _take(self, prober: socket.socket, address: str) -> None:
        task = self._loop.create_task(self._answer(prober))
        out = self._probers.add(task, address)
        task.add_done_callback(lambda _: self._gone(task, prober))
        if out is not None:
            out.cancel()

    def _gone(self, task: asyncio.Task[None], prober: socket.socket) -> None:
        self._probers.remove(task)
        prober.close()  # one that is cancelled before it has begun has not done so

    async def _answer(self, prober: socket.socket) -> None:
        """Prove to one prober who this is; it closes first, so that no connection of this port lingers here."""
        with prober, contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._prove(prober), ANSWER_S_MAX)

    async def _prove(self, prober: socket.socket) -> None:
        nonce = await _receive(self._loop, prober, NONCE_BYTES)
        if len(nonce) == NONCE_BYTES:
            await self._loop.sock_sendall(prober, proof(self._key, nonce, self._attempt))
            await self._loop.sock_recv(prober, 1)


def proof(token: str, nonce: bytes, attempt: int) -> bytes:
    """Return the listener's answer to a nonce."""
    return hmac.digest(token.encode(), nonce + str(attempt).encode(), "sha256")


async def probe(
    targets: tuple[str, ...], port: int, token: str, attempt: int
) -> tuple[tuple[Reached, ...], tuple[str, ...]]:
    """Try all addresses at once; return those that reach the node meant, in the given order, and how others failed."""
    own = {one.ip: one.interface for one in addresses()}
    found = await asyncio.gather(*(_try(target, port, token, attempt, own) for target in targets))
    reached = tuple(one for one in found if isinstance(one, Reached))
    return reached, tuple(one for one in found if isinstance(one, str))


async def _try(target: str, port: int, token: str, attempt: int, own: dict[str, str]) -> Reached | str:
    loop = asyncio.get_running_loop()
    connected = False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)

        async def ask() -> bytes:
            nonlocal connected
            await loop.sock_connect(sock, (target, port))
            connected = True
            nonce = secrets.token_bytes(NONCE_BYTES)
            await loop.sock_sendall(sock, nonce)
            answer = await _receive(loop, sock, _PROOF_BYTES)
            return nonce if hmac.compare_digest(answer, proof(token, nonce, attempt)) else b""

        try:
            proven = await asyncio.wait_for(ask(), PROBE_S_MAX)
        except (OSError, asyncio.TimeoutError) as err:
            return f"{target}:{port} from {_own_address(sock, own)} {_why(err, connected)}"
        if not proven:
            return f"{target}:{port} from {_own_address(sock, own)} another machine answered"
        return Reached(target, own.get(sock.getsockname()[0], ""))


def _own_address(sock: socket.socket, own: dict[str, str]) -> str:
    """Return the address that the kernel chose for the way there; where it knows no way, all that this host has."""
    chosen = str(sock.getsockname()[0])
    return chosen if chosen != "0.0.0.0" else ", ".join(own) or "a host without an address"


def _why(err: Exception, connected: bool) -> str:
    if isinstance(err, (asyncio.TimeoutError, TimeoutError)):
        return (
            f"took the connection and said nothing for {PROBE_S_MAX:g} s (another machine?)"
            if connected
            else f"timed out after {PROBE_S_MAX:g} s (firewall?)"
        )
    if connected:
        return "another machine answered"
    if isinstance(err, ConnectionRefusedError):
        return "refused"
    assert isinstance(err, OSError)
    return "no route" if err.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH) else err.strerror or str(err)


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, wanted_bytes: int) -> bytes:
    """Return so many bytes, fewer when the other side closes before."""
    data = b""
    while len(data) < wanted_bytes:
        more = await loop.sock_recv(sock, wanted_bytes - len(data))
        if not more:
            break
        data += more
    return data


def holder(port: int) -> str:
    """Say who listens on a TCP port of this host, as far as /proc tells; empty when it tells nothing."""
    inodes = _listening(port)
    if not inodes:
        return ""
    for pid in procfs.pids():
        if _has_socket(pid, inodes):
            command = procfs.text(procfs.PROC / str(pid) / "cmdline").replace("\0", " ").strip()
            return f"pid {pid} ({command[:200] or procfs.text(procfs.PROC / str(pid) / 'comm').strip()})"
    return "a process of another user"


def _listening(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port (`man 5 proc`, /proc/net/tcp)."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in procfs.text(procfs.PROC / "net" / table).splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{words[9]}]")
    return found


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
