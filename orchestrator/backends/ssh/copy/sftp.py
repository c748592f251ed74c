"""Copies by SFTP over an open connection, for hosts without rsync and for `orch collect`: file by file, each atomically.

Files are sent by SFTP with many requests in flight, and fetched as the output of a command. A file is written under a
temporary name and renamed when it is complete. A file that is already here as expected is not copied again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import paramiko

from orchestrator.backends.api import Direction
from orchestrator.backends.ssh.connect.connection import Connection, RemoteCommand
from orchestrator.backends.ssh.copy.copy_task import STALL_S_MAX, ConnectionBroken, CopyTask, is_same_file
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import CheckpointFile
from orchestrator.core.errors import HostError
from orchestrator.core.jobdir.durable import atomic_replacement

REQUEST_BYTES = 32_768
"""What any server takes, and gives, at once."""

READ_BYTES = 1 << 20

# Quoted as a launch's command is. The place to begin and the path come on standard input, a line each: no shell reads
# them, and `%b` turns what stands for a line break in the path into one.
_TAIL = """/bin/sh -c 'read -r n; IFS= read -r p; echo {mark}; exec tail -c "+$n" <"$(printf %b "$p")"'"""


def copy(task: CopyTask, connection: Connection) -> None:
    """Copy file by file. Raises Broken, HostError, Cancelled, LaunchError."""
    task.done_bytes = 0
    with contextlib.closing(connection.sftp()) as client, task.abort_with(client.close):
        session = SftpCopy(task, connection, client)
        for name in task.copy.names:
            try:
                if task.copy.direction is Direction.FETCH:
                    session.fetch(name, task.copy.local_dir / name)
                else:
                    _send(session, name)
            except (EOFError, OSError, paramiko.SSHException) as err:
                task.raise_if_cancelled()
                raise _copy_error(err, session, name) from err


@dataclass(frozen=True, slots=True)
class SftpCopy:
    """A copy, and the connection and SFTP client by which it is made."""

    task: CopyTask
    connection: Connection
    sftp: paramiko.SFTPClient

    def path(self, name: str) -> str:
        """Return where a file of the copy lies on the host."""
        return f"{self.task.copy.remote_dir}/{name}"

    def fetch(self, name: str, target: Path) -> None:
        """Fetch a file to a place of this machine. Raises Broken, HostError, Cancelled, LaunchError, OSError; what paramiko raises when
        the connection breaks."""
        task, copy = self.task, self.task.copy
        expected = next((entry for entry in copy.expected if entry.name == name), None)
        if expected is not None and is_same_file(target, expected):
            task.done_bytes += expected.size_bytes
            return
        about = self._stat(name)
        if expected is not None and not (
            about.size_bytes == expected.size_bytes and disk.is_same_time(about.mtime_ns, expected.mtime_ns)
        ):
            raise HostError(f"{name} was written again on {copy.node} before it was copied")
        with _local_errors(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replacement(target, durable=False) as part:
            digest = self.append(name, part, about.size_bytes)
            if expected is not None and expected.sha256 != digest:
                if self._stat(name) != about:
                    raise HostError(f"{name} was written again on {copy.node} before it was copied")
                if expected.sha256:
                    raise task.damage_error(name)
            mtime_ns = about.mtime_ns if expected is None else expected.mtime_ns
            os.utime(part, ns=(mtime_ns, mtime_ns))

    def _stat(self, name: str) -> CheckpointFile:
        """Return the size of a file of a host, and its time in whole seconds."""
        about = self.sftp.stat(os.fsencode(self.path(name)))
        return CheckpointFile(name, about.st_size or 0, int(about.st_mtime or 0) * 10**9)

    def append(self, name: str, target: Path, size_bytes: int) -> str:
        """Append to a file what it lacks of that on the host, up to a size, and return the sha256 of what came. Raises as `fetch` does."""
        path = self.path(name)
        with _local_errors(target.parent):
            file = target.open("ab")
        with file, self.sftp.open(os.fsencode(path), "rb") as source:  # fails when it may not be read
            begin = file.tell()
            if size_bytes - begin <= REQUEST_BYTES:
                source.seek(begin)
                return _write(self.task, file, blocks(source.read, size_bytes - begin))
            with contextlib.closing(open_tail(self.connection, path, begin)) as remote:
                read = functools.partial(remote.read, wait_s=STALL_S_MAX)
                with self.task.abort_with(remote.close):
                    return _write(self.task, file, blocks(read, size_bytes - begin))


def _write(task: CopyTask, file: IO[bytes], blocks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
        with _local_errors(Path(file.name).parent):
            file.write(block)
        task.advance(len(block))
    return digest.hexdigest()


def open_tail(connection: Connection, path: str, begin: int) -> RemoteCommand:
    """Begin to read a file of a host at a byte. Raises LaunchError, OSError.

    Uses `open_tail`: SFTP waits for each request before the next, unless a thread of paramiko's reads ahead, which ends with
    a traceback on standard error when the connection is closed.
    """
    mark = f"orch-{secrets.token_hex(8)}".encode()
    remote = connection.run(_TAIL.format(mark=mark.decode()))
    escaped = os.fsencode(path).replace(b"\\", rb"\0134").replace(b"\n", rb"\0012")
    remote.send(b"%d\n%s\n" % (begin + 1, escaped))
    while (line := remote.line(STALL_S_MAX)) is not None and not line.endswith(mark):
        pass  # what a login shell prints
    return remote


def blocks(read: Callable[[int], bytes], size_bytes: int) -> Iterator[bytes]:
    """Yield the first `size_bytes` of a file in order. Raises Broken when less of it comes."""
    received_bytes = 0
    while received_bytes < size_bytes:
        block = read(min(READ_BYTES, size_bytes - received_bytes))
        if not block:
            raise ConnectionBroken(f"{received_bytes} of {size_bytes} bytes arrived")
        received_bytes += len(block)
        yield block


def _send(session: SftpCopy, name: str) -> None:
    """Write a file on a host. SFTP gives times in whole seconds, in which a file can be written twice; so a file that
    another copy brought there does not count as the same."""
    task, sftp = session.task, session.sftp
    path = PurePosixPath(session.path(name))
    with _local_errors(task.copy.local_dir / name):
        source = (task.copy.local_dir / name).open("rb")
    with source:
        about, begin_bytes = os.fstat(source.fileno()), task.done_bytes
        if name in task.sent_files or (name in task.copy.written_by_host and _is_unchanged(sftp, path, about)):
            task.done_bytes += about.st_size
            return
        _make_folders(sftp, path.parent)
        with _part_file(sftp, path) as part:
            sftp.putfo(source, part, callback=lambda sent, _: task.advance(begin_bytes + sent - task.done_bytes))
            sftp.utime(part, (about.st_mtime, about.st_mtime))
    task.sent_files.append(name)


def _is_unchanged(sftp: paramiko.SFTPClient, path: PurePosixPath, about: os.stat_result) -> bool:
    """Return whether a host has still the file that it has written itself."""
    try:
        remote = sftp.stat(os.fsencode(path))
    except FileNotFoundError:
        return False
    return (remote.st_size, int(remote.st_mtime or 0)) == (about.st_size, int(about.st_mtime))


@contextlib.contextmanager
def _part_file(sftp: paramiko.SFTPClient, path: PurePosixPath) -> Iterator[bytes]:
    """Yield the path of a part file next to `path`; at the end rename it to `path`, or remove it where that fails."""
    part = os.fsencode(path.with_name(f".orch-{secrets.token_hex(6)}.part"))
    try:
        yield part
        _rename(sftp, part, os.fsencode(path))
    except BaseException:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            sftp.remove(part)
        raise


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


def _rename(sftp: paramiko.SFTPClient, part: bytes, path: bytes) -> None:
    """Rename atomically; a server without OpenSSH's extension for that cannot replace a file."""
    try:
        sftp.posix_rename(part, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            sftp.remove(path)
        sftp.rename(part, path)


@contextlib.contextmanager
def _local_errors(path: Path) -> Iterator[None]:
    """Turn errors of this machine's disk into HostError: they are not the connection's fault."""
    try:
        yield
    except OSError as err:
        raise HostError(f"{path} on this machine: {err.strerror}") from err


def _copy_error(err: Exception, session: SftpCopy, name: str) -> Exception:
    """Return what a host's refusal means. The protocol reports a full disk as a bare "Failure"."""
    channel, node = session.sftp.get_channel(), session.task.copy.node
    is_broken = not isinstance(err, OSError) or isinstance(err, TimeoutError | ConnectionError)
    if is_broken or channel is None or channel.closed:
        return ConnectionBroken(f"the connection broke: {str(err) or type(err).__name__}")
    path = session.path(name)
    if isinstance(err, FileNotFoundError):
        return HostError(f"{path} does not exist on {node}")
    if not isinstance(err, OSError) or err.errno is None:
        return HostError(f"{path} cannot be written on {node}, where no space may be left (its sftp-server: {err})")
    return HostError(f"{path} on {node}: {err.strerror}")
