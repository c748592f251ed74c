"""Collection of a job's results: its logs, checkpoints and evidence copied to one folder; and the local place of files fetched
from its hosts."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.client import job_checkpoints
from orchestrator.client.job import POLL_S, Job
from orchestrator.client.logs import trackers
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointFile, CheckpointState
from orchestrator.core.checkpoints.resume_choice import OVERRIDE_STATES
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import home, ownership, start_folder
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.text import format_count, shorten_list
from orchestrator.supervisor.transfers.checkpoint_copies import INCOMING
from orchestrator.supervisor.transfers.checkpoint_disk import LocalCheckpointFolders

OTHERS_BYTES_MAX = 2 * 10**9
"""Limit on files that ranks wrote into their working directory, other than checkpoints, without `--all`."""

SKIPPED_SHOWN = 5
VERSIONS_MAX = 100
"""Limit on the versions of one file of a host."""


@dataclass(frozen=True, slots=True)
class CollectedFiles:
    """Result of a collect: the folder, and the number of checkpoints and other files of ranks. `outside`: the checkpoints
    outside of the job's folder; `left_out`: a text for what was too large; `skipped`: texts for pipes and other special files."""

    folder: Path
    checkpoints: int
    others: int
    outside: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def collect(job: Job, to: Path | None, *, checkpoints: bool = True, everything: bool = False) -> CollectedFiles:
    """Copy a job's logs, checkpoints (unless not wanted), evidence, post-mortem (`why.json`), and what its ranks have written where
    they start to a folder. `everything`: also more than `OTHERS_BYTES_MAX` of that.

    Without `to` that is the job folder, into which `remote_files` has fetched what hosts had. Raises OrchError, and
    UserError for an unfit `to`.
    """
    homes = LocalCheckpointFolders(job.folder, job.plan())
    complete = [
        checkpoint
        for checkpoint in _load_checkpoints(job).values()
        if checkpoint.state is CheckpointState.WHOLE and checkpoint.locations
    ]
    inside = [checkpoint for checkpoint in complete if homes.is_in_job_folder(checkpoint)]
    saved = {homes.folder(checkpoint) / piece.name for checkpoint in inside for piece in checkpoint.files}
    written = {job.folder.code / file.name: file.size_bytes for file in start_folder.find_written_files(job.folder)}
    others = {path: size_bytes for path, size_bytes in written.items() if path not in saved}
    outside = [checkpoint for checkpoint in complete if checkpoint not in inside]
    outside_paths = tuple(
        os.path.realpath(checkpoint.path)
        if Path(checkpoint.path).is_relative_to(job.folder.root)
        else f"{checkpoint.host}:{checkpoint.path}".removeprefix(":")
        for checkpoint in outside
    )
    if to is None:
        return CollectedFiles(job.folder.root, len(inside), len(others), outside_paths)
    _refuse_target(job, to)
    too_large = sum(others.values()) > OTHERS_BYTES_MAX and not everything
    left_out = {str(path.relative_to(job.folder.root)): others[path] for path in others} if too_large else {}
    saved_in_code = [path for path in saved if checkpoints and path.is_relative_to(job.folder.code)]
    skipped = _copy_all(job, to, [*saved_in_code, *([] if left_out else others)], checkpoints=checkpoints)
    texts = shorten_list(
        [f"{path} is not a file or folder, and was not copied" for path in skipped],
        SKIPPED_SHOWN,
        "are not files",
    )
    count = len(inside) if checkpoints else 0
    return CollectedFiles(
        to,
        count,
        0 if left_out else len(others),
        outside_paths,
        tuple(describe_left_out(left_out)),
        tuple(texts),
    )


