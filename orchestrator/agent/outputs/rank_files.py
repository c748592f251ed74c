"""Files that the ranks here have opened in an attempt, as their hooks note them: where checkpoints are written and at which
step, and which checkpoints were read before the first step."""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.ranks.hook.layout import FILES_FILE
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import home, ownership
from orchestrator.core.jobdir.layout import JobDir

BLOCK_BYTES_MAX = 1 << 20
"""How much of one file is read at a time."""

SHARED_RANKS_MAX = 64
"""The files of how many ranks of a job are compared with those of other jobs."""


@dataclass(slots=True)
class RankFiles:
    """The files by their absolute paths. `written`: the step at which each was written last; `created`: those that were not
    there before; `read`: those that were read before the first step, in the order of their last reading. `resolve`: returns where a
    file lies."""

    resolve: Callable[[str], str] = str
    written: dict[str, int] = field(default_factory=dict)
    created: set[str] = field(default_factory=set)
    read: dict[str, None] = field(default_factory=dict)
    # The steps at which something was written
    write_steps: set[int] = field(default_factory=set)
    # Processes whose reading is noted
    readers: set[int] = field(default_factory=set)
    # By rank's file: how much of it has been read
    _offsets: dict[Path, int] = field(default_factory=dict)

    def read_notes(self, folders: Iterable[Path]) -> None:
        """Read what the hooks of the ranks with these folders have noted since the last call."""
        for folder in folders:
            with contextlib.suppress(OSError):
                self._read_file_notes(folder / FILES_FILE)

    def _read_file_notes(self, file: Path) -> None:
        offset = self._offsets.get(file, 0)
        if file.stat().st_size <= offset:
            return
        with os.fdopen(ownership.open_regular(file), "rb") as noted:
            noted.seek(offset)
            lines = noted.read(BLOCK_BYTES_MAX).split(b"\n")
        self._offsets[file] = offset + sum(len(line) + 1 for line in lines[:-1])
        for line in lines[:-1]:
            with contextlib.suppress(ValueError, SyntaxError):
                kind, number, is_new, path = line.decode().split(" ", 3)
                self._note(kind, int(number), is_new == "1", self.resolve(ast.literal_eval(path)))

    def _note(self, kind: str, number: int, is_new: bool, path: str) -> None:
        if kind == "pid":
            self.readers.add(number)
        elif kind == "read":
            self.read.pop(path, None)
            self.read[path] = None
        else:
            self.written[path] = number
            self.write_steps.add(number)
            if is_new:
                self.created.add(path)

    def has_reads_of(self, trainers: set[int]) -> bool:
        """Return whether the reads of each process that makes steps of these ranks are noted."""
        return bool(trainers) and trainers <= self.readers


def find_shared_files(job: JobDir) -> tuple[str, ...]:
    """Return a message for each other unended job whose ranks write a file that ranks of this job write, too."""
    shared_by_job: dict[str, str] = {}
    if not (written := _find_external_writes(job)):
        return ()
    with contextlib.suppress(ClusterError):  # the home cannot be read
        others = [other for other in home.unfinished_jobs(job.root.parents[1]) if other.id != job.id]
        shared_by_job = {other.id: min(written & _find_external_writes(other), default="") for other in others}
    return tuple(
        f"{name} is running, too, and writes the same file, {file}; fix: give each job a folder of its own"
        for name, file in shared_by_job.items()
        if file
    )


def _find_external_writes(job: JobDir) -> set[str]:
    """Return what ranks of a job have written outside of its folder, also where a link leads out of it."""
    files, own_folder = RankFiles(), f"{os.path.realpath(job.root)}/"
    files.read_notes(itertools.islice(job.root.glob("nodes/*/attempt-*/rank-*"), SHARED_RANKS_MAX))
    return {path for path in map(os.path.realpath, files.written) if not path.startswith(own_folder)}
