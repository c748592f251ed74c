"""Be nobody for a while: root reads and writes everything, so what a user is refused must be tried without its rights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """Give up root's rights over files inside the block; whoever is not root has none to give up.

    `folder`, the test's own, belongs to nobody from then on, and can be reached.
    """
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    closed = [parent for parent in folder.parents if not parent.stat().st_mode & 0o001]
    modes = [(parent, parent.stat().st_mode & 0o7777) for parent in closed]
    for parent, mode in modes:
        parent.chmod(mode | 0o011)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        for parent, mode in modes:
            parent.chmod(mode)
