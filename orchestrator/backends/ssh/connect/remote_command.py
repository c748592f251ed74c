"""Command that runs on a host: its input, output and exit code.

One thread reads; another may write. Every wait and every buffer has a limit: output that is not read stays with the
host, as the channel's window bounds it, and of standard error only the last bytes are kept.
"""

from __future__ import annotations

import contextlib
import time

import paramiko

LINE_BYTES_MAX = 1 << 20
ERRORS_BYTES_MAX = 16 << 10
ERRORS_S_MAX = 0.5
"""How long to read standard error after a command's end; a child that it left may hold that open."""

END_POLL_S = 0.02
POLL_S = 0.1
"""How long one read or write waits. A reader drains standard error as often, so that it cannot block the output."""

SEND_STALL_S_MAX = 60.0
BLOCK_BYTES = 32 << 10


class RemoteCommand:
    """A command on a host, over a channel of its own."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._buffer = bytearray()
        self._errors = b""
        channel.settimeout(POLL_S)

    @property
    def errors(self) -> str:
        """The end of what came on standard error so far."""
        self._read_errors()
        return self._errors.decode(errors="replace")

    def send(self, data: bytes) -> None:
        """Write to the command's standard input. Raises BrokenPipeError, TimeoutError when it takes nothing."""
        view = memoryview(data)
        moved = time.monotonic()
        while view:
            try:
                sent = self._channel.send(bytes(view[:BLOCK_BYTES]))
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

        A line of more than `LINE_BYTES_MAX` comes in parts.
        """
        deadline = time.monotonic() + wait_s
        searched = 0
        while True:
            end = self._buffer.find(b"\n", searched)
            if end >= 0 or len(self._buffer) >= LINE_BYTES_MAX:
                cut = end if 0 <= end <= LINE_BYTES_MAX else LINE_BYTES_MAX
                line = bytes(self._buffer[:cut])
                del self._buffer[: cut + (cut == end)]
                return line
            searched = len(self._buffer)
            if not self._fill_buffer(deadline):
                rest, self._buffer = bytes(self._buffer), bytearray()
                return rest or None

    def read(self, n_bytes: int, wait_s: float) -> bytes:
        """Return at most `n_bytes` of standard output, nothing at its end. Raises TimeoutError."""
        if not self._buffer:
            self._fill_buffer(time.monotonic() + wait_s)
        data = bytes(self._buffer[:n_bytes])
        del self._buffer[:n_bytes]
        return data

    def exit_code(self, wait_s: float) -> int | None:
        """Wait for the exit code; None after a signal or a broken connection. Raises TimeoutError."""
        deadline = time.monotonic() + wait_s
        while not self._channel.exit_status_ready():
            self._read_errors()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"still running after {wait_s:g} s")
            time.sleep(END_POLL_S)
        self._read_last_errors()
        code = self._channel.recv_exit_status()
        return None if code < 0 else code

    def close(self) -> None:
        """Let go of the command; its standard input and output end."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()

    def _fill_buffer(self, deadline: float) -> bool:
        """Wait until the buffer has grown; False at the end of output."""
        while True:
            self._read_errors()
            try:
                more = self._channel.recv(LINE_BYTES_MAX)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise TimeoutError("no output") from None
                continue
            except (OSError, EOFError, paramiko.SSHException):
                return False
            self._buffer += more
            return bool(more)

    def _read_last_errors(self) -> None:
        """Read what follows the exit code: RFC 4254, 6.10 allows a server to send it before the last output."""
        deadline = time.monotonic() + ERRORS_S_MAX
        while time.monotonic() < deadline and self._read_error_block():
            pass

    def _read_errors(self) -> None:
        while self._channel.recv_stderr_ready():
            self._read_error_block()

    def _read_error_block(self) -> bool:
        """Read the next bytes of standard error; False after its end."""
        try:
            more = self._channel.recv_stderr(ERRORS_BYTES_MAX)
        except TimeoutError:
            return True
        except (OSError, EOFError, paramiko.SSHException):
            return False
        self._errors = (self._errors + more)[-ERRORS_BYTES_MAX:]
        return bool(more)