def _copy_all(job: Job, to: Path, written: Sequence[Path], *, checkpoints: bool) -> list[Path]:
    """Copy the parts of a job, and these files of its ranks, all or none. Return what cannot be copied, such as a pipe.
    Raises ClusterError."""
    skipped = list[Path]()
    why = json.dumps(_load_post_mortem(job), indent=2)
    created = [path for path in (to, *to.parents) if not path.exists()]
    saved = (job.folder.checkpoints,) if checkpoints else ()
    parts = (job.folder.logs, *saved, job.folder.root / "evidence", job.folder.from_hosts)
    files = (job.folder.spec, job.folder.provenance, job.folder.journal)
    excluded = _folders_to_skip(job)
    try:
        to.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=to, ignore_cleanup_errors=True) as name:
            stage = Path(name)
            (stage / "why.json").write_text(why)
            for part in parts:
                if part.exists() and (not part.is_symlink() or home.is_own_job(job.folder)):
                    skipped += _copy_folder(part, stage / part.name, excluded)
            for file in dict.fromkeys((*files, *_tracker_files(job), *written)):
                if file.exists():
                    place = stage / file.relative_to(job.folder.root)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    _copy(file, place)
            for path in stage.iterdir():
                path.rename(to / path.name)
    except BaseException as err:
        for path in created:
            with contextlib.suppress(OSError):  # it was not made, or another process uses it by now
                path.rmdir()
        if isinstance(err, OSError):
            fix = "fix that, or free some space there, then run orch collect again; no partial copy was left"
            where = f"{err.filename}: " if err.filename else ""
            raise ClusterError(f"cannot be copied: {where}{_reason(err)}", str(to), fix) from err
        raise
    return skipped


def _tracker_files(job: Job) -> list[Path]:
    """Return the files of trackers' runs; those among the checkpoints are copied with them."""
    try:
        runs = trackers.find_runs(job.folder, job.plan().created_at) if home.is_own_job(job.folder) else ()
    except ClusterError:
        return []
    found = [file for run in runs for file in trackers.run_files(run)]
    return [file for file in found if not file.is_relative_to(job.folder.checkpoints)]


def _load_checkpoints(job: Job) -> dict[int, Checkpoint]:
    """Return the checkpoints of a job; none if its ledger cannot be read: files are copied anyway."""
    try:
        return job_checkpoints.load_checkpoints(job.folder)
    except ClusterError:
        return {}


def _folders_to_skip(job: Job) -> tuple[Path, ...]:
    """Return what need not be copied: checkpoints in transfer, and kept files of checkpoints that are still in place."""
    checkpoints = job.folder.checkpoints
    kept = checkpoints / disk.KEPT_FOLDER
    in_place = [
        kept / str(checkpoint.number)
        for checkpoint in _load_checkpoints(job).values()
        if checkpoint.state in OVERRIDE_STATES
        and checkpoint.locations
        and not disk.compare(checkpoint, deep=False).fault
    ]
    unneeded = [path for path in kept.iterdir() if path not in in_place] if kept.is_dir() else []
    return (checkpoints / INCOMING, *(in_place if unneeded else [kept]))


def _copy_folder(source: Path, target: Path, excluded: Collection[Path]) -> list[Path]:
    """Copy a folder, see `_copy`, but for some folders in it; return what in it cannot be copied."""
    skipped = list[Path]()
    target.mkdir(ownership.mode_of_copy(source.stat().st_mode) | stat.S_IRWXU)
    for place, folders, names in os.walk(source, onerror=_raise_unless_gone):
        folders[:] = [name for name in folders if Path(place, name) not in excluded]
        for path in [Path(place, name) for name in (*folders, *names)]:
            if not _copy(path, target / path.relative_to(source)):
                skipped.append(path)
    return skipped


def _raise_unless_gone(err: OSError) -> None:
    """Raise the error of listing a folder, unless a running job has deleted it meanwhile."""
    if not isinstance(err, FileNotFoundError):
        raise err


