"""Working folder of the ranks: the files of the code snapshot, files that were written since, and folders that are links
shared with other jobs.

The list of the snapshot's files (`snapshot.json`) has the size and time of each: a file that differs was written by a rank.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir

FILES_MAX = 200_000
"""How many files are inspected."""

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
"""Usual names of output folders; a link with such a name is reported at submit."""


def record_snapshot_files(job: JobDir, names: Iterable[Path]) -> None:
    """Record the files of the snapshot in the job's folder. Raises OSError."""
    recorded = {}
    for name in names:
        about = (job.code / name).lstat()
        recorded[str(name)] = (about.st_size, about.st_mtime_ns)
    job.snapshot_files.write_text(json.dumps(recorded))


def find_written_files(job: JobDir) -> dict[str, int]:
    """Return the files that were written in the working folder since the snapshot, new or changed, with their sizes in
    bytes, by name; links are not followed, and caches are skipped. Empty if the files of the snapshot are not known. Raises OSError."""
    try:
        recorded = codec.loads(dict[str, tuple[int, int]], ownership.read_regular(job.snapshot_files))
    except (FileNotFoundError, codec.CodecError):
        return {}
    written_files = {}
    for folder, folders, files in os.walk(job.code):
        folders[:] = sorted(name for name in folders if name != CACHE)
        for name in files:
            path = Path(folder, name)
            about = path.lstat()
            own = str(path.relative_to(job.code))
            if stat.S_ISREG(about.st_mode) and recorded.get(own) != (about.st_size, about.st_mtime_ns):
                written_files[own] = about.st_size
        if len(written_files) > FILES_MAX:
            break
    return dict(sorted(written_files.items()))


def find_links(job: JobDir) -> dict[str, str]:
    """Return the folders and compiled modules of the working folder that are links out of the job's folder, with their
    targets. Raises OSError."""
    targets = {}
    for folder, folders, files in os.walk(job.code):
        for name in sorted([*folders, *(name for name in files if name.endswith(".so"))]):
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(job.root.resolve()):
                targets[str(path.relative_to(job.code))] = str(path.resolve())
    return targets


def find_output_links(job: JobDir) -> dict[str, str]:
    """Return those links that have the usual name of an output folder."""
    return {name: to for name, to in find_links(job).items() if name.rpartition("/")[2].lower() in OUTPUT_FOLDERS}
