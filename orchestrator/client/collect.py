"""Results of a job: its logs, checkpoints and evidence copied to one place; and where files that its hosts still have come
to in its folder."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.client import saves
from orchestrator.client.job import POLL_S, Job
from orchestrator.client.logs import trackers
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.choice import NAMED
from orchestrator.core.checkpoints.names import METADATA
from orchestrator.core.checkpoints.save import Save, SaveState
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import home, ownership
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.supervisor.transfers.save_copies import COMING

_TORN = ".torn-attempt-"
"""What is in the names of torn saves that were moved out of the sight of scripts."""

VERSIONS_MAX = 100
"""How many versions of one file of a host may lie beside it."""


def collect(job: Job, to: Path | None, *, checkpoints: bool = True) -> Path:
    """Copy a job's logs, checkpoints (unless not wanted), evidence and post-mortem (`why.json`) to a folder; return where they
    are.

    Without `to` that is the job folder, into which `remote_files` has fetched what hosts had. Raises OrchError, and
    UserError for an unfit `to`.
    """
    if to is None:
        return job.folder.root
    _refuse_unfit(job, to)
    why = json.dumps(_why(job), indent=2)
    made = [path for path in (to, *to.parents) if not path.exists()]
    saved = (job.folder.checkpoints,) if checkpoints else ()
    parts = (job.folder.logs, *saved, job.folder.root / "evidence", job.folder.from_hosts)
    files = (job.folder.spec, job.folder.provenance, job.folder.journal)
    without = _twice(job)
    try:
        to.mkdir(parents=True, exist_ok=True)
        (to / "why.json").write_text(why)
        for part in parts:
            if part.exists() and (not part.is_symlink() or home.is_ours(job.folder)):
                _copy_folder(part, to / part.name, without)
        if checkpoints:
            _copy_saved_elsewhere(job, to / job.folder.checkpoints.name)
        for file in (*files, *_of_trackers(job)):
            if file.exists():
                place = to / file.relative_to(job.folder.root)
                place.parent.mkdir(parents=True, exist_ok=True)
                _copy(file, place)
    except BaseException as err:
        _take_back(
            [to / "why.json", *(to / path.name for path in (*parts, *files, *trackers.places(job.folder)))],
            made,
        )
        if isinstance(err, OSError):
            fix = "mend that, or free some space there, then collect again; nothing was left there"
            raise ClusterError(f"cannot be copied: {_reason(err)}", str(to), fix) from err
        raise
    return to


def _copy_saved_elsewhere(job: Job, to: Path) -> None:
    """Copy the saves of a job that are in its working folder; those elsewhere stay where they are."""
    if not home.is_ours(job.folder):
        return
    for save in _saves(job).values():
        if save.state in NAMED and save.places and save.places[0].root == str(job.folder.code):
            for piece in save.pieces:
                (to / piece.name).parent.mkdir(parents=True, exist_ok=True)
                _copy(job.folder.code / piece.name, to / piece.name)


def _of_trackers(job: Job) -> list[Path]:
    """Return the files of trackers' runs; those among the checkpoints are copied with them."""
    try:
        runs = trackers.runs(job.folder, job.plan().created_at) if home.is_ours(job.folder) else ()
    except ClusterError:
        return []
    found = [file for run in runs for file in trackers.files(run)]
    return [file for file in found if not file.is_relative_to(job.folder.checkpoints)]


def _saves(job: Job) -> dict[int, Save]:
    """Return the saves of a job; none if its ledger cannot be read: files are copied all the same."""
    try:
        return saves.known(job.folder)
    except ClusterError:
        return {}


def _twice(job: Job) -> tuple[Path, ...]:
    """Return what need not be copied: saves on their way, and what is kept of a save that is in its place."""
    checkpoints = job.folder.checkpoints
    kept = checkpoints / disk.KEPT
    in_place = [
        kept / str(save.number)
        for save in _saves(job).values()
        if save.state in NAMED and save.places and not disk.compare(save, deep=False).fault
    ]
    own = [path for path in kept.iterdir() if path not in in_place] if kept.is_dir() else []
    return (checkpoints / COMING, *(in_place if own else [kept]))


