"""Marks of the newest checkpoint: pointer files, and the links that scripts make. They are no part of a checkpoint, but libraries begin
from what they name."""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path

from orchestrator.core.checkpoints import disk, file_groups

DIGITS = 7
"""How many digits Megatron gives the number in the name of a checkpoint's folder."""


def copy_marks(source: Path, target: Path, known: set[tuple[str, int, int]], *, keeps_unknown: bool = False) -> None:
    """Copy marks whose checkpoint is at the target, too. `known`: versions that were copied; `keeps_unknown`: no other is replaced."""
    for path in source.rglob("*"):
        name, is_link = path.relative_to(source), path.is_symlink()
        if not (is_link or path.name in file_groups.POINTERS):
            continue
        with contextlib.suppress(OSError, ValueError, StopIteration):  # it has changed, or leads elsewhere
            beside, is_there = (target / name).parent, os.path.lexists(target / name)
            if _stamp(source, name) in known or (keeps_unknown and is_there and _stamp(target, name) not in known):
                continue
            if is_link:
                leads = target / Path(os.path.normpath(path.parent / path.readlink())).relative_to(source)
            else:  # a name, or Megatron's number alone
                last = path.read_text().strip().rpartition("/")[2].rjust(DIGITS, "0")
                leads = next(beside.glob(f"*{glob.escape(last)}"))
            leads.stat()
            disk.put_file(Path(os.path.relpath(leads, beside)) if is_link else path, target / name, is_link=is_link)
            known.update((_stamp(source, name), _stamp(target, name)))


def _stamp(root: Path, name: Path) -> tuple[str, int, int]:
    about = (root / name).lstat()
    return str(name), about.st_size, about.st_mtime_ns
