"""Formats of checkpoint files: whether a file is cut off, which other files its checkpoint needs, and its step.

Each reader is chosen by content, reads little, and executes nothing:
- A zip (what torch.save writes, also .npz) ends with a directory of what is in it. `deep` reads all and compares the
  CRC-32 of each record.
- safetensors: its header states its length, to the byte.
- `.metadata` of torch.distributed.checkpoint (or `__R.metadata`, one a rank): a pickle, written last, that names the
  files with offsets and lengths.
- `….index.json` names the files of sharded weights; `…-00001-of-00002…` says how many there are.
- `trainer_state.json` of the HF Trainer, which it writes last, has the step, and which checkpoint is best. Any other
  `.json` is complete JSON, or lines of it.
A file of another format, or one that is too large to be read, proves nothing.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from orchestrator.core.checkpoints import file_groups
from orchestrator.core.checkpoints.checkpoint import RequiredFile
from orchestrator.core.checkpoints.pickle_tokens import Token, read_tokens

HEAD_BYTES_MAX = 64 << 20
"""How much of a header, an index or a pickle is read; a `.metadata` of 100,000 shards has 14 MB."""

JSON_BYTES_MAX, OTHER_JSON_BYTES_MAX = 16 << 20, 1 << 20
"""The same of JSON, which takes up to 25 times as much memory; a tokenizer may have 30 MB, and is not worth reading."""

STATE_PICKLE_BYTES_MAX = 4 << 20
"""How much of the pickle in a torch.save is searched for its step."""

CITES_MAX = 64
ZIP_START, ZIP_END, PICKLE_START = b"PK\x03\x04", b"PK\x05\x06", b"\x80"

STEP_MAX = 10**15 - 1
STEP_DEPTH_MAX = 2
"""How many containers deep a step is looked for: in a state, and in a dict or an object of one."""

_ZIP_ERRORS = (
    OSError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,
    ValueError,
    OverflowError,
    NotImplementedError,
    struct.error,
)
"""What `zipfile` raises for files that are damaged."""

_STEP_KEYS = ("global_step", "step", "iter_num", "iteration", "iter", "num_updates", "it", "global_steps")
"""Keys of a state whose number is the step, the surest first."""

_SETTINGS = re.compile(r"arg|conf|cfg|param|option|setting|data|sampler|loader", re.IGNORECASE)
"""Keys of a state below which a number is a setting, or counts batches."""

_PART_OF = re.compile(r"(\d+)([-_]of[-_])(\d+)", re.IGNORECASE)
_CHECKPOINT_NAME = re.compile(r"\.(ckpt|pt|pth|bin|safetensors|tar|zip)$|checkpoint-\d+$")


@dataclass(frozen=True, slots=True)
class FileReading:
    """Content of a file by its format. `fault`: why it is damaged, empty if no damage is found; `is_proved`: its format proves
    that it is complete; `has_optimizer`: it has the state of an optimizer; `is_weights`: it is the `state_dict` of a model."""

    fault: str = ""
    # It could not be read, which proves nothing
    is_unsure: bool = False
    is_proved: bool = False
    needs: tuple[RequiredFile, ...] = ()
    step: int | None = None
    has_optimizer: bool = False
    is_weights: bool = False
    is_lightning: bool = False
    is_torch: bool = False
    cites: tuple[str, ...] = ()


NOTHING = FileReading()


def read_file(root: Path, name: str, size_bytes: int) -> FileReading:
    """Read the file `name` below `root`."""
    try:
        return _read_path(root, name, size_bytes)
    except OSError as err:
        return FileReading(fault=f"cannot be read: {err.strerror}", is_unsure=True)


def _read_path(root: Path, name: str, size_bytes: int) -> FileReading:
    if not size_bytes:
        empty = file_groups.is_checkpoint_file(name) or name.endswith((file_groups.METADATA, file_groups.TRAINER_STATE))
        return FileReading(fault="is empty") if empty else NOTHING
    with open_regular(root / name) as file:
        return _read_open_file(file, name, size_bytes)


def find_damage(root: Path, name: str, size_bytes: int) -> tuple[str, str]:
    """Read all of a file without a recorded sha256; return its fault, and what was compared, either empty."""
    try:
        return verify_file(root, name, size_bytes)
    except OSError as err:
        return f"cannot be read: {err.strerror}", ""


def verify_file(root: Path, name: str, size_bytes: int) -> tuple[str, str]:
    """The same, but raises OSError if the file cannot be read."""
    reading = _read_path(root, name, size_bytes)
    if reading.fault:
        return reading.fault, ""
    if not reading.is_torch and PurePosixPath(name).suffix not in (".npz", ".zip"):
        return "", "its length" if reading.is_proved else ""
    try:
        with open_regular(root / name) as file, zipfile.ZipFile(file) as archive:
            return _compare_checksums(archive)
    except _ZIP_ERRORS as err:
        _raise_disk_error(err)
        return f"cannot be read to its end: {err}", ""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; the open of a pipe would wait for its writer. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(22, "it is not a file")
    return os.fdopen(fd, "rb")


def _raise_disk_error(err: Exception) -> None:
    """Raise an error of the disk; an offset outside of the file is an OSError, too."""
    if isinstance(err, OSError) and err.errno not in (None, errno.EINVAL):
        raise err


def _compare_checksums(archive: zipfile.ZipFile) -> tuple[str, str]:
    """Compare the CRC of each record. torch can be set to write none: then all are 0."""
    records = archive.infolist()
    if not any(record.CRC for record in records):
        return "", ""
    bad = archive.testzip()
    return (f"its record {bad} has a wrong CRC-32" if bad else ""), "CRC-32"


def _read_open_file(file: BinaryIO, name: str, size_bytes: int) -> FileReading:
    path = PurePosixPath(name)
    head = file.read(9)
    if path.name.endswith(file_groups.METADATA) and head[:1] == PICKLE_START and size_bytes <= HEAD_BYTES_MAX:
        return _read_dcp(head + file.read(size_bytes), path)
    if head[:4] == ZIP_START:
        return _read_zip(file, has_others=path.suffix == ".distcp")
    if path.suffix == ".safetensors":
        return _read_safetensors(head, file, size_bytes)
    if path.suffix == ".json" and size_bytes <= JSON_BYTES_MAX:
        return _read_json(head + file.read(size_bytes), path)
    return NOTHING


def find_numbered_parts(name: str) -> tuple[RequiredFile, ...]:
    """Return all files of a set, by the name of one, such as `model-00001-of-00002.safetensors`."""
    match = _PART_OF.search(name)
    if match is None or not 0 < int(match[3]) <= 10_000:
        return ()
    digits, last = match[1], int(match[3])
    first = 0 if int(digits) == 0 else 1
    ends = range(first, last + first)
    return tuple(
        RequiredFile(f"{name[: match.start(1)]}{number:0{len(digits)}}{name[match.end(1) :]}", 1, name)
        for number in ends
    )


# Readers


def _read_dcp(data: bytes, path: PurePosixPath) -> FileReading:
    """Read the files that a `.metadata` names: `relative_path`, `offset` and `length` of each stored value."""
    ends: dict[str, int] = {}
    piece, offset, key = "", 0, ""
    try:
        for _, token in read_tokens(data):
            if isinstance(token, str):
                if key == "relative_path":
                    piece, key = token, ""
                else:
                    key = token
            elif key == "offset":
                offset = token
            elif key == "length" and piece:
                ends[piece] = max(ends.get(piece, 0), offset + token)
    except ValueError:
        return FileReading(fault="is cut off")
    needs = tuple(RequiredFile(str(path.parent / piece), end, str(path)) for piece, end in sorted(ends.items()))
    return FileReading(is_proved=bool(needs), needs=needs)


def _read_zip(file: BinaryIO, *, has_others: bool) -> FileReading:
    """Read a zip; a file of torch.distributed.checkpoint has several in a row. In a zip that is cut off, an inner one may be
    found: so a zip proves something only if it is the whole file."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            is_whole = has_others or min((record.header_offset for record in records), default=0) == 0
            file.seek(-len(ZIP_END) - 18 - len(archive.comment), os.SEEK_END)
            is_whole = is_whole and file.read(len(ZIP_END)) == ZIP_END
            state = next((record for record in records if record.filename.endswith("/data.pkl")), None)
            data = _read_record_head(file, state) if state is not None else b""
    except _ZIP_ERRORS as err:
        _raise_disk_error(err)
        return FileReading(fault="is cut off: its zip has no end" if "not a zip" in str(err) else f"is damaged: {err}")
    if state is not None:
        return _read_state(data, is_whole=is_whole)
    # Stable-Baselines3 has a torch.save of each part in a zip.
    return FileReading(is_proved=is_whole, has_optimizer=any("optim" in record.filename for record in records))