def _copy_folder(source: Path, target: Path, without: Collection[Path] = ()) -> None:
    """Copy a folder, see `_copy`."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder, name) in without]

    try:
        shutil.copytree(source, target, symlinks=True, copy_function=_copy, ignore=left_out)
    except shutil.Error as err:
        # What is not there any more, a running job has deleted
        if there := [one for one in err.args[0] if os.path.lexists(one[0])]:
            raise shutil.Error(there) from err
    for folder, _, _ in os.walk(
        target
    ):  # they have the modes of their sources: take others' right to write from them
        Path(folder).chmod(ownership.mode_of_copy(Path(folder).stat().st_mode))


def _copy(source: str | Path, target: str | Path) -> None:
    """Copy a file with its times.

    Its mode loses set-user-ID and others' right to write: a file of another user's job must not run as the collector.
    """
    try:
        shutil.copyfile(source, target, follow_symlinks=False)
        about = Path(source).lstat()
    except FileNotFoundError:
        if os.path.lexists(source):
            raise
        return  # a running job has deleted or renamed it meanwhile
    if not Path(target).is_symlink():
        os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))
        Path(target).chmod(ownership.mode_of_copy(about.st_mode))


def _why(job: Job) -> Json:
    """Return the post-mortem, or why there is none: the rest is copied all the same."""
    try:
        return job.why()
    except OrchError as err:
        return {"id": job.id, "unknown": str(err)}


def _refuse_unfit(job: Job, to: Path) -> None:
    """Raise UserError for a folder that cannot take a copy of the job."""
    try:
        if to.resolve().is_relative_to(job.folder.root.resolve()):
            raise UserError("a copy of the job inside its own folder", str(to), "name a folder elsewhere")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            to.lstat()  # `exists` tells of no error from Python 3.14 on
            if not to.is_dir() or any(to.iterdir()):
                raise UserError("is not an empty folder", str(to), "name a new one")
    except (OSError, RuntimeError) as err:
        # A name is too long, a folder may not be entered, or links form a circle.
        what = f"cannot be read: {_reason(err)}"
        raise UserError(what, str(to), "name a folder that you can write to") from err


def _reason(err: BaseException) -> str:
    """Return why a copy failed; of many files that could not be copied the first, and how many more."""
    if not isinstance(err, shutil.Error):
        return (err.strerror if isinstance(err, OSError) else None) or str(err)
    failed = err.args[0]
    source, _, why = failed[0]
    return f"{source}: {why}" + (f", and {len(failed) - 1} more" if len(failed) > 1 else "")


def _take_back(copies: Sequence[Path], made: Sequence[Path]) -> None:
    """Remove the copies of a collect that failed, and the folders that were `made` for it, the innermost first."""
    for path in copies:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()
    for path in made:
        with contextlib.suppress(OSError):  # it was not made, or another process uses it by now
            path.rmdir()


LAST_S_MAX = 360.0
"""How long to wait for what an ended job's supervisor still fetches."""


def await_last(job: Job) -> None:
    """Wait until an ended job's supervisor has fetched what it can; revive it if it died in the meantime."""
    deadline_s = time.monotonic() + LAST_S_MAX
    while not job.folder.ended.exists() and time.monotonic() < deadline_s:
        job.source.settle()
        time.sleep(POLL_S)


# Files of hosts


@dataclass(frozen=True, slots=True)
class CheckpointsThere:
    """Where ranks save on a host: a folder in that of the job, and the glob of `checkpoint.path` in it."""

    folder: str
    glob: str

    def has(self, name: str) -> bool:
        """Tell whether a file of the job, by its name on the host, belongs to a checkpoint."""
        return name.startswith(("checkpoints/", f"{self.folder}/")) and self.may_have(name, is_file=True)

    def may_have(self, name: str, *, is_file: bool) -> bool:
        """Tell whether a file belongs to a checkpoint, or a folder may hold one; True in other folders of the job."""
        folder, *parts = name.split("/")
        wanted = self.glob.split("/")
        if folder != self.folder or folder == "checkpoints" or _TORN in parts[0]:
            return True
        return (len(parts) >= len(wanted) or not is_file) and all(map(fnmatch.fnmatchcase, parts, wanted))

    def hides(self, name: str) -> bool:
        """Tell whether a name is that of an unfinished file, by the dot that it begins with."""
        folder, *parts = name.split("/")
        if parts[-1] in (".", ".."):
            return True
        if not parts[-1].startswith(".") or parts[-1] == METADATA or _TORN in name:
            return False
        wanted = self.glob.split("/")[len(parts) - 1 : len(parts)]
        return folder != self.folder or not any(part.startswith(".") for part in wanted)


