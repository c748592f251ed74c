"""Completeness of a checkpoint by its file formats alone: whole, cut off, or with files missing.

- A zip (what `torch.save` writes) ends with its directory; a safetensors file is as long as its header says.
- A folder of `torch.distributed.checkpoint` has pieces and `.metadata`, which is written last and names them all. It is
  a pickle from an untrusted writer: its strings are read as bytes, and it is never unpickled.
- A `….index.json` (weights of Transformers in several files) names its pieces.
- A temporary name, or `checkpoint-is-incomplete.txt` of the HF Trainer, marks its folder as unfinished.
- A file of another format proves nothing.
"""

from __future__ import annotations

import enum
import errno
import json
import re
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FILES_MAX = 10_000
"""Files read in one checkpoint folder."""

MANIFEST_BYTES_MAX = 64 << 20
"""How much of a `.metadata` or an index file is read; 100,000 tensors take 4 MB."""

SUFFIXES = frozenset(
    {".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pkl", ".npz", ".tar", ".distcp", ".model"}
)
METADATA = ".metadata"
PIECE = ".distcp"
LIGHTNING_LAST = "meta.pt"
"""The file that Lightning adds last to a folder of torch.distributed.checkpoint."""

_TEMPORARY = re.compile(
    r"^tmp|[._-](tmp|temp|incomplete|lock)([._-]|\d|$)|\.(part|partial)$|~$", re.IGNORECASE
)
_MARKERS = ("checkpoint-is-incomplete.txt",)
_PIECE_NAME = re.compile(rb"\x8c(.)([\x20-\x7e]{1,255}?\.distcp)", re.DOTALL)
"""A short text as pickle protocols 4 and later write it: an opcode, its length in one byte, the text."""
_PICKLE_START = b"\x80"
_ZIP_START = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22
# The end record of a zip and the longest comment after it.
_ZIP_TAIL_BYTES = 66_000


class Wholeness(enum.Enum):
    """What a checkpoint's formats prove; most formats prove nothing."""

    WHOLE = "whole"
    TORN = "torn"  # cut off, or marked as not done
    UNFINISHED = "unfinished"  # pieces are missing
    UNKNOWN = "unknown"


_GONE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP))


@dataclass(frozen=True, slots=True)
class Shape:
    """The files of an entry. Equal shapes at two times mean that nothing was written in between."""

    # (path in the entry, size in bytes, mtime in ns); "." for an entry that is a file
    files: tuple[tuple[str, int, int], ...]

    @property
    def mtime_ns(self) -> int:
        return max((mtime_ns for _, _, mtime_ns in self.files), default=0)

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self.files)


def inspect_shape(path: Path) -> Shape:
    """Return the shape of an entry, without files that vanish during the call."""
    files: list[tuple[str, int, int]] = []
    todo = [path]
    while todo and len(files) < FILES_MAX:
        file = todo.pop()
        try:
            if file.is_dir():
                todo.extend(sorted(file.iterdir(), reverse=True))
                continue
            about = file.stat()
        except OSError:
            continue
        files.append((str(file.relative_to(path)), about.st_size, about.st_mtime_ns))
    return Shape(tuple(files))


def is_unreadable(path: Path) -> bool:
    """Tell whether an entry may be there and cannot be read now, as on a disk that has lost its server: its files cannot
    be told from files that are gone."""
    todo = [path]
    while todo:
        file = todo.pop()
        try:
            if stat.S_ISDIR(file.stat().st_mode):
                todo.extend(file.iterdir())
        except OSError as err:
            if err.errno not in _GONE:
                return True
    return False


def is_temporary(name: str) -> bool:
    """Tell whether a name marks a file as unfinished."""
    return _TEMPORARY.search(name) is not None


