"""Bulk copies by SFTP over an open connection, for hosts without rsync: file by file, each atomically.

Files are sent by SFTP with many requests in flight, and fetched as the output of a command. A file is written under a
temporary name and renamed when it is whole. A file that is already here as expected is not copied again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

import paramiko

from orchestrator.backends.api import Direction
from orchestrator.backends.ssh.connect.connection import Connection, RemoteCommand
from orchestrator.backends.ssh.copy.copy_task import STALL_S_MAX, Broken, CopyTask, fits, mark
from orchestrator.core.errors import HostError
from orchestrator.core.jobdir.durable import installed

REQUEST_BYTES = 32_768
"""What any server takes at once."""

READ_BYTES = 1 << 20

# Quoted as a launch's command is. The place to begin and the path come on standard input, a line each: no shell reads
# them, and `%b` turns what stands for a line break in the path into one.
_TAIL = """/bin/sh -c 'read -r n; IFS= read -r p; echo {mark}; exec tail -c "+$n" <"$(printf %b "$p")"'"""


def copy(task: CopyTask, connection: Connection) -> None:
    """Copy file by file. Raises Broken, HostError, Cancelled, LaunchError."""
    task.begin()
    with contextlib.closing(connection.sftp()) as sftp, task.ended_by(sftp.close):
        try:
            for name in task.copy.names:
                if task.copy.direction is Direction.FETCH:
                    _fetch(task, connection, sftp, name)
                else:
                    _send(task, sftp, name)
        except (EOFError, OSError, paramiko.SSHException) as err:
            task.check()
            raise Broken(f"the line broke: {str(err) or type(err).__name__}") from err


def tail(connection: Connection, path: str, begin: int) -> RemoteCommand:
    """Begin to read a file of a host at a byte. Raises LaunchError, OSError.

    Uses `tail`: SFTP waits for each request before the next, unless a thread of paramiko's reads ahead, which ends with
    a traceback on standard error when the connection is closed.
    """
    mark = f"orch-{secrets.token_hex(8)}".encode()
    remote = connection.run(_TAIL.format(mark=mark.decode()))
    escaped = os.fsencode(path).replace(b"\\", rb"\0134").replace(b"\n", rb"\0012")
    remote.send(b"%d\n%s\n" % (begin + 1, escaped))
    while (line := remote.line(STALL_S_MAX)) is not None and not line.endswith(mark):
        pass  # what a login shell prints
    return remote


def blocks(remote: RemoteCommand, size_bytes: int) -> Iterator[bytes]:
    """Yield the first `size_bytes` of a file in order. Raises OSError when less of it comes."""
    received_bytes = 0
    while received_bytes < size_bytes:
        block = remote.read(min(READ_BYTES, size_bytes - received_bytes), STALL_S_MAX)
        if not block:
            raise OSError(f"{received_bytes} of {size_bytes} bytes came")
        received_bytes += len(block)
        yield block


def _fetch(task: CopyTask, connection: Connection, sftp: paramiko.SFTPClient, name: str) -> None:
    copy = task.copy
    target = copy.local_dir / name
    expected = next((entry for entry in copy.expected if entry.name == name), None)
    if expected is not None and fits(target, expected):
        task.skip(expected.size_bytes)
        return
    path = f"{copy.remote_dir}/{name}"
    try:
        with sftp.open(os.fsencode(path), "rb") as source:  # fails when it may not be read
            attributes = source.stat()
    except OSError as err:
        raise _refused(err, sftp, path, copy.node) from err
    size_bytes, mtime_s = attributes.st_size or 0, int(attributes.st_mtime or 0)
    if expected is not None and (size_bytes, mtime_s) != (expected.size_bytes, expected.mtime_ns // 10**9):
        raise HostError(f"{name} was written again on {copy.node} before it was copied")
    with _local(copy.local_dir):
        target.parent.mkdir(parents=True, exist_ok=True)
    with installed(target, durable=False) as part:
        digest = _receive(task, connection, path, part, size_bytes)
        if expected is not None and expected.sha256 != digest:
            again = sftp.stat(os.fsencode(path))
            if (again.st_size, int(again.st_mtime or 0)) != (size_bytes, mtime_s):
                raise HostError(f"{name} was written again on {copy.node} before it was copied")
            if expected.sha256:
                raise task.damaged(name)
        os.utime(part, (mtime_s, mtime_s))
        if expected is not None:
            mark(part, expected)


def _receive(task: CopyTask, connection: Connection, path: str, part: Path, size_bytes: int) -> str:
    """Write a file as it comes, and return its sha256."""
    digest = hashlib.sha256()
    with _local(task.copy.local_dir):
        file = part.open("wb")
    with file, contextlib.closing(tail(connection, path, 0)) as remote, task.ended_by(remote.close):
        for block in blocks(remote, size_bytes):
            digest.update(block)
            with _local(task.copy.local_dir):
                file.write(block)
            task.advance(len(block))
    return digest.hexdigest()


def _send(task: CopyTask, sftp: paramiko.SFTPClient, name: str) -> None:
    """Write a file on a host. SFTP gives times in whole seconds, in which a file can be written twice; so a file that
    another copy brought there does not count as the same."""
    copy = task.copy
    path = PurePosixPath(copy.remote_dir, name)
    try:
        source = (copy.local_dir / name).open("rb")
    except OSError as err:
        raise HostError(f"{copy.local_dir / name} on this machine: {err.strerror}") from err
    with source:
        about = os.fstat(source.fileno())
        if name in task.sent or (name in copy.there and _is_there(sftp, path, about)):
            task.skip(about.st_size)
            return
        try:
            _make_folders(sftp, path.parent)
            with _part_of(sftp, path) as part:
                _upload(task, sftp, source, part)
        except OSError as err:
            raise _refused(err, sftp, str(path), copy.node) from err
    task.sent.append(name)


def _is_there(sftp: paramiko.SFTPClient, path: PurePosixPath, about: os.stat_result) -> bool:
    """Tell whether a host has still the file that it has written itself."""
    try:
        there = sftp.stat(os.fsencode(path))
    except FileNotFoundError:
        return False
    return (there.st_size, int(there.st_mtime or 0)) == (about.st_size, int(about.st_mtime))


def _upload(task: CopyTask, sftp: paramiko.SFTPClient, source: IO[bytes], part: PurePosixPath) -> None:
    attributes = os.fstat(source.fileno())
    with contextlib.closing(sftp.open(os.fsencode(part), "wb")) as target:
        target.set_pipelined(True)
        while block := source.read(REQUEST_BYTES):
            target.write(block)
            task.advance(len(block))
        _check_all_written(target, attributes.st_size)
    sftp.utime(os.fsencode(part), (attributes.st_mtime, attributes.st_mtime))


@contextlib.contextmanager
def _part_of(sftp: paramiko.SFTPClient, path: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield the path of a part file next to `path`; at the end rename it to `path`, or remove it where that fails."""
    part = path.with_name(f".orch-{secrets.token_hex(6)}.part")
    try:
        yield part
        _rename(sftp, part, path)
    except BaseException:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            sftp.remove(os.fsencode(part))
        raise


