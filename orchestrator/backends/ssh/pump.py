"""How do bytes get from a forwarded port of a host to the supervisor's own port, and back?

Rules: no host makes another wait, and what nobody takes is not read. So each flow has one thread of its own, the only
one that sends on the SSH connection, for that may take as long as a network is broken; the other way, the thread in
which paramiko reads writes straight into the socket and never waits. What the socket does not take at once is kept,
and only what it took is given back to the channel's window: the window bounds what is kept.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import paramiko
from paramiko.buffered_pipe import BufferedPipe

DIAL_S_MAX = 10.0
"""How long the supervisor's own port may take to answer; it is on this machine."""

READ_BYTES = 64 * 1024
"""How much is read from the supervisor's side before it is sent on."""

GIVE_BACK_BYTES = 64 * 1024
"""After so many bytes the far end is told that there is room again; paramiko folds them further."""

LINGER_S = 10.0
"""How long the host's side may take to end after the supervisor's side did."""

LOOK_S = 30.0
"""How often a flow in which nothing happens looks around; news wakes it at once."""

Address = tuple[str, int]

if TYPE_CHECKING:
    _Pipe = BufferedPipe[bytes]
else:
    _Pipe = BufferedPipe  # generic for type checkers only


class Bell:
    """Wakes a thread that waits in poll, from any other thread, also when that has left already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        """Wake the waiting thread."""
        with self._lock:  # a number that was closed may be another file's by now
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def quiet(self) -> None:
        """Hear the bell, however often it rang."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)
            self._fd = -1


class Inflow(_Pipe):
    """Takes the place of the buffer that paramiko feeds, so that bytes go on in the thread that read them.

    `feed` and `close` are called by paramiko, `close` with the channel's lock held: neither waits for anything.
    """

    def __init__(self, bell: Bell) -> None:
        super().__init__()
        self._bell = bell
        self._mutex = threading.Lock()
        self._socket: socket.socket | None = None
        self._kept = bytearray()
        self._taken_bytes = 0
        self._failed: OSError | None = None
        self._ended = False

    def feed(self, data: bytes) -> None:
        """Pass on what came from the host; keep what the socket does not take now."""
        with self._mutex:
            if self._failed is not None:
                return
            sent = 0 if self._kept else self._send(data)
            if sent < len(data):
                self._kept += memoryview(data)[sent:]
            if self._kept or self._failed is not None or self._taken_bytes >= GIVE_BACK_BYTES:
                self._bell.ring()

    def close(self) -> None:
        """The host sends no more."""
        with self._mutex:
            self._ended = True
            self._bell.ring()

    def read(self, nbytes: int, timeout: float | None = None) -> bytes:
        """Return as many bytes as the socket took. Only their number counts: with it, `Channel.recv` gives the window
        back, while the bytes themselves have long arrived."""
        with self._mutex:
            count = min(nbytes, self._taken_bytes)
            self._taken_bytes -= count
        return bytes(count)

    def open(self, goal: socket.socket) -> None:
        """From now on `goal`, which never blocks, takes the bytes."""
        with self._mutex:
            self._socket = goal

    def flush(self) -> bool:
        """Pass on what was kept, as much as goes; tell whether all of it went. Raises OSError when nobody takes it."""
        with self._mutex:
            if self._kept and self._failed is None:
                sent = self._send(self._kept)
                del self._kept[:sent]
            if self._failed is not None:
                raise self._failed
            return not self._kept

    @property
    def taken_bytes(self) -> int:
        """What the socket took and the window does not know of yet."""
        return self._taken_bytes

    @property
    def ended(self) -> bool:
        return self._ended

    def _send(self, data: bytes | bytearray) -> int:
        if self._socket is None:
            return 0
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as err:
            self._failed = err
            return 0
        self._taken_bytes += sent
        return sent


class Flow:
    """One forwarded connection: a channel of the SSH connection on one side, a socket of this machine on the other.

    To be made in the thread that hands the channel out, before anything of it was read.
    """

    def __init__(self, channel: paramiko.Channel, goal: Address, ended: Callable[[], None]) -> None:
        self._channel = channel
        self._goal = goal
        self._ended = ended
        self._bell = Bell()
        self._inflow = Inflow(self._bell)
        channel.in_buffer = self._inflow
        self._thread = threading.Thread(target=self._run, name=f"flow to {goal[1]}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Be the flow's thread. Whatever breaks one side ends both: the agent dials again, and says what is missing."""
        try:
            with socket.create_connection(self._goal, timeout=DIAL_S_MAX) as local:
                local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                local.setblocking(False)
                self._inflow.open(local)
                self._pump(local)
        except (OSError, EOFError, paramiko.SSHException):
            pass
        finally:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                self._channel.close()
            self._bell.close()
            self._ended()

    def _pump(self, local: socket.socket) -> None:
        """Carry bytes until either side is through."""
        channel, inflow = self._channel, self._inflow
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        linger_until_s: float | None = None  # once the supervisor's side has ended
        shut = False
        while linger_until_s is None or time.monotonic() < linger_until_s:
            closed, ended = (
                channel.closed,
                inflow.ended,
            )  # before the flush: what comes first is passed on first
            flushed = inflow.flush()
            while inflow.taken_bytes and channel.recv(inflow.taken_bytes):
                pass
            if flushed and ended and not shut:
                local.shutdown(socket.SHUT_WR)
                shut = True
            if flushed and (closed or (shut and linger_until_s is not None)):
                return
            mask = (0 if flushed else select.POLLOUT) | (select.POLLIN if linger_until_s is None else 0)
            poll.register(local, mask)
            seen = dict(poll.poll((LOOK_S if linger_until_s is None else LINGER_S) * 1000))
            if self._bell.fileno() in seen:
                self._bell.quiet()
            if linger_until_s is None and seen.get(local.fileno(), 0) & ~select.POLLOUT:
                if not self._send_on(local):
                    linger_until_s = time.monotonic() + LINGER_S
            elif seen.get(local.fileno(), 0) & (select.POLLERR | select.POLLHUP):
                return

    def _send_on(self, local: socket.socket) -> bool:
        """Carry what the supervisor said to the host; tell whether it goes on speaking."""
        try:
            data = local.recv(READ_BYTES)
        except BlockingIOError:
            return True
        if data:
            self._channel.sendall(data)
            return True
        self._channel.shutdown_write()
        return False