def _copy(source: Path, target: Path) -> bool:
    """Copy a file with its times, a link, or a folder without what is in it; return False for a pipe, a socket or a device.

    Its mode loses set-user-ID and others' right to write: a file of another user's job must not run as the collector.
    """
    try:
        about = source.lstat()
        if stat.S_ISDIR(about.st_mode):
            target.mkdir(ownership.mode_of_copy(about.st_mode) | stat.S_IRWXU)
        elif stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
            shutil.copyfile(source, target, follow_symlinks=False)
        else:
            return False
    except FileNotFoundError:
        if os.path.lexists(source):
            raise
        return True  # a running job has deleted or renamed it meanwhile
    if stat.S_ISREG(about.st_mode):
        os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))
        target.chmod(ownership.mode_of_copy(about.st_mode))
    return True


def _load_post_mortem(job: Job) -> Json:
    """Return the post-mortem, or why there is none: the rest is copied anyway."""
    try:
        return job.why()
    except OrchError as err:
        return {"id": job.id, "unknown": str(err)}


def _refuse_target(job: Job, to: Path) -> None:
    """Raise UserError for a folder that cannot take a copy of the job."""
    try:
        if to.resolve().is_relative_to(job.folder.root.resolve()):
            raise UserError("the copy would be inside the job's own folder", str(to), "name another folder")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            to.lstat()  # `exists` hides errors from Python 3.14 on
            if not to.is_dir() or any(to.iterdir()):
                raise UserError("is not an empty folder", str(to), "name a new folder")
    except (OSError, RuntimeError) as err:
        # A name is too long, a folder may not be entered, or links form a circle.
        what = f"cannot be read: {_reason(err)}"
        raise UserError(what, str(to), "name a folder that you can write to") from err


def _reason(err: BaseException) -> str:
    return (err.strerror if isinstance(err, OSError) else None) or str(err)


FINAL_FETCH_S_MAX = 360.0
"""Limit on the wait for the last fetches of an ended job's supervisor."""


def await_final_fetch(job: Job) -> None:
    """Wait until an ended job's supervisor has fetched what it can; revive it if it died in the meantime."""
    deadline_s = time.monotonic() + FINAL_FETCH_S_MAX
    while not job.folder.ended.exists() and time.monotonic() < deadline_s:
        job.source.settle()
        time.sleep(POLL_S)


# Files of hosts


def is_rank_file(name: str) -> bool:
    """Tell whether ranks may have written a file, by its name in the job's folder."""
    return name.startswith(("checkpoints/", "code/"))


def is_hidden(name: str) -> bool:
    """Tell whether a file of a job on a host need not come: compiled code, what orch itself has not finished, or a file outside of
    the folders of ranks whose name begins with a dot."""
    folder, *parts = name.split("/")
    if parts[-1] == start_folder.CACHE:
        return True
    if folder == "checkpoints":
        return parts[0] in (INCOMING, disk.KEPT_FOLDER)
    return parts[-1].startswith(".") and folder != "code"


