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

from orchestrator.client import saves
from orchestrator.client.job import POLL_S, Job
from orchestrator.client.logs import trackers
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.choice import NAMED
from orchestrator.core.checkpoints.save import Piece, Save, SaveState
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import home, ownership, start_folder
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.text import counted, first
from orchestrator.supervisor.transfers.save_copies import COMING
from orchestrator.supervisor.transfers.save_disk import Homes

OTHERS_BYTES_MAX = 2 * 10**9
"""Limit on files that ranks wrote into their working directory, other than checkpoints, without `--all`."""

LEFT_SHOWN = 5
VERSIONS_MAX = 100
"""Limit on the versions of one file of a host."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Result of a collect: the folder, and the number of checkpoints and other files of ranks. `elsewhere`: the checkpoints
    outside of the job's folder; `left`: a text for what was too large; `odd`: texts for pipes and other special files."""

    place: Path
    checkpoints: int
    others: int
    elsewhere: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()


def collect(job: Job, to: Path | None, *, checkpoints: bool = True, everything: bool = False) -> Collected:
    """Copy a job's logs, checkpoints (unless not wanted), evidence, post-mortem (`why.json`), and what its ranks have written where
    they start to a folder. `everything`: also more than `OTHERS_BYTES_MAX` of that.

    Without `to` that is the job folder, into which `remote_files` has fetched what hosts had. Raises OrchError, and
    UserError for an unfit `to`.
    """
    homes = Homes(job.folder, job.plan())
    whole = [save for save in _saves(job).values() if save.state is SaveState.WHOLE and save.places]
    inside = [save for save in whole if homes.owns(save)]
    saved = {homes.of(save) / piece.name for save in inside for piece in save.pieces}
    written = {job.folder.code / file.name: file.size_bytes for file in start_folder.written(job.folder)}
    others = {path: size_bytes for path, size_bytes in written.items() if path not in saved}
    out = [save for save in whole if save not in inside]
    elsewhere = tuple(
        os.path.realpath(save.path)
        if Path(save.path).is_relative_to(job.folder.root)
        else f"{save.host}:{save.path}".removeprefix(":")
        for save in out
    )
    if to is None:
        return Collected(job.folder.root, len(inside), len(others), elsewhere)
    _refuse_unfit(job, to)
    too_large = sum(others.values()) > OTHERS_BYTES_MAX and not everything
    left = {str(path.relative_to(job.folder.root)): others[path] for path in others} if too_large else {}
    own = [path for path in saved if checkpoints and path.is_relative_to(job.folder.code)]
    odd = _copy_all(job, to, [*own, *([] if left else others)], checkpoints=checkpoints)
    texts = first(
        [f"{path} is not a file or folder, and was not copied" for path in odd], LEFT_SHOWN, "are not files"
    )
    count = len(inside) if checkpoints else 0
    return Collected(to, count, 0 if left else len(others), elsewhere, tuple(left_there(left)), tuple(texts))


def _copy_all(job: Job, to: Path, written: Sequence[Path], *, checkpoints: bool) -> list[Path]:
    """Copy the parts of a job, and these files of its ranks, all or none. Return what cannot be copied, such as a pipe.
    Raises ClusterError."""
    odd = list[Path]()
    why = json.dumps(_why(job), indent=2)
    made = [path for path in (to, *to.parents) if not path.exists()]
    saved = (job.folder.checkpoints,) if checkpoints else ()
    parts = (job.folder.logs, *saved, job.folder.root / "evidence", job.folder.from_hosts)
    files = (job.folder.spec, job.folder.provenance, job.folder.journal)
    without = _twice(job)
    try:
        to.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=to, ignore_cleanup_errors=True) as name:
            stage = Path(name)
            (stage / "why.json").write_text(why)
            for part in parts:
                if part.exists() and (not part.is_symlink() or home.is_ours(job.folder)):
                    odd += _copy_folder(part, stage / part.name, without)
            for file in dict.fromkeys((*files, *_of_trackers(job), *written)):
                if file.exists():
                    place = stage / file.relative_to(job.folder.root)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    _copy(file, place)
            for path in stage.iterdir():
                path.rename(to / path.name)
    except BaseException as err:
        for path in made:
            with contextlib.suppress(OSError):  # it was not made, or another process uses it by now
                path.rmdir()
        if isinstance(err, OSError):
            fix = "fix that, or free some space there, then run orch collect again; no partial copy was left"
            where = f"{err.filename}: " if err.filename else ""
            raise ClusterError(f"cannot be copied: {where}{_reason(err)}", str(to), fix) from err
        raise
    return odd