def _check_all_written(target: paramiko.SFTPFile, size_bytes: int) -> None:
    """Ask for the size: paramiko ignores answers to pipelined writes. Raises OSError."""
    written_bytes = target.stat().st_size or 0
    if written_bytes < size_bytes:
        raise OSError(f"it took {written_bytes} of {size_bytes} bytes")


def _make_folders(sftp: paramiko.SFTPClient, folder: PurePosixPath) -> None:
    """Make a folder and its parents, as far as they are missing."""
    for parent in (*reversed(folder.parents), folder):
        try:
            mode = sftp.stat(os.fsencode(parent)).st_mode or 0
        except FileNotFoundError:
            sftp.mkdir(os.fsencode(parent))
            continue
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(20, f"{parent} is no folder")


def _rename(sftp: paramiko.SFTPClient, part: PurePosixPath, path: PurePosixPath) -> None:
    """Rename atomically; a server without OpenSSH's extension for that cannot replace a file."""
    try:
        sftp.posix_rename(os.fsencode(part), os.fsencode(path))
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            sftp.remove(os.fsencode(path))
        sftp.rename(os.fsencode(part), os.fsencode(path))


@contextlib.contextmanager
def _local(here: Path) -> Iterator[None]:
    """Turn errors of this machine's disk into HostError: they are not the connection's fault."""
    try:
        yield
    except OSError as err:
        raise HostError(f"{here} on this machine: {err.strerror}") from err


def _refused(err: OSError, sftp: paramiko.SFTPClient, path: str, node: str) -> Exception:
    """Return what a host's refusal means. The protocol reports a full disk as a bare "Failure"."""
    channel = sftp.get_channel()
    if isinstance(err, TimeoutError | ConnectionError) or channel is None or channel.closed:
        return Broken(f"the line broke: {str(err) or type(err).__name__}")
    if isinstance(err, FileNotFoundError):
        return HostError(f"{path} is not there on {node}")
    if err.errno is None:
        return HostError(
            f"{path} cannot be written on {node}, where no space may be left (its sftp-server: {err})"
        )
    return HostError(f"{path} on {node}: {err.strerror or err}")
