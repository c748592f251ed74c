"""Port forward: bytes between a forwarded port of a host and the supervisor's own port.

Rules: no host delays another, and nothing is read that the other side does not take. So each forwarded connection has
two threads, one for each direction, and each reads only when all that it read before has been taken. Beyond that, the
channel's window and the kernel's buffers bound what is kept, and hold up the sender.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import paramiko

from orchestrator.core.wire.port_acceptor import cut_off

DIAL_S_MAX = 10.0
"""How long the supervisor's own port may take to answer; it is on this machine."""

READ_BYTES = 64 * 1024

FORWARDS_MAX = 16
"""How many connections one host may have: its agent has one, but any process there can reach the port. The supervisor
cuts off strangers after seconds."""

LINGER_S = 10.0
"""How long the host's side may take to end after the supervisor's side did."""

Address = tuple[str, int]


class Forward:
    """One forwarded connection: a channel of the SSH connection on one side, a socket of this machine on the other."""

    def __init__(self, channel: paramiko.Channel, address: Address, ended: Callable[[], None]) -> None:
        self._channel = channel
        self._address = address
        self._ended = ended
        self.is_over = False
        threading.Thread(target=self._run, name=f"forward to {address[1]}", daemon=True).start()

    def _run(self) -> None:
        """Run the thread. A break of one side ends both: the agent dials again, and reports what is missing."""
        try:
            with socket.create_connection(self._address, timeout=DIAL_S_MAX) as local:
                local.settimeout(None)
                local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                inward = threading.Thread(
                    target=self._copy_to_supervisor,
                    args=(local,),
                    name=f"forward from {self._address[1]}",
                    daemon=True,
                )
                inward.start()
                try:
                    self._copy_to_host(local)
                    inward.join(LINGER_S)
                finally:
                    cut_off(local)
        except (OSError, EOFError, paramiko.SSHException):
            pass
        finally:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                self._channel.close()
            self.is_over = True
            self._ended()

    def _copy_to_host(self, local: socket.socket) -> None:
        """Copy bytes from the supervisor to the host, until the supervisor shuts down its side."""
        while data := local.recv(READ_BYTES):
            self._channel.sendall(data)
        self._channel.shutdown_write()

    def _copy_to_supervisor(self, local: socket.socket) -> None:
        """Copy bytes from the host to the supervisor, until the host shuts down its side or is lost."""
        try:
            while data := self._channel.recv(READ_BYTES):
                local.sendall(data)
            if not self._channel.closed:
                local.shutdown(socket.SHUT_WR)
                return
        except (OSError, EOFError, paramiko.SSHException):
            pass
        cut_off(local)
