"""Agents' memories for checkpoints on this machine: real files in a folder that stands for the memory, real TLS between two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.outputs.checkpoint_memory import CheckpointMemory
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import CheckpointFile, CopyTarget, FileLocation
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import orders, reports
from orchestrator.submission.credentials import new_certificate
from tests.support import fake_host, jobs
from tests.support.saved_files import SAVED_NS, write

WAIT_S_MAX = 20.0
CERTIFICATE, KEY = (text.decode() for text in new_certificate())
ROOMY = 1 << 50
MEMORY_BYTES = 1 << 20


def wait(is_done: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end_s = time.monotonic() + WAIT_S_MAX
    while not is_done():
        assert time.monotonic() < end_s, "not within the time of a test"
        time.sleep(0.005)


def pieces(root: Path, *names: str, hashed: bool = True) -> tuple[CheckpointFile, ...]:
    """Return the records of files as they are."""
    abouts = [(root / name).stat() for name in names]
    digests = [disk.sha256(root / name) if hashed else "" for name in names]
    found = zip(names, abouts, digests, strict=True)
    return tuple(CheckpointFile(name, one.st_size, one.st_mtime_ns, digest) for name, one, digest in found)


@dataclass
class MemoryBench:
    """The memory of one node, and what it has reported."""

    memory: CheckpointMemory
    job: JobDir
    told: list[reports.ReliableReport]
    notes: list[str] = field(default_factory=list)

    @property
    def disk(self) -> Path:
        return self.job.checkpoints

    def save(self, name: str, data: bytes = b"data", at_ns: int = SAVED_NS) -> Path:
        """Write a file as a rank does."""
        return write(self.memory.folder / name, data, at_ns)

    def copy(
        self,
        number: int,
        files: tuple[CheckpointFile, ...],
        target: CopyTarget = CopyTarget.DISK,
        *sources: FileLocation,
        peer: MemoryBench | None = None,
        is_overwritten: bool = False,
    ) -> reports.CheckpointCopied:
        """Copy files; return the report."""
        addresses = {} if peer is None else {peer.memory._config.node: peer.memory.addresses}
        self.memory.copy(orders.CopyCheckpoint(number, files, target, sources, addresses, is_overwritten))
        return self.next_report()

    def next_report(self) -> reports.CheckpointCopied:
        """Wait for a report."""
        count = len(self.told)

        def is_there() -> bool:
            self.memory.poll()
            return len(self.told) > count

        wait(is_there)
        found = self.told[count]
        assert isinstance(found, reports.CheckpointCopied)
        return found

    def store(self, number: int, *names: str, is_overwritten: bool = False) -> reports.CheckpointCopied:
        """Copy files that ranks have written to the disk."""
        return self.copy(number, pieces(self.memory.folder, *names), is_overwritten=is_overwritten)

    def drain(self) -> reports.CheckpointCopied:
        """Store all that is left."""
        wait(self.memory.drain)
        self.memory.poll()
        found = self.told[-1]
        assert isinstance(found, reports.CheckpointCopied) and found.number == 0
        return found

    def drain_in_vain(self) -> None:
        """Begin to store all that is left, and wait until that has failed."""
        count = len(self.told)
        wait(self.memory.drain)
        self.memory.poll()
        assert len(self.told) == count

    def location(self, *names: str, root: Path | None = None) -> FileLocation:
        """Return where files are, for another node."""
        return FileLocation(self.memory._config.node, str(root or self.memory.folder), names, is_memory=True)


@contextmanager
def memory_bench(
    folder: Path, node: str = "node-0", *, job_home: Path | None = None, **fields: object
) -> Iterator[MemoryBench]:
    """Make the memory of a node below `folder`; `job_home`: where the job's folder is, if another node shares it."""
    job = JobDir((job_home or folder / node) / jobs.ID)
    for path in (job.checkpoints, job.node(node), folder / "memory"):
        path.mkdir(parents=True, exist_ok=True)
    config = fake_host.config(
        node, root=str(job.root), memory_bytes=MEMORY_BYTES, memory_dir=str(folder / "memory"), peer_key=KEY,
        peer_certificate=CERTIFICATE, **fields,  # type: ignore[arg-type]
    )  # fmt: skip
    found: list[reports.ReliableReport] = []
    notes: list[str] = []
    memory = CheckpointMemory(config, job, found.append, notes.append, lambda: None)
    try:
        yield MemoryBench(memory, job, found, notes)
    finally:
        memory.close()