class FetchTargets:
    """Local place of the files that an ended job's hosts still have, if they are fetched at all.

    - Files that orch writes on a host only grow: the missing end is fetched.
    - A file of ranks that the folder lacks is put at its own path. Another one of the same name is put into
      `from-hosts/HOST`; so is one that would get into the folder of a complete checkpoint without belonging to it.
    - A file is fetched once, as sizes and times show, in whole seconds, which is what SFTP has.
    - What the ledger calls pruned, or written over by a save that is home as it was recorded, does not come.
    """

    def __init__(self, job: JobDir, homes: LocalCheckpointFolders, checkpoints: Mapping[int, Checkpoint]) -> None:
        self._job, self._homes = job, homes
        # By local path: the checkpoints that a file belonged to, as it was then
        self._saved: dict[Path, list[tuple[Checkpoint, CheckpointFile]]] = {}
        for checkpoint in checkpoints.values():
            for piece in checkpoint.files:
                self._saved.setdefault(homes.folder(checkpoint) / piece.name, []).append((checkpoint, piece))
        self._whole = [checkpoint for checkpoint in checkpoints.values() if checkpoint.state is CheckpointState.WHOLE]

    def target(self, host: str, file: CheckpointFile) -> Path | None:
        """Return the local path for a file; None if it need not be fetched. Raises OSError."""
        local_path = self._homes.local_path(file.name)
        if not is_rank_file(file.name):
            return None if local_path.is_file() and local_path.stat().st_size >= file.size_bytes else local_path
        if self._is_superseded(local_path, file):
            return None
        if not os.path.lexists(local_path):
            if not self._is_foreign(local_path):
                return local_path
        elif _matches_local(local_path, file):
            return None
        for number in range(1, VERSIONS_MAX):
            path = self._job.from_hosts / (host if number == 1 else f"{host}.{number}") / file.name
            if not os.path.lexists(path):
                return path
            if _matches_local(path, file):
                return None
        raise OSError(errno.EMFILE, f"{VERSIONS_MAX - 1} versions of it are in {self._job.from_hosts}")

    def too_large(self, files: Sequence[CheckpointFile], bytes_max: float) -> dict[str, int]:
        """Return the files of ranks that belong to no checkpoint, with their sizes, if their sum exceeds the limit."""
        others = {
            file.name: file.size_bytes
            for file in files
            if file.name.startswith("code/") and self._homes.local_path(file.name) not in self._saved
        }
        return others if sum(others.values()) > bytes_max else {}

    def is_extra_version(self, path: Path) -> bool:
        """Tell whether a path is that of another version of a file."""
        return path.is_relative_to(self._job.from_hosts)

    def drop_duplicate(self, file: CheckpointFile, path: Path) -> bool:
        """Delete another version of a file that has the same bytes; tell whether it did. Raises OSError."""
        local_path = self._homes.local_path(file.name)
        if (
            not local_path.is_file()
            or local_path.stat().st_size != path.stat().st_size
            or disk.sha256(local_path) != disk.sha256(path)
        ):
            return False
        path.unlink()
        return True

    def _is_superseded(self, local_path: Path, file: CheckpointFile) -> bool:
        """Tell whether `checkpoint.keep` deleted a file, or a fetched checkpoint has overwritten it."""
        saved = self._saved.get(local_path, ())
        states = [
            checkpoint.state
            for checkpoint, piece in saved
            if _has_size_and_time(file, piece.size_bytes, piece.mtime_ns)
        ]
        is_fetched = any(
            checkpoint.state is CheckpointState.WHOLE and disk.matches_record(self._homes.folder(checkpoint), piece)
            for checkpoint, piece in saved
        )
        is_superseded = CheckpointState.PRUNED in states or (CheckpointState.GONE in states and is_fetched)
        return is_superseded and CheckpointState.WHOLE not in states

    def _is_foreign(self, local_path: Path) -> bool:
        """Tell whether a file would get into the folder of a complete checkpoint without belonging to it, or replace the ledger."""
        return local_path == self._job.ledger or any(
            local_path.is_relative_to(self._homes.folder(checkpoint) / checkpoint.main)
            and all(self._homes.folder(checkpoint) / piece.name != local_path for piece in checkpoint.files)
            for checkpoint in self._whole
            if checkpoint.main != "."
        )


def _matches_local(path: Path, file: CheckpointFile) -> bool:
    """Tell whether a file here has the size and time of one on a host. Raises OSError."""
    about = path.stat()
    return _has_size_and_time(file, about.st_size, about.st_mtime_ns)


def _has_size_and_time(file: CheckpointFile, size_bytes: int, mtime_ns: int) -> bool:
    return file.size_bytes == size_bytes and disk.is_same_time(file.mtime_ns, mtime_ns)


def describe_left_out(left: Mapping[str, int]) -> list[str]:
    """Return a text on the files of ranks that were too large to be copied; empty for none."""
    if not left:
        return []
    largest = sorted(left, key=lambda name: -left[name])[:SKIPPED_SHOWN]
    size_gb = sum(left.values()) / 1e9
    what = f"{format_count(len(left), 'file')} that ranks wrote ({size_gb:.1f} GB, no checkpoints) were not copied"
    return [f"{what}: {', '.join(largest)}{', …' if len(left) > SKIPPED_SHOWN else ''}; orch collect --all copies them"]
