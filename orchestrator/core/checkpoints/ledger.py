"""Ledger of checkpoints, `checkpoints/ledger.jsonl`: every checkpoint that ranks wrote or a person adopted. One writer.

A line is a JSON object with a `number` and the changed fields of that checkpoint; the first line of a number has all
fields. Folders in the job folder are written relative to it, so that a job folder can move. A torn last line is ignored.
Any other line that cannot be read or applied is reported and skipped: only checkpoints in the ledger are resumed from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState, FileLocation
from orchestrator.core.jobdir import full_disk, ownership
from orchestrator.core.jobdir.durable import replace_text, sync_folder

COMPACT_BYTES = 8 << 20
"""From this size on a supervisor compacts the ledger when it starts, if the disk has space for it."""

ENDED_MAX = 1_000
"""How many torn, gone or pruned checkpoints stay in a compacted ledger; their files are no longer listed."""

ENDED_STATES = (CheckpointState.TORN, CheckpointState.GONE, CheckpointState.PRUNED)


def read(job_root: Path, file: Path) -> tuple[dict[int, Checkpoint], list[str]]:
    """Return the checkpoints by number, none without a file, and a message for each line that cannot be read. Raises OSError."""
    try:
        lines = ownership.read_regular(file).split(b"\n")
    except FileNotFoundError:
        return {}, []
    changes: dict[int, list[codec.Json]] = {}
    faults = []
    for at, line in enumerate(lines[:-1], 1):
        try:
            change = codec.loads_plain(line)
            changes.setdefault(codec.unpack(int, change["number"]), []).append(change)
        except (codec.CodecError, KeyError):
            faults.append(f"{file}:{at} cannot be read")
    checkpoints: dict[int, Checkpoint] = {}
    for number, own in sorted(changes.items()):
        checkpoint, fault = _apply_changes(own)
        if checkpoint is not None:
            checkpoints[number] = _relocate(checkpoint, job_root, is_read=True)
        if fault:
            faults.append(
                f"{file}: checkpoint {number} cannot be read{' in part' if checkpoint is not None else ''}: {fault}"
            )
    return checkpoints, faults


def _apply_changes(changes: list[codec.Json]) -> tuple[Checkpoint | None, str]:
    """Apply changes to a checkpoint, without those that are invalid; return it, and why the first invalid one is."""
    data: codec.Json = {}
    for change in changes:
        data |= change
    with contextlib.suppress(codec.CodecError):
        return codec.unpack(Checkpoint, data), ""
    checkpoint, data, fault = None, {}, ""
    for change in changes:
        try:
            checkpoint = codec.unpack(Checkpoint, data | change)
            data |= change
        except codec.CodecError as err:
            fault = fault or str(err)
    return checkpoint, fault


class Ledger:
    """The ledger as its one writer holds it, with absolute folders."""

    def __init__(self, job_root: Path, file: Path) -> None:
        """Read the existing file. Raises OSError."""
        self._root = job_root
        self._file = file
        self.checkpoints, self.faults = read(job_root, file)
        self._written: dict[int, codec.Json] = {
            number: self._packed(checkpoint) for number, checkpoint in self.checkpoints.items()
        }
        self._dirty: dict[int, None] = {}
        self._reported_fault = ""
        if file.exists() and file.stat().st_size > COMPACT_BYTES:
            with contextlib.suppress(OSError):  # it can wait: the disk may be full
                self._compact()

    @property
    def next_number(self) -> int:
        return max(self.checkpoints, default=0) + 1

    def put(self, checkpoint: Checkpoint) -> None:
        """Enter a checkpoint, new or changed; `flush` writes it."""
        if self.checkpoints.get(checkpoint.number) != checkpoint:
            self.checkpoints[checkpoint.number] = checkpoint
            self._dirty[checkpoint.number] = None

    def flush(self) -> None:
        """Write the changes, durably. Raises OSError; the next call tries again."""
        if not self._dirty:
            return
        changes = []
        for number in self._dirty:
            packed, before = self._packed(self.checkpoints[number]), self._written.get(number, {})
            changed = {key: value for key, value in packed.items() if before.get(key, ...) != value}
            changes.append((number, packed, {"number": number, **changed}))
        text = "".join(json.dumps(change) + "\n" for _, _, change in changes)
        self._append(text.encode())
        for number, packed, _ in changes:
            self._written[number] = packed
        self._dirty.clear()

    def try_flush(self) -> list[str]:
        """Write the changes, or leave them to a later call if the file cannot be written; return why, once. Raises OSError if
        the disk is full."""
        try:
            self.flush()
            self._reported_fault, previous = "", ""
        except OSError as err:
            if full_disk.is_full(err):
                raise
            what = "new checkpoints are not used for a restart until it can"
            self._reported_fault, previous = (
                f"{self._file} cannot be written: {err.strerror}; {what}",
                self._reported_fault,
            )
        return [self._reported_fault] if self._reported_fault != previous else []

    def _append(self, data: bytes) -> None:
        self._file.parent.mkdir(exist_ok=True)
        is_new = not self._file.exists()
        fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                data = b" cut off\n" + data  # marks the rest of a torn line as invalid
            try:
                written = os.write(fd, data)
                if written < len(data):
                    raise OSError(28, "No space left on device", str(self._file))
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
        if is_new:
            sync_folder(self._file.parent)

    def _compact(self) -> None:
        ended = [number for number, checkpoint in self.checkpoints.items() if checkpoint.state in ENDED_STATES]
        forgotten = set(ended[:-ENDED_MAX])
        checkpoints = {number: checkpoint for number, checkpoint in self.checkpoints.items() if number not in forgotten}
        checkpoints |= {number: dataclasses.replace(checkpoints[number], files=()) for number in ended[-ENDED_MAX:]}
        written = {number: self._packed(checkpoint) for number, checkpoint in checkpoints.items()}
        replace_text(self._file, "".join(json.dumps(packed) + "\n" for packed in written.values()))
        self.checkpoints, self._written = checkpoints, written

    def _packed(self, checkpoint: Checkpoint) -> codec.Json:
        packed: codec.Json = codec.pack(_relocate(checkpoint, self._root, is_read=False))
        return packed


def _relocate(checkpoint: Checkpoint, root: Path, *, is_read: bool) -> Checkpoint:
    """Return a checkpoint with its folders as in memory (absolute), or as in the file (relative)."""

    def relocated(place: FileLocation) -> FileLocation:
        path = Path(place.root)
        if place.host:
            return place
        if is_read:
            return dataclasses.replace(place, root=str(root / path))
        inside = str(path.relative_to(root)) if path.is_relative_to(root) else place.root
        return dataclasses.replace(place, root=inside)

    return dataclasses.replace(checkpoint, locations=tuple(map(relocated, checkpoint.locations)))
