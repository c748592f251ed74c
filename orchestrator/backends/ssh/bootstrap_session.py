"""Bootstrap session of the launching side with a host: staged replies over one command's input and output.

Each stage has a limit; each failure names its stage, the reason and a fix. What a login shell prints on its own is
noise: it is skipped, and kept as evidence.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from orchestrator.backends.api import LaunchError
from orchestrator.core import codec
from orchestrator.core.observations import Retryable
from orchestrator.core.wire import bootstrap as w

SHELL_S_MAX = 20.0
PYTHON_S_MAX = 30.0
FOLDER_S_MAX = 30.0
STALL_S_MAX = 60.0
"""How long a copy may make no progress: no byte taken, no sign of unpacking."""

LEASE_S_MAX = 30.0
AGENT_S_MAX = 20.0
SURVEY_S_MAX = 60.0
CLEAN_UP_S_MAX = 100.0
"""A survey may have to wake the GPUs, and a cleanup to wait for processes to end."""

STEP_S_MAX = 30.0
"""How long a step of a check may take, unless it has a limit of its own."""

LAUNCH_S_MAX = 3600.0
"""Limit of a session, even while the host shows signs of life."""

END_S_MAX = 5.0
CLOCK_S_MAX = 60.0
"""A host whose clock differs by more gets a note."""

BLOCK_BYTES = 256 * 1024
NOISE_BYTES_MAX = 4 << 20
NOISE_LINES_SHOWN = 5
EVIDENCE_CHARS_MAX = 400

LIMITS_S = {
    "shell": SHELL_S_MAX, "python": PYTHON_S_MAX, "folder": FOLDER_S_MAX, "copy": STALL_S_MAX, "lease": LEASE_S_MAX,
    "agent": AGENT_S_MAX, "survey": SURVEY_S_MAX, "cleanup": CLEAN_UP_S_MAX, "check": STEP_S_MAX,
}  # fmt: skip

_TIMEOUT_TEXTS = {
    "shell": (
        "its login shell has not run the command",
        "check whether `ssh HOST true` returns, and what ~/.bashrc does",
    ),
    "python": (
        "no Python has answered",
        "check whether `python3 --version` returns there; a network disk may hang",
    ),
    "folder": (
        "the job's folder could not be created",
        "a network disk may hang: set ssh.remote_dir to a local one",
    ),
    "copy": ("the copy has made no progress", "check the network and the disk there"),
    "lease": ("no lease was granted", "check whether `nvidia-smi -L` returns there"),
    "agent": ("the agent has not answered", ""),
}

_REPLIES = codec.classes_by_kind(w.Reply)
T = TypeVar("T")
U = TypeVar("U")


class RemoteProcess(Protocol):
    """A command that runs on a host."""

    @property
    def errors(self) -> str:
        """The end of its standard error."""

    def send(self, data: bytes) -> None:
        """Write to its standard input. Raises BrokenPipeError, TimeoutError."""

    def line(self, wait_s: float) -> bytes | None:
        """Return the next line of its standard output, None at the end. Raises TimeoutError."""

    def exit_code(self, wait_s: float) -> int | None:
        """Return its exit code, None when that is not known. Raises TimeoutError."""

    def close(self) -> None:
        """Let go of it."""


class HostConnection(Protocol):
    """An open connection to a host."""

    def run(self, command: str) -> RemoteProcess:
        """Run a command in the user's login shell there. Raises LaunchError("shell")."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Monotonic time for limits, and wall-clock time."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


CLOCKS = Clocks()