def _of_trackers(job: Job) -> list[Path]:
    """Return the files of trackers' runs; those among the checkpoints are copied with them."""
    try:
        runs = trackers.runs(job.folder, job.plan().created_at) if home.is_ours(job.folder) else ()
    except ClusterError:
        return []
    found = [file for run in runs for file in trackers.files(run)]
    return [file for file in found if not file.is_relative_to(job.folder.checkpoints)]


def _saves(job: Job) -> dict[int, Save]:
    """Return the checkpoints of a job; none if its ledger cannot be read: files are copied anyway."""
    try:
        return saves.known(job.folder)
    except ClusterError:
        return {}


def _twice(job: Job) -> tuple[Path, ...]:
    """Return what need not be copied: checkpoints in transfer, and kept files of checkpoints that are still in place."""
    checkpoints = job.folder.checkpoints
    kept = checkpoints / disk.KEPT
    in_place = [
        kept / str(save.number)
        for save in _saves(job).values()
        if save.state in NAMED and save.places and not disk.compare(save, deep=False).fault
    ]
    own = [path for path in kept.iterdir() if path not in in_place] if kept.is_dir() else []
    return (checkpoints / COMING, *(in_place if own else [kept]))


def _copy_folder(source: Path, target: Path, without: Collection[Path]) -> list[Path]:
    """Copy a folder, see `_copy`, but for some folders in it; return what in it cannot be copied."""
    odd = list[Path]()
    target.mkdir(ownership.mode_of_copy(source.stat().st_mode) | stat.S_IRWXU)
    for place, folders, names in os.walk(source, onerror=_raise_unless_gone):
        folders[:] = [name for name in folders if Path(place, name) not in without]
        for path in [Path(place, name) for name in (*folders, *names)]:
            if not _copy(path, target / path.relative_to(source)):
                odd.append(path)
    return odd


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


def _why(job: Job) -> Json:
    """Return the post-mortem, or why there is none: the rest is copied anyway."""
    try:
        return job.why()
    except OrchError as err:
        return {"id": job.id, "unknown": str(err)}


def _refuse_unfit(job: Job, to: Path) -> None:
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


LAST_S_MAX = 360.0
"""Limit on the wait for the last fetches of an ended job's supervisor."""


def await_last(job: Job) -> None:
    """Wait until an ended job's supervisor has fetched what it can; revive it if it died in the meantime."""
    deadline_s = time.monotonic() + LAST_S_MAX
    while not job.folder.ended.exists() and time.monotonic() < deadline_s:
        job.source.settle()
        time.sleep(POLL_S)


# Files of hosts


def is_of_ranks(name: str) -> bool:
    """Tell whether ranks may have written a file, by its name in the job's folder."""
    return name.startswith(("checkpoints/", "code/"))


def is_hidden(name: str) -> bool:
    """Tell whether a file of a job on a host need not come: compiled code, what orch itself has not finished, or a file outside of
    the folders of ranks whose name begins with a dot."""
    folder, *parts = name.split("/")
    if parts[-1] == start_folder.CACHE:
        return True
    if folder == "checkpoints":
        return parts[0] in (COMING, disk.KEPT)
    return parts[-1].startswith(".") and folder != "code"