@dataclass(frozen=True, slots=True)
class HostFile:
    """A file of the job on a host, by its name in the job's folder there."""

    name: str
    size_bytes: int
    mtime_s: int

    @property
    def piece(self) -> str:
        """Its name as the ledger has it, if it belongs to a checkpoint."""
        return self.name.partition("/")[2]

    def is_like(self, path: Path) -> bool:
        """Tell whether a file here has its size and time. Raises OSError."""
        about = path.stat()
        return about.st_size == self.size_bytes and int(about.st_mtime) == self.mtime_s


class Arrivals:
    """Where the checkpoint files that an ended job's hosts still have come to in its folder, if they come at all.

    - A file that the folder lacks comes into its place. Another one of the same name comes beside it, into
      `from-hosts/HOST`; so does one that would get into the folder of a whole save that does not have it.
    - What has come does not come again. Sizes and times tell, in whole seconds, which is what SFTP has.
    - What the ledger calls pruned, or written over by a save that is home as it was recorded, does not come.
    """

    def __init__(self, job: JobDir, saves: Mapping[int, Save]) -> None:
        self._job = job
        # By name: the states of the saves that a file was of, with its size and time then
        self._states: dict[str, list[tuple[SaveState, int, int]]] = {}
        for save in saves.values():
            for piece in save.pieces:
                about = save.state, piece.size_bytes, piece.mtime_ns // 10**9
                self._states.setdefault(piece.name, []).append(about)
        self._whole = [save for save in saves.values() if save.state is SaveState.WHOLE]

    def place(self, host: str, file: HostFile) -> Path | None:
        """Return where a file is to come; None if it need not. Raises OSError."""
        own = self._job.checkpoints / file.piece
        if self._is_over(file):
            return None
        if not os.path.lexists(own):
            if not self._is_alien(file):
                return own
        elif file.is_like(own):
            return None
        for number in range(1, VERSIONS_MAX):
            path = self._job.from_hosts / (host if number == 1 else f"{host}.{number}") / file.name
            if not os.path.lexists(path):
                return path
            if file.is_like(path):
                return None
        raise OSError(errno.EMFILE, f"{VERSIONS_MAX - 1} versions of it lie in {self._job.from_hosts}")

    def is_beside(self, path: Path) -> bool:
        """Tell whether a place is not that of its name."""
        return path.is_relative_to(self._job.from_hosts)

    def drop_copy(self, file: HostFile, path: Path) -> bool:
        """Delete what came beside a file with the same bytes; tell whether it did. Raises OSError."""
        own = self._job.checkpoints / file.piece
        if (
            not own.is_file()
            or own.stat().st_size != path.stat().st_size
            or disk.sha256(own) != disk.sha256(path)
        ):
            return False
        path.unlink()
        return True

    def _is_over(self, file: HostFile) -> bool:
        """Tell whether `checkpoint.keep` deleted a file, or a save that is home has written it over."""
        about = file.size_bytes, file.mtime_s
        states = [state for state, *known in self._states.get(file.piece, ()) if tuple(known) == about]
        if SaveState.WHOLE in states:
            return False
        return SaveState.PRUNED in states or (SaveState.GONE in states and self._is_home(file.piece))

    def _is_home(self, name: str) -> bool:
        pieces = (piece for save in self._whole for piece in save.pieces if piece.name == name)
        return any(disk.is_as_recorded(self._job.checkpoints, piece) for piece in pieces)

    def _is_alien(self, file: HostFile) -> bool:
        """Tell whether a file would get into the folder of a whole save that does not have it, or become the ledger."""
        return file.piece == self._job.ledger.name or any(
            file.piece.startswith(f"{save.main}/") and all(piece.name != file.piece for piece in save.pieces)
            for save in self._whole
        )
