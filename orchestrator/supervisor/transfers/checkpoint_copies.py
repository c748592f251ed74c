"""Checkpoint transfer over SSH: fetches checkpoints from the hosts that wrote them, and sends them to the hosts of the next
attempt.

Rules
- A checkpoint is fetched when it is closed and all of its files are hashed. Its files are staged in `.coming/NUMBER` and
  renamed into place, where they replace a checkpoint of the same names.
- A file that was overwritten before it was copied does not have its recorded size and time: the checkpoint is not fetched.
- No checkpoint is moved into place while one of the same names is being sent, or if a later one of them is there.
- No name that a host sends leads out of the checkpoint folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.backends.api import BulkCopier, Copy, CopyResult, Direction
from orchestrator.core.checkpoints.checkpoint import Checkpoint, FileLocation, HostPart
from orchestrator.core.jobdir.durable import sync_folder
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.status_file import TransferStatus
from orchestrator.core.wire import reports

INCOMING = ".coming"
FROM_START = ".start"
"""Suffix of the staging folders of checkpoints from the folder where the ranks start."""

OLD = ".old"
INCOMING_MAX = 100
"""The most checkpoints fetched at once; beyond it the connection is too slow for the job, and the oldest is given up."""

PART_BYTES_MAX, PATH_BYTES_MAX = 255, 3_000
"""Limits on the length of a file name and of a path; the latter leaves room for the job folder's path."""


@dataclass(slots=True)
class _Fetch:
    """A checkpoint that is being fetched, and its copies that are not done."""

    save: Checkpoint
    copies: dict[str, Copy] = field(default_factory=dict)


