"""Rendezvous of a gang, as a node prepares it: the port of the first node, and probes of its addresses by the other nodes.

A connection alone proves little: every host has a docker bridge of the same address. So the listener answers a nonce with
HMAC-SHA256 (RFC 2104) of the nonce and the attempt, keyed by the job's token. Only the intended node can do that.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import random
import secrets
import socket
from collections.abc import Callable

from orchestrator.core.errors import HostError
from orchestrator.core.host import interfaces
from orchestrator.core.observations import ReachableAddress
from orchestrator.core.wire.port_acceptor import Acceptor

PORT_TRIES_MAX = 200
PORT_RANGE = range(20_000, 30_000)
"""Below the ports that Linux gives to outgoing connections (32,768 and up), so that no connection takes a job's."""


def hold_port(seed: str, fixed: int | None, ports: range = PORT_RANGE) -> socket.socket:
    """Return a socket that listens on the fixed port, or on a free one of `ports`. Raises HostError when none is free.

    The caller closes it right before another process takes the port.
    """
    if fixed is not None:
        return _hold_one(fixed)
    chooser = random.Random(seed)
    for _ in range(PORT_TRIES_MAX):
        with contextlib.suppress(HostError):
            return _hold_one(chooser.choice(ports))
    raise HostError(f"no free port among {PORT_TRIES_MAX} between {ports.start} and {ports.stop}")


def free_port(seed: str) -> int:
    """Return a TCP port that is free now. Raises HostError after `PORT_TRIES_MAX` tries."""
    with hold_port(seed, None) as held:
        return int(held.getsockname()[1])


def _hold_one(port: int) -> socket.socket:
    try:
        return listen(port)
    except OSError as err:
        holder = interfaces.describe_listener(port) if err.errno == errno.EADDRINUSE else ""
        taken = f"is taken by {holder}" if holder else f"cannot be listened on: {err.strerror}"
        raise HostError(f"port {port} {taken}; choose another rendezvous.port, or none") from err


PROBE_S_MAX = 3.0
"""How long one address may take to answer; all are probed at once."""

PROBERS_MAX = 256
"""How many probers the listener serves at once; each of a job's nodes is connected for an instant. The others wait."""

BACKLOG = 1024

ANSWER_S_MAX = 5.0
NONCE_BYTES = 32
_PROOF_BYTES = 32


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
    """Listener that holds the rendezvous port until the ranks start, and answers probes."""

    def __init__(self, sock: socket.socket, token: str, attempt: int) -> None:
        """`sock` comes from `listen`; an event loop must be running."""
        self._key = token
        self._attempt = attempt
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(sock, self._answer, pending_max=PROBERS_MAX, pending_s_max=ANSWER_S_MAX)

    def close(self) -> None:
        """Release the port at once: a server may bind it before this returns to the loop."""
        self._acceptor.close()

    async def _answer(self, prober: socket.socket, _admit: Callable[[], None]) -> None:
        """Prove to one prober that this is its node; it closes first, so that no TIME_WAIT stays on this port."""
        with prober, contextlib.suppress(OSError):
            await self._prove(prober)

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
) -> tuple[tuple[ReachableAddress, ...], tuple[str, ...]]:
    """Probe all addresses at once; return those that reach the intended node, in the given order, and the failures."""
    interfaces_by_ip = {address.ip: address.interface for address in interfaces.list_addresses()}
    results = await asyncio.gather(*(_probe_one(target, port, token, attempt, interfaces_by_ip) for target in targets))
    reached = tuple(result for result in results if isinstance(result, ReachableAddress))
    return reached, tuple(result for result in results if isinstance(result, str))


async def _probe_one(
    target: str, port: int, token: str, attempt: int, interfaces_by_ip: dict[str, str]
) -> ReachableAddress | str:
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
            return f"{target}:{port} from {_source_address(sock, interfaces_by_ip)} {_failure_reason(err, connected)}"
        if not proven:
            return f"{target}:{port} from {_source_address(sock, interfaces_by_ip)} another machine answered"
        return ReachableAddress(target, interfaces_by_ip.get(sock.getsockname()[0], ""))


def _source_address(sock: socket.socket, interfaces_by_ip: dict[str, str]) -> str:
    """Return the source address that the kernel chose; without a route, all addresses of this host."""
    chosen = str(sock.getsockname()[0])
    return chosen if chosen != "0.0.0.0" else ", ".join(interfaces_by_ip) or "a host without an address"


def _failure_reason(err: Exception, connected: bool) -> str:
    if isinstance(err, (asyncio.TimeoutError, TimeoutError)):
        return (
            f"accepted the connection and sent nothing for {PROBE_S_MAX:g} s (another machine?)"
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
    """Return `wanted_bytes` bytes, fewer when the other side closes before."""
    data = b""
    while len(data) < wanted_bytes:
        more = await loop.sock_recv(sock, wanted_bytes - len(data))
        if not more:
            break
        data += more
    return data
