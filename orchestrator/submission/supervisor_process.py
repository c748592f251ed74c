"""Supervisor process of a job, as commands see it: started with its job, started again when it died, continued when stopped.

Rules: a command does so for all jobs of its user, and for no other user's; in Slurm's allocation the batch script does it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import home, locks, ownership
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.text import with_fix

STOPPED_S_MAX = 30.0
"""How long a supervisor may be stopped (state T), writing no status, before it is continued."""

BEGIN_S_MAX = 30.0
"""How long a submit may take from the plan to the supervisor's lock; after that it counts as cut off."""


def revive(job: JobDir) -> str:
    """Start the supervisor of an unended job that has none, or continue one that was stopped by a signal; return what was
    done in words, empty for nothing. In Slurm's allocation the batch script does so.

    Raises ClusterError when it does not come up.
    """
    if job.ended.exists() or not home.is_ours(job) or home.is_slurm(job):
        return ""
    if _is_supervised(job):
        return _let_go_on(job)
    from orchestrator.supervisor import guard

    words = guard.last_words(job)
    start_supervisor(job)
    return f"had died; a new one has taken over{f' ({words}; see {job.supervisor_log})' if words else ''}"


def _let_go_on(job: JobDir) -> str:
    """Continue a supervisor of this machine that has been stopped by a signal for longer than `STOPPED_S_MAX`."""
    who = locks.holder(job.lock)
    if who is None or who["host"] != os.uname().nodename:
        return ""
    from orchestrator.core.host import procfs

    try:
        stat = procfs.stat(who["pid"])
        if stat is None or stat.state != "T" or time.time() - job.state.stat().st_mtime < STOPPED_S_MAX:
            return ""
        if stat.ppid == stat.session:  # its guard, which began this session and may have been stopped with it
            os.kill(stat.ppid, signal.SIGCONT)
        os.kill(who["pid"], signal.SIGCONT)
    except OSError:
        return ""  # it has written nothing yet, or is gone by now
    return "had been stopped, by a signal; it goes on"


def _is_supervised(job: JobDir) -> bool:
    """Tell whether the job has a supervisor, by its lock. One of another machine is not replaced: the agents and ranks of a
    local job are there."""
    if not job.lock.exists():
        return time.time() - job.plan.stat().st_mtime < BEGIN_S_MAX  # its submit is at work
    if locks.is_held(job.lock):
        return True
    who = locks.holder(job.lock)
    return who is not None and who["host"] != os.uname().nodename


LEFT_S_MIN = 60.0
"""How long a job of another machine must have been silent before it can be taken over."""

WATCH_S, WATCH_POLL_S = 5.0, 0.5
"""How long the status of such a job is watched before it is taken over: a supervisor writes it every second."""


def left_behind_by(job: JobDir, silent_s: float) -> str:
    """Return the machine of an unended local job if all that is in the job's folder says that nothing of it runs there any
    more: no lock of its supervisor or of an agent is held, and its status is `silent_s` old. Empty for any other job.

    Such is a job of a session that was ended from outside, whose folder is on a disk that was kept. An agent holds its lock
    for as long as ranks of it can run. It is no proof: a person must have said that the machine is gone.
    """
    who = locks.holder(job.lock)
    if job.ended.exists() or who is None or who["host"] == os.uname().nodename or home.is_slurm(job):
        return ""
    held = [job.lock, *job.root.glob("nodes/*/agent.lock")]
    if _is_over_ssh(job) or silent_s < LEFT_S_MIN or any(locks.is_held(lock) for lock in held):
        return ""
    return "" if _is_written(job.state) else str(who["host"])


def _is_written(state: Path) -> bool:
    """Tell whether a status file changes within `WATCH_S`: its age is by the other machine's clock, which may be wrong, and
    a disk may show locks to no other machine."""
    deadline_s = time.monotonic() + WATCH_S
    try:
        before = ownership.read_regular(state)
        while time.monotonic() < deadline_s:
            time.sleep(WATCH_POLL_S)
            if ownership.read_regular(state) != before:
                return True
    except OSError:  # such as a stale handle: it was replaced this moment
        return True
    return False


SUPERVISOR_ENV = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
SSH_ENV = ("SSH_AUTH_SOCK",)
"""The variables that a supervisor needs, and those that it needs for SSH in addition."""

START_S_MAX = 30.0


@ownership.closed_to_others()
def start_supervisor(job: JobDir) -> None:
    """Start the job's supervisor under its guard, detached, and wait until it listens. Raises ClusterError when it does
    not come up, and UserError for a job that is not this user's alone."""
    import subprocess

    from orchestrator.core.jobdir.plan import Plan
    from orchestrator.supervisor import guard
    from orchestrator.supervisor.journal import lost_journal

    home.require_ours(job)
    over_ssh = _is_over_ssh(job)
    names = (*SUPERVISOR_ENV, *SSH_ENV) if over_ssh else SUPERVISOR_ENV
    env = {name: os.environ[name] for name in names if name in os.environ}
    alone = () if over_ssh else ("-I", "-S")  # paramiko comes from site-packages; all else is in the bundle
    with contextlib.suppress(OSError, codec.CodecError):  # a damaged plan is reported by its supervisor
        lost_journal.require_journal(job, codec.loads(Plan, job.plan.read_bytes()))
    before_ns = guard.up_at(job)
    with job.supervisor_log.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [sys.executable, *alone, str(job.bundle), "guard", str(job.root)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=job.root, start_new_session=True,
        )  # fmt: skip
    deadline_s = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline_s:
        if guard.up_at(job) != before_ns or process.poll() == 0:
            return
        if process.returncode is not None:
            break
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(
            process.pid, signal.SIGKILL
        )  # if it came up later, it would act for a job that was given up
    process.wait()
    with job.supervisor_log.open("rb") as log:
        log.seek(log_start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    why, fix = with_fix(lines[-1] if lines else "no word from it")
    raise ClusterError(
        f"the supervisor did not come up: {why}", str(job.supervisor_log), fix or "read that file"
    )


def _is_over_ssh(job: JobDir) -> bool:
    """Tell whether a job uses SSH; False for a damaged plan, which its supervisor reports."""
    try:
        return bool(codec.loads_plain(ownership.read_regular(job.plan))["backend"] == "ssh")
    except (OSError, codec.CodecError, KeyError):
        return False
