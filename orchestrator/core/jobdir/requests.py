"""What did people ask of a job after its submit? One numbered file each in the job folder, written once, never changed.

A request outlives everybody: `asked` reads them, for whoever supervises the job.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.durable import replace_text, sync_folder

NUMBER_MAX = 1_000_000


def ask(folder: Path, what: str, **more: str) -> int:
    """Write a request and return its number; two people asking at once get two numbers.

    `what`: cancel; restart; resume, with `path`; or allocation_ended, with `allocation`, `cause` (a value of `Cause`) and `why`.
    Raises UserError for another user's job, and ClusterError when the disk refuses.
    """
    try:
        return _ask(folder, what, more)
    except OSError as err:
        raise refused(err, folder.parent) from err


def refused(err: OSError, root: Path) -> OrchError:
    """Return for people why something could not be written into the job folder `root`."""
    found = ownership.fault(root)
    if isinstance(err, PermissionError) and found:
        return UserError(found.what, str(found.where), found.fix)
    is_full = err.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = f"make room in {root}, then try again" if is_full else "see to that file or folder, then try again"
    return ClusterError(f"cannot be written: {err.strerror}", str(err.filename or root), fix)


def _ask(folder: Path, what: str, more: dict[str, str]) -> int:
    if found := ownership.fault(folder.parent):
        raise UserError(found.what, str(found.where), found.fix)
    folder.mkdir(mode=0o755, exist_ok=True)
    if not ownership.is_own(folder):
        raise PermissionError(errno.EACCES, "it is not yours alone", str(folder))
    part = folder / f".{os.getpid()}.part"
    replace_text(part, codec.dumps_plain({"ask": what, **more}))
    try:
        for number in range(
            max([number_of(path) for path in folder.glob("*.json")], default=0) + 1, NUMBER_MAX
        ):
            try:
                os.link(part, folder / f"{number:06d}.json")
            except FileExistsError:
                continue
            sync_folder(folder)
            return number
    finally:
        part.unlink()
    what = f"no number is left for a request: the last is {NUMBER_MAX - 1}"
    raise ClusterError(
        what, str(folder), "delete there the files with the highest numbers that orch did not write"
    )


def number_of(path: Path) -> int:
    """Return the number in a request's file name; 0 for a file that is none."""
    return int(path.stem) if re.fullmatch(r"[0-9]{1,6}", path.stem) else 0
