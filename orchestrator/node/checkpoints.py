"""Which checkpoints are complete? The simplest honest rule, applied to whatever matches the job's glob.

An entry (a file or a folder) counts as complete when it is not being written any more and no file in it is torn.
That it is not being written is known when every rank here has made an optimizer step after its last byte (so the call
that saved it has returned, whoever made it), or when all ranks ended with code 0. A file of which neither is known
when the ranks are gone must be whole by its own format. A script without steps has only the clock: its entry must
have stood unchanged for `SETTLE_S`.

Temporary names never count. Under the default glob `*` only what looks like a checkpoint counts, so that a metrics
file or a picture beside it is never resumed from.
"""

from __future__ import annotations

import enum
import glob
import re
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path

SETTLE_S = 2.0
ENTRIES_MAX = 10_000
"""Files looked at in one folder-shaped checkpoint, and entries looked at in one scan."""

SUFFIXES = frozenset(
    {".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pkl", ".npz", ".tar", ".distcp", ".model"}
)
_TEMPORARY = re.compile(
    r"^\.|^tmp|[._-](tmp|temp|incomplete|lock)([._-]|\d|$)|\.(part|partial)$|~$", re.IGNORECASE
)
_MARKERS = ("checkpoint-is-incomplete.txt",)
_ZIP_START = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22
_ZIP_TAIL_BYTES = 66_000  # the end record of a zip and the longest comment behind it