def wholeness(path: Path, shape: Shape) -> Wholeness:
    """Return how complete the entry is, as far as the formats of its files prove it."""
    names = [PurePosixPath(name) for name, _, _ in shape.files]
    if any(name.name in _MARKERS or is_temporary(name.name) for name in names):
        return Wholeness.TORN
    of_files = {_file_wholeness(path / name, size) for name, size, _ in shape.files}
    if Wholeness.TORN in of_files:
        return Wholeness.TORN
    if not _has_all_pieces(path, names):
        return Wholeness.UNFINISHED
    return Wholeness.UNKNOWN if Wholeness.UNKNOWN in of_files else Wholeness.WHOLE


def proves_itself(path: Path, shape: Shape) -> bool:
    """Tell whether an entry is whole by its formats and cannot lack a file: it is one file, or a folder of
    torch.distributed.checkpoint with exactly the files that its `.metadata` names."""
    if wholeness(path, shape) is not Wholeness.WHOLE:
        return False
    names = {name for name, _, _ in shape.files}
    if METADATA not in names:
        return path.is_file()
    more = {LIGHTNING_LAST} if path.suffix == ".ckpt" else set()
    return names == {METADATA, *more, *_pieces_named(path / METADATA)}


def is_half_rewritten(before: Shape | None, now: Shape) -> bool:
    """Tell whether pieces were rewritten since `before`, and the `.metadata` that is written last was not."""
    old = {name: (size, mtime_ns) for name, size, mtime_ns in before.files} if before else {}
    new = {name: (size, mtime_ns) for name, size, mtime_ns in now.files}
    changed = {name for name in new if name.endswith(PIECE) and old.get(name, new[name]) != new[name]}
    manifests = {str(PurePosixPath(name).with_name(METADATA)) for name in changed}
    return any(name in new and old.get(name) == new[name] for name in manifests)


def _file_wholeness(path: Path, size_bytes: int) -> Wholeness:
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
            elif path.name == METADATA and head[:1] == _PICKLE_START:
                file.seek(size_bytes - 1)
                whole = file.read() == b"."  # the opcode that ends a pickle
            else:
                return Wholeness.UNKNOWN
    except OSError:
        return Wholeness.TORN
    return Wholeness.WHOLE if whole else Wholeness.TORN


def _ends_with_directory(tail: bytes) -> bool:
    """Tell whether a zip ends with its end record: 22 bytes and a comment of the length named in it."""
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


def _has_all_pieces(path: Path, names: Iterable[PurePosixPath]) -> bool:
    """Tell whether every named piece exists, and every folder of pieces has its metadata.

    Ranks that save without `use_collectives` have a `__RANK.metadata` each.
    """
    folders: dict[PurePosixPath, set[str]] = {}
    for name in names:
        folders.setdefault(name.parent, set()).add(name.name)
    for folder, files in folders.items():
        lists = [name for name in files if name.endswith(METADATA)]
        if not lists and any(name.endswith(PIECE) for name in files):
            return False
        wanted = {piece for name in lists for piece in _pieces_named(path / folder / name)}
        for index in [name for name in files if name.endswith(".index.json")]:
            wanted |= _pieces_indexed(path / folder / index)
        if not wanted <= files:
            return False
    return True


def _pieces_named(metadata: Path) -> set[str]:
    """Return the pieces that a `.metadata` names: the texts in it that end in `.distcp`."""
    matches = _PIECE_NAME.finditer(_start_of(metadata))
    return {match[2].decode() for match in matches if match[1][0] == len(match[2])}


def _pieces_indexed(index: Path) -> set[str]:
    """Return the files that an index of weights names; for a cut-off index the empty name, which no file has."""
    try:
        data = json.loads(_start_of(index))
    except (ValueError, RecursionError):
        return {""}
    weights = data.get("weight_map") if isinstance(data, dict) else None
    return set(map(str, weights.values())) if isinstance(weights, dict) else set()


def _start_of(path: Path) -> bytes:
    if not path.is_file():  # reading a pipe never returns
        return b""
    try:
        with path.open("rb") as file:
            return file.read(MANIFEST_BYTES_MAX)
    except OSError:
        return b""
