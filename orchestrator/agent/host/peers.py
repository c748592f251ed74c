"""Measurement of links between nodes: a listener on the ports that ranks would use, and dials to it from other nodes.

A dial proves that the intended node answers (see `rendezvous.probe`), then takes the round trip of a byte, the best of
several, and sends for a short time; the listener counts what arrives. All waits are bounded.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Sequence

from orchestrator.agent.host import rendezvous
from orchestrator.core.host_facts import Link

DIAL_S_MAX = 2.0
"""How long one address may take to answer."""

SILENT_S_MAX = 5.0
"""How long a listener waits for more data from a connected dialler."""

ADDRESSES_MAX = 4
PINGS = 10
BLOCK = bytes(1 << 16)
COUNT_BYTES = 8
DIALLERS_MAX = 64
WRONG_MACHINE = "another machine answered"


class PeerListener:
    """Listener on two ports: that of the rendezvous, and one that the kernel chooses, as gloo and NCCL do."""

    def __init__(self, token: str, port: int | None) -> None:
        """Raises HostError when the fixed port is taken."""
        self._token = token
        first = rendezvous.hold_port(token, port)
        self._sockets = (first, rendezvous.listen(0))
        self.ports = tuple(int(sock.getsockname()[1]) for sock in self._sockets)
        self._dialler_slots = threading.Semaphore(DIALLERS_MAX)
        for sock in self._sockets:
            sock.setblocking(True)
            threading.Thread(target=self._accept, args=(sock,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                dialler, _ = listener.accept()
                if self._dialler_slots.acquire(blocking=False):
                    threading.Thread(target=self._serve, args=(dialler,), daemon=True).start()
                else:
                    dialler.close()

    def _serve(self, dialler: socket.socket) -> None:
        try:
            with dialler, contextlib.suppress(OSError):
                dialler.settimeout(SILENT_S_MAX)
                dialler.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                nonce = _receive(dialler, rendezvous.NONCE_BYTES)
                dialler.sendall(rendezvous.proof(self._token, nonce, 0))
                for _ in range(PINGS):
                    dialler.sendall(_receive(dialler, 1))
                count = 0
                while data := dialler.recv(1 << 18):
                    count += len(data)
                dialler.sendall(count.to_bytes(COUNT_BYTES, "big"))
        finally:
            self._dialler_slots.release()


def measure_link(addresses: Sequence[str], ports: Sequence[int], token: str, send_s: float) -> Link:
    """Dial each port of another node at the first of its addresses that answers; send for `send_s` to the first port."""
    address, rtt_s, bytes_per_s = "", 0.0, 0.0
    faults = []
    for port in ports:
        why = []
        for candidate in [address] if address else addresses[:ADDRESSES_MAX]:
            try:
                took = _dial(candidate, port, token, 0.0 if bytes_per_s else send_s)
            except OSError as err:
                why.append(f"{candidate}:{port} {_reason(err)}")
                continue
            address, why = candidate, []
            if not rtt_s:
                rtt_s, bytes_per_s = took
            break
        faults.append(", ".join(why))
    return Link(address, rtt_s, bytes_per_s, tuple(faults))


def _dial(address: str, port: int, token: str, send_s: float) -> tuple[float, float]:
    """Return the round trip and the throughput. Raises OSError."""
    with socket.create_connection((address, port), timeout=DIAL_S_MAX) as line:
        line.settimeout(SILENT_S_MAX)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(rendezvous.NONCE_BYTES)
        line.sendall(nonce)
        expected = rendezvous.proof(token, nonce, 0)
        if not hmac.compare_digest(_receive(line, len(expected)), expected):
            raise OSError(WRONG_MACHINE)
        rtt_s = min(_ping(line) for _ in range(PINGS))
        began_s = time.monotonic()
        while send_s and time.monotonic() - began_s < send_s:
            line.sendall(BLOCK)
        line.shutdown(socket.SHUT_WR)
        count = int.from_bytes(_receive(line, COUNT_BYTES), "big")
        return rtt_s, count / max(time.monotonic() - began_s, 1e-6) if send_s else 0.0


def _ping(line: socket.socket) -> float:
    began_s = time.monotonic()
    line.sendall(b"p")
    _receive(line, 1)
    return time.monotonic() - began_s


def _receive(line: socket.socket, wanted_bytes: int) -> bytes:
    data = b""
    while len(data) < wanted_bytes:
        more = line.recv(wanted_bytes - len(data))
        if not more:
            raise OSError(WRONG_MACHINE)
        data += more
    return data


def _reason(err: OSError) -> str:
    if isinstance(err, TimeoutError):
        return f"timed out after {DIAL_S_MAX:g} s (firewall?)"
    if isinstance(err, ConnectionRefusedError):
        return "refused (firewall?)"
    return "no route" if err.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH) else err.strerror or str(err)
