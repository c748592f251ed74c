"""Job folder on a host: created, checked, and filled with bundle and code during a launch.

Rules: several hosts may share the disk and launch at the same time, so only one of them at a time works in the folder
(`launch.lock`). A file is renamed into place once it is complete, so a file that exists is complete. Where hosts share
the submitter's disk, the folder is the one that the job was submitted from, recognised by its token, and nothing is
copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.agent.bootstrap.replies import Replies, request_failure
from orchestrator.core.jobdir import locks, ownership
from orchestrator.core.jobdir.durable import replace_bytes, replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire.tokens import is_token

SPARE_BYTES = 16 << 20
"""Free space needed beyond the copied files: logs and the agent's own files grow at once."""

SIBLINGS_MAX = 50
"""How many other jobs' folders are searched for the same code."""

LOCK_S_MAX = 600.0
LOCK_POLL_S = 0.1
PROGRESS_S = 2.0
"""How often a long step reports that it is still in progress."""

WRITE_TEST_BYTES = 4096


def resolve(root: str) -> JobDir:
    """Return the job's folder, absolute on this host. Raises RequestFailed."""
    path = Path(root)
    with contextlib.suppress(RuntimeError):
        return JobDir((Path.home() / path.expanduser()).absolute())
    raise w.RequestFailed(
        "folder", f"{root}: `~` has no meaning on this host", "set ssh.remote_dir to an absolute path"
    )


def is_submit_folder(job: JobDir, token: str) -> bool:
    """Return whether this is the folder that the job was submitted from."""
    try:
        return is_token(token) and (job.secrets / "token").read_text().strip() == token
    except (OSError, UnicodeDecodeError):
        return False


def require_ownership(job: JobDir) -> None:
    """Raise RequestFailed unless the job's folder, if it exists, and all that is used in it belong to this user alone."""
    if job.root.is_symlink() or job.root.exists():
        error = ownership.find_fault_within(job.root)
        if error is not None:
            raise w.RequestFailed("folder", f"{error.where}: {error.what}", error.fix)


def check_space(job: JobDir, request: w.LaunchAgent) -> None:
    """Check that the disk has room for what is missing, before anything is written. Raises RequestFailed."""
    try:
        disk = os.statvfs(nearest_existing(job.root))
        needed_bytes = _missing_bytes(job, request) + SPARE_BYTES
    except OSError as err:
        raise request_failure("folder", err, job.root) from err
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < needed_bytes:
        reason = f"{format_megabytes(free_bytes)} MB free in {job.root}, {format_megabytes(needed_bytes)} MB needed"
        raise w.RequestFailed("folder", reason, "free some space there, or set ssh.remote_dir to a larger disk")
    if disk.f_files and not disk.f_favail:
        reason = f"no more files can be created in {job.root}: its disk is out of inodes"
        raise w.RequestFailed("folder", reason, "remove files there, or set ssh.remote_dir to another disk")


def _missing_bytes(job: JobDir, request: w.LaunchAgent) -> int:
    code_bytes = 0 if job.code.is_dir() else request.code.size_bytes + request.unpacked_bytes
    return code_bytes + (0 if job.bundle.exists() else request.bundle.size_bytes)


def nearest_existing(path: Path) -> Path:
    """Return the longest existing part of `path`, which may be a file."""
    parts = (path, *path.parents)
    return next(part for part in parts if os.path.exists(part) or part == part.parent)  # noqa: PTH110 -- never raises


def create_folder(job: JobDir, request: w.LaunchAgent) -> None:
    """Create the job folder and the node's own folder in it, and check that they are writable. Raises RequestFailed."""
    config = request.config
    node = job.node(config.node)
    try:
        job.root.parent.mkdir(parents=True, exist_ok=True)
        job.root.mkdir(mode=0o700, exist_ok=True)  # files that other programs copy into it have any mode
        require_ownership(job)
        for folder in (node, job.checkpoints, job.logs):
            folder.mkdir(parents=True, exist_ok=True)
        replace_bytes(node / "write-test", bytes(WRITE_TEST_BYTES))
        (node / "write-test").unlink(missing_ok=True)
        replace_text(node / "endpoint", f"{config.address}\n", durable=False)
    except OSError as err:
        raise request_failure("folder", err, job.root) from err


