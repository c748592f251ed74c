"""Keys of submits, `keys/KEY` in the job home: a submit with a key makes one job, however often it is repeated.

Rules: the file names the job's id before its folder is moved into place, and says `made` after that. So a submit that was
cut off in between is repeated, and a job that was deleted later is not made again. The file is locked meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.layout import JobDir

KEY_CHARS_MAX = 100
OTHER_S_MAX = 120.0
"""How long another submit with the same key is waited for."""

_MADE = "made"


@dataclass(frozen=True, slots=True)
class SubmitKey:
    """A key that this process alone submits with."""

    key: str
    folder: Path
    fd: int

    def job(self) -> JobDir | None:
        """Return the job that was submitted with the key. Raises UserError when that job was deleted."""
        job_id, _, made = os.pread(self.fd, 1000, 0).decode(errors="replace").strip().partition(" ")
        if not job_id:
            return None
        job = JobDir(self.folder / "jobs" / job_id)
        if job.root.exists():
            self.note(job_id, made=True)
            return job
        if made == _MADE:
            what = f"the job of this key, {job_id}, was deleted"
            raise UserError(what, f"--key {self.key}", "choose another key for another job")
        return None

    def note(self, job_id: str, *, made: bool) -> None:
        """Write down the job of the key: before its folder is moved into place, and after that."""
        text = f"{job_id} {_MADE if made else ''}\n".encode()
        os.pwrite(self.fd, text, 0)
        os.ftruncate(self.fd, len(text))
        os.fsync(self.fd)


@contextlib.contextmanager
def held(folder: Path, key: str) -> Iterator[SubmitKey]:
    """Hold a key of a job home. Raises UserError for one that is no name of a file, and ClusterError when another submit
    holds it for too long."""
    if not re.fullmatch(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{KEY_CHARS_MAX - 1}}}", key):
        fix = f"take 1 to {KEY_CHARS_MAX} letters, digits, dots, dashes and underscores, no dash or dot first"
        raise UserError(f"{key[:KEY_CHARS_MAX]!r} is no key", "--key", fix)
    path = folder / "keys" / key
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = locks.open_file(path)
    except OSError as err:
        raise ClusterError(f"cannot be written: {err.strerror}", str(path), "mend that folder") from err
    try:
        if not locks.acquire(fd, OTHER_S_MAX):
            what = f"another submit with this key is at work for {OTHER_S_MAX:.0f} s"
            raise ClusterError(what, str(path), "orch status --all shows whether its job is there")
        yield SubmitKey(key, folder, fd)
    finally:
        os.close(fd)
