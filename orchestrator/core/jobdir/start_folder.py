"""The folder where the ranks of a job start: what the snapshot of the code brought there, what was written there since, and which
of its folders are links that other jobs share.

The list of what was brought (`snapshot.json`) has the size and time of each file: a file that has another is a rank's.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir

FILES_MAX = 200_000
"""How many files are looked at."""

CACHE = "__pycache__"

OUTPUT_FOLDERS = frozenset(
    [
        "out",
        "output",
        "outputs",
        "result",
        "results",
        "run",
        "runs",
        "checkpoint",
        "checkpoints",
        "ckpt",
        "ckpts",
        "log",
        "logs",
        "lightning_logs",
        "save",
        "saves",
        "models",
    ]
)
"""Names of folders in which scripts usually save; a link of such a name is told of at submit."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that is new or has changed since the snapshot, by its name where ranks start."""

    name: str
    size_bytes: int


def note_brought(job: JobDir, names: Iterable[Path]) -> None:
    """Write down the files of the snapshot, which lies in the job's folder. Raises OSError."""
    brought = {}
    for name in names:
        about = (job.code / name).lstat()
        brought[str(name)] = (about.st_size, about.st_mtime_ns)
    job.brought.write_text(json.dumps(brought))


def written(job: JobDir) -> list[WrittenFile]:
    """Return what was written where ranks start since the snapshot, by name; links are not followed, nor are caches looked at.
    Empty where it is not known what the snapshot brought. Raises OSError."""
    try:
        brought = codec.loads(dict[str, tuple[int, int]], ownership.read_regular(job.brought))
    except (FileNotFoundError, codec.CodecError):
        return []
    found = []
    for folder, folders, files in os.walk(job.code):
        folders[:] = sorted(name for name in folders if name != CACHE)
        for name in files:
            path = Path(folder, name)
            about = path.lstat()
            own = str(path.relative_to(job.code))
            if stat.S_ISREG(about.st_mode) and brought.get(own) != (about.st_size, about.st_mtime_ns):
                found.append(WrittenFile(own, about.st_size))
        if len(found) > FILES_MAX:
            break
    return sorted(found, key=lambda file: file.name)


def links(job: JobDir) -> dict[str, str]:
    """Return the folders and compiled modules where ranks start that are links out of the job's folder, and where they lead.
    Raises OSError."""
    found = {}
    for folder, folders, files in os.walk(job.code):
        for name in sorted([*folders, *(name for name in files if name.endswith(".so"))]):
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(job.root.resolve()):
                found[str(path.relative_to(job.code))] = str(path.resolve())
    return found


def output_links(job: JobDir) -> dict[str, str]:
    """Return those links whose names are usual for what scripts write."""
    return {name: to for name, to in links(job).items() if name.rpartition("/")[2].lower() in OUTPUT_FOLDERS}
