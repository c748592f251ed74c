"""A job that has failed, with saves on its disk and in its ledger."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from orchestrator.client.job import Job
from orchestrator.core import codec
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import (
    START_PREFIX,
    Checkpoint,
    CheckpointFile,
    FileLocation,
    StepSource,
)
from orchestrator.core.checkpoints.ledger import Ledger
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from tests.support import folders, jobs, saved_files
from tests.support.saved_files import Model, adam, torch_save, write

S = 1_000_000_000
NOW_NS = int(jobs.BEGAN_S) * S + 60 * S
"""When the first save was written, a minute after the submit."""


def state(step: int) -> bytes:
    """Return a torch.save of the whole state of a training at a step."""
    return torch_save({"model": Model(), "optimizer": adam(), "step": step})


class Shelf:
    """The saves of one job of four ranks."""

    def __init__(self, place: Path) -> None:
        self.job: JobDir = folders.failed(place)
        self.folder = self.job.checkpoints
        self._book = Ledger(self.job.root, self.job.ledger)

    @property
    def plan(self) -> Plan:
        return Job(self.job).plan()

    def replan(self, **fields: Any) -> None:
        """Change fields of the plan."""
        self.job.plan.write_text(codec.dumps(dataclasses.replace(self.plan, **fields)))

    def add(self, step: int, files: dict[str, bytes] | None = None, **fields: Any) -> Checkpoint:
        """Write the files of a save, and enter it; `fields` are those that differ. `prefix`: what its key begins with."""
        number = self._book.next_number
        files = files or {f"step-{step}.pt": state(step)}
        root, prefix = Path(fields.pop("root", self.folder)), fields.pop("prefix", "")
        pieces = []
        for name, data in files.items():
            path = write(root / name, data, NOW_NS + number * S)
            pieces.append(CheckpointFile(name, len(data), NOW_NS + number * S, disk.sha256(path)))
        main = fields.pop("main", next(iter(files)))
        known = {
            "key": prefix + main,
            "series": prefix + main,
            "steps": step,
            "step": step,
            "stated": step,
            "step_source": StepSource.STATED,
        }
        place = FileLocation("", str(root))
        more = {"files": tuple(pieces), "locations": (place,), "written_ns": NOW_NS + number * S}
        save = saved_files.saved(number, **{"main": main, "world_size": 4, **known, **more, **fields})
        self.change(save)
        return save

    def add_at_start(self, step: int, files: dict[str, bytes], **fields: Any) -> Checkpoint:
        """Write and enter a save where the ranks start."""
        return self.add(step, files, root=self.job.code, prefix=START_PREFIX, **fields)

    def change(self, save: Checkpoint) -> None:
        """Enter what has changed of a save."""
        self._book.put(save)
        self._book.flush()

    def keep(self, save: Checkpoint) -> None:
        """Keep a save, as the supervisor does against its script."""
        assert disk.keep_copy(save, self.folder / disk.KEPT_FOLDER / str(save.number), copies=True)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, which keeps its size and time."""
    about, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    write(path, bytes(data), about.st_mtime_ns)