class Arrivals:
    """Local place of the files that an ended job's hosts still have, if they are fetched at all.

    - Files that orch writes on a host only grow: the missing end is fetched.
    - A file of ranks that the folder lacks is put at its own path. Another one of the same name is put into
      `from-hosts/HOST`; so is one that would get into the folder of a complete checkpoint without belonging to it.
    - A file is fetched once, as sizes and times show, in whole seconds, which is what SFTP has.
    - What the ledger calls pruned, or written over by a save that is home as it was recorded, does not come.
    """

    def __init__(self, job: JobDir, homes: Homes, saves: Mapping[int, Save]) -> None:
        self._job, self._homes = job, homes
        # By local path: the checkpoints that a file belonged to, as it was then
        self._saved: dict[Path, list[tuple[Save, Piece]]] = {}
        for save in saves.values():
            for piece in save.pieces:
                self._saved.setdefault(homes.of(save) / piece.name, []).append((save, piece))
        self._whole = [save for save in saves.values() if save.state is SaveState.WHOLE]

    def place(self, host: str, file: Piece) -> Path | None:
        """Return the local path for a file; None if it need not be fetched. Raises OSError."""
        own = self._homes.of_host(file.name)
        if not is_of_ranks(file.name):
            return None if own.is_file() and own.stat().st_size >= file.size_bytes else own
        if self._is_over(own, file):
            return None
        if not os.path.lexists(own):
            if not self._is_alien(own):
                return own
        elif _is_like(own, file):
            return None
        for number in range(1, VERSIONS_MAX):
            path = self._job.from_hosts / (host if number == 1 else f"{host}.{number}") / file.name
            if not os.path.lexists(path):
                return path
            if _is_like(path, file):
                return None
        raise OSError(errno.EMFILE, f"{VERSIONS_MAX - 1} versions of it are in {self._job.from_hosts}")

    def too_large(self, files: Sequence[Piece], bytes_max: float) -> dict[str, int]:
        """Return the files of ranks that belong to no checkpoint, with their sizes, if their sum exceeds the limit."""
        others = {
            file.name: file.size_bytes
            for file in files
            if file.name.startswith("code/") and self._homes.of_host(file.name) not in self._saved
        }
        return others if sum(others.values()) > bytes_max else {}

    def is_beside(self, path: Path) -> bool:
        """Tell whether a path is that of another version of a file."""
        return path.is_relative_to(self._job.from_hosts)

    def drop_copy(self, file: Piece, path: Path) -> bool:
        """Delete another version of a file that has the same bytes; tell whether it did. Raises OSError."""
        own = self._homes.of_host(file.name)
        if (
            not own.is_file()
            or own.stat().st_size != path.stat().st_size
            or disk.sha256(own) != disk.sha256(path)
        ):
            return False
        path.unlink()
        return True

    def _is_over(self, own: Path, file: Piece) -> bool:
        """Tell whether `checkpoint.keep` deleted a file, or a fetched checkpoint has overwritten it."""
        saved = self._saved.get(own, ())
        states = [save.state for save, piece in saved if _is_that(file, piece.size_bytes, piece.mtime_ns)]
        is_home = any(
            save.state is SaveState.WHOLE and disk.is_as_recorded(self._homes.of(save), piece)
            for save, piece in saved
        )
        is_over = SaveState.PRUNED in states or (SaveState.GONE in states and is_home)
        return is_over and SaveState.WHOLE not in states

    def _is_alien(self, own: Path) -> bool:
        """Tell whether a file would get into the folder of a complete checkpoint without belonging to it, or replace the ledger."""
        return own == self._job.ledger or any(
            own.is_relative_to(self._homes.of(save) / save.main)
            and all(self._homes.of(save) / piece.name != own for piece in save.pieces)
            for save in self._whole
            if save.main != "."
        )


def _is_like(path: Path, file: Piece) -> bool:
    """Tell whether a file here has the size and time of one on a host. Raises OSError."""
    about = path.stat()
    return _is_that(file, about.st_size, about.st_mtime_ns)


def _is_that(file: Piece, size_bytes: int, mtime_ns: int) -> bool:
    return file.size_bytes == size_bytes and disk.is_same_time(file.mtime_ns, mtime_ns)


def left_there(left: Mapping[str, int]) -> list[str]:
    """Return a text on the files of ranks that were too large to be copied; empty for none."""
    if not left:
        return []
    largest = sorted(left, key=lambda name: -left[name])[:LEFT_SHOWN]
    size_gb = sum(left.values()) / 1e9
    what = f"{counted(len(left), 'file')} that ranks wrote ({size_gb:.1f} GB, no checkpoints) were not copied"
    return [
        f"{what}: {', '.join(largest)}{', …' if len(left) > LEFT_SHOWN else ''}; orch collect --all copies them"
    ]
