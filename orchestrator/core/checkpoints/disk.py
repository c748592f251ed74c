"""Operations on the files of checkpoints: compare with the ledger, hash, keep a copy, restore, quarantine, delete.

Rules: a file is renamed or deleted only while its size and time are those of the ledger. Nothing is ever overwritten.
Copies have the times of their sources, since scripts sort by them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from orchestrator.core.checkpoints import formats
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointFile
from orchestrator.core.checkpoints.file_groups import POINTERS, is_checkpoint_file, mask_numbers
from orchestrator.core.checkpoints.tree import read_pointer
from orchestrator.core.jobdir.durable import atomic_replacement, sync_folder

BLOCK_BYTES = 4 << 20
_GONE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP))
KEPT_FOLDER = ".kept"
"""Folder, in that of the checkpoints, with copies of what scripts would overwrite or delete before their next checkpoint is
complete."""

FREE_SHARE, PASSING_SHARE = 0.5, 0.9
"""Share of the free space that a copy may take, and the share while the older one that it replaces still exists."""

POINTER_DIGITS = 7
"""How many digits Megatron gives a number in a folder's name; its pointer file has the number alone."""

Pace = Callable[[int], None]
"""Called with the number of bytes that were read; it may wait, or raise to give up."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of a checkpoint with the ledger. `fault`: the first difference, empty for none; `pieces`: the files as they
    are now; `compared`: what was compared, as text; `is_unsure`: a file could not be read, which proves nothing."""

    fault: str
    pieces: tuple[CheckpointFile, ...]
    compared: str
    is_unsure: bool = False


def unlimited_pace(_: int) -> None:
    """Read without a limit on speed."""


def sha256(path: Path, pace: Pace = unlimited_pace) -> str:
    """Return the sha256 of a file. Raises OSError."""
    digest, block = hashlib.sha256(), bytearray(BLOCK_BYTES)
    with formats.open_regular(path) as file:
        while count := os.readv(file.fileno(), [block]):
            digest.update(memoryview(block)[:count])
            pace(count)
    return digest.hexdigest()


def hash_files(
    root: Path, pieces: tuple[CheckpointFile, ...], pace: Pace = unlimited_pace
) -> tuple[CheckpointFile, ...] | None:
    """Return files with their sha256; None if one has changed, or changes meanwhile. Raises OSError."""
    done = []
    for piece in pieces:
        digest = piece.sha256 or sha256(root / piece.name, pace)
        if not matches_record(root, piece):
            return None
        done.append(replace(piece, sha256=digest))
    return tuple(done)


def matches_record(root: Path, piece: CheckpointFile) -> bool:
    """Return whether a file has the recorded size and time."""
    try:
        about = (root / piece.name).stat()
    except OSError:
        return False
    return about.st_size == piece.size_bytes and is_same_time(about.st_mtime_ns, piece.mtime_ns)


