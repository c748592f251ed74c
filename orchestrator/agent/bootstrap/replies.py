"""Replies of a host before its agent runs: marked lines on standard output, among other output of the shell.

The other end may vanish unnoticed, so every wait has a limit: an alarm ends this process.
"""

from __future__ import annotations

import errno
import getpass
import hashlib
import os
import signal
from typing import BinaryIO

from orchestrator.core import codec
from orchestrator.core.wire import bootstrap as w

SILENT_S_MAX = 120
"""How long either end may be silent; the launch script sets the first alarm."""

BLOCK_BYTES = 256 * 1024


class Replies:
    """Connection to the launcher."""

    def __init__(self, mark: str, source: BinaryIO) -> None:
        self._mark = mark
        self._source = source

    def send(self, reply: w.Reply) -> None:
        """Send a reply. Raises BrokenPipeError when the launcher is gone."""
        signal.alarm(SILENT_S_MAX)
        data = f"\n{self._mark} {codec.dumps_kind(reply)}\n".encode("utf-8", "surrogateescape")
        while data:
            data = data[os.write(1, data) :]

    def receive(self, size_bytes: int, target: BinaryIO) -> str:
        """Write the next `size_bytes` received bytes to `target`, and return their sha256. Raises EOFError."""
        digest = hashlib.sha256()
        left_bytes = size_bytes
        while left_bytes:
            block = self._source.read(min(left_bytes, BLOCK_BYTES))
            if not block:
                raise EOFError
            signal.alarm(SILENT_S_MAX)
            digest.update(block)
            target.write(block)
            left_bytes -= len(block)
        return digest.hexdigest()

    def next_line(self, silent_s_max: int) -> bytes:
        """Return the next line that is sent within this time, empty at the end of the input; else this process ends."""
        signal.alarm(silent_s_max)
        line = self._source.readline(w.STEP_BYTES_MAX)
        signal.alarm(silent_s_max)
        return line

    def received_go(self) -> bool:
        """Read the next line; return whether it is `GO`."""
        return self._source.readline(len(w.GO) + 1).strip() == w.GO


def request_failure(stage: str, err: OSError, place: object) -> w.RequestFailed:
    """Return an OSError as a failed request with its fix."""
    where = err.filename or place
    reason = f"{where}: {(err.strerror or str(err)).lower()}"
    match err.errno:
        case errno.EACCES | errno.EPERM:
            fix = f"make it writable for {_user()}, or set ssh.remote_dir to a folder that is"
        case errno.EROFS:
            fix = "set ssh.remote_dir to a folder that can be written"
        case errno.ENOSPC | errno.EDQUOT:
            fix = "free some space there, or set ssh.remote_dir to a larger disk"
        case errno.ENOTDIR | errno.EEXIST | errno.ENAMETOOLONG | errno.ELOOP:
            fix = "set ssh.remote_dir to a path where a folder can be created"
        case errno.ENOLCK | errno.ENOSYS | errno.EOPNOTSUPP:
            fix = "files cannot be locked there: set ssh.remote_dir to a disk where they can"
        case _:
            return w.RequestFailed(stage, reason, "check that disk, or set ssh.remote_dir to another one", "transient")
    return w.RequestFailed(stage, reason, fix)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.geteuid()}"