def _read_record_head(file: BinaryIO, record: zipfile.ZipInfo) -> bytes:
    """Return the beginning of a record as torch stores it. `zipfile` would refuse one without a checksum, and could
    unpack few bytes to very many. Raises struct.error, OSError, BadZipFile."""
    if record.compress_type != zipfile.ZIP_STORED:
        return b""
    file.seek(record.header_offset + 26)
    file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
    data = file.read(min(record.file_size, STATE_PICKLE_BYTES_MAX))
    if record.CRC and len(data) == record.file_size and zlib.crc32(data) != record.CRC:
        raise zipfile.BadZipFile(f"{record.filename} has a wrong CRC-32")
    return data


def _read_state(data: bytes, *, is_whole: bool) -> FileReading:
    """Read the pickle of a torch.save: its step, whether it has an optimizer, and which checkpoint it calls best."""
    steps: dict[str, tuple[int, int]] = {}  # by key: how deep it lies, the number
    texts: set[str] = set()
    cites: dict[str, None] = {}
    is_weights, part = False, ""
    for (_, key), (depth, value) in _pairs(data):
        if isinstance(value, str):
            texts.add(value)
            part = value if depth <= 1 else part
            is_weights = is_weights or (depth <= 1 and value.endswith(".weight"))
            if _CHECKPOINT_NAME.search(value) and len(cites) < CITES_MAX:
                cites[PurePosixPath(value).name] = None
        elif key in _STEP_KEYS and 0 <= value <= STEP_MAX:
            is_setting = depth > 1 and _SETTINGS.search(part)
            if not is_setting and depth <= steps.get(str(key), (STEP_DEPTH_MAX, 0))[0]:
                steps[str(key)] = (depth, value)
    top = min((depth for depth, _ in steps.values()), default=0)
    found = [steps[key][1] for key in _STEP_KEYS if key in steps and steps[key][0] == top]
    return FileReading(
        is_proved=is_whole, step=found[0] if found else None, has_optimizer="param_groups" in texts, is_weights=is_weights,
        is_lightning="pytorch-lightning_version" in texts, is_torch=True, cites=tuple(cites),
    )  # fmt: skip


