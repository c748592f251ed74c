"""The checkpoints in a job folder, as they lie on the disk: whole ones, those on their way, and what hosts reported of
them.

Rules: `checkpoints/NAME` is one whole version or does not exist. A version on its way gathers in a folder of its own
on the same disk (`checkpoints/.coming/KEY/`) and is renamed into its place. `carried/KEY.json` holds what the hosts
last reported of a name, and its state; `carried/lost.json` the hosts that will report nothing more. No name that a
host sends leads out of the checkpoint folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path

from orchestrator.agent.outputs.checkpoint_formats import FILES_MAX, Wholeness, inspect_shape, wholeness
from orchestrator.core import codec
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir.durable import replace_text, sync_folder
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire.messages import ManifestEntry
from orchestrator.supervisor.transfers.checkpoint_versions import Version, VersionState

COMING = ".coming"
"""Where versions gather, within the checkpoint folder; names with a leading dot are never taken for checkpoints."""

OLD = ".old"
"""Where the old version lies, within the folder of the new one, for the instant of their exchange."""

LOST = "lost.json"

PART_BYTES_MAX = 255
PATH_BYTES_MAX = 3_000
"""How long a name in a folder, and a name with its folders, may be on the file systems of Linux (255, 4096); the latter
leaves room for the path of the job folder."""

READ_BYTES = 1 << 20

_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")


class CheckpointStore:
    """The checkpoints of one job on the submit machine."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._manifests = job.root / "carried"
        self._known: dict[str, tuple[ManifestEntry, ...]] = {}  # by the path of the checkpoint

    def load(self) -> list[Version]:
        """Return what hosts have reported, a version for each name; clear away what was left unfinished.

        A manifest that cannot be read (of another version of orch) counts as none.
        """
        versions: list[Version] = []
        for path in sorted(self._manifests.glob("*.json")):
            with contextlib.suppress(OSError, codec.CodecError):
                versions.append(codec.loads(Version, path.read_bytes()))
        self._known = {
            str(self.path(version.name)): version.pieces
            for version in versions
            if version.state is VersionState.INSTALLED
        }
        keys = {version.key for version in versions if version.state is VersionState.EXPECTED}
        for stage in sorted((self._job.checkpoints / COMING).glob("*")):
            for version in versions:  # an exchange that was cut off between its two renames is undone
                old, goal = stage / OLD / version.name, self.path(version.name)
                if old.exists() and not goal.exists():
                    old.rename(goal)
            if stage.name not in keys:
                shutil.rmtree(stage, ignore_errors=True)
        return versions

    def path(self, name: str) -> Path:
        """Return where a checkpoint lies in the job folder."""
        return self._job.checkpoints / name

    def stage(self, version: Version) -> Path:
        """Return where a version gathers on its way."""
        return self._job.checkpoints / COMING / version.key

    def note(self, version: Version) -> None:
        """Write down what hosts have reported of a name, and its state. Raises OSError."""
        self._manifests.mkdir(exist_ok=True)
        replace_text(self._manifest(version.name), codec.dumps(version))

    def forget(self, name: str) -> None:
        """Forget what hosts have reported of a name; if the disk refuses, it is forgotten later."""
        with contextlib.suppress(OSError):
            self._manifest(name).unlink()

    def lost(self) -> dict[str, int]:
        """Return the nodes that were lost, with the last attempt of which they have not reported all."""
        with contextlib.suppress(OSError, codec.CodecError):
            return codec.loads(dict[str, int], (self._manifests / LOST).read_bytes())
        return {}

    def note_lost(self, lost: dict[str, int]) -> None:
        """Write down which nodes were lost; if the disk refuses, only this process remembers it."""
        with contextlib.suppress(OSError):
            self._manifests.mkdir(exist_ok=True)
            replace_text(self._manifests / LOST, codec.dumps(lost))

    def install(self, version: Version) -> None:
        """Put a version that has gathered into its place, durably. Raises OSError."""
        stage, goal = self.stage(version), self.path(version.name)
        new = stage / version.name
        goal.parent.mkdir(parents=True, exist_ok=True)
        if new.is_dir() or goal.is_dir():
            if goal.exists():
                self._take_out(version)
            new.rename(goal)
        else:
            new.replace(goal)
        sync_folder(goal.parent)
        self._known[str(goal)] = version.pieces

    def take_away(self, version: Version) -> Path:
        """Take a version out of its place; return where it lies now, to be deleted. Raises OSError."""
        self.forget(version.name)
        self._take_out(version)
        return self.stage(version)

    def _take_out(self, version: Version) -> None:
        old = self.stage(version) / OLD / version.name
        old.parent.mkdir(parents=True, exist_ok=True)
        self.path(version.name).rename(old)

    def flaw(self, name: str, pieces: tuple[ManifestEntry, ...]) -> str:
        """Return why a checkpoint of this name cannot be kept here; empty if it can."""
        names = [piece.name for piece in pieces]
        if not 0 < len(names) <= FILES_MAX or len(set(names)) < len(names):
            return f"{len(names)} files, each once and at most {FILES_MAX}, cannot be"
        bad = next((path for path in [name, *names] if not _stays_inside(path)), None)
        if bad is not None:
            return f"{bad!r} would not lie in the checkpoint folder"
        if not all(path.startswith(f"{name}/") or names == [name] for path in names):
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
        return wholeness(gathered, inspect_shape(gathered)) is Wholeness.UNFINISHED

    def name_of(self, path: str) -> str:
        """Return a checkpoint's name in the checkpoint folder; of one that lies elsewhere, the name that it would
        get."""
        whole = Path(path)
        folder = self._job.checkpoints
        return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else whole.name

    def top_of(self, path: str) -> Path:
        """Return the folder that a checkpoint's name is relative to."""
        return Path(path).parents[len(Path(self.name_of(path)).parts) - 1]

    def pieces(self, path: str) -> tuple[ManifestEntry, ...]:
        """Return the files of a checkpoint: the known ones while sizes and times fit, else all are read, which may
        take long. Raises ClusterError."""
        top, shape = self.top_of(path), inspect_shape(Path(path))
        names = {
            str((Path(path) / name).relative_to(top)): (size, mtime_ns)
            for name, size, mtime_ns in shape.files
        }
        known = self._known.get(path, ())
        if {piece.name: (piece.size_bytes, piece.mtime_ns) for piece in known} != names or not names:
            try:
                known = tuple(_piece_of(file, str(file.relative_to(top))) for file, _ in files_of(Path(path)))
            except OSError as err:
                raise ClusterError(
                    f"cannot be read: {err.strerror}", path, "resume from another one"
                ) from err
            self._known[path] = known
        return known

    def _manifest(self, name: str) -> Path:
        """Return the manifest file of a name: readable, short, and different from that of any other name."""
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
        return self._manifests / f"{_UNFIT.sub('_', name)[:60]}-{digest[:16]}.json"


