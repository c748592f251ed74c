"""Scan of the files below a checkpoint folder: sizes and times, links, and what pointer files name.

Rules: a link below the folder is never followed, except one at its top that leads out of it (an output folder on
another disk), and those from a folder in memory to the disk. A scan has limits on entries, depth and time, and reports
when it was cut off. A subfolder with more entries than a checkpoint can have is skipped, so that it hides no other.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.core.checkpoints import file_groups, formats
from orchestrator.core.checkpoints.checkpoint import CheckpointFile

ENTRIES_MAX = 100_000
FOLDER_ENTRIES_MAX = 20_000
DEPTH_MAX = 16
SCAN_S_MAX = 60.0
POINTER_BYTES_MAX = 4_096
ORCH_FILES = frozenset(("ledger.jsonl", ".kept", ".coming"))
"""Files of orch itself in a job's checkpoint folder."""


@dataclass(slots=True)
class Tree:
    """Result of a scan. `pointed`: names that pointer files and links call the newest; `cut`: why the scan is incomplete;
    `unreadable`: folders that could not be read; `disk_folder`: the folder to which links are always followed."""

    root: Path
    files: dict[str, CheckpointFile] = field(default_factory=dict)
    pointed: set[str] = field(default_factory=set)
    cut: str = ""
    unreadable: list[str] = field(default_factory=list)
    disk_folder: Path | None = None


def split_glob(folder: Path, glob: str) -> tuple[Path, str]:
    """Return the folder that file names are relative to, and the glob below it, for a `checkpoint.path`."""
    whole = Path(glob) if os.path.isabs(glob) else folder / glob  # noqa: PTH117
    if not os.path.isabs(glob):  # noqa: PTH117
        return folder, glob
    parts = whole.parts
    plain = next((at for at, part in enumerate(parts) if any(c in part for c in "*?[")), len(parts) - 1)
    return Path(*parts[:plain]), "/".join(parts[plain:])


def scan(root: Path, glob: str = "*", disk_folder: Path | None = None) -> Tree:
    """Return what is below `root` and matches `glob`, see `matches_glob`. `disk_folder`: see `Tree`."""
    tree, pattern = Tree(root, disk_folder=disk_folder), _parts(glob)
    todo = [("", 0, _expand_globstar(frozenset({0}), pattern))]
    count, due_s = 0, time.monotonic() + SCAN_S_MAX
    while todo:
        folder, depth, places = todo.pop()
        try:
            with os.scandir(root / folder) as entries:
                fit = ((entry, _advance(entry.name, places, pattern)) for entry in entries)
                shown = ((entry, at) for entry, at in fit if at and (folder or entry.name not in ORCH_FILES))
                visible = sorted(itertools.islice(shown, ENTRIES_MAX + 1), key=lambda pair: pair[0].name)
        except FileNotFoundError:
            continue
        except OSError as err:
            tree.unreadable.append(f"{folder or root}: {err.strerror}")
            continue
        if folder and len(visible) > FOLDER_ENTRIES_MAX:
            tree.cut = f"{folder} has more than {FOLDER_ENTRIES_MAX:,} entries"
            continue
        for entry, at in visible:
            name = f"{folder}/{entry.name}" if folder else entry.name
            count += 1
            if count > ENTRIES_MAX or time.monotonic() > due_s:
                is_long = count <= ENTRIES_MAX
                tree.cut = f"not all within {SCAN_S_MAX:g} s" if is_long else f"more than {ENTRIES_MAX:,} entries"
                return tree
            with contextlib.suppress(OSError):
                if add_entry(tree, entry.path, name, is_top=depth < len(pattern)):
                    if depth >= DEPTH_MAX:
                        tree.cut = f"more than {DEPTH_MAX} folders deep"
                    else:
                        todo.append((name, depth + 1, at))
                elif len(pattern) not in at:
                    tree.files.pop(name, None)
    return tree


def matches_glob(name: str, glob: str) -> bool:
    """Return whether a file, or a folder that it is in, matches a glob: one part for each part of the name, `**` for any number."""
    pattern = _parts(glob)
    places = _expand_globstar(frozenset({0}), pattern)
    for part in name.split("/"):
        places = _advance(part, places, pattern)
    return len(pattern) in places


def _parts(glob: str) -> list[str]:
    return [part for part in glob.split("/") if part not in ("", ".")]


def _expand_globstar(positions: frozenset[int], pattern: list[str]) -> frozenset[int]:
    """Return positions in a glob with those after each `**`, which may match nothing."""
    while more := {at + 1 for at in positions if at < len(pattern) and pattern[at] == "**"} - positions:
        positions |= more
    return positions


def _advance(part: str, positions: frozenset[int], pattern: list[str]) -> frozenset[int]:
    """Return the positions in a glob after a part of a name; its end stays, since all below a match belongs to it."""
    is_hidden = part.startswith(".") and part != file_groups.METADATA
    if len(pattern) in positions:
        return frozenset() if is_hidden else frozenset({len(pattern)})
    fit = {
        at if pattern[at] == "**" else at + 1
        for at in positions
        if fnmatch.fnmatchcase(part, pattern[at]) and (not is_hidden or pattern[at].startswith("."))
    }
    return _expand_globstar(frozenset(fit), pattern)


def add_entry(tree: Tree, path: str, name: str, *, is_top: bool) -> bool:
    """Add the entry at a path to the tree; tell whether it is a folder to enter. `is_top`: links out of the folder are
    followed there. Raises OSError."""
    about = os.stat(path, follow_symlinks=False)  # noqa: PTH116 -- a Path for each of 100,000 files takes twice as long
    if stat.S_ISLNK(about.st_mode):
        target = Path(os.path.realpath(path))
        real_root = Path(os.path.realpath(tree.root))
        is_on_disk = tree.disk_folder is not None and target.is_relative_to(tree.disk_folder)
        if is_on_disk and target != Path(str(tree.disk_folder), name):
            target = real_root / target.relative_to(str(tree.disk_folder))  # a script's link, to one of orch
        if target.is_relative_to(real_root):
            tree.pointed.add(str(target.relative_to(real_root)))
            return False
        if not (is_top or is_on_disk) or real_root.is_relative_to(target):
            return False
        about = os.stat(path)  # noqa: PTH116
    if stat.S_ISDIR(about.st_mode):
        return True
    if stat.S_ISREG(about.st_mode):
        tree.files[name] = CheckpointFile(name, about.st_size, about.st_mtime_ns)
        folder, _, last = name.rpartition("/")
        if last in file_groups.POINTERS and about.st_size <= POINTER_BYTES_MAX:
            tree.pointed.add(f"{folder}/{read_pointer(Path(path))}".lstrip("/"))
    return False


def read_pointer(path: Path) -> str:
    """Return the name in a pointer file. Raises OSError."""
    with formats.open_regular(path) as file:
        return file.read(POINTER_BYTES_MAX).decode("utf-8", "replace").strip().rpartition("/")[2]