class CheckpointCopies:
    """Checkpoint transfers of one job."""

    def __init__(self, job: JobDir, copier: BulkCopier | None, root: Path, glob: str) -> None:
        """`copier`: None where all hosts share the disk, and nothing is copied; `root`: the local folder of `checkpoint.path`;
        `glob`: `checkpoint.path`, which gives that folder on hosts."""
        self._copier = copier
        self._job = job
        self._root = root if root.is_relative_to(job.root) else job.checkpoints
        self._folder = job.checkpoint_location(glob)[0].name
        self._fetches: dict[int, _Fetch] = {}
        self._sends: dict[str, tuple[Checkpoint, Copy]] = {}  # by node
        self._done: list[tuple[int, str]] = []
        self._count = 0
        self.finished_sends: list[tuple[str, str]] = []  # a node, and why its checkpoint was not sent; empty if it was
        self.discards: list[tuple[str, Checkpoint]] = []
        self.has_transferred = False
        if copier is None:
            return
        for stage in (self._root / INCOMING).glob("*"):
            _put_back(stage, job.code if stage.name.endswith(FROM_START) else self._root)
        shutil.rmtree(self._root / INCOMING, ignore_errors=True)

    def fetch(self, checkpoint: Checkpoint) -> None:
        """Begin to fetch a checkpoint, unless it is being fetched, or nothing is copied: a resume may have changed `checkpoint.path`."""
        if self._copier is None or checkpoint.number in self._fetches:
            return
        fetch = self._fetches[checkpoint.number] = _Fetch(checkpoint)
        for place in checkpoint.locations:
            if place.host and not place.is_memory:
                pieces = tuple(piece for piece in checkpoint.files if piece.name in place.names)
                names, key = tuple(piece.name for piece in pieces), f"fetch {checkpoint.number} {place.host}"
                stage = self._staging_folder(checkpoint)
                copy = Copy(key, place.host, Direction.FETCH, place.root, stage, names, pieces)
                fetch.copies[key] = copy
                self._copier.copy(copy)
        if len(self._fetches) > INCOMING_MAX:
            self._give_up(min(self._fetches), f"more than {INCOMING_MAX} are being fetched at once")

    def fetch_unhashed(self, checkpoints: Iterable[Checkpoint], attempt: int) -> None:
        """Fetch checkpoints that will not be hashed any more, since their attempt is over; their format verifies them."""
        for checkpoint in checkpoints:
            if checkpoint.is_in_transit and checkpoint.attempt == attempt:
                self.fetch(checkpoint)

    def is_overwritten(self, checkpoint: Checkpoint, part: HostPart) -> bool:
        """Return whether a checkpoint that waits to be hashed cannot be fetched any more, since its host has overwritten it."""
        names = {piece.name for piece in part.files}
        is_waiting = checkpoint.is_in_transit and checkpoint.number not in self._fetches
        return is_waiting and not names.isdisjoint(piece.name for piece in checkpoint.files)

    def take_fetched(self) -> list[tuple[int, str]]:
        """Return the checkpoints that were fetched since the last call, or could not be, with the reason."""
        for copied in self._copier.copied() if self._copier is not None else ():
            self.has_transferred = True
            self._note_copied(copied)
        done, self._done = self._done, []
        return done

    def _note_copied(self, copied: CopyResult) -> None:
        copy = copied.copy
        if copy.direction is Direction.SEND:
            sending = self._sends.get(copy.node)
            if sending is not None and sending[1].key == copy.key:
                del self._sends[copy.node]
                self.finished_sends.append((copy.node, copied.error))
            for number in list(self._fetches):  # what waited for the end of its sending
                self._finish(number)
            return
        number = int(copy.key.split()[1])
        fetch = self._fetches.get(number)
        if fetch is None or copy.key not in fetch.copies:
            return
        del fetch.copies[copy.key]
        if copied.error:
            self._give_up(number, copied.error)
        else:
            self._finish(number)

    def _finish(self, number: int) -> None:
        fetch = self._fetches[number]
        names = {piece.name for piece in fetch.save.files}
        is_sent = any(not names.isdisjoint(copy.names) for _, copy in self._sends.values())
        if fetch.copies or is_sent:
            return
        try:
            local_folder = self._root if fetch.save.is_named else self._job.code
            install(fetch.save, local_folder, self._staging_folder(fetch.save))
        except OSError as err:
            self._give_up(number, f"{err.filename}: {err.strerror} on this machine")
            return
        del self._fetches[number]
        self._done.append((number, ""))
        for older in [
            older for older, other in self._fetches.items() if older < number and shares_files(fetch.save, other.save)
        ]:
            self._give_up(older, superseded_reason(number))

    def _give_up(self, number: int, why: str) -> None:
        self.cancel_fetch(number)
        self._done.append((number, why))

    def cancel_fetch(self, number: int) -> None:
        """Cancel the fetch of a checkpoint, if there is one."""
        fetch = self._fetches.pop(number, None)
        if fetch is not None and self._copier is not None:
            for key in fetch.copies:
                self._copier.drop(key)
            shutil.rmtree(self._staging_folder(fetch.save), ignore_errors=True)

    def _local_folder(self, checkpoint: Checkpoint) -> Path:
        """Return the local folder of a checkpoint."""
        return self._root if checkpoint.is_named else self._job.code

    def _staging_folder(self, checkpoint: Checkpoint) -> Path:
        """Return the staging folder of a checkpoint."""
        return self._root / INCOMING / f"{checkpoint.number}{'' if checkpoint.is_named else FROM_START}"

    def _host_folder(self, checkpoint: Checkpoint, host_root: str) -> str:
        """Return the folder of a checkpoint on a host."""
        return f"{host_root}/{self._folder if checkpoint.is_named else self._job.code.name}"

    # To hosts

    def send(self, checkpoint: Checkpoint, node: str, host_root: str) -> bool:
        """Begin to send a checkpoint to a host; False if nothing is to be sent, since hosts see its folder, or it is gone. Files that
        are there already are not sent again."""
        root = Path(checkpoint.locations[0].root if checkpoint.locations else "/")
        if self._copier is None or not self._needs_sending(root):
            return False
        sending = self._sends.get(node)
        if sending is not None and sending[0].number == checkpoint.number:
            return True
        self.end_sends(node)
        self._count += 1
        names = tuple(piece.name for piece in checkpoint.files)
        names_on_host = next((one.names for one in checkpoint.locations if one.host == node and not one.is_memory), ())
        target = self._host_folder(checkpoint, host_root)
        copy = Copy(
            f"send {self._count} {node}", node, Direction.SEND, target, root, names, checkpoint.files, names_on_host
        )
        self._sends[node] = (checkpoint, copy)
        self._copier.copy(copy)
        return True

    def end_sends(self, node: str) -> None:
        """Cancel what is being sent to a host."""
        sending = self._sends.pop(node, None)
        if sending is not None and self._copier is not None:
            self._copier.drop(sending[1].key)
            for number in list(self._fetches):  # what waited for the end of its sending
                self._finish(number)
        self.finished_sends = [(name, error) for name, error in self.finished_sends if name != node]

    def _needs_sending(self, root: Path) -> bool:
        """Return whether a local checkpoint is sent to hosts: one outside of the job folder that a person names is taken to be on a
        shared disk."""
        return root.is_relative_to(self._job.root)

    def locate_on_host(self, checkpoint: Checkpoint, node: str, host_root: str) -> Checkpoint:
        """Return a checkpoint of the job folder as it is on a host to which it was sent."""
        if self._copier is None or not self._needs_sending(Path(checkpoint.locations[0].root)):
            return checkpoint
        place = FileLocation(
            node, self._host_folder(checkpoint, host_root), tuple(piece.name for piece in checkpoint.files)
        )
        return dataclasses.replace(checkpoint, locations=(place,))

    def discard(self, checkpoint: Checkpoint) -> None:
        """Have a pruned checkpoint deleted on the hosts that wrote it."""
        self.discards += [(one.host, restrict_to(checkpoint, one)) for one in checkpoint.locations if one.host]

    @property
    def is_fetching(self) -> bool:
        """Whether a checkpoint is being fetched."""
        return bool(self._fetches)

    def list_transfers(self) -> list[TransferStatus]:
        """Return the copies under way, as `orch status --json` shows them; `done_bytes` is None while not known."""
        done_bytes = self._copier.progress() if self._copier is not None else {}
        fetches = [(fetch.save, copy) for fetch in self._fetches.values() for copy in fetch.copies.values()]
        return [
            TransferStatus(
                name=checkpoint.main,
                node=copy.node,
                direction=copy.direction.value,
                bytes=sum(piece.size_bytes for piece in checkpoint.files if piece.name in copy.names),
                done_bytes=done_bytes.get(copy.key),
            )
            for checkpoint, copy in [*fetches, *self._sends.values()]
        ]


