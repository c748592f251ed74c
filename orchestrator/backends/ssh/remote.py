"""A command that runs on a host: what goes in, what comes out, how it ended.

One thread reads; another may write. Nothing waits without a limit, and nothing is kept without one: what nobody reads
stays with the host, as the channel's window says, and of standard error only the last bytes are remembered.
"""

from __future__ import annotations

import threading
import time

import paramiko

LINE_BYTES_MAX = 1 << 20
ERRORS_BYTES_MAX = 16 << 10
ERRORS_S_MAX = 0.5
"""How long after a command's end more may come on its standard error; a child that it left may hold that open."""

ERRORS_POLL_S = 0.01
SEND_STALL_S_MAX = 60.0
PIECE_BYTES = 32 << 10


class Remote:
    """A command on a host, over a channel of its own."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._news = threading.Event()
        self._buffer = bytearray()
        self._errors = b""
        channel.settimeout(1.0)  # of one try; the limits proper are counted here
        channel.in_buffer.set_event(self._news)
        channel.in_stderr_buffer.set_event(self._news)

    @property
    def errors(self) -> str:
        """The end of what came on standard error so far."""
        self._take_errors()
        return self._errors.decode(errors="replace")

    def send(self, data: bytes) -> None:
        """Write to the command's standard input. Raises BrokenPipeError, TimeoutError when it takes nothing."""
        view = memoryview(data)
        moved = time.monotonic()
        while view:
            try:
                sent = self._channel.send(bytes(view[:PIECE_BYTES]))
            except TimeoutError:
                if time.monotonic() - moved > SEND_STALL_S_MAX:
                    raise TimeoutError(f"the host took nothing for {SEND_STALL_S_MAX:.0f} s") from None
                continue
            except (OSError, EOFError, paramiko.SSHException) as err:
                raise BrokenPipeError(str(err)) from err
            if not sent:
                raise BrokenPipeError("the command reads no more, or the connection is gone")
            moved = time.monotonic()
            view = view[sent:]

    def end_input(self) -> None:
        """Close the command's standard input."""
        try:
            self._channel.shutdown_write()
        except (OSError, EOFError, paramiko.SSHException) as err:
            raise BrokenPipeError(str(err)) from err

    def line(self, wait_s: float) -> bytes | None:
        """Return the next line of standard output, without its end; None after the last. Raises TimeoutError.

        A line of more than `LINE_BYTES_MAX` comes in pieces.
        """
        deadline = time.monotonic() + wait_s
        seen = 0
        while True:
            end = self._buffer.find(b"\n", seen)
            if end >= 0 or len(self._buffer) >= LINE_BYTES_MAX:
                cut = end if 0 <= end <= LINE_BYTES_MAX else LINE_BYTES_MAX
                line = bytes(self._buffer[:cut])
                del self._buffer[: cut + (cut == end)]
                return line
            seen = len(self._buffer)
            if not self._more(deadline):
                rest, self._buffer = bytes(self._buffer), bytearray()
                return rest or None

    def read(self, n_bytes: int, wait_s: float) -> bytes:
        """Return at most `n_bytes` of standard output, nothing at its end. Raises TimeoutError."""
        if not self._buffer:
            self._more(time.monotonic() + wait_s)
        data = bytes(self._buffer[:n_bytes])
        del self._buffer[:n_bytes]
        return data

    def exit_code(self, wait_s: float) -> int | None:
        """Wait for the end; None when it was a signal or a broken connection. Raises TimeoutError."""
        deadline = time.monotonic() + wait_s
        while not self._channel.status_event.wait(min(1.0, max(0.0, deadline - time.monotonic()))):
            self._take_errors()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"still running after {wait_s:g} s")
        self._take_last_errors()
        code = self._channel.exit_status
        return None if code < 0 else code

    def close(self) -> None:
        """Let go of the command; its standard input and output end."""
        try:
            self._channel.close()
        except (OSError, EOFError, paramiko.SSHException):
            pass

    def _more(self, deadline: float) -> bool:
        """Wait until the buffer has grown; False at the end of output."""
        while True:
            self._take_errors()
            # In this order: what came between the two looks is still read.
            over = self._channel.eof_received or self._channel.closed
            if self._channel.recv_ready():
                more = self._receive()
                self._buffer += more
                return bool(more)
            if over:
                return False
            if not self._news.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("no output")

    def _receive(self) -> bytes:
        """Take what is there; nothing when the connection breaks over it."""
        try:
            return self._channel.recv(LINE_BYTES_MAX)
        except (OSError, EOFError, paramiko.SSHException):
            return b""

    def _take_last_errors(self) -> None:
        """A server may tell how a command ended before the last that it said (RFC 4254, 6.10 leaves that open)."""
        deadline = time.monotonic() + ERRORS_S_MAX
        while True:
            over = self._channel.eof_received or self._channel.closed
            self._take_errors()
            if over or time.monotonic() >= deadline:
                return
            time.sleep(ERRORS_POLL_S)

    def _take_errors(self) -> None:
        while self._channel.recv_stderr_ready():
            try:
                more = self._channel.recv_stderr(ERRORS_BYTES_MAX)
            except (OSError, EOFError, paramiko.SSHException):
                return
            self._errors = (self._errors + more)[-ERRORS_BYTES_MAX:]
