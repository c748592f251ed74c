"""Bytes between a forwarded port of a host and the supervisor's own port.

Rules: no host makes another wait, and what is not taken is not read. So each forwarded connection has two threads, one
each way, and each reads only when all that it read before has been taken: beyond that, the channel's window and the
kernel's buffers bound what is kept, and hold up the sender.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import paramiko

DIAL_S_MAX = 10.0
"""How long the supervisor's own port may take to answer; it is on this machine."""

READ_BYTES = 64 * 1024

FLOWS_MAX = 16
"""How many connections one host may have: its agent has one, and all others there can reach the port too."""

LINGER_S = 10.0
"""How long the host's side may take to end after the supervisor's side did."""

Address = tuple[str, int]


class Forward:
    """One forwarded connection: a channel of the SSH connection on one side, a socket of this machine on the other."""

    def __init__(self, channel: paramiko.Channel, goal: Address, ended: Callable[[], None]) -> None:
        self._channel = channel
        self._goal = goal
        self._ended = ended
        self._local: socket.socket | None = None
        self._is_put_out = False
        self.is_over = False
        self.said_bytes = 0
        """How much the supervisor has said: to a stranger hardly anything, to an agent more and more."""
        threading.Thread(target=self._run, name=f"flow to {goal[1]}", daemon=True).start()

    def put_out(self) -> None:
        """End the flow, from any thread and without waiting."""
        self._is_put_out = True
        if self._local is not None:
            _shut(self._local)

    def _run(self) -> None:
        """Be the flow's thread. Whatever breaks one side ends both: the agent dials again, and says what is missing."""
        try:
            with socket.create_connection(self._goal, timeout=DIAL_S_MAX) as local:
                local.settimeout(None)
                local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._local = local
                if self._is_put_out:
                    return
                inward = threading.Thread(
                    target=self._inward, args=(local,), name=f"flow from {self._goal[1]}", daemon=True
                )
                inward.start()
                try:
                    self._outward(local)
                    inward.join(0.0 if self._is_put_out else LINGER_S)
                finally:
                    _shut(local)
        except (OSError, EOFError, paramiko.SSHException):
            pass
        finally:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                self._channel.close()
            self.is_over = True
            self._ended()

    def _outward(self, local: socket.socket) -> None:
        """Carry what the supervisor says to the host, until it has said all."""
        while data := local.recv(READ_BYTES):
            self._channel.sendall(data)
            self.said_bytes += len(data)
        self._channel.shutdown_write()

    def _inward(self, local: socket.socket) -> None:
        """Carry what the host says to the supervisor, until it has said all or is gone."""
        try:
            while data := self._channel.recv(READ_BYTES):
                local.sendall(data)
            if not self._channel.closed:
                local.shutdown(socket.SHUT_WR)
                return
        except (OSError, EOFError, paramiko.SSHException):
            pass
        _shut(local)


def admit(flows: list[Forward], new: Forward) -> list[Forward]:
    """Return a host's flows with a new one. For one too many, that one goes to which the supervisor has said least,
    the oldest of several: so whatever else dials there, an agent keeps its connection, and gets a new one."""
    going_on = [flow for flow in flows if not flow.is_over]
    if len(going_on) >= FLOWS_MAX:
        out = min(going_on, key=lambda flow: flow.said_bytes)
        out.put_out()
        going_on.remove(out)
    return [*going_on, new]


def _shut(local: socket.socket) -> None:
    """End a line for both threads; `close` alone wakes neither."""
    with contextlib.suppress(OSError):
        local.shutdown(socket.SHUT_RDWR)
