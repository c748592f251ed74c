"""Files that the ranks here have opened in an attempt, as their hooks note them: where they save and at which step, and which
checkpoints they had read when they made their first step."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.ranks.hook.layout import FILES_FILE
from orchestrator.agent.ranks.processes import RankProcess
from orchestrator.core.jobdir import ownership

BLOCK_BYTES_MAX = 1 << 20
"""How much of one file is read at a time."""


@dataclass(slots=True)
class RankFiles:
    """The files by their absolute paths. `written`: the step at which each was written last; `made`: those that were not
    there before; `read`: those that were read before the first step, in the order of their last reading. `place`: returns where a
    file lies."""

    place: Callable[[str], str] = str
    written: dict[str, int] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    read: dict[str, None] = field(default_factory=dict)
    # Processes whose reading is noted
    readers: set[int] = field(default_factory=set)
    # By rank's file: how much of it has been read
    _offsets: dict[Path, int] = field(default_factory=dict)

    def follow(self, processes: Iterable[RankProcess]) -> None:
        """Take up what the hooks of these ranks have noted since the last call."""
        for process in processes:
            with contextlib.suppress(OSError):
                self._follow(process.folder / FILES_FILE)

    def _follow(self, file: Path) -> None:
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
                self._take(kind, int(number), is_new == "1", self.place(ast.literal_eval(path)))

    def _take(self, kind: str, number: int, is_new: bool, path: str) -> None:
        if kind == "pid":
            self.readers.add(number)
        elif kind == "read":
            self.read.pop(path, None)
            self.read[path] = None
        else:
            self.written[path] = number
            if is_new:
                self.made.add(path)

    def know_beginning(self, processes: Iterable[RankProcess]) -> bool:
        """Tell whether the reading of each process is noted that makes the steps of these ranks."""
        trainers = {last.pid for process in processes if (last := process.counter.read()).step}
        return bool(trainers) and trainers <= self.readers