def _pairs(data: bytes) -> Iterator[tuple[Token, Token]]:
    """Yield each text or number with the previous one, up to where the pickle may be cut off."""
    before: Token = (0, "")
    try:
        for token in read_tokens(data):
            yield before, token
            before = token
    except ValueError:
        return


def _read_safetensors(head: bytes, file: BinaryIO, size_bytes: int) -> FileReading:
    """Check the length of a safetensors file: u64 length of the header, JSON with the offsets, then the data."""
    (header_bytes,) = struct.unpack("<Q", head[:8]) if len(head) >= 8 else (1 << 63,)
    if 8 + header_bytes > size_bytes:
        return FileReading(fault="is cut off within its header")
    if header_bytes > JSON_BYTES_MAX:
        return NOTHING
    try:
        header = json.loads(head[8:] + file.read(max(0, header_bytes - len(head) + 8)))
        about = header.pop("__metadata__", {})
        end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return FileReading(fault="has a damaged header")
    if size_bytes != 8 + header_bytes + end:
        return FileReading(fault=f"has {size_bytes:,} bytes instead of {8 + header_bytes + end:,}")
    stated = [str(about[key]) for key in _STEP_KEYS if key in about] if isinstance(about, dict) else []
    step = int(stated[0]) if stated and re.fullmatch(r"[0-9]{1,15}", stated[0]) else None
    return FileReading(is_proved=True, step=step)


def _read_json(data: bytes, path: PurePosixPath) -> FileReading:
    try:
        if path.name.endswith(".index.json"):
            return _read_index(json.loads(data), path)
        if path.name == file_groups.TRAINER_STATE:
            return _read_trainer_state(json.loads(data))
        if len(data) > OTHER_JSON_BYTES_MAX:
            return NOTHING
        _check_json(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return FileReading(fault="is cut off or damaged")
    return FileReading(is_proved=True)


def _read_index(data: Any, path: PurePosixPath) -> FileReading:
    pieces = sorted({str(piece) for piece in data["weight_map"].values()})
    needs = tuple(RequiredFile(str(path.parent / piece), 1, str(path)) for piece in pieces)
    return FileReading(is_proved=True, needs=needs)


def _read_trainer_state(state: Any) -> FileReading:
    step, best = state.get("global_step"), state.get("best_model_checkpoint")
    is_step = type(step) is int and 0 <= step <= STEP_MAX
    cites = (PurePosixPath(best).name,) if isinstance(best, str) else ()
    return FileReading(is_proved=True, step=step if is_step else None, cites=cites)


def _check_json(data: bytes) -> None:
    """Read JSON, or lines of it. Raises ValueError, RecursionError."""
    try:
        json.loads(data)
    except ValueError:
        for line in data.splitlines():
            json.loads(line)
