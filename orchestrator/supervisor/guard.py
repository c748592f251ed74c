"""Guard of a job's supervisor: its parent, which starts it again when it dies and does nothing else.

Rules: a supervisor that ends with code 0 has done its work, or found another one at work, and is not started again.
Nor is one that finds the job folder unfit: the last line of its log says what must be mended. One that dies again and
again is given up, in such a line; so is a first one that never came up, since the process that started it waits for
that. The lock in the job folder decides who supervises, so a guard never asks who else starts one. In Slurm's
allocation the batch script does the same. The guard loads next to nothing: it lives as long as the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir

DEATHS_MAX = 5
DEATHS_S = 60.0
"""This many deaths within this time are too many."""

PAUSE_S = 0.25
"""The pause before the first new start; doubled with each further death within `DEATHS_S`."""

NO_ROOM_PAUSE_S, NO_ROOM_MAX = 30.0, 120
"""Pause before a supervisor is started again that could not be started, for want of memory or processes, and how often."""

GIVEN_UP = "given up"

UNFIT = 78
"""The exit code of a supervisor whose job folder is not fit to work in (EX_CONFIG of sysexits.h)."""

LAST_BYTES = 1024


def main(folder: Path) -> int:
    """Keep the supervisor of the job in `folder` running, started as this guard was; return the exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that submitted the job may close
    argv = [*sys.orig_argv[:-2], "supervise", str(folder)]

    def run() -> int:
        return os.waitpid(os.posix_spawn(sys.executable, argv, os.environ), 0)[1]

    return keep(JobDir(folder), run, time.monotonic, time.sleep)


def keep(
    job: JobDir, run: Callable[[], int], clock: Callable[[], float], sleep: Callable[[float], None]
) -> int:
    """Call `run`, which returns a wait status, until a supervisor has done its work or too many have died."""
    deaths: list[float] = []
    refused = 0
    never_up = up_at(job)
    while True:
        try:
            code = os.waitstatus_to_exitcode(run())
        except OSError as err:
            refused += 1
            if refused > NO_ROOM_MAX or job.ended.exists() or not job.plan.exists():
                _log(f"the supervisor cannot be started: {err.strerror}: {GIVEN_UP}")
                return 1
            _log(f"the supervisor cannot be started: {err.strerror}: it is tried again")
            sleep(NO_ROOM_PAUSE_S)
            continue
        refused = 0
        if code == 0 or job.ended.exists() or not job.plan.exists():
            return 0
        if code == UNFIT or up_at(job) == never_up:
            return 1
        never_up = -1
        deaths = [at_s for at_s in [*deaths, clock()] if clock() - at_s < DEATHS_S]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if len(deaths) >= DEATHS_MAX:
            _log(f"the supervisor {how}, death {len(deaths)} within {DEATHS_S:.0f} s: {GIVEN_UP}")
            return 1
        _log(f"the supervisor {how}: another is started")
        sleep(PAUSE_S * 2.0 ** (len(deaths) - 1))


def last_words(job: JobDir) -> str:
    """Return the line in which a guard gave up, if that is the last of the supervisor's log; empty if not."""
    try:
        with os.fdopen(ownership.open_regular(job.supervisor_log), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[-1].partition(" guard: ")[2] if lines and lines[-1].endswith(GIVEN_UP) else ""


def up_at(job: JobDir) -> int:
    """Return when a supervisor last came up, which touches the endpoint file, in ns by the disk's clock; 0 for never."""
    try:
        return job.endpoint.stat().st_mtime_ns
    except OSError:
        return 0


def _log(text: str) -> None:
    """Write a line to the supervisor's log, which is standard error; a full disk does not end a guard."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with contextlib.suppress(OSError):
        print(f"{at} guard: {text}", file=sys.stderr, flush=True)
