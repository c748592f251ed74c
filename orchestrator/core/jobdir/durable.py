"""Files that survive a power cut: write next to the file, fsync, replace, fsync the folder; and the append-only line log.

Rules: a reader sees the old text or the new, never half of one; a private file is never readable by others, not even
for an instant; an appended line is complete or it is the last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from orchestrator.core.jobdir import full_disk, ownership

LINE_BYTES_MAX = 1 << 20

PART_CHARS_MAX = 40
"""How much of a file's name the name of its part has: names are limited in bytes, four a character at most."""


@contextlib.contextmanager
def atomic_replacement(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path that atomically replaces `path` at the end of the block, and is removed if the block fails.
    `durable=False` skips the fsyncs, for files that can be written again."""
    part = path.with_name(f".{path.name[:PART_CHARS_MAX]}.{os.urandom(6).hex()}.part")
    try:
        yield part
        if durable:
            _sync(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def replace_bytes(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Put `data` at `path` as `atomic_replacement` does."""
    with atomic_replacement(path, durable=durable) as part:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data)


def replace_text(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Put `text` at `path` atomically, as UTF-8."""
    replace_bytes(path, text.encode("utf-8", "surrogateescape"), mode=mode, durable=durable)


def make_subfolders(root: Path, folder: Path) -> None:
    """Make a folder below `root`, the job's folder, and its parents; never `root` itself, which may be deleted by now.
    Raises OSError."""
    if folder != root:
        make_subfolders(root, folder.parent)
        folder.mkdir(exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class LineLog:
    """An append-only file of lines with one writer; a torn last line, left by a crash, is cut off at opening.

    While the disk is full, `append` and `sync` wait. A network disk may have accepted lines and lost them before it
    reports that it is full: then the file is cut to what is known to be on disk, and the rest is written again.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size_bytes = os.fstat(self._fd).st_size
        self._safe_bytes = _complete_lines_bytes(self._fd, size_bytes)
        if self._safe_bytes < size_bytes:
            os.ftruncate(self._fd, self._safe_bytes)
        self._unsynced = bytearray()  # what was appended since the last `sync`
        self._written_bytes = 0  # how much of it is in the file

    @property
    def safe_bytes(self) -> int:
        """How many bytes are known to be on disk: whole lines."""
        return self._safe_bytes

    def append(self, line: str) -> None:
        """Append one line, once the disk has room. `sync` makes it durable."""
        data = line.encode("utf-8", "surrogateescape") + b"\n"
        assert b"\n" not in data[:-1], "a record is one line"
        self._unsynced += data
        full_disk.retry_while_full(self._write)

    def sync(self) -> None:
        """Make everything appended so far durable, once the disk has room."""
        if not self._unsynced:
            return
        full_disk.retry_while_full(self._sync)
        self._safe_bytes += len(self._unsynced)
        self._unsynced.clear()
        self._written_bytes = 0

    def close(self) -> None:
        """Make everything durable, and close the file."""
        self.sync()
        os.close(self._fd)

    def _write(self) -> None:
        while self._written_bytes < len(self._unsynced):
            rest = self._unsynced[self._written_bytes :]
            self._written_bytes += os.pwrite(self._fd, rest, self._safe_bytes + self._written_bytes)

    def _sync(self) -> None:
        self._write()
        try:
            os.fdatasync(self._fd)
        except OSError:
            self._written_bytes = 0
            os.ftruncate(self._fd, self._safe_bytes)
            raise


def _complete_lines_bytes(fd: int, size_bytes: int) -> int:
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
