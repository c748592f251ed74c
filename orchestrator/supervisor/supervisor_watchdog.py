"""Watchdog of a job's supervisor: its parent process, which restarts it when it dies and does nothing else.

Rules
- A supervisor that ends with code 0 has finished, or found another one running, and is not restarted.
- Nor is one that finds the job folder unfit: the last line of its log says what must be fixed.
- A first supervisor that never came up is not restarted: the process that started it waits for that.
- One that dies again and again is given up: the file `given-up` says why, until another watchdog starts.
- The lock in the job folder decides who supervises, so a watchdog never checks for others.

In a Slurm allocation the batch script does the same. The watchdog imports almost nothing: it lives as long as the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.core.backoff import Backoff
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir

DEATHS_MAX = 5
DEATHS_S = 60.0
"""This many deaths within this time are too many."""

PAUSES = Backoff(first_s=0.25, factor=2.0, max_s=8.0)
"""The pauses before restarts, by the number of deaths within `DEATHS_S`."""

START_RETRY_S, START_RETRIES_MAX = 30.0, 120
"""Pause before the next try if a supervisor could not be started for lack of memory or processes, and the number of tries."""

WHY_BYTES_MAX = 1024

EXIT_UNFIT_FOLDER = 78
"""The exit code of a supervisor whose job folder is not fit to work in (EX_CONFIG of sysexits.h)."""


def main(folder: Path) -> int:
    """Keep the supervisor of the job in `folder` running, started with this process's arguments; return the exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that submitted the job may close
    argv = [*sys.orig_argv[:-2], "supervise", str(folder)]

    def run() -> int:
        return os.waitpid(os.posix_spawn(sys.executable, argv, os.environ), 0)[1]

    return keep_running(JobDir(folder), run, time.monotonic, time.sleep)


def keep_running(
    job: JobDir, run: Callable[[], int], clock: Callable[[], float], sleep: Callable[[float], None]
) -> int:
    """Call `run`, which returns a wait status, until a supervisor has done its work or too many have died."""
    deaths: list[float] = []
    refused = 0
    initial_start_ns = read_start_ns(job)
    with contextlib.suppress(OSError):
        job.given_up.unlink()
    while True:
        try:
            code = os.waitstatus_to_exitcode(run())
        except OSError as err:
            refused += 1
            if refused > START_RETRIES_MAX or job.ended.exists() or not job.plan.exists():
                return _give_up(job, f"the supervisor cannot be started: {err.strerror}")
            _log(f"the supervisor cannot be started: {err.strerror}: trying again")
            sleep(START_RETRY_S)
            continue
        refused = 0
        if code == 0 or job.ended.exists() or not job.plan.exists():
            return 0
        if code == EXIT_UNFIT_FOLDER or read_start_ns(job) == initial_start_ns:
            return 1
        initial_start_ns = -1
        deaths = [at_s for at_s in [*deaths, clock()] if clock() - at_s < DEATHS_S]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if len(deaths) >= DEATHS_MAX:
            return _give_up(job, f"the supervisor {how}, {len(deaths)} deaths within {DEATHS_S:.0f} s")
        _log(f"the supervisor {how}: starting another one")
        sleep(PAUSES.pause_s(len(deaths)))


def read_given_up_reason(job: JobDir) -> str:
    """Return why a watchdog has given up the job's supervisor; empty if none has."""
    try:
        return ownership.read_regular(job.given_up)[:WHY_BYTES_MAX].decode(errors="replace").strip()
    except OSError:
        return ""


def _give_up(job: JobDir, why: str) -> int:
    why = f"{why}: given up"
    _log(why)
    if job.plan.exists():  # a deleted job leaves nothing behind
        with contextlib.suppress(OSError):
            job.given_up.write_text(why)
    return 1


def read_start_ns(job: JobDir) -> int:
    """Return when a supervisor last came up, which touches the endpoint file, in ns by the disk's clock; 0 for never."""
    try:
        return job.endpoint.stat().st_mtime_ns
    except OSError:
        return 0


def _log(text: str) -> None:
    """Write a line to the supervisor's log, which is standard error; a full disk does not end a watchdog."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with contextlib.suppress(OSError):
        print(f"{at} watchdog: {text}", file=sys.stderr, flush=True)