def _stays_inside(name: str) -> bool:
    """Tell whether a relative path, as a host sent it, can only lie below where it is put."""
    try:
        raw = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    parts = name.split("/")
    fits = len(raw) <= PATH_BYTES_MAX and all(len(os.fsencode(part)) <= PART_BYTES_MAX for part in parts)
    return fits and b"\0" not in raw and not {"", ".", ".."} & set(parts) and parts[0] not in (COMING, OLD)


# Checkpoints at any path


def files_of(path: Path) -> tuple[tuple[Path, int], ...]:
    """Return the files of a checkpoint, itself or those below it, with their sizes. Raises ClusterError."""
    files = tuple((path / name, size_bytes) for name, size_bytes, _ in inspect_shape(path).files)
    if not files:
        raise ClusterError("there is no checkpoint", str(path), "name one of `orch checkpoints`")
    if len(files) >= FILES_MAX:
        what = f"it has {FILES_MAX} files or more, too many to send to hosts"
        raise ClusterError(
            what, str(path), "put it where the hosts see it, and name it in the job's own arguments"
        )
    return files


def _piece_of(path: Path, name: str) -> ManifestEntry:
    """Return the manifest entry of a file, reading all of it. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        while block := file.read(READ_BYTES):
            digest.update(block)
    return ManifestEntry(name, before.st_size, before.st_mtime_ns, digest.hexdigest())