class Wholeness(enum.Enum):
    """What the format of a file tells about it; most formats tell nothing."""

    WHOLE = "whole"
    TORN = "torn"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Shape:
    """What an entry looks like on disk: its files with sizes and times. Equal shapes: nothing was written between."""

    files: tuple[tuple[str, int, int], ...]

    @property
    def mtime_ns(self) -> int:
        return max((mtime_ns for _, _, mtime_ns in self.files), default=0)

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self.files)


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint and the time of its last byte."""

    path: Path
    mtime_ns: int


@dataclass(slots=True)
class CheckpointWatch:
    """Looks again and again at one folder; every checkpoint is reported once, and once more when rewritten."""

    folder: Path
    pattern: str
    reported: dict[Path, Shape] = field(default_factory=dict)
    seen: dict[Path, Shape] = field(default_factory=dict)

    def begin(self) -> None:
        """Take what is there now as known: it belongs to attempts before."""
        self.reported = dict(self._entries())
        self.seen = dict(self.reported)

    def scan(self, stepped_ns: int, now_ns: int) -> list[Found]:
        """Return what became complete, oldest first.

        `stepped_ns`: when every rank that makes steps had made one, 0 if there was none; wall clock of this node.
        """
        found: list[Found] = []
        for path, shape in self._entries():
            still = self.seen.get(path) == shape
            self.seen[path] = shape
            if not still or self.reported.get(path) == shape:
                continue
            settled = shape.mtime_ns < stepped_ns or (
                not stepped_ns and shape.mtime_ns + SETTLE_S * 1e9 < now_ns
            )
            if settled and wholeness(path, shape) is not Wholeness.TORN:
                self.reported[path] = shape
                found.append(Found(path, shape.mtime_ns))
        return sorted(found, key=lambda one: one.mtime_ns)

    def last_scan(self, stepped_ns: int, all_ended_well: bool) -> tuple[list[Found], list[Path]]:
        """Return what is complete now that all ranks are gone, and what was reported before but is spoiled."""
        found: list[Found] = []
        spoiled: list[Path] = []
        present = dict(self._entries())
        for path, shape in present.items():
            if self.reported.get(path) == shape:
                continue
            proven = shape.mtime_ns < stepped_ns or all_ended_well
            known = wholeness(path, shape)
            # A folder whose files are all whole may still miss one.
            if known is not Wholeness.TORN and (proven or (path.is_file() and known is Wholeness.WHOLE)):
                found.append(Found(path, shape.mtime_ns))
            elif path in self.reported:
                spoiled.append(path)
        spoiled += [path for path in self.reported if path not in present]
        return sorted(found, key=lambda one: one.mtime_ns), spoiled

    def doubtful(self, found: list[Found]) -> list[Found]:
        """Return the folders that were written to and are not known to be whole, now that all ranks are gone; `found`
        are those that the last scan has found."""
        known = {one.path for one in found}
        return [
            Found(path, shape.mtime_ns)
            for path, shape in self._entries()
            if self.reported.get(path) != shape and path not in known and path.is_dir()
        ]

    def torn(self) -> list[Path]:
        """Return the entries that were certainly cut off while they were written."""
        return [path for path, shape in self._entries() if wholeness(path, shape) is Wholeness.TORN]

    def prune(self, keep: int) -> list[Path]:
        """Delete all but the newest `keep` of what this watch knows to be complete; return what was deleted.

        Only entries directly in the job's own checkpoint folder are ever deleted.
        """
        known = sorted(self.reported.items(), key=lambda item: item[1].mtime_ns)
        old = [path for path, shape in known if path.parent == self.folder and self.seen.get(path) == shape]
        gone = old[: max(0, len(old) - keep)]
        for path in gone:
            _delete(path)
            self.reported.pop(path, None)
            self.seen.pop(path, None)
        return gone

    def _entries(self) -> list[tuple[Path, Shape]]:
        """Return the non-empty entries that match, with their shapes."""
        full = str(Path(glob.escape(str(self.folder))) / self.pattern)  # an absolute pattern stays as it is
        entries: list[tuple[Path, Shape]] = []
        names = sorted(glob.glob(full))  # noqa: PTH207 -- Path.glob takes no absolute pattern
        for name in names[:ENTRIES_MAX]:
            path = Path(name)
            if _TEMPORARY.search(path.name):
                continue
            shape = look(path)
            if shape.size_bytes and (self.pattern != "*" or _plausible(path, shape)):
                entries.append((path, shape))
        return entries


def look(path: Path) -> Shape:
    """Return the shape of an entry; what vanishes meanwhile is left out."""
    files: list[tuple[str, int, int]] = []
    todo = [path]
    while todo and len(files) < ENTRIES_MAX:
        one = todo.pop()
        try:
            if one.is_dir():
                todo.extend(sorted(one.iterdir(), reverse=True))
                continue
            stat = one.stat()
        except OSError:
            continue
        files.append((str(one.relative_to(path)), stat.st_size, stat.st_mtime_ns))
    return Shape(tuple(files))


def wholeness(path: Path, shape: Shape) -> Wholeness:
    """Tell whether the entry is whole, as far as the formats of its files let one know."""
    names = [Path(name).name for name, _, _ in shape.files]
    if any(name in _MARKERS or _TEMPORARY.search(name) for name in names):
        return Wholeness.TORN
    known = {_file_wholeness(path / name, size) for name, size, _ in shape.files}
    if Wholeness.TORN in known:
        return Wholeness.TORN
    return Wholeness.UNKNOWN if Wholeness.UNKNOWN in known else Wholeness.WHOLE


def _file_wholeness(path: Path, size_bytes: int) -> Wholeness:
    """A zip (torch.save) ends with its directory; a safetensors file is as long as its header says."""
    if not size_bytes:
        return Wholeness.TORN if path.suffix in SUFFIXES else Wholeness.UNKNOWN
    try:
        with path.open("rb") as file:
            head = file.read(8)
            if path.suffix == ".safetensors":
                whole = _safetensors_is_whole(head, file.read(1 << 20), size_bytes)
            elif head[:4] == _ZIP_START:
                file.seek(max(0, size_bytes - _ZIP_TAIL_BYTES))
                whole = _ends_with_directory(file.read())
            else:
                return Wholeness.UNKNOWN
    except OSError:
        return Wholeness.TORN
    return Wholeness.WHOLE if whole else Wholeness.TORN


def _ends_with_directory(tail: bytes) -> bool:
    """Tell whether a zip's end record is the last thing in it: 22 bytes and a comment as long as it says."""
    start = tail.rfind(_ZIP_END)
    if start < 0 or start + _ZIP_END_BYTES > len(tail):
        return False
    (comment_bytes,) = struct.unpack_from("<H", tail, start + 20)
    return start + _ZIP_END_BYTES + int(comment_bytes) == len(tail)


def _safetensors_is_whole(head: bytes, more: bytes, size_bytes: int) -> bool:
    """Check the header of the safetensors format: u64 header length, then JSON with the tensors' end offsets."""
    if len(head) < 8:
        return False
    (header_bytes,) = struct.unpack("<Q", head)
    if header_bytes > len(more):
        return 8 + int(header_bytes) <= size_bytes
    ends = [int(end) for end in re.findall(rb'"data_offsets":\[\d+,(\d+)\]', more[:header_bytes])]
    return size_bytes >= 8 + int(header_bytes) + max(ends, default=0)


def _plausible(path: Path, shape: Shape) -> bool:
    """Tell whether the entry looks like a checkpoint: some file of it has a suffix of the trade."""
    names = [path.name] if path.is_file() else [Path(name).name for name, _, _ in shape.files]
    return any(Path(name).suffix in SUFFIXES for name in names)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