class BootstrapSession:
    """One session with a host, always in some stage, which has until `_deadline_s`."""

    def __init__(self, remote: RemoteProcess, sentinel: bytes, bundle: bytes, clocks: Clocks) -> None:
        self.clocks = clocks
        self.code: Path | None = None
        self._remote = remote
        self._sentinel = sentinel + b" "
        self._bundle = bundle
        self._noise: deque[str] = deque(maxlen=NOISE_LINES_SHOWN)
        self._noise_bytes = 0
        self._end_s = clocks.monotonic() + LAUNCH_S_MAX
        self.enter("shell")

    def enter(self, stage: str, limit_s: float | None = None) -> None:
        """Enter a stage; its limit begins now. `limit_s`: another than the stage's own."""
        self._stage = stage
        self._limit_s = LIMITS_S[stage] if limit_s is None else limit_s
        if limit_s is not None:  # a check may take as long as its user says, in steps
            self._end_s = max(self._end_s, self.clocks.monotonic() + limit_s)
        self._extend_deadline()

    def _extend_deadline(self) -> None:
        self._deadline_s = min(self.clocks.monotonic() + self._limit_s, self._end_s)

    def expect(self, reply_type: type[T]) -> T:
        """Return the next reply, which must be `reply_type`; send the blobs that the host asks for. Raises LaunchError."""
        return self.expect_either(reply_type, reply_type)

    def expect_either(self, first: type[T], second: type[U]) -> T | U:
        """Return the next reply, which must be `first` or `second`; see `expect`. Raises LaunchError."""
        while True:
            reply = self._next_reply()
            if isinstance(reply, (first, second)):
                return reply
            match reply:
                case w.SendBlob(what):
                    self._send_blob(what)
                case w.Working():
                    self._extend_deadline()
                case w.Failed():
                    raise LaunchError(reply.stage, reply.reason, reply.fix, Retryable(reply.trouble))
                case _:
                    raise self._stage_error(f"unexpected reply {type(reply).__name__}")

    def send(self, data: bytes) -> None:
        """Write to the host. Raises LaunchError."""
        try:
            self._remote.send(data)
        except TimeoutError as err:
            raise self._timeout_error() from err
        except (OSError, EOFError) as err:
            raise self._hang_up_error() from err

    def _send_blob(self, what: str) -> None:
        """Send a blob that the host lacks, in the stage `copy`, whose limit each block extends."""
        stage = self._stage
        for block in self._blocks(what):
            self.enter("copy")
            self.send(block)
        self.enter(stage)

    def _blocks(self, what: str) -> Iterator[bytes]:
        if what == "bundle":
            for at in range(0, len(self._bundle), BLOCK_BYTES):
                yield self._bundle[at : at + BLOCK_BYTES]
            return
        if self.code is None:
            raise self._stage_error(f"it asked for {what}")
        try:
            with self.code.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    yield block
        except OSError as err:
            reason = f"{self.code} cannot be read: {err.strerror}"
            raise LaunchError("copy", reason, "submit the job again", Retryable.PERMANENT) from err

    def _next_reply(self) -> w.Reply:
        """Return the next reply, skipping noise. Raises LaunchError."""
        while True:
            line = self._next_line()
            noise, sentinel, text = line.partition(self._sentinel)
            self._note_noise(noise)
            if sentinel:
                try:
                    reply: w.Reply = codec.loads_kind(_REPLIES, text)
                except (codec.CodecError, UnicodeDecodeError) as err:
                    raise self._stage_error(f"its reply cannot be read: {err}") from err
                return reply

    def _next_line(self) -> bytes:
        left_s = self._deadline_s - self.clocks.monotonic()
        if left_s <= 0:
            raise self._timeout_error()
        try:
            line = self._remote.line(left_s)
        except TimeoutError as err:
            raise self._timeout_error() from err
        except (OSError, EOFError) as err:
            raise self._stage_error(f"the connection broke: {str(err) or type(err).__name__}") from err
        if line is None:
            raise self._end_error()
        return line

    def _note_noise(self, data: bytes) -> None:
        text = data.decode(errors="replace").strip()
        if not text:
            return
        self._noise.append(text[:EVIDENCE_CHARS_MAX])
        self._noise_bytes += len(data)
        if self._noise_bytes > NOISE_BYTES_MAX:
            raise self._stage_error(
                "its login shell prints without end", "check what ~/.bashrc there prints", Retryable.PERMANENT
            )

    def notes(self, clock_s: float) -> tuple[str, ...]:
        """Return the oddities of a session that succeeded."""
        notes = []
        if self._noise:
            notes.append(f"its login shell prints on its own: {' | '.join(self._noise)}"[:EVIDENCE_CHARS_MAX])
        if abs(clock_s) > CLOCK_S_MAX:
            notes.append(f"its clock is {abs(clock_s):.0f} s {'ahead' if clock_s > 0 else 'behind'}")
        return tuple(notes)

    # Failures.

    def _stage_error(self, reason: str, fix: str = "", trouble: Retryable = Retryable.TRANSIENT) -> LaunchError:
        return LaunchError(self._stage, reason + self._evidence(), fix, trouble)

    def _timeout_error(self) -> LaunchError:
        what, fix = _TIMEOUT_TEXTS.get(self._stage, ("it has not answered", ""))
        return self._stage_error(f"{what} for {self._limit_s:.0f} s", fix)

    def _hang_up_error(self) -> LaunchError:
        """Return why the host has stopped reading, which its last reply may say."""
        with contextlib.suppress(LaunchError):
            self._deadline_s = min(self._deadline_s, self.clocks.monotonic() + END_S_MAX)
            while not isinstance(reply := self._next_reply(), w.Failed):
                pass
            return LaunchError(reply.stage, reply.reason, reply.fix, Retryable(reply.trouble))
        return self._end_error()

    def _end_error(self) -> LaunchError:
        code: int | None = None
        with contextlib.suppress(OSError, EOFError):  # TimeoutError is one
            code = self._remote.exit_code(END_S_MAX)
        if code is None:
            return self._stage_error("the connection broke")
        if self._stage == "shell":
            fix = "`ssh HOST true` must end with code 0 there: check its ~/.bashrc and the user's login shell"
            return self._stage_error(
                f"its login shell ended with code {code} before it ran the command", fix, Retryable.PERMANENT
            )
        return self._stage_error(f"it ended with code {code}")

    def _evidence(self) -> str:
        """Return what the host has printed, if anything."""
        lines = [*self._noise, *(line.strip() for line in self._remote.errors.splitlines() if line.strip())]
        text = " | ".join(lines[-NOISE_LINES_SHOWN:])
        return f"; it printed: {text[-EVIDENCE_CHARS_MAX:]}" if text else ""
