"""Bulk copies by rsync where both ends have it: one rsync process over OpenSSH, file by file, each atomically.

rsync is fast and resumes in the middle of a file after a broken connection. It needs a login shell that prints nothing
and an OpenSSH client that can log in by itself. If it fails for a reason that SFTP may not have, SFTP copies instead.
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
from orchestrator.backends.ssh.copy.copy_task import STALL_S_MAX, ConnectionBroken, CopyTask, UnsupportedTool
from orchestrator.core.errors import HostError

OUTPUT_BYTES_MAX = 16_384
END_S_MAX = 5.0
PARTIAL = ".orch-partial"
"""Folder next to a fetched file for its begun part after a broken connection; removed once the file is complete."""

DIFFERS = b"orch-differs:"

_NO_SPACE = re.compile(rb"No space left on device|Disk quota exceeded|File too large")
_NO_FILE = re.compile(
    rb"(?:link_stat|readlink_stat|send_files failed to open|opendir|change_dir)[^\n]*No such file|has vanished"
)
_DONE = re.compile(rb"(\d+)\s+\d+%")
_CONNECTION_CODES = (10, 12, 30, 35)
"""Exit codes of a broken connection: socket I/O, protocol data stream, time-outs (`man rsync`)."""


def copy(task: CopyTask, ssh: tuple[str, ...], host: str) -> None:
    """Copy by rsync; an earlier try may have left parts of files. Raises Unfit, Broken, HostError, Cancelled."""
    task.done_bytes = 0
    progress_options = ["--info=progress2", "--no-human-readable", *([] if task.tries else ["--whole-file"])]
    _run(task, _argv(task, ssh, host, progress_options))


def require_unchanged(task: CopyTask, ssh: tuple[str, ...], host: str) -> None:
    """Compare the sizes and times of fetched files with those on their host. Raises HostError when one was written again
    there; Unfit, Broken, Cancelled."""
    done_bytes = task.done_bytes
    output = _run(task, _argv(task, ssh, host, ["--dry-run", f"--out-format={DIFFERS.decode()}%n"]))
    task.done_bytes = done_bytes
    _, differs, rest = output.partition(DIFFERS)  # before that may be what the host shows at a login
    if differs:
        name = rest.partition(b"\n")[0].decode(errors="replace").removeprefix("./")
        raise HostError(f"{name} was written again on {task.copy.node} before it was copied")


def _run(task: CopyTask, argv: list[str]) -> bytes:
    """Run rsync for the files of a copy, and return the end of its output."""
    with tempfile.TemporaryFile() as names:
        names.write(b"".join(b"./" + os.fsencode(name) + b"\0" for name in task.copy.names))
        names.seek(0)
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
            raise UnsupportedTool(f"rsync cannot be started: {err.strerror}") from err
    assert process.stdout is not None
    with process.stdout as out:
        try:
            with task.abort_with(lambda: _end(process, signal.SIGTERM)):
                output = _follow_progress(out, task)
                code = process.wait(END_S_MAX)
        except subprocess.TimeoutExpired as err:
            raise ConnectionBroken("rsync did not end") from err
        finally:
            _finish(process)
    task.raise_if_cancelled()
    if code != 0:
        raise _copy_error(code, output, task)
    return output


def _argv(task: CopyTask, ssh: tuple[str, ...], host: str, options: list[str]) -> list[str]:
    """Return rsync's argv. The first try sends whole files, since checkpoints have nothing in common; later ones resume.

    A file that is there already may be of the same second with other bytes, so fractions count
    (rsync before 3.1.3 takes all files for others then).
    """
    copy = task.copy
    fetches = copy.direction is Direction.FETCH
    argv = ["rsync", "-LRtOs0", "--no-implied-dirs", "--files-from=-"]
    # Not on a host, where it might pass for a part of a checkpoint.
    argv += [f"--partial-dir={PARTIAL}"] if fetches else ["--modify-window=-1"]
    argv += [f"--timeout={STALL_S_MAX:.0f}", *options]
    if task.limit.bytes_per_s is not None:
        argv.append(f"--bwlimit={max(1, int(task.limit.bytes_per_s / 1024))}")
    name = f"[{host}]" if ":" in host else host
    remote, local = f"{name}:{copy.remote_dir}/", f"{copy.local_dir}/"
    argv += ["-e", " ".join(map(_quote_word, ssh)), "--"]
    return argv + ([remote, local] if fetches else [local, remote])


def _quote_word(word: str) -> str:
    """Quote a word of `-e` as rsync reads it: a quote within is doubled, and a backslash has no meaning."""
    return "'" + word.replace("'", "''") + "'"


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RSYNC_")}
    return {**kept, "LC_ALL": "C"}


def _follow_progress(out: IO[bytes], task: CopyTask) -> bytes:
    """Follow the progress until rsync closes its output; return the end of that output. Raises Broken."""
    output, moved_s = b"", time.monotonic()
    while True:
        ready, _, _ = select.select([out], [], [], STALL_S_MAX)
        block = os.read(out.fileno(), 65536) if ready else b""
        if ready and not block:
            return output
        output = (output + block)[-OUTPUT_BYTES_MAX:]
        done = _DONE.findall(output)
        if done and int(done[-1]) > task.done_bytes:
            task.done_bytes, moved_s = int(done[-1]), time.monotonic()
        if time.monotonic() - moved_s > STALL_S_MAX:
            raise ConnectionBroken(f"no byte was copied for {STALL_S_MAX:.0f} s")


def _finish(process: subprocess.Popen[bytes]) -> None:
    """Leave no process behind: TERM first, so that rsync keeps what it has begun, then KILL."""
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


def _copy_error(code: int, output: bytes, task: CopyTask) -> Exception:
    copy = task.copy
    fetches = copy.direction is Direction.FETCH
    lines = [line.strip() for line in re.split(rb"[\r\n]+", output) if line.strip() and not _DONE.search(line)]
    last = b" / ".join(lines[-3:]).decode(errors="replace")
    if _NO_SPACE.search(output):
        where = f"{copy.local_dir} on this machine" if fetches else f"{copy.remote_dir} on {copy.node}"
        return HostError(f"no space is left for it in {where}")
    if _NO_FILE.search(output):
        where = f"on {copy.node}" if fetches else "on this machine"
        return HostError(f"it was deleted {where} before it was copied ({last})")
    if code in _CONNECTION_CODES:
        return ConnectionBroken(f"the connection broke ({last})")
    return UnsupportedTool(f"rsync ended with code {code} ({last})")
