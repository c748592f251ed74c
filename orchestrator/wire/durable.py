"""How does a file survive the power cut? Write beside it, fsync, replace, fsync the folder.

Rules: a reader sees the old text or the new, never half of one; a private file is never readable by others, not even
for an instant; an appended line is whole or it is the last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

LINE_BYTES_MAX = 1 << 20


def replace_bytes(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Put `data` at `path` atomically. `durable=False` skips the fsyncs, for files that are only a view."""
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
    """An append-only file of lines with one writer; a torn last line, left by a crash, is cut off at opening."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size_bytes = os.fstat(self._fd).st_size
        whole_bytes = _whole_lines_bytes(self._fd, size_bytes)
        if whole_bytes < size_bytes:
            os.ftruncate(self._fd, whole_bytes)
        os.lseek(self._fd, whole_bytes, os.SEEK_SET)
        self._dirty = False

    def append(self, line: str) -> None:
        """Append one line; it is on its way to the disk, `sync` makes it sure."""
        data = line.encode("utf-8", "surrogateescape") + b"\n"
        assert b"\n" not in data[:-1], "a record is one line"
        while data:
            data = data[os.write(self._fd, data) :]
        self._dirty = True

    def sync(self) -> None:
        if self._dirty:
            os.fdatasync(self._fd)
            self._dirty = False

    def close(self) -> None:
        self.sync()
        os.close(self._fd)


def _whole_lines_bytes(fd: int, size_bytes: int) -> int:
    """Return how many bytes of the file are whole lines: up to and with the last newline."""
    end = size_bytes
    while end > 0:
        start = max(0, end - LINE_BYTES_MAX)
        block = os.pread(fd, end - start, start)
        cut = block.rfind(b"\n")
        if cut >= 0:
            return start + cut + 1
        end = start
    return 0


def read_lines(path: Path) -> Iterator[str]:
    """Yield the whole lines of a `LineLog`, also while another process writes it; a torn last one is left out."""
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            yield raw[:-1].decode("utf-8", "surrogateescape")
