"""Acceptor of connections on a port that strangers can reach.

Rules: unauthenticated peers have a limit in number and in time; at the limit, further ones wait in the kernel's
backlog. When the host has no descriptor or memory left, accepting pauses and is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

RETRY_S = 0.5
"""How long accepting pauses after a failure."""

Serve = Callable[[socket.socket, Callable[[], None]], Coroutine[Any, Any, None]]
"""What serves a connection, non-blocking, and a function to call once its peer is known."""


class Acceptor:
    """Accepts the connections of a listening socket, of which `pending_max` may be unknown, each for `pending_s_max`."""

    def __init__(self, listener: socket.socket, serve: Serve, *, pending_max: int, pending_s_max: float) -> None:
        """Start to accept; needs a running event loop."""
        listener.setblocking(False)
        self._listener = listener
        self._serve = serve
        self._pending_max = pending_max
        self._pending_s_max = pending_s_max
        self._pending: dict[asyncio.Task[None], asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_short = False  # no descriptor was left, which has been reported
        self._loop = asyncio.get_running_loop()
        self._resume_accepting()

    def close(self) -> None:
        """Close the port at once, and all connections whose peer is not known."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for task in self._pending:
            task.cancel()

    def _resume_accepting(self) -> None:
        if self._listener.fileno() >= 0 and len(self._pending) < self._pending_max:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as err:
            if not self._is_short:
                print(f"no connection can be accepted now: {err.strerror}", flush=True)
            self._is_short = True
            self._loop.remove_reader(self._listener)
            self._loop.call_later(RETRY_S, self._resume_accepting)
            return
        self._is_short = False
        sock.setblocking(False)
        task = self._loop.create_task(self._serve(sock, lambda: self._settle(task)))
        self._tasks.add(task)
        self._pending[task] = self._loop.call_later(self._pending_s_max, cut_off, sock)
        task.add_done_callback(lambda _: self._end(task, sock))
        if len(self._pending) >= self._pending_max:
            self._loop.remove_reader(self._listener)

    def _settle(self, task: asyncio.Task[None]) -> None:
        """Stop counting a connection as pending: its peer is known, or it has ended."""
        timer = self._pending.pop(task, None)
        if timer is not None:
            timer.cancel()
            self._resume_accepting()

    def _end(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        self._settle(task)
        self._tasks.discard(task)
        sock.close()  # a task that was cancelled before it began has not closed it


def cut_off(sock: socket.socket) -> None:
    """Shut down a connection, so that its readers see the end, which `close` alone does not show them; a task that is cancelled in TLS could leave a transport on a
    descriptor that the next connection gets."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
