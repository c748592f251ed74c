"""Accepting connections on a port that strangers can reach: never so many that the process itself runs short.

Rules: a process keeps `FDS_RESERVED` descriptors for its own work; a host that has no descriptor or memory left is one
that cannot take a connection now, and is tried again; a flood leaves the loop time for all else.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

FDS_RESERVED = 128
"""So many of the descriptors that a process may have open are not for strangers."""

BATCH_MAX = 64
"""How many connections are taken at once."""

BATCH_PAUSE_S = 0.02
"""How long after a full batch no more are taken: so all else has its turn, and 3,200 a second are."""

RETRY_S = 0.5
"""How long after a failure no more are taken."""


class Acceptor:
    """Takes the connections of a listening socket. `take` gets each with the address it comes from, not blocking;
    `refused` is called with the reason for each that is closed, and for each time that none could be taken."""

    def __init__(
        self,
        listener: socket.socket,
        take: Callable[[socket.socket, str], None],
        refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        """There must be a running loop."""
        listener.setblocking(False)
        self._listener = listener
        self._take = take
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._pausing: asyncio.TimerHandle | None = None
        self._go_on()

    def close(self) -> None:
        """Give the port up, at once."""
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
    """Return below which number descriptors are for strangers; the kernel gives the lowest that is free."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 31 if allowed == resource.RLIM_INFINITY else allowed - min(FDS_RESERVED, allowed // 4)


class Crowd(Generic[T]):
    """Those who wait, each with the address that it comes from, at most `most`.

    For one too many the oldest goes, of the address that has most of them: however many come from elsewhere, and even
    from the same address, a new one has its time.
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
        """Add one; return the one that must go for it, which the caller removes."""
        self._addresses[one] = address
        self._counts[address] = self._counts.get(address, 0) + 1
        if len(self._addresses) <= self._most:
            return None
        most = max(self._counts.values())
        return next(each for each, where in self._addresses.items() if self._counts[where] == most)

    def remove(self, one: T) -> str:
        """Take one out; return its address."""
        address = self._addresses.pop(one)
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]
        return address

    def everyone(self) -> list[T]:
        """Return all, the oldest first."""
        return list(self._addresses)
