"""Ownership of a job folder: whether all that would be executed, loaded or written there is the caller's alone.

Rules: a folder and its files count as they are, never as what a symbolic link leads to. The folder is the caller's; its
contents are the caller's or root's, who could change them anyway; no other user can write to it. The two folders above
it, `jobs` and the job home, may be shared when they are sticky and the caller's or root's: the owner of a sticky folder
can replace its content. The folders further up are the choice of the user who named the job home. Jobs of other
users are read, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from orchestrator.core.errors import Fault

WRITABLE = stat.S_IWGRP | stat.S_IWOTH

ROOT_UID = 0

LINKED = ("checkpoints", "evidence", "logs")
"""Folders that a user may have moved to another disk, with a link of his own in place: nothing in them is executed."""

LOADED = ("requests", "scripts", "secrets")
"""The folders whose files are checked one by one."""


def find_fault(root: Path) -> Fault | None:
    """Return why the job folder `root`, or a folder above it, is not exclusively the caller's; None when it is."""
    for folder in (root.parent.parent, root.parent):
        if found := _find_parent_fault(folder):
            return found
    if owner := _owner(root):
        return Fault(str(root), f"this job belongs to {owner}", f"ask {owner}")
    return _find_path_fault(root)


def find_fault_within(root: Path) -> Fault | None:
    """Return the same of the job folder with all that orch would execute, load or write in it."""
    if path_fault := find_fault(root):
        return path_fault
    for entry in _entries(root):
        path = Path(entry.path)
        is_own_link = entry.is_symlink() and entry.name in LINKED and not _owner(path)
        if not is_own_link and (path_fault := _find_path_fault(path)):
            return path_fault
        is_loaded = entry.name in LOADED and entry.is_dir(follow_symlinks=False)
        if is_loaded and (path_fault := next(filter(None, map(_find_path_fault, path.iterdir())), None)):
            return path_fault
    return None


def belongs_to_caller(path: Path) -> bool:
    """Return whether a file or folder exists, belongs to the caller, and is not a symbolic link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)


def is_own(path: Path) -> bool:
    """Return whether a file or folder is not a link, belongs to the caller, and cannot be written by other users."""
    return belongs_to_caller(path) and _find_path_fault(path) is None


def mode_of_copy(mode: int) -> int:
    """Return the mode of a copy: no set-user-ID bit, and no right to write for other users."""
    return mode & 0o777 & ~WRITABLE


@contextlib.contextmanager
def restricted_umask() -> Iterator[None]:
    """Make nothing in this block writable by other users, whatever the umask is."""
    before = os.umask(WRITABLE)
    os.umask(before | WRITABLE)
    try:
        yield
    finally:
        os.umask(before)


def restrict_umask() -> None:
    """Make nothing writable by other users in this process and those that it starts, whatever the umask is."""
    os.umask(os.umask(WRITABLE) | WRITABLE)


def open_inside(path: Path) -> int:
    """Open a file of a job folder that may be another user's, for reading, but no link, which may lead out of it.

    Raises OSError, see `open_regular`.
    """
    return open_regular(path, os.O_NOFOLLOW)


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a file of a job folder for reading, or as `flags` say. Raises OSError, also for a pipe or a device, which may
    never answer."""
    fd = os.open(path, os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o666)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is neither a file nor a folder", str(path))


def open_for_reading(path: Path) -> BinaryIO:
    """Open a file as `open_regular` does, for reading."""
    return os.fdopen(open_regular(path), "rb")


def open_for_append(path: Path) -> FileIO:
    """Open a file of a job folder, which may be a new one, to add to its end. Raises OSError, see `open_regular`."""
    fd = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.lseek(fd, 0, os.SEEK_END)
    return FileIO(fd, "ab")


def read_regular(path: Path) -> bytes:
    """Return the bytes of a file of a job folder. Raises OSError, see `open_regular`."""
    with open_for_reading(path) as file:
        return file.read()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _find_parent_fault(folder: Path) -> Fault | None:
    """Return why a folder in which job folders lie is not safe; a link to it counts with what it leads to."""
    try:
        link, status = folder.lstat(), folder.stat()
    except OSError as err:
        return _unreadable_fault(folder, err)
    fix = "set ORCH_HOME, or ssh.remote_dir, to a folder of your own"
    if not _is_trusted(link.st_uid) and stat.S_ISLNK(link.st_mode):
        what = f"it is a symbolic link of {user_name(link.st_uid)}, who can lead it elsewhere"
        return Fault(str(folder), what, fix)
    if not _is_trusted(status.st_uid):
        what = f"it belongs to {user_name(status.st_uid)}, who can replace its content"
        return Fault(str(folder), what, fix)
    if status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & WRITABLE:
        what = f"other users can write to it (mode {stat.S_IMODE(status.st_mode):o}), and replace its content"
        fix = f"chmod go-w {folder}, or chmod +t if it is meant to be shared; or {fix}"
        return Fault(str(folder), what, fix)
    return None


def _find_path_fault(path: Path) -> Fault | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None  # gone in the meantime
    except OSError as err:
        return _unreadable_fault(path, err)
    caution = "after checking that everything in it is yours"
    if not _is_trusted(status.st_uid):
        what = f"it belongs to {user_name(status.st_uid)}, in a job folder of yours"
        return Fault(str(path), what, f"make yourself its owner, {caution}")
    if stat.S_ISLNK(status.st_mode):
        what = "it is a symbolic link, which orch does not follow there"
        return Fault(str(path), what, "replace it with a real file or folder")
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return Fault(str(path), "it is neither a file nor a folder", "replace it with a real file or folder")
    if status.st_mode & WRITABLE:
        what = f"other users can write to it (mode {stat.S_IMODE(status.st_mode):o})"
        return Fault(str(path), what, f"chmod go-w {path}, {caution}")
    return None


def _unreadable_fault(path: Path, err: OSError) -> Fault:
    return Fault(str(path), f"it cannot be inspected: {err.strerror}", "check its permissions")


def _is_trusted(uid: int) -> bool:
    """Return whether this owner is trusted: the caller, or root, who could change everything anyway."""
    return uid in (ROOT_UID, os.geteuid())


def _owner(path: Path) -> str:
    """Return the user whose file this is; empty for the caller's own, and when that cannot be seen."""
    try:
        uid = path.lstat().st_uid
    except OSError:
        return ""
    return user_name(uid) if uid != os.geteuid() else ""


def user_name(uid: int) -> str:
    """Return the name of a user of this machine, or `user 1234` for one that it does not know."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"user {uid}"