def is_same_time(mtime_ns: int, recorded_ns: int) -> bool:
    """Return whether two times of a file are equal; the first may have lost its fraction of a second (SFTP)."""
    return mtime_ns in (recorded_ns, recorded_ns // 10**9 * 10**9)


def compare(checkpoint: Checkpoint, *, deep: bool, pace: Pace = unlimited_pace) -> Comparison:
    """Compare the files of a checkpoint with the ledger: sizes and times; the bytes too if these differ, or if `deep`.

    Bytes without a sha256 are compared with the checksums of their format. A file with another time and the same bytes
    was only touched or copied.
    """
    root = Path(checkpoint.locations[0].root)
    pieces, kinds = [], dict[str, int]()
    for piece in checkpoint.files:
        try:
            about = (root / piece.name).stat()
        except OSError as err:
            is_gone = err.errno in _GONE
            fault = f"{piece.name} {'is gone' if is_gone else f'cannot be read: {err.strerror}'}"
            return Comparison(fault, checkpoint.files, "", is_unsure=not is_gone)
        if about.st_size != piece.size_bytes:
            what = "is empty" if not about.st_size else f"has {about.st_size:,} bytes instead of {piece.size_bytes:,}"
            return Comparison(f"{piece.name} {what}", checkpoint.files, "")
        is_touched = not is_same_time(about.st_mtime_ns, piece.mtime_ns)
        if is_touched or deep:
            try:
                fault, by = _bytes_differ(root, piece, is_touched, pace)
            except OSError as err:
                fault = f"{piece.name} cannot be read: {err.strerror}"
                return Comparison(fault, checkpoint.files, "", is_unsure=True)
            if fault:
                return Comparison(f"{piece.name} {fault}", checkpoint.files, "")
        else:
            by = "size and time"
        kinds[by] = kinds.get(by, 0) + 1
        pieces.append(replace(piece, mtime_ns=about.st_mtime_ns))
    many = "" if len(pieces) == 1 else f" of {len(pieces)} files"
    return Comparison("", tuple(pieces), " and ".join(by for by in kinds if by) + many)


def _bytes_differ(root: Path, piece: CheckpointFile, is_touched: bool, pace: Pace) -> tuple[str, str]:
    """Return how the bytes of a file differ from the saved ones, and what was compared. Raises OSError."""
    if piece.sha256:
        same = sha256(root / piece.name, pace) == piece.sha256
        return ("" if same else "differs from what was saved (sha256)"), "sha256"
    if is_touched:
        return "was rewritten, and its original checksum is unknown", ""
    fault, by = formats.verify_file(root, piece.name, piece.size_bytes)
    return fault, by or "size and time, its format has no check sum"


# Moves


def quarantine(root: Path, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Quarantine the files of a torn checkpoint, so that scripts do not find them: rename them to `.NAME.torn-attempt-N` at
    the top of the checkpoint folder.

    Return the renames. Files that differ from their record stay.
    """
    is_folder = checkpoint.main != "." and (root / checkpoint.main).is_dir()
    names = [checkpoint.main] if is_folder else [piece.name for piece in checkpoint.files]
    if not all(matches_record(root, piece) for piece in checkpoint.files) or not checkpoint.files:
        return []
    return _quarantine(root, names, checkpoint.attempt)


def quarantine_unfinished(root: Path, checkpoint: Checkpoint, attempt: int) -> list[tuple[str, str]]:
    """Quarantine folders named like that of a checkpoint, with greater numbers and no checkpoint file: ranks were killed
    before they wrote one.

    Return the renames.
    """
    folder = root / checkpoint.main
    shape = mask_numbers(folder.name)
    if "#" not in shape or not all(piece.name.startswith(f"{checkpoint.main}/") for piece in checkpoint.files):
        return []
    with contextlib.suppress(OSError):
        begun = [
            str(path.relative_to(root))
            for path in sorted(folder.parent.iterdir())
            if mask_numbers(path.name) == shape and path.is_dir() and _numbers(path) > _numbers(folder)
            if not any(is_checkpoint_file(file.name) for file in path.rglob("*"))
        ]
        return _quarantine(root, begun, attempt)
    return []


def _numbers(path: Path) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", path.name)]


def _quarantine(root: Path, names: Iterable[str], attempt: int) -> list[tuple[str, str]]:
    moved = []
    for name in names:
        path = root / name
        if path.is_symlink():
            continue
        target = root / f".{path.name}.torn-attempt-{attempt}"
        count = 1
        while os.path.lexists(target):
            count += 1
            target = root / f".{path.name}.torn-attempt-{attempt}.{count}"
        with contextlib.suppress(OSError):
            path.rename(target)
            moved.append((name, target.name))
    return moved


def keep_copy(checkpoint: Checkpoint, kept_folder: Path, *, copies: bool, older: Iterable[Path] = ()) -> bool:
    """Keep a checkpoint in the folder `kept_folder` whatever its script does: by hard links, or by copies (which share blocks if the
    disk can) if its files are overwritten in place. Return whether it is kept. `older`: the folders that it replaces. Raises
    OSError, also if copies would take too much of the disk."""
    root = Path(checkpoint.locations[0].root)
    kept_folder.parent.mkdir(exist_ok=True)
    copies = copies or kept_folder.parent.stat().st_dev != (root / checkpoint.files[0].name).stat().st_dev
    if copies:
        free_bytes = shutil.disk_usage(kept_folder.parent).free
        after_bytes = free_bytes + sum(map(_exclusive_bytes, older))
        if checkpoint.size_bytes > min(PASSING_SHARE * free_bytes, FREE_SHARE * after_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(kept_folder))
    part = kept_folder.with_name(f"{kept_folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        for piece in checkpoint.files:
            target = part / piece.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if copies:
                copy_file(root / piece.name, target)
            else:
                os.link(root / piece.name, target)
            if not matches_record(root, piece) or not matches_record(part, piece):
                return False  # rewritten meanwhile
        shutil.rmtree(kept_folder, ignore_errors=True)  # an earlier version of the same checkpoint
        part.rename(kept_folder)
        return True
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _exclusive_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files that have no other hard link."""
    found = (path.lstat() for path in folder.rglob("*"))
    return sum(about.st_size for about in found if stat.S_ISREG(about.st_mode) and about.st_nlink == 1)


def restore(checkpoint: Checkpoint, kept_folder: Path, root: Path) -> bool:
    """Copy a kept checkpoint back to its original folder, if no file has these names. Return whether it is complete there.
    Raises OSError."""
    targets = [root / piece.name for piece in checkpoint.files]
    if any(map(os.path.lexists, targets)):
        return all(matches_record(root, piece) for piece in checkpoint.files)
    for piece, target in zip(checkpoint.files, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        copy_file(kept_folder / piece.name, part)
        part.rename(target)
    for folder in {target.parent for target in targets}:
        sync_folder(folder)
    return True


def copy_file(source: Path, target: Path) -> None:
    """Copy a file with its times, durably; on disks that can, it shares its blocks. Raises OSError."""
    with formats.open_regular(source) as read, target.open("wb") as write:
        about = os.fstat(read.fileno())
        done = 0
        while count := _copy_block(read.fileno(), write.fileno(), done):
            done += count
        os.fsync(write.fileno())
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))


def _copy_block(read: int, write: int, done: int) -> int:
    try:
        return os.copy_file_range(read, write, 1 << 30)
    except OSError:
        return os.sendfile(write, read, done, 1 << 30)


def put_file(source: Path, target: Path, *, is_link: bool = False, is_hard: bool = False) -> None:
    """Put a file at `target` at once: a link to it, a hard link if that is possible, or a copy. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replacement(target, durable=False) as part:
        if is_hard:
            with contextlib.suppress(OSError):  # it is on another disk
                os.link(os.path.realpath(source), part)
        if is_link:
            part.symlink_to(source)
        elif not part.exists():
            copy_file(source, part)


def install(names: Iterable[str], stage: Path, root: Path) -> None:
    """Move complete files from a staging folder to their places below `root`, durably. Raises OSError."""
    names, folders = tuple(names), {root}
    for path in map(PurePosixPath, names):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (stage / path).replace(root / path)
        folders.update(root / folder for folder in path.parents)
    date_folders(root, names)
    for folder in folders:
        sync_folder(folder)


def date_folders(root: Path, names: Iterable[str]) -> None:
    """Give the folders of files below `root` the time of what is newest in them, as if ranks had written all of it: scripts that
    delete their oldest checkpoints sort by it."""
    for folder in sorted({folder for name in names for folder in PurePosixPath(name).parents}, reverse=True)[:-1]:
        with contextlib.suppress(OSError):
            newest_ns = max(path.stat().st_mtime_ns for path in (root / folder).iterdir())
            os.utime(root / folder, ns=(newest_ns, newest_ns))


def copy_marks(source: Path, target: Path, known: set[tuple[str, int, int]], *, keeps_unknown: bool = False) -> None:
    """Copy what names the newest checkpoint beside it, pointer files and links that scripts make, once that checkpoint is at the target,
    too. `known`: versions that are copies; `keeps_unknown`: only these are replaced."""
    for path in walk(source):
        name = str(path.relative_to(source))
        with contextlib.suppress(OSError, StopIteration):  # it changes, or what it names is not there
            stamp, is_link, beside = _own_stamp(source, name), path.is_symlink(), (target / name).parent
            mark = read_pointer(path) if path.name in POINTERS and not is_link else ""
            mark = str(path.readlink()).removeprefix(f"{path.parent}/") if is_link else mark
            is_left = keeps_unknown and os.path.lexists(target / name) and _own_stamp(target, name) not in known
            if mark and not is_left and stamp not in known:
                ending = mark.zfill(POINTER_DIGITS) if mark.isdigit() else "/"
                newest = next(one.name for one in beside.iterdir() if one.name == mark or one.name.endswith(ending))
                put_file(Path(newest) if is_link else path, target / name, is_link=is_link)
                known.update((stamp, _own_stamp(target, name)))


def _own_stamp(root: Path, name: str) -> tuple[str, int, int]:
    about = (root / name).lstat()
    text = (root / name).readlink() if stat.S_ISLNK(about.st_mode) else ""
    return f"{name}\0{text}" if text else name, about.st_size, about.st_mtime_ns


def walk(folder: Path) -> Iterator[Path]:
    """Yield all that is below a folder, which may change meanwhile."""
    return (Path(above, name) for above, folders, names in os.walk(folder) for name in (*folders, *names))


def list_files(folder: Path) -> list[CheckpointFile]:
    """Return the regular files below a folder, hidden ones, too, but none through links. It may change meanwhile."""
    found = []
    for path in walk(folder):
        with contextlib.suppress(OSError):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode):
                found.append(CheckpointFile(str(path.relative_to(folder)), about.st_size, about.st_mtime_ns))
    return found


def delete_checkpoint(checkpoint: Checkpoint, root: Path) -> str:
    """Delete the files of a checkpoint, and nothing else; return why it stays, empty once it is deleted. All of it is renamed
    first: what cannot be deleted must not look like a checkpoint, and a repeated call finds what a killed one has left."""
    folder = root / checkpoint.main
    paths = [folder, *(root / piece.name for piece in checkpoint.files)]
    hidden = [path.with_name(f".{path.name}.deleted") for path in paths if path != root]
    is_begun = any(map(os.path.lexists, hidden))
    present = [piece for piece in checkpoint.files if not is_begun or os.path.lexists(root / piece.name)]
    if checkpoint.files and not is_begun and not any(os.path.lexists(root / piece.name) for piece in present):
        return ""  # an earlier call has deleted it, and its caller could not write that down
    changed = next((piece.name for piece in present if not matches_record(root, piece)), "")
    if changed or not checkpoint.files:
        return f"{changed or checkpoint.main} has changed since it was saved"
    if folder.is_symlink():
        return f"{checkpoint.main} is a symbolic link"
    is_folder = folder != root and folder.is_dir() and len(present) == len(checkpoint.files)
    is_whole_folder = is_folder and _files_below(folder) == len(present)
    for path in [folder] if is_whole_folder else [root / piece.name for piece in present]:
        with contextlib.suppress(OSError):
            path.rename(path.with_name(f".{path.name}.deleted"))
        if os.path.lexists(path):
            return f"{path.name} cannot be deleted"
    for path in hidden:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()
    return ""


def _files_below(folder: Path) -> int:
    found = os.walk(folder)
    return sum(len(files) + sum(Path(above, name).is_symlink() for name in inner) for above, inner, files in found)


def remove_folder(path: Path) -> None:
    """Delete a folder of orch, as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)
