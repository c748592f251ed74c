"""Snapshot of a job's code: a copy of the workdir at submit, so that later edits never reach a running job.

Files that git tracks or would track are copied; what it ignores (data, outputs, environments) is linked, so that relative
paths keep working; without git everything is copied. A virtual environment is linked in any case. Above the limit nothing is copied, and the error names the largest
files.

Hosts that do not see this disk get an archive: the copies, and of what git ignores only what `ssh.sync` names. The same
content makes the same archive, byte for byte, so that a host which has it need not get it again.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from orchestrator.core.errors import UserError
from orchestrator.core.jobdir import ownership

FILES_MAX = 200_000
LARGEST_SHOWN = 5
COMPRESS_LEVEL = 3
"""Of gzip, 1 to 9: code becomes small at any level, weights at no level."""

GIT_S_MAX = 60.0
_TARGET_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a copy that come from its target."""


@dataclass(frozen=True, slots=True)
class CodeSnapshot:
    """Files to copy and to link, relative to `root`."""

    root: Path
    copies: tuple[Path, ...]
    links: tuple[Path, ...]
    # Size of the copies
    size_bytes: int
    # Files for the archive only
    synced: tuple[Path, ...] = ()


def plan_snapshot(root: Path, limit_mb: int, leave_out: Path) -> CodeSnapshot:
    """Return the snapshot of `root`, yet to be taken; `leave_out` (the job home) is not part of it.

    Raises UserError when it is too large, naming the largest files, or when something cannot be read.
    """
    listed = _list_by_git(root)
    names, links = listed if listed is not None else (_list_files(root, leave_out, prunes=True), ())
    environments = {name.parent for name in names if _is_environment(root, name)}
    if environments:
        names = [name for name in names if environments.isdisjoint(name.parents)]
        links = (*links, *sorted(environments))
    inside = [name for name in names if not _is_within(root / name, leave_out)]
    sizes = {name: size for name in inside if (size := _size_bytes(root / name)) is not None}
    _refuse_too_large(sizes, root, limit_mb, has_git=listed is not None)
    kept = tuple(link for link in links if not _is_within(root / link, leave_out) and (root / link).exists())
    return CodeSnapshot(root, tuple(sorted(sizes)), kept, sum(sizes.values()))


def copy_files(snapshot: CodeSnapshot, to: Path) -> None:
    """Write the snapshot into the new folder `to`. Raises UserError when a file cannot be read, OSError for a full disk."""
    to.mkdir(parents=True)
    made: set[Path] = {to}
    for name in snapshot.copies:
        target = to / name
        if target.parent not in made:
            target.parent.mkdir(parents=True, exist_ok=True)
            made.add(target.parent)
        _copy(snapshot.root, name, target)
    for name in snapshot.links:
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(target):
            target.symlink_to(snapshot.root / name)


def add_synced(snapshot: CodeSnapshot, paths: Sequence[str], limit_mb: int, leave_out: Path) -> CodeSnapshot:
    """Return the snapshot with the files below the paths that `ssh.sync` names, less those that are copied anyway.

    Raises UserError for a path that is missing or lies outside, and when all together is too large.
    """
    root, where = snapshot.root, "ssh.sync"
    copied, sizes = frozenset(snapshot.copies), dict[Path, int]()
    for text in paths:
        name = Path(os.path.normpath(text))
        if name.is_absolute() or name.parts[:1] == ("..",):
            raise UserError(f"{text} lies outside workdir", where, "name paths below workdir, or link there")
        if not (root / name).exists():
            raise UserError(f"there is no {text} in workdir", where, f"name a path below {root}")
        names = _list_files_under(root, name) if (root / name).is_dir() else [name]
        inside = [inner for inner in names if inner not in copied and not _is_within(root / inner, leave_out)]
        sizes |= {inner: size for inner in inside if (size := _size_bytes(_source(root, inner))) is not None}
    _check_sync(snapshot, paths, sizes, limit_mb)
    return replace(snapshot, synced=tuple(sorted(sizes)))


def _source(root: Path, name: Path) -> Path:
    """Return the file to pack for a synced name: the target of a link that leaves the folder, since on a host the link
    would lead nowhere."""
    path = root / name
    goal = path.resolve()
    return goal if path.is_symlink() and goal.is_file() and not goal.is_relative_to(root.resolve()) else path


def _check_sync(snapshot: CodeSnapshot, paths: Sequence[str], sizes: dict[Path, int], limit_mb: int) -> None:
    synced_bytes = sum(sizes.values())
    if snapshot.size_bytes + synced_bytes <= limit_mb * 1_000_000:
        return
    what = (
        f"code ({snapshot.size_bytes / 1e6:.0f} MB) and ssh.sync ({synced_bytes / 1e6:.0f} MB in {', '.join(paths)}) "
        f"are over snapshot.limit_mb {limit_mb}"
    )
    fix = "put large data on the hosts themselves and name it by an absolute path, or raise snapshot.limit_mb"
    raise UserError(what, "ssh.sync", fix)


