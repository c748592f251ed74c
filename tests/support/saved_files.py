"""Files as frameworks save them, made by hand, and a watch that looks at them."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

from orchestrator.agent.outputs.checkpoint_watch import CheckpointWatch

S = 1_000_000_000
SAVED_NS = 1_000 * S
"""When the entries of these tests were written."""

STEPPED_NS = SAVED_NS + S
NOW_NS = SAVED_NS + S


def zipped() -> bytes:
    """Return what torch.save writes, as far as its format goes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("data.pkl", "x" * 5000)
    return out.getvalue()


def safetensors(missing_bytes: int = 0) -> bytes:
    """Return a file of one tensor, cut off by so many bytes."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, separators=(",", ":"))
    return struct.pack("<Q", len(header)) + header.encode() + bytes(16 - missing_bytes)


def metadata(*pieces: str) -> bytes:
    """Return a pickle that names pieces where that of torch.distributed.checkpoint does."""
    stored = {number: {"relative_path": piece, "offset": 0} for number, piece in enumerate(pieces)}
    return pickle.dumps({"a.weight": "not.distcp.", "storage_data": stored}, 4)


def distributed(folder: Path, at_ns: int = SAVED_NS, pieces: int = 2) -> Path:
    """Write a folder as torch.distributed.checkpoint does."""
    names = [f"__{rank}_0.distcp" for rank in range(pieces)]
    for name in names:
        write(folder / name, zipped(), at_ns)
    write(folder / ".metadata", metadata(*names), at_ns)
    return folder


def write(path: Path, data: bytes = b"data", at_ns: int = SAVED_NS) -> Path:
    """Write a file that is of that time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, ns=(at_ns, at_ns))
    return path


def begun(folder: Path, pattern: str = "*") -> CheckpointWatch:
    """Return a watch that takes what is there for known."""
    watch = CheckpointWatch(folder, pattern)
    watch.begin()
    return watch


def scan_twice(watch: CheckpointWatch, stepped_ns: int = STEPPED_NS, now_ns: int = NOW_NS) -> list[str]:
    """An entry must look the same twice, so the first look finds nothing new."""
    first = watch.scan(stepped_ns, now_ns)
    return [one.path.name for one in [*first, *watch.scan(stepped_ns, now_ns)]]
