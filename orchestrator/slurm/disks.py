"""Can other machines see this folder? As far as the kind of its file system tells; nobody is asked.

A disk of this machine may still be there on the others, when this machine exports it: so the answer is worth a word, a
warning where that is not done, and refuses nothing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

LOCAL_KINDS = frozenset(
    [
        *(
            "ext2",
            "ext3",
            "ext4",
            "xfs",
            "btrfs",
            "zfs",
            "f2fs",
            "jfs",
            "reiserfs",
            "bcachefs",
            "ntfs",
            "ntfs3",
        ),
        *("vfat", "exfat", "tmpfs", "ramfs", "overlay", "aufs", "squashfs"),
    ]
)
"""File systems on a disk or in the memory of one machine."""

UNSHARED_KINDS = frozenset(["tmpfs", "ramfs", "overlay", "aufs"])
"""Of these the ones in the memory or the container of one machine, which are not exported to others."""

MOUNTS = Path("/proc/self/mountinfo")


def local_kind(folder: Path, mounts: Path = MOUNTS) -> str:
    """Return the kind of file system a folder is on, such as `ext4`, if it is one of this machine alone; else nothing.

    The folder need not exist yet.
    """
    place = next(path for path in (folder, *folder.parents) if path.exists()).resolve()
    try:
        text = mounts.read_text(errors="surrogateescape")
    except OSError:
        return ""
    found = [(point, kind) for point, kind in map(_mount, text.splitlines()) if place.is_relative_to(point)]
    kind = max(enumerate(found), key=lambda one: (len(one[1][0].parts), one[0]))[1][1] if found else ""
    return kind if kind in LOCAL_KINDS else ""


def _mount(line: str) -> tuple[Path, str]:
    """Return mount point and kind of a line of mountinfo, see proc_pid_mountinfo(5); blanks are written as octals."""
    before, _, after = line.partition(" - ")
    point = re.sub(
        r"\\([0-7]{3})", lambda octal: os.fsdecode(bytes([int(octal[1], 8)])), before.split(" ")[4]
    )
    return Path(point), after.split(" ")[0]