def install(job: JobDir, request: w.LaunchAgent, bundle: bytes, replies: Replies, placed: w.FolderReady) -> None:
    """Copy bundle and code into the folder, unless they are there. Raises RequestFailed, EOFError."""
    try:
        with _hold_folder_lock(job, replies):
            replies.send(placed)
            if _sha256(job.bundle) != request.bundle.sha256:
                replace_bytes(job.bundle, bundle)
            if not job.code.is_dir():
                _install_code(job, request.code, replies)
    except BrokenPipeError:
        raise
    except OSError as err:
        raise request_failure("copy", err, job.root) from err


@contextlib.contextmanager
def _hold_folder_lock(job: JobDir, replies: Replies) -> Iterator[None]:
    """Hold the lock for work in the folder, on any host. Raises RequestFailed when another launch holds it for `LOCK_S_MAX`."""
    deadline_s = time.monotonic() + LOCK_S_MAX
    progress = _Progress(replies, "waiting for another launch in the same folder")
    lock = job.root / "launch.lock"
    fd = locks.open_file(lock)
    try:
        while not locks.acquire(fd, LOCK_POLL_S, LOCK_POLL_S):
            if time.monotonic() > deadline_s:
                reason = f"another launch{locks.holder_text(lock)} has held {lock} for {LOCK_S_MAX:.0f} s"
                raise w.RequestFailed("folder", reason, "", "transient")
            progress.report()
        locks.sign(fd)
        yield
    finally:
        os.close(fd)


class _Progress:
    """Reporter of a long step: sends `Working` every `PROGRESS_S`."""

    def __init__(self, replies: Replies, what: str) -> None:
        self._replies = replies
        self._what = what
        self._due_s = time.monotonic() + PROGRESS_S

    def report(self) -> None:
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + PROGRESS_S
            self._replies.send(w.Working(self._what))


def format_megabytes(size_bytes: int) -> str:
    """Return a size for people, in MB."""
    return f"{size_bytes / 1e6:.1f}"


def _sha256(path: Path) -> str:
    """Return the hash of a file; empty when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()


def _install_code(job: JobDir, code: w.Blob, replies: Replies) -> None:
    """Get the code archive and unpack it. Partial files of a killed launch are deleted first; a failed launch leaves none."""
    archive, part = job.archive, job.root / ".code.tar.gz.part"
    unpacked = job.root / ".code.part"
    try:
        part.unlink(missing_ok=True)
        shutil.rmtree(unpacked, ignore_errors=True)
        if _sha256(archive) != code.sha256:
            if not _link_sibling(job, code, part):
                _receive_code(code, part, replies)
            part.replace(archive)
        _unpack(archive, unpacked, _Progress(replies, "unpacking the code"))
        unpacked.rename(job.code)
    except BaseException:
        part.unlink(missing_ok=True)
        shutil.rmtree(unpacked, ignore_errors=True)
        raise


def _receive_code(code: w.Blob, part: Path, replies: Replies) -> None:
    replies.send(w.SendBlob("code"))
    with part.open("wb") as file:
        if replies.receive(code.size_bytes, file) != code.sha256:
            raise w.RequestFailed("copy", "the code archive arrived damaged", "", "transient")


def _link_sibling(job: JobDir, code: w.Blob, part: Path) -> bool:
    """Hard-link the same archive from another job's folder, which costs no space; return whether one was found."""
    for name in sorted(os.listdir(job.root.parent))[-SIBLINGS_MAX:]:  # noqa: PTH208 -- names, to be sorted
        other = job.root.parent / name / "code.tar.gz"
        with contextlib.suppress(OSError):
            # Another user can still change an archive that is not ours.
            if ownership.is_own(other) and other.stat().st_size == code.size_bytes and _sha256(other) == code.sha256:
                part.hardlink_to(other)
                return True
    return False


def _unpack(archive: Path, to: Path, progress: _Progress) -> None:
    import tarfile
    import zlib

    to.mkdir()

    def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        for member in tar:
            progress.report()
            yield member

    try:
        with tarfile.open(archive, "r:gz") as tar:
            # Its hash proves that the submitter sent the archive: links that lead out of the snapshot are intended.
            tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            tar.extractall(to, members(tar))
    except (tarfile.TarError, EOFError, zlib.error) as err:
        raise w.RequestFailed("copy", f"the code archive cannot be unpacked: {err}", "submit the job again") from err
