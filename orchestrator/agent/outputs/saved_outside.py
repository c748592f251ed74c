"""Checkpoints outside of `checkpoint.path`: what a script saves in its working folder, such as `snapshot.pt` or
`lightning_logs/…`.

Rules: such a file is reported and nothing else: no attempt starts from it. It was written since the attempt began, and
has an ending and a name of checkpoints; without any such, what was written after the first step counts. A walk reads few
entries, the upper folders first, and follows the links that the snapshot has in place of ignored folders.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from orchestrator.agent.outputs import checkpoint_series
from orchestrator.agent.outputs.checkpoint_formats import (
    METADATA,
    Shape,
    Wholeness,
    inspect_shape,
    is_temporary,
    wholeness,
)
from orchestrator.core.jobdir.layout import IN_CODE
from orchestrator.core.observations import SavedFile

WALK_S = 5.0
WALK_SHARE_MAX = 0.02
"""How much of its time an agent may spend in walks: on a slow disk they are rarer."""

REPORT_S = 30.0
"""How often a file that is rewritten again and again is reported."""

ENTRIES_MAX = 5_000
FOLDER_ENTRIES_MAX = 1_000
"""Entries read in one walk, and in one folder."""

DEPTH_MAX = 4
"""How many folders lie above a file at most: `lightning_logs/version_0/checkpoints/epoch=0-step=10.ckpt` has three."""

PATTERNS_MAX = 8
"""Series of files that are reported of one walk, those that were written last."""

_NAMES = re.compile(r"ckpt|checkpoint|chkpt|snapshot|resume|state|(^|[^a-z])(last|latest)([^a-z]|$)", re.IGNORECASE)  # fmt: skip
_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".tar"})
"""Endings of files that can hold all that a resume needs; others, such as .safetensors, hold weights alone."""

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_COUNT = re.compile(r"(?<![A-Za-z0-9])\d+(?:\.\d+)?(?![A-Za-z0-9])")
"""A number of its own in the name of a folder, which the next attempt may count up: `version_0`, but not `gpt2`."""

_LAST_NUMBER = re.compile(r"(?<=[-_=.])\d+(?=\.[A-Za-z]+$)")
"""A number of its own before the ending, as in `model-1.pt`."""


class SavedOutside:
    """Looks for checkpoints in the working folder during one attempt after the other."""

    def __init__(self, code: Path) -> None:
        self._code = code
        self._began_ns = 0
        self._due_s = 0.0
        # By pattern: the time of the last byte that was reported, and when that was.
        self._reported: dict[str, tuple[int, float]] = {}
        # Checkpoints by their names were seen: other files are not worth a word.
        self._has_named = False

    def begin(self, now_ns: int) -> None:
        """Begin an attempt: what is older was written by others, or reported then."""
        self._began_ns = now_ns

    def is_due(self, now_s: float) -> bool:
        """Tell whether the next walk is due."""
        return now_s >= self._due_s

    def walk(
        self,
        known: Collection[Path],
        step_at: Callable[[int], int],
        clock: Callable[[], float],
        *,
        is_last: bool = False,
    ) -> list[tuple[SavedFile, int]]:
        """Return what is to be reported, each file with the time of its last byte, ns. `known`: the checkpoints of
        `checkpoint.path`; `step_at`: the steps made by a wall clock time; `is_last`: the ranks have ended."""
        began_s = clock()
        newest: dict[str, tuple[Path, Shape]] = {}
        written = list(self._written(step_at))
        self._has_named = self._has_named or any(_is_named(path) for path, _ in written)
        for path, shape in written:
            if self._has_named and not _is_named(path):
                continue
            pattern = _pattern(path.relative_to(self._code))
            if pattern not in newest or shape.mtime_ns > newest[pattern][1].mtime_ns:
                newest[pattern] = (path, shape)
        own = {path.resolve() for path in known}
        latest = sorted(newest.items(), key=lambda item: -item[1][1].mtime_ns)[:PATTERNS_MAX]
        found = []
        for pattern, (path, shape) in latest:
            before_ns, at_s = self._reported.get(pattern, (0, began_s - REPORT_S))
            is_new = shape.mtime_ns != before_ns and (is_last or began_s >= at_s + REPORT_S)
            if is_new and path.resolve() not in own and wholeness(path, shape) is not Wholeness.TORN:
                self._reported[pattern] = (shape.mtime_ns, began_s)
                name = path.relative_to(self._code.parent).as_posix()
                found.append((SavedFile(name, IN_CODE + pattern), shape.mtime_ns))
        now_s = clock()
        self._due_s = now_s + max(WALK_S, (now_s - began_s) / WALK_SHARE_MAX)
        return found

    def _written(self, step_at: Callable[[int], int]) -> Iterable[tuple[Path, Shape]]:
        """Yield what looks like a checkpoint and was written in this attempt."""
        for path in _candidates(self._code):
            shape = inspect_shape(path)
            if not shape.size_bytes or shape.mtime_ns < self._began_ns:
                continue
            if _is_named(path) or step_at(shape.mtime_ns):
                yield path, shape


def _candidates(top: Path) -> Iterable[Path]:
    """Yield the files and folders that are checkpoints by their kind: of all folders at one depth those first that were
    changed last, so that a large data set costs what is left."""
    level, left = [top], ENTRIES_MAX
    for depth in range(DEPTH_MAX + 1):
        below: list[Path] = []
        for folder in sorted(level, key=_changed_ns, reverse=True):
            if left <= 0:
                return
            entries = _entries(folder, min(left, FOLDER_ENTRIES_MAX))
            left -= len(entries)
            if depth and any(entry.name == METADATA for entry in entries):
                yield folder  # of torch.distributed.checkpoint
                continue
            for entry in entries:
                path = Path(entry.path)
                if entry.name.startswith(".") or entry.name in _SKIPPED or is_temporary(entry.name):
                    continue
                is_folder = _is_dir(entry)
                if _is_checkpoint_folder(path) if is_folder else path.suffix in _SUFFIXES:
                    yield path
                elif is_folder:
                    below.append(path)
        level = below


def _entries(folder: Path, most: int) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(itertools.islice(entries, most))
    except OSError:
        return []


def _changed_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_checkpoint_folder(path: Path) -> bool:
    """Tell whether a folder is one checkpoint of a series, such as `checkpoint-500`."""
    if not checkpoint_series.member(path, 0, is_folder=True).counts or path.name.isdigit():
        return False
    return checkpoint_series.is_plausible(path, inspect_shape(path))


def _is_named(path: Path) -> bool:
    if path.is_dir():
        return True
    return _NAMES.search(path.name) is not None or checkpoint_series.member(path, 0, is_folder=False).counts


def _pattern(path: Path) -> str:
    """Return the glob of a file's series: `*` for the numbers that count up."""
    name, member = glob.escape(path.name), checkpoint_series.member(path, 0, is_folder=False)
    if member.counts:
        name = re.sub(r"\d+(\.\d+(?=\D))?", "*", name)
    elif member.order:  # a number, which is not that of a rank
        name = _LAST_NUMBER.sub("*", name)
    return "/".join([*(_COUNT.sub("*", glob.escape(part)) for part in path.parts[:-1]), name])
