"""How is bulk copied where both ends have rsync? By one process of it, over OpenSSH, file by file and each atomically.

It is fast and goes on in the middle of a file after a broken line, but it needs a shell that says nothing and an
OpenSSH that can log in by itself. Whatever it fails of, except what would fail in any way, is left to SFTP.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from typing import IO

from orchestrator.backends.api import Direction
from orchestrator.backends.ssh.copy.copy_task import STALL_S_MAX, Broken, CopyTask, Failed, Unfit

SAID_BYTES_MAX = 16_384
END_S_MAX = 5.0
PARTIAL = ".orch-partial"
"""Where the begun part of a file that is fetched is kept after a broken line, beside it; gone once it is whole."""

_NO_SPACE = re.compile(rb"No space left on device|Disk quota exceeded|File too large")
_NO_FILE = re.compile(
    rb"(?:link_stat|readlink_stat|send_files failed to open|opendir|change_dir)[^\n]*No such file|has vanished"
)
_DONE = re.compile(rb"(\d+)\s+\d+%")
_LINE_CODES = (10, 12, 30, 35)
"""Exit codes that tell of a line: socket I/O, protocol data stream, time-outs (`man rsync`)."""


def copy(load: CopyTask, ssh: tuple[str, ...], host: str, again: bool) -> None:
    """Copy by rsync; `again`: it may find begun parts of files. Raises Unfit, Broken, Failed, GivenUp."""
    load.begin()
    with tempfile.TemporaryFile() as names:
        names.write(b"".join(b"./" + os.fsencode(name) + b"\0" for name in load.copy.names))
        names.seek(0)
        argv = _argv(load, ssh, host, again)
        try:
            process = subprocess.Popen(
                argv,
                stdin=names,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as err:
            raise Unfit(f"rsync cannot be started: {err.strerror}") from err
    assert process.stdout is not None
    with process.stdout as out:
        try:
            with load.ended_by(lambda: _end(process, signal.SIGTERM)):
                said = _watch(out, load)
                code = process.wait(END_S_MAX)
        except subprocess.TimeoutExpired as err:
            raise Broken("rsync did not end") from err
        finally:
            _finish(process)
    load.check()
    if code != 0:
        raise _error(code, said, load)


def _argv(load: CopyTask, ssh: tuple[str, ...], host: str, again: bool) -> list[str]:
    """Return rsync's argv. Whole files, since nothing in two checkpoints is alike; but it goes on with what was begun."""
    copy = load.copy
    fetches = copy.direction is Direction.FETCH
    argv = ["rsync", "-LRtOs0", "--no-implied-dirs", "--files-from=-"]
    argv += (
        [f"--partial-dir={PARTIAL}"] if fetches else []
    )  # on a host it might pass for a part of a checkpoint
    argv += ["--info=progress2", "--no-human-readable", f"--timeout={STALL_S_MAX:.0f}"]
    argv += [] if again else ["--whole-file"]
    if load.bytes_per_s is not None:
        argv.append(f"--bwlimit={max(1, int(load.bytes_per_s / 1024))}")
    name = f"[{host}]" if ":" in host else host
    there, here = f"{name}:{copy.there}/", f"{copy.here}/"
    argv += ["-e", " ".join(map(_quoted, ssh)), "--"]
    return argv + ([there, here] if fetches else [here, there])


def _quoted(word: str) -> str:
    """Quote a word of `-e` as rsync reads it: a quote within is doubled, and a backslash is nothing special."""
    return "'" + word.replace("'", "''") + "'"


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RSYNC_")}
    return {**kept, "LC_ALL": "C"}


def _watch(out: IO[bytes], load: CopyTask) -> bytes:
    """Follow how far it is until it closes its output; return the last that it said. Raises Broken."""
    said, moved_s = b"", time.monotonic()
    while True:
        ready, _, _ = select.select([out], [], [], STALL_S_MAX)
        block = os.read(out.fileno(), 65536) if ready else b""
        if ready and not block:
            return said
        said = (said + block)[-SAID_BYTES_MAX:]
        done = _DONE.findall(said)
        if done and int(done[-1]) > load.done_bytes:
            load.done_bytes, moved_s = int(done[-1]), time.monotonic()
        if time.monotonic() - moved_s > STALL_S_MAX:
            raise Broken(f"not a byte was copied for {STALL_S_MAX:.0f} s")


def _finish(process: subprocess.Popen[bytes]) -> None:
    """Leave no process behind, whatever happened; asked first, so that it keeps what it has begun."""
    if process.poll() is not None:
        return
    _end(process, signal.SIGTERM)
    try:
        process.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        _end(process, signal.SIGKILL)
        process.wait()


def _end(process: subprocess.Popen[bytes], signum: int) -> None:
    """Signal rsync and its ssh."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)


def _error(code: int, said: bytes, load: CopyTask) -> Exception:
    copy = load.copy
    fetches = copy.direction is Direction.FETCH
    lines = [line.strip() for line in re.split(rb"[\r\n]+", said) if line.strip() and not _DONE.search(line)]
    last = b" / ".join(lines[-3:]).decode(errors="replace")
    if _NO_SPACE.search(said):
        where = f"{copy.here} on this machine" if fetches else f"{copy.there} on {copy.node}"
        return Failed(f"no space is left for it in {where}")
    if _NO_FILE.search(said):
        where = f"on {copy.node}" if fetches else "on this machine"
        return Failed(f"it was deleted {where} before it was copied ({last})")
    if code in _LINE_CODES:
        return Broken(f"the line broke ({last})")
    return Unfit(f"rsync ended with code {code} ({last})")
