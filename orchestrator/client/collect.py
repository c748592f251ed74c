"""Results of a job: its logs, checkpoints and evidence copied to one place; and where files that its hosts still have come
to in its folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.client import saves
from orchestrator.client.job import POLL_S, Job
from orchestrator.client.logs import trackers
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.choice import NAMED
from orchestrator.core.checkpoints.save import Save, SaveState
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import home, ownership, start_folder
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.text import counted, first
from orchestrator.supervisor.transfers.save_copies import COMING
from orchestrator.supervisor.transfers.save_disk import Homes

OTHERS_BYTES_MAX = 2 * 10**9
"""How much ranks may have written where they start that is of no checkpoint, and is copied without `--all`."""

LEFT_SHOWN = 5
VERSIONS_MAX = 100
"""How many versions of one file of a host may lie beside it."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What was brought together: where, and how many checkpoints and other files of ranks there are. `elsewhere`: the checkpoints
    that lie outside of the job's folder; `left`: a text for what was too large, `odd`: texts for pipes and the like."""

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
    out = [save.path for save in whole if save not in inside]
    elsewhere = tuple(
        os.path.realpath(path) if Path(path).is_relative_to(job.folder.root) else path for path in out
    )
    if to is None:
        return Collected(job.folder.root, len(inside), len(others), elsewhere)
    _refuse_unfit(job, to)
    too_large = sum(others.values()) > OTHERS_BYTES_MAX and not everything
    left = {str(path.relative_to(job.folder.root)): others[path] for path in others} if too_large else {}
    own = [path for path in saved if checkpoints and path.is_relative_to(job.folder.code)]
    odd = _copy_all(job, to, [*own, *([] if left else others)], checkpoints=checkpoints)
    texts = first([f"{path} is no file, and was not copied" for path in odd], LEFT_SHOWN, "are no files")
    count = len(inside) if checkpoints else 0
    return Collected(to, count, 0 if left else len(others), elsewhere, tuple(left_there(left)), tuple(texts))


def _copy_all(job: Job, to: Path, written: Sequence[Path], *, checkpoints: bool) -> list[Path]:
    """Copy the parts of a job, and these files of its ranks; what was copied is deleted again if one fails. Return what is no file
    that can be copied, such as a pipe. Raises ClusterError."""
    odd = list[Path]()
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
                odd += _copy_folder(part, to / part.name, without)
        for file in dict.fromkeys((*files, *_of_trackers(job), *written)):
            if file.exists():
                place = to / file.relative_to(job.folder.root)
                place.parent.mkdir(parents=True, exist_ok=True)
                _copy(file, place)
    except BaseException as err:
        copied = [*(to / path.name for path in (*parts, *files, *trackers.places(job.folder))), to / "code"]
        _take_back([to / "why.json", *copied], made)
        if isinstance(err, OSError):
            fix = "mend that, or free some space there, then collect again; nothing was left there"
            raise ClusterError(f"cannot be copied: {_reason(err)}", str(to), fix) from err
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


def _copy_folder(source: Path, target: Path, without: Collection[Path] = ()) -> list[Path]:
    """Copy a folder, see `_copy`; return what in it is neither a file nor a folder nor a link."""
    odd = list[Path]()

    def left_out(folder: str, names: list[str]) -> list[str]:
        odd.extend(path for name in names if _is_odd(path := Path(folder, name)))
        return [name for name in names if (path := Path(folder, name)) in without or path in odd]

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
    return odd


def _is_odd(path: Path) -> bool:
    """Tell whether what lies at a path is a pipe, a socket or a device."""
    with contextlib.suppress(OSError):
        mode = path.lstat().st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
    return False


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


def is_of_ranks(name: str) -> bool:
    """Tell whether a file of a job, by its name in the job's folder, is one that ranks may have written."""
    return name.startswith(("checkpoints/", "code/"))


def is_hidden(name: str) -> bool:
    """Tell whether a file of a job on a host need not come: compiled code, what orch itself has not finished, or a file outside of
    the folders of ranks whose name begins with a dot."""
    folder, *parts = name.split("/")
    if parts[-1] in (".", "..", "__pycache__"):
        return True
    if folder == "checkpoints":
        return parts[0] in (COMING, disk.KEPT)
    return parts[-1].startswith(".") and folder != "code"