def install(checkpoint: Checkpoint, root: Path, stage: Path) -> None:
    """Move a staged checkpoint into its place, durably; it replaces what was there. Raises OSError."""
    old = stage / OLD
    names = [piece.name for piece in checkpoint.files if (stage / piece.name).exists()]
    is_folder = len(names) == len(checkpoint.files) and checkpoint.main != "." and (stage / checkpoint.main).is_dir()
    for name in [checkpoint.main] if is_folder else names:
        goal = root / name
        goal.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(goal):
            (old / name).parent.mkdir(parents=True, exist_ok=True)
            goal.rename(old / name)
        (stage / name).rename(goal)
        sync_folder(goal.parent)
    shutil.rmtree(stage, ignore_errors=True)


def _put_back(stage: Path, root: Path) -> None:
    """Undo an interrupted replacement: what was moved away for a checkpoint is moved back."""
    gathered = [path for path in stage.rglob("*") if path.is_file() and stage / OLD not in path.parents]
    for path in sorted((stage / OLD).rglob("*")) if gathered else ():
        goal = root / path.relative_to(stage / OLD)
        with contextlib.suppress(OSError):  # of a folder that has come back, its files have
            if not (path.is_dir() and goal.is_dir()):
                path.rename(goal)


def shares_files(checkpoint: Checkpoint, other: Checkpoint) -> bool:
    """Return whether two checkpoints have a file of the same name in one folder."""
    return checkpoint.base_folder == other.base_folder and not {piece.name for piece in checkpoint.files}.isdisjoint(
        piece.name for piece in other.files
    )


def superseded_reason(number: int) -> str:
    """Return why a checkpoint is not fetched any more."""
    return f"checkpoint {number}, which overwrote it, was fetched first"


def find_invalid_names(report: reports.CheckpointSeen) -> str:
    """Return why names that a host sends cannot be those of a checkpoint; empty if they can."""
    names = [piece.name for piece in report.part.files]
    if not names or len(set(names)) < len(names):
        return f"its list of {len(names)} files is empty or has duplicates"
    bad = next((name for name in [*names, report.main] if not is_safe_name(name)), None)
    if bad is not None:
        return f"{bad!r} is not inside the checkpoint folder"
    if any(piece.size_bytes < 0 for piece in report.part.files):
        return "a size is negative"
    return ""


def is_safe_name(name: str) -> bool:
    """Return whether a relative path, as a host sent it, can only lie below where it is put."""
    try:
        raw = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    parts = name.split("/") if name != "." else ["top"]
    fits = len(raw) <= PATH_BYTES_MAX and all(len(os.fsencode(part)) <= PART_BYTES_MAX for part in parts)
    return fits and b"\0" not in raw and not {"", ".", ".."} & set(parts) and parts[0] not in (INCOMING, OLD)


def restrict_to_host(checkpoint: Checkpoint, node: str) -> Checkpoint | None:
    """Return a checkpoint as it is on a host, None if no file of it is there."""
    place = next((place for place in checkpoint.locations if place.host == node), None)
    return restrict_to(checkpoint, place) if place is not None else None


def restrict_to(checkpoint: Checkpoint, place: FileLocation) -> Checkpoint:
    """Return a checkpoint with the files of one of its locations only."""
    pieces = tuple(piece for piece in checkpoint.files if piece.name in place.names)
    return dataclasses.replace(checkpoint, files=pieces, locations=(place,))
