"""Does a job still have its supervisor? One that died is started again, and one that was stopped is let go on.

Rules: whoever types a command does so for all of his jobs, and for nobody else's; in Slurm's allocation the batch script
does it.
"""

from __future__ import annotations

import os
import signal
import time

from orchestrator import home
from orchestrator.wire import locks
from orchestrator.wire.paths import JobDir

STOPPED_S_MAX = 30.0
"""How long a supervisor may be stopped (state T) before it is let go on: so long it has written no status."""

BEGIN_S_MAX = 30.0
"""How long a submit may take from the plan to the supervisor's lock; one that has not by then was cut off."""


def revive(job: JobDir) -> str:
    """Start the supervisor of a job that has none and has not ended, or let it go on if somebody has stopped it; say what
    was needed, empty if nothing. In Slurm's allocation the batch script does so.

    Raises ClusterError when it does not come up.
    """
    if job.ended.exists() or not home.is_ours(job) or home.is_slurm(job):
        return ""
    if _is_supervised(job):
        return _let_go_on(job)
    from orchestrator import guard, submission

    words = guard.last_words(job)
    submission.start_supervisor(job)
    return f"had died; a new one has taken over{f' ({words}; see {job.supervisor_log})' if words else ''}"


def _let_go_on(job: JobDir) -> str:
    """Let a supervisor go on that has been stopped here, by a signal, for longer than whoever did so can have meant."""
    who = locks.holder(job.lock)
    if who is None or who["host"] != os.uname().nodename:
        return ""
    from orchestrator.node import procfs

    try:
        stat = procfs.look(who["pid"])
        if stat is None or stat.state != "T" or time.time() - job.state.stat().st_mtime < STOPPED_S_MAX:
            return ""
        if stat.ppid == stat.session:  # its guard, which began this session and may have been stopped with it
            os.kill(stat.ppid, signal.SIGCONT)
        os.kill(who["pid"], signal.SIGCONT)
    except OSError:
        return ""  # it has written nothing yet, or has gone meanwhile
    return "had been stopped, by a signal; it goes on"


def _is_supervised(job: JobDir) -> bool:
    """Tell whether somebody holds the job's lock. A supervisor of another machine is not ours to replace: the agents
    and ranks of a local job are there."""
    if not job.lock.exists():
        return time.time() - job.plan.stat().st_mtime < BEGIN_S_MAX  # its submit is at work
    if locks.is_held(job.lock):
        return True
    who = locks.holder(job.lock)
    return who is not None and who["host"] != os.uname().nodename