def write_archive(snapshot: CodeSnapshot, code: Path, to: Path) -> None:
    """Write the archive `to` (tar, gzip) of a snapshot whose copies are in `code`.

    Raises UserError when a file cannot be read, OSError for a full disk.
    """
    sources = {name: _source(snapshot.root, name) for name in snapshot.synced}
    sources |= {name: code / name for name in snapshot.copies}
    to.touch(mode=0o600)  # files in it may be private
    with (
        to.open("wb") as file,
        gzip.GzipFile("", "wb", COMPRESS_LEVEL, file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(sources):
            try:
                _add(archive, sources[name], name)
            except OSError as err:
                if err.errno in _TARGET_ERRORS:
                    raise
                what = f"cannot be packed: {err.strerror or err}"
                raise UserError(
                    what, str(sources[name]), "make it readable, and do not change it during the submit"
                ) from err


def _add(archive: tarfile.TarFile, source: Path, name: Path) -> None:
    """Add a file or link; owner, times and all of the mode but the execute bit are left out."""
    mode = source.lstat()
    info = tarfile.TarInfo(str(name))
    if stat.S_ISLNK(mode.st_mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.fspath(source.readlink()), 0o777
        archive.addfile(info)
        return
    info.mode = 0o755 if mode.st_mode & stat.S_IXUSR else 0o644
    info.size = mode.st_size
    with source.open("rb") as file:
        archive.addfile(info, file)


def _copy(root: Path, name: Path, target: Path) -> None:
    source = root / name
    try:
        if source.is_symlink():
            _copy_link(root, source, target)
        else:
            _copy_file(source, target)
    except OSError as err:
        if err.errno in _TARGET_ERRORS:
            raise
        raise UserError(
            f"cannot be copied: {err.strerror}", str(source), "make it readable, or let git ignore it"
        ) from err


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file with its times and its mode, without set-user-ID and other users' right to write: the copy is executed."""
    shutil.copyfile(source, target)
    status = source.stat()
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    target.chmod(ownership.mode_of_copy(status.st_mode))


def _copy_link(root: Path, source: Path, target: Path) -> None:
    """Copy a link. One that stays inside the folder stays inside the copy, or it would lead to files that are edited later;
    one that leaves the folder leads to the same place as before."""
    written = source.readlink()
    goal = Path(os.path.normpath(source.parent / written))
    if not goal.is_relative_to(root):
        target.symlink_to(goal)
    else:
        target.symlink_to(os.path.relpath(goal, source.parent) if written.is_absolute() else written)


def _list_by_git(root: Path) -> tuple[list[Path], tuple[Path, ...]] | None:
    """Return (tracked or trackable, ignored) by git, or None outside of a repository."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return None
    files = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if not files:
        return None  # the whole folder is ignored, so git lists none of its files
    ignored = _git(root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    names: list[Path] = []
    for text in dict.fromkeys(files):  # a file in conflict is listed once for each of its stages
        path = root / text
        names += _list_files_under(root, Path(text)) if path.is_dir() and not path.is_symlink() else [Path(text)]
    return names, tuple(Path(text) for text in ignored if text != "./")


def _git(root: Path, *words: str) -> list[str]:
    """Return the names that git lists. Raises UserError when it fails: a guess might copy a whole environment."""
    fix = "make `git status` work in this folder, or move the code out of the repository"
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=GIT_S_MAX, check=False)
    except FileNotFoundError as err:
        raise UserError("this is a git repository, but git is not installed", str(root), "install git") from err
    except subprocess.TimeoutExpired as err:
        raise UserError(f"git did not list this folder within {GIT_S_MAX:g} s", str(root), fix) from err
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"git cannot list this folder: {lines[0] if lines else 'no reason given'}", str(root), fix)
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _is_environment(root: Path, name: Path) -> bool:
    """Return whether a file is the mark of a virtual environment below `root` (PEP 405)."""
    inner = name.name == "pyvenv.cfg" and len(name.parts) > 1
    return inner and os.path.lexists(root / name.parent / "bin" / "python")


def _list_files(root: Path, leave_out: Path, *, prunes: bool = False) -> list[Path]:
    """Return all files below `root`; if it `prunes`, of a virtual environment its mark alone."""
    inside: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=_unreadable):
        here = Path(folder)
        mark = (here / "pyvenv.cfg").relative_to(root)
        if prunes and mark.name in files and _is_environment(root, mark):
            inside.append(mark)
            folders.clear()
            continue
        kept = [name for name in folders if name != ".git" and not _is_within(here / name, leave_out)]
        linked = [name for name in kept if (here / name).is_symlink()]
        folders[:] = sorted(name for name in kept if name not in linked)
        inside += [(here / name).relative_to(root) for name in [*files, *linked] if name != ".git"]
        if len(inside) > FILES_MAX:
            fix = "put the code into a folder of its own and name it in workdir"
            raise UserError(f"more than {FILES_MAX} files to snapshot", str(root), fix)
    return inside


def _unreadable(err: OSError) -> NoReturn:
    raise UserError(
        f"cannot be read: {err.strerror}", str(err.filename), "make it readable, or let git ignore it"
    ) from err


def _list_files_under(root: Path, name: Path) -> list[Path]:
    """Return the files of a submodule, or of a repository inside, of which git lists only the folder."""
    return [name / inner for inner in _list_files(root / name, root / ".git")]


def _is_within(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder)


def _size_bytes(path: Path) -> int | None:
    """Return a file's size, 0 for a link, None for what cannot be in a snapshot (vanished, sockets, pipes, devices)."""
    try:
        mode = path.lstat()
    except OSError:
        return None
    if stat.S_ISLNK(mode.st_mode):
        return 0
    return mode.st_size if stat.S_ISREG(mode.st_mode) else None


def _refuse_too_large(sizes: dict[Path, int], root: Path, limit_mb: int, has_git: bool) -> None:
    total = sum(sizes.values())
    if total <= limit_mb * 1_000_000:
        return
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:LARGEST_SHOWN]
    named = ", ".join(f"{name} ({size / 1e6:.0f} MB)" for name, size in largest)
    what = f"the code snapshot would be {total / 1e6:.0f} MB, over snapshot.limit_mb {limit_mb}; the largest: {named}"
    ignore = "name data in .gitignore (it is then linked, not copied)"
    fix = ignore if has_git else "make workdir a git repository and " + ignore
    raise UserError(what, str(root), f"{fix}, or raise snapshot.limit_mb")
