"""Bulk copies where rsync cannot: over the connection that is there, file by file and each atomically.

Files are sent by SFTP with many requests on their way at once, and fetched as the output of a command. A file is
written under a temporary name and renamed when it is whole; what is at home already as it is wanted is not copied again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import paramiko

from orchestrator.backends.api import Direction
from orchestrator.backends.ssh.connect.connection import Connection, RemoteCommand
from orchestrator.backends.ssh.copy.copy_task import STALL_S_MAX, Broken, CopyTask, Failed, fits, mark

REQUEST_BYTES = 32_768
"""What any server takes at once."""

READ_BYTES = 1 << 20

# Quoted as a launch's command is. The place to begin and the path come on standard input, a line each: no shell reads
# them, and `%b` turns what stands for a line break in the path into one.
_TAIL = """/bin/sh -c 'read -r n; IFS= read -r p; echo {mark}; exec tail -c "+$n" <"$(printf %b "$p")"'"""


def copy(load: CopyTask, connection: Connection) -> None:
    """Copy file by file. Raises Broken, Failed, GivenUp, LaunchError."""
    load.begin()
    with contextlib.closing(connection.sftp()) as sftp, load.ended_by(sftp.close):
        try:
            for name in load.copy.names:
                if load.copy.direction is Direction.FETCH:
                    _fetch(load, connection, sftp, name)
                else:
                    _send(load, sftp, name)
        except (EOFError, OSError, paramiko.SSHException) as err:
            load.check()
            raise Broken(f"the line broke: {str(err) or type(err).__name__}") from err


def tail(connection: Connection, path: str, begin: int) -> RemoteCommand:
    """Begin to read a file of a host at a byte. Raises LaunchError, OSError.

    By `tail`, since SFTP waits for each request before the next, unless a thread of paramiko's reads ahead, which ends
    with a traceback on standard error when the line is closed.
    """
    mark = f"orch-{secrets.token_hex(8)}".encode()
    remote = connection.run(_TAIL.format(mark=mark.decode()))
    line = os.fsencode(path).replace(b"\\", rb"\0134").replace(b"\n", rb"\0012")
    remote.send(b"%d\n%s\n" % (begin + 1, line))
    while (said := remote.line(STALL_S_MAX)) is not None and not said.endswith(mark):
        pass  # what a login shell prints
    return remote


def blocks(remote: RemoteCommand, size_bytes: int) -> Iterator[bytes]:
    """Read so much of a file in order. Raises OSError when less of it comes."""
    came_bytes = 0
    while came_bytes < size_bytes:
        block = remote.read(min(READ_BYTES, size_bytes - came_bytes), STALL_S_MAX)
        if not block:
            raise OSError(f"{came_bytes} of {size_bytes} bytes came")
        came_bytes += len(block)
        yield block


def _fetch(load: CopyTask, connection: Connection, sftp: paramiko.SFTPClient, name: str) -> None:
    copy = load.copy
    goal = copy.here / name
    wanted = next((piece for piece in copy.wanted if piece.name == name), None)
    if wanted is not None and fits(goal, wanted):
        load.skip(wanted.size_bytes)
        return
    path = f"{copy.there}/{name}"
    try:
        with sftp.open(os.fsencode(path), "rb") as source:  # whether it may be read at all
            seen = source.stat()
    except OSError as err:
        raise _refused(err, sftp, path, copy.node) from err
    size_bytes, mtime_s = seen.st_size or 0, int(seen.st_mtime or 0)
    if wanted is not None and (size_bytes, mtime_s) != (wanted.size_bytes, wanted.mtime_ns // 10**9):
        raise Failed(f"{name} was written again on {copy.node} before it was copied")
    part = goal.with_name(f".orch-{secrets.token_hex(6)}.part")
    with _local(copy.here):
        goal.parent.mkdir(parents=True, exist_ok=True)
        target = part.open("wb")
    try:
        with target, contextlib.closing(tail(connection, path, 0)) as remote, load.ended_by(remote.close):
            for block in blocks(remote, size_bytes):
                with _local(copy.here):
                    target.write(block)
                load.advance(len(block))
        os.utime(part, (mtime_s, mtime_s))
        if wanted is not None:
            mark(part, wanted)
        part.replace(goal)
    finally:
        part.unlink(missing_ok=True)


def _send(load: CopyTask, sftp: paramiko.SFTPClient, name: str) -> None:
    """Write a file on a host. SFTP tells times in whole seconds, in which a file can be written twice, so what another
    copy brought there is not taken for the same."""
    copy = load.copy
    path = PurePosixPath(copy.there, name)
    part = path.with_name(f".orch-{secrets.token_hex(6)}.part")
    try:
        source = (copy.here / name).open("rb")
    except OSError as err:
        raise Failed(f"{copy.here / name} on this machine: {err.strerror}") from err
    with source:
        seen = os.fstat(source.fileno())
        if name in load.sent:
            load.skip(seen.st_size)
            return
        try:
            _make_folders(sftp, path.parent)
            with contextlib.closing(sftp.open(os.fsencode(part), "wb")) as target:
                target.set_pipelined(True)
                while block := source.read(REQUEST_BYTES):
                    target.write(block)
                    load.advance(len(block))
                _see_all_written(target, seen.st_size)
            sftp.utime(os.fsencode(part), (seen.st_mtime, seen.st_mtime))
            _rename(sftp, part, path)
            load.sent.append(name)
        except OSError as err:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                sftp.remove(os.fsencode(part))
            raise _refused(err, sftp, str(path), copy.node) from err


def _see_all_written(target: paramiko.SFTPFile, size_bytes: int) -> None:
    """Ask for the size, since answers to writes that were not waited for are not looked at. Raises OSError."""
    written_bytes = target.stat().st_size or 0
    if written_bytes < size_bytes:
        raise OSError(f"it took {written_bytes} of {size_bytes} bytes")


def _make_folders(sftp: paramiko.SFTPClient, folder: PurePosixPath) -> None:
    """Make a folder and those above it, as far as they are missing."""
    for one in (*reversed(folder.parents), folder):
        try:
            mode = sftp.stat(os.fsencode(one)).st_mode or 0
        except FileNotFoundError:
            sftp.mkdir(os.fsencode(one))
            continue
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(20, f"{one} is no folder")


def _rename(sftp: paramiko.SFTPClient, part: PurePosixPath, path: PurePosixPath) -> None:
    """Put a file in its place at once; a server without that extension of OpenSSH's cannot replace one."""
    try:
        sftp.posix_rename(os.fsencode(part), os.fsencode(path))
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            sftp.remove(os.fsencode(path))
        sftp.rename(os.fsencode(part), os.fsencode(path))


@contextlib.contextmanager
def _local(here: Path) -> Iterator[None]:
    """What goes wrong with this machine's disk is no fault of the line."""
    try:
        yield
    except OSError as err:
        raise Failed(f"{here} on this machine: {err.strerror}") from err


def _refused(err: OSError, sftp: paramiko.SFTPClient, path: str, node: str) -> Exception:
    """Return what a host's refusal says. The protocol has no word for a full disk: that is a bare "Failure"."""
    channel = sftp.get_channel()
    if isinstance(err, TimeoutError | ConnectionError) or channel is None or channel.closed:
        return Broken(f"the line broke: {str(err) or type(err).__name__}")
    if isinstance(err, FileNotFoundError):
        return Failed(f"{path} is not there on {node}")
    if err.errno is None:
        return Failed(
            f"{path} cannot be written on {node}, where no space may be left (its sftp-server: {err})"
        )
    return Failed(f"{path} on {node}: {err.strerror or err}")
