"""Exit codes that Slurm gives to a program that it could not execute. Pure."""

from __future__ import annotations

import errno
import os

_CODES = (errno.E2BIG, errno.EAGAIN, errno.ENOMEM, errno.EACCES)


def explained(code: str) -> str:
    """Return why no program could be started, empty where the exit code does not tell. slurmstepd ends such a task with
    the error's number (slurm 22.05), and only slurmd's own log has more. All that orch starts prints something first.
    """
    if not code.isdigit() or int(code) not in _CODES:
        return ""
    limit = ", see ulimit -u there" if int(code) == errno.EAGAIN else ""
    return f"{os.strerror(int(code))}{limit}"
