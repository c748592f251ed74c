"""Acceptor of connections on a port that strangers can reach, and the bounded crowd of peers not yet identified.

Rules: the process keeps `FDS_RESERVED` descriptors for its own work; when the host has no descriptor or memory left,
accepting pauses and is tried again; a flood leaves the event loop time for everything else.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

FDS_RESERVED = 128
"""How many of the descriptors that a process may have open are not for strangers."""

BATCH_MAX = 64
"""How many connections are accepted at once."""

BATCH_PAUSE_S = 0.02
"""How long accepting pauses after a full batch: others get their turn, and 3,200 connections a second are accepted."""

RETRY_S = 0.5
"""How long accepting pauses after a failure."""


class Acceptor:
    """Accepts the connections of a listening socket.

    `take` gets each socket, non-blocking, with the address it comes from. `refused` gets the reason for each connection
    that is closed at once, and for each time that none could be accepted.
    """

    def __init__(
        self,
        listener: socket.socket,
        take: Callable[[socket.socket, str], None],
        refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Start to accept; needs a running event loop."""
        listener.setblocking(False)
        self._listener = listener
        self._take = take
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._pausing: asyncio.TimerHandle | None = None
        self._go_on()

    def close(self) -> None:
        """Give up the port, at once."""
        if self._pausing is not None:
            self._pausing.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _go_on(self) -> None:
        self._pausing = None
        self._loop.add_reader(self._listener, self._accept)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pausing = self._loop.call_later(seconds, self._go_on)

    def _accept(self) -> None:
        for _ in range(BATCH_MAX):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as err:
                self._refused(f"none can be taken now: {err.strerror}")
                self._pause(RETRY_S)
                return
            if sock.fileno() >= _fds_max():
                sock.close()
                self._refused("few descriptors are left, see `ulimit -n`")
            else:
                sock.setblocking(False)
                self._take(sock, str(address[0]))
        self._pause(BATCH_PAUSE_S)


def _fds_max() -> int:
    """Return the number from which descriptors are not for strangers; the kernel gives the lowest that is free."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 31 if allowed == resource.RLIM_INFINITY else allowed - min(FDS_RESERVED, allowed // 4)


class Crowd(Generic[T]):
    """At most `most` waiting members, each with the address that it comes from.

    A member too many evicts the oldest member of the address that has the most, so that a new member gets its time,
    however many come from elsewhere, or even from the same address.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._addresses: dict[T, str] = {}  # the oldest first
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __contains__(self, one: T) -> bool:
        return one in self._addresses

    def add(self, one: T, address: str) -> T | None:
        """Add a member; return the member that it evicts, which the caller removes."""
        self._addresses[one] = address
        self._counts[address] = self._counts.get(address, 0) + 1
        if len(self._addresses) <= self._most:
            return None
        most = max(self._counts.values())
        return next(each for each, where in self._addresses.items() if self._counts[where] == most)

    def remove(self, one: T) -> str:
        """Remove a member; return its address."""
        address = self._addresses.pop(one)
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]
        return address

    def everyone(self) -> list[T]:
        """Return all members, the oldest first."""
        return list(self._addresses)