@dataclass(frozen=True, slots=True)
class HostFile:
    """A file of the job on a host, by its name in the job's folder there."""

    name: str
    size_bytes: int
    mtime_s: int

    def is_like(self, path: Path) -> bool:
        """Tell whether a file here has its size and time. Raises OSError."""
        about = path.stat()
        return about.st_size == self.size_bytes and int(about.st_mtime) == self.mtime_s


class Arrivals:
    """Where the files of ranks that an ended job's hosts still have come to in its folder, if they come at all.

    - What orch writes on a host only grows, and what is missing at its end comes.
    - A file of ranks that the folder lacks comes into its place. Another one of the same name comes beside it, into
      `from-hosts/HOST`; so does one that would get into the folder of a whole save that does not have it.
    - What has come does not come again. Sizes and times tell, in whole seconds, which is what SFTP has.
    - What the ledger calls pruned, or written over by a save that is home as it was recorded, does not come.
    """

    def __init__(self, job: JobDir, homes: Homes, saves: Mapping[int, Save]) -> None:
        self._job, self._homes = job, homes
        # By name: the states of the saves that a file was of, with its size and time then
        self._states: dict[str, list[tuple[SaveState, int, int]]] = {}
        for save in saves.values():
            for piece in save.pieces:
                about = save.state, piece.size_bytes, piece.mtime_ns // 10**9
                self._states.setdefault(str(homes.of(save) / piece.name), []).append(about)
        self._whole = [save for save in saves.values() if save.state is SaveState.WHOLE]

    def place(self, host: str, file: HostFile) -> Path | None:
        """Return where a file is to come; None if it need not. Raises OSError."""
        own = self._homes.of_host(file.name)
        if not is_of_ranks(file.name):
            return None if own.is_file() and own.stat().st_size >= file.size_bytes else own
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

    def too_large(self, files: Sequence[HostFile], bytes_max: float) -> dict[str, int]:
        """Return the files where ranks start that are of no checkpoint, with their sizes, if they are more than this together."""
        others = {
            file.name: file.size_bytes
            for file in files
            if file.name.startswith("code/") and str(self._homes.of_host(file.name)) not in self._states
        }
        return others if sum(others.values()) > bytes_max else {}

    def is_beside(self, path: Path) -> bool:
        """Tell whether a place is not that of its name."""
        return path.is_relative_to(self._job.from_hosts)

    def drop_copy(self, file: HostFile, path: Path) -> bool:
        """Delete what came beside a file with the same bytes; tell whether it did. Raises OSError."""
        own = self._homes.of_host(file.name)
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
        about, own = (file.size_bytes, file.mtime_s), self._homes.of_host(file.name)
        states = [state for state, *known in self._states.get(str(own), ()) if tuple(known) == about]
        if SaveState.WHOLE in states:
            return False
        return SaveState.PRUNED in states or (SaveState.GONE in states and self._is_home(own))

    def _is_home(self, own: Path) -> bool:
        found = ((self._homes.of(save), piece) for save in self._whole for piece in save.pieces)
        return any(
            folder / piece.name == own and disk.is_as_recorded(folder, piece) for folder, piece in found
        )

    def _is_alien(self, file: HostFile) -> bool:
        """Tell whether a file would get into the folder of a whole save that does not have it, or become the ledger."""
        own = self._homes.of_host(file.name)
        return own == self._job.ledger or any(
            own.is_relative_to(self._homes.of(save) / save.main)
            and all(self._homes.of(save) / piece.name != own for piece in save.pieces)
            for save in self._whole
            if save.main != "."
        )


def left_there(left: Mapping[str, int]) -> list[str]:
    """Say which files where ranks start were too large to be copied, by their names and sizes; nothing for none."""
    if not left:
        return []
    largest = sorted(left, key=lambda name: -left[name])[:LEFT_SHOWN]
    size_gb = sum(left.values()) / 1e9
    what = (
        f"{counted(len(left), 'file')} where ranks start ({size_gb:.1f} GB, no checkpoints) were not copied"
    )
    return [
        f"{what}: {', '.join(largest)}{', …' if len(left) > LEFT_SHOWN else ''}; orch collect --all brings them"
    ]
