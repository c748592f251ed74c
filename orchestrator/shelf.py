"""Which of a job's checkpoints are at home, and which are on their way? The folders and manifests, decisions elsewhere.

Rules: `checkpoints/NAME` is one whole version or not there at all. What is on its way gathers in a folder of its own
on the same disk (`checkpoints/.coming/N/`) and is renamed into its place. `carried/KEY.json` tells which version is at
home, `carried/KEY.coming.json` which one is on its way; the latter is gone only when the former is true.
`carried/KEY.dead.json` tells which one was given up before all hosts had told their parts, and `carried/gaps.json` which
never will. No name that a host sends
leads out of the checkpoint folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import ClusterError
from orchestrator.node.formats import Wholeness, look, wholeness
from orchestrator.versions import Gaps, Version
from orchestrator.wire import codec
from orchestrator.wire.durable import replace_text, sync_folder
from orchestrator.wire.messages import Piece
from orchestrator.wire.paths import JobDir

COMING = ".coming"
"""Where versions gather, within the checkpoint folder; names with a leading dot are never taken for checkpoints."""

OLD = ".old"
"""Where the version before lies, within the folder of the new one, for the instant of their exchange."""

PIECES_MAX = 10_000
"""Files of one checkpoint, as the agents' own limit."""

PART_BYTES_MAX = 255
PATH_BYTES_MAX = 3_000
"""How long a name in a folder, and a name with its folders, may be on the file systems of Linux; room for ours is
left in the latter."""

READ_BYTES = 1 << 20

_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Way:
    """What is on its way under one name: a version, and the one that will follow it."""

    version: Version
    following: Version | None


class Shelf:
    """The checkpoints of one job on the submit machine."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._manifests = job.root / "carried"
        self._hashed: dict[str, tuple[Piece, ...]] = {}  # of checkpoints without a version, by path

    def load(self) -> tuple[list[Version], list[Way], list[Version]]:
        """Return the versions at home, those on their way and the dead ones; clear away what was left unfinished.

        A manifest that cannot be read (of another version of orch) counts as none.
        """
        home: list[Version] = []
        coming: list[Way] = []
        dead: list[Version] = []
        for path in sorted(self._manifests.glob("*.json")):
            with contextlib.suppress(OSError, codec.CodecError):
                if path.name.endswith(".coming.json"):
                    coming.append(codec.loads(Way, path.read_bytes()))
                elif path.name.endswith(".dead.json"):
                    dead.append(codec.loads(Version, path.read_bytes()))
                else:
                    home.append(codec.loads(Version, path.read_bytes()))
        for way in coming:
            self._put_back(way.version)
        stages = {str(way.version.number) for way in coming}
        for left in sorted((self._job.checkpoints / COMING).glob("*")):
            if left.name not in stages:
                shutil.rmtree(left, ignore_errors=True)
        return [version for version in home if self.path(version.name).exists()], coming, dead

    def _put_back(self, version: Version) -> None:
        """Undo an exchange of folders that was cut off between its two renames."""
        old, goal = self.stage(version) / OLD, self.path(version.name)
        if old.exists() and not goal.exists():
            old.rename(goal)

    def path(self, name: str) -> Path:
        """Return where a checkpoint is at home."""
        return self._job.checkpoints / name

    def stage(self, version: Version) -> Path:
        """Return where a version gathers on its way."""
        return self._job.checkpoints / COMING / str(version.number)

    def note_coming(self, way: Way) -> None:
        """Write down what is on its way. Raises OSError."""
        self._manifests.mkdir(exist_ok=True)
        replace_text(self._coming(way.version.name), codec.dumps(way))

    def forget_coming(self, name: str) -> None:
        """Write down that nothing of this name is on its way; if the disk refuses, it is fetched again some day."""
        with contextlib.suppress(OSError):
            self._coming(name).unlink()

    def note_dead(self, version: Version) -> None:
        """Write down that a version was given up. Raises OSError."""
        self._manifests.mkdir(exist_ok=True)
        replace_text(self._dead(version.name), codec.dumps(version))

    def gaps(self) -> Gaps:
        """Return what will never be heard of."""
        with contextlib.suppress(OSError, codec.CodecError):
            return codec.loads(Gaps, self._gaps.read_bytes())
        return Gaps({}, {}, ())

    def note_gaps(self, gaps: Gaps) -> None:
        """Write down what will never be heard of; if the disk refuses, that only outlives this process."""
        with contextlib.suppress(OSError):
            self._manifests.mkdir(exist_ok=True)
            replace_text(self._gaps, codec.dumps(gaps))

    def forget_dead(self, name: str) -> None:
        """Forget the dead version of a name; if the disk refuses, it is forgotten later."""
        with contextlib.suppress(OSError):
            self._dead(name).unlink()

    def install(self, version: Version) -> None:
        """Put a version that has gathered in its place, and write it down. Raises OSError."""
        stage, goal = self.stage(version), self.path(version.name)
        new = stage / version.name
        goal.parent.mkdir(parents=True, exist_ok=True)
        if new.is_dir() or goal.is_dir():
            if goal.exists():
                goal.rename(stage / OLD)
            new.rename(goal)
        else:
            new.replace(goal)
        sync_folder(goal.parent)
        replace_text(self._manifest(version.name), codec.dumps(version))

    def take_away(self, version: Version) -> Path:
        """Take a version out of its place; return where it lies now, to be deleted. Raises OSError."""
        self._manifest(version.name).unlink()
        away = self.stage(version)
        away.mkdir(parents=True, exist_ok=True)
        self.path(version.name).rename(away / OLD)
        return away

    def flaw(self, name: str, pieces: tuple[Piece, ...]) -> str:
        """Say why a checkpoint of this name cannot be kept here; empty if it can."""
        names = [piece.name for piece in pieces]
        if not 0 < len(names) <= PIECES_MAX or len(set(names)) < len(names):
            return f"{len(names)} files, each once and at most {PIECES_MAX}, cannot be"
        bad = next((one for one in [name, *names] if not _stays_inside(one)), None)
        if bad is not None:
            return f"{bad!r} would not lie in the checkpoint folder"
        if not all(one.startswith(f"{name}/") or names == [name] for one in names):
            return "files are named that are not its own"
        if any(piece.size_bytes < 0 or not _SHA256.fullmatch(piece.sha256) for piece in pieces):
            return "sizes or checksums are none"
        folder = self._job.checkpoints
        above = [folder.joinpath(*Path(name).parts[:depth]) for depth in range(1, len(Path(name).parts) + 1)]
        link = next((path for path in above if path.is_symlink()), None)
        return f"{link} is a symbolic link" if link else ""

    def lacks_pieces(self, version: Version) -> bool:
        """Tell whether a version that has gathered names pieces that no host had."""
        gathered = self.stage(version) / version.name
        return wholeness(gathered, look(gathered)) is Wholeness.UNFINISHED

    def name_of(self, path: str) -> str:
        """Return a checkpoint's name in the checkpoint folder; of one that lies elsewhere, that which it would get."""
        whole = Path(path)
        folder = self._job.checkpoints
        return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else whole.name

    def top_of(self, path: str) -> Path:
        """Return the folder that a checkpoint's name is relative to."""
        return Path(path).parents[len(Path(self.name_of(path)).parts) - 1]

    def pieces(self, path: str, version: Version | None) -> tuple[Piece, ...]:
        """Return the files of a checkpoint: those of its version while they fit, else all are read, which may take
        long. Raises ClusterError."""
        top = self.top_of(path)
        for known in (version.pieces if version else (), self._hashed.get(path, ())):
            if known and all(_fits(top / piece.name, piece) for piece in known):
                return known
        try:
            pieces = tuple(_piece_of(file, str(file.relative_to(top))) for file, _ in files_of(Path(path)))
        except OSError as err:
            raise ClusterError(f"cannot be read: {err.strerror}", path, "resume from another one") from err
        self._hashed[path] = pieces
        return pieces

    @property
    def _gaps(self) -> Path:
        return self._manifests / "gaps.json"

    def _manifest(self, name: str) -> Path:
        return self._manifests / f"{_key(name)}.json"

    def _coming(self, name: str) -> Path:
        return self._manifests / f"{_key(name)}.coming.json"

    def _dead(self, name: str) -> Path:
        return self._manifests / f"{_key(name)}.dead.json"


