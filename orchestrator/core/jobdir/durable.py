"""Files that survive a power cut: write next to the file, fsync, replace, fsync the folder; and the append-only line log.

Rules: a reader sees the old text or the new, never half of one; a private file is never readable by others, not even
for an instant; an appended line is whole or it is the last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from orchestrator.core.jobdir import full_disk, ownership

LINE_BYTES_MAX = 1 << 20


def replace_bytes(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Put `data` at `path` atomically. `durable=False` skips the fsyncs, for files that can be written again."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def replace_text(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Put `text` at `path` atomically, as UTF-8."""
    replace_bytes(path, text.encode("utf-8", "surrogateescape"), mode=mode, durable=durable)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class LineLog:
    """An append-only file of lines with one writer; a torn last line, left by a crash, is cut off at opening.

    While the disk is full, lines wait in memory. Then the file is cut to what is known to be on disk: a network disk may
    have accepted lines and lost them before it reported that it is full.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size_bytes = os.fstat(self._fd).st_size
        self._safe_bytes = _whole_lines_bytes(self._fd, size_bytes)
        if self._safe_bytes < size_bytes:
            os.ftruncate(self._fd, self._safe_bytes)
        self._owed = bytearray()  # what was appended since the last `sync`
        self._written_bytes = 0  # how much of it is in the file
        self.is_full = False
        """The disk was full when it was last written to."""

    @property
    def owed_bytes(self) -> int:
        """How many bytes are not known to be on disk."""
        return len(self._owed)

    @property
    def safe_bytes(self) -> int:
        """How many bytes are known to be on disk: whole lines."""
        return self._safe_bytes

    def append(self, line: str) -> None:
        """Append one line: write it, or keep it until the disk has room. `sync` makes it durable."""
        data = line.encode("utf-8", "surrogateescape") + b"\n"
        assert b"\n" not in data[:-1], "a record is one line"
        self._owed += data
        if self.is_full:
            return
        try:
            self._write()
        except OSError as err:
            self._take_back(err)

    def sync(self) -> bool:
        """Make everything appended so far durable; False when the disk is full."""
        if not self._owed:
            return True
        try:
            self._write()
            os.fdatasync(self._fd)
        except OSError as err:
            self._take_back(err)
            return False
        self._safe_bytes += len(self._owed)
        self._owed.clear()
        self._written_bytes, self.is_full = 0, False
        return True

    def close(self) -> None:
        """Close the file; lines that wait for room are lost, as in a crash."""
        self.sync()
        os.close(self._fd)

    def _write(self) -> None:
        while self._written_bytes < len(self._owed):
            rest = self._owed[self._written_bytes :]
            self._written_bytes += os.pwrite(self._fd, rest, self._safe_bytes + self._written_bytes)

    def _take_back(self, err: OSError) -> None:
        """Cut off what is not known to be on disk, to be written again. Raises every error but that of a full disk."""
        if not full_disk.is_full(err):
            raise err
        self.is_full, self._written_bytes = True, 0
        os.ftruncate(self._fd, self._safe_bytes)


def _whole_lines_bytes(fd: int, size_bytes: int) -> int:
    """Return how many bytes of the file are whole lines: up to the last newline, and with it."""
    end = size_bytes
    while end > 0:
        start = max(0, end - LINE_BYTES_MAX)
        block = os.pread(fd, end - start, start)
        cut = block.rfind(b"\n")
        if cut >= 0:
            return start + cut + 1
        end = start
    return 0


def read_lines(path: Path, offset: int = 0) -> Iterator[str]:
    """Yield the whole lines of a `LineLog` from byte `offset` on, also while another process writes it; a torn last one
    is left out."""
    with os.fdopen(ownership.open_regular(path), "rb") as file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            yield raw[:-1].decode("utf-8", "surrogateescape")