def _key(name: str) -> str:
    """Return a file name for a checkpoint's name: readable, short, and never that of another one."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{_UNFIT.sub('_', name)[:60]}-{digest[:16]}"


def _stays_inside(name: str) -> bool:
    """Tell whether a relative path, as a host sent it, can only lie below where it is put."""
    try:
        raw = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    parts = name.split("/")
    fits = len(raw) <= PATH_BYTES_MAX and all(len(os.fsencode(part)) <= PART_BYTES_MAX for part in parts)
    return fits and b"\0" not in raw and not {"", ".", ".."} & set(parts) and parts[0] not in (COMING, OLD)


# Checkpoints that any path names


def files_of(path: Path) -> tuple[tuple[Path, int], ...]:
    """Return the files of a checkpoint, itself or those below it, with their sizes, in order. Raises ClusterError."""
    try:
        files = tuple((file, file.stat().st_size) for file in ([path] if path.is_file() else _walk(path)))
    except OSError as err:
        raise ClusterError(
            f"cannot be read: {err.strerror}", str(err.filename or path), "look at it"
        ) from err
    if not files:
        raise ClusterError("there is no checkpoint", str(path), "name one of `orch checkpoints`")
    if len(files) > PIECES_MAX:
        what = f"more than {PIECES_MAX} files are in it, too many to send to hosts"
        raise ClusterError(
            what, str(path), "put it where the hosts see it, and name it in the job's own arguments"
        )
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, one more than are allowed at most."""
    found = 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(parent, name) for name in sorted(names)):
            if path.is_file() and found <= PIECES_MAX:
                found += 1
                yield path
        if found > PIECES_MAX:
            return


def _piece_of(path: Path, name: str) -> Piece:
    """Return what a file is, reading all of it. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        while block := file.read(READ_BYTES):
            digest.update(block)
    return Piece(name, before.st_size, before.st_mtime_ns, digest.hexdigest())


def _fits(path: Path, piece: Piece) -> bool:
    """Tell, from size and time alone, whether a file is still the piece that it was."""
    try:
        stat = path.stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (piece.size_bytes, piece.mtime_ns)
