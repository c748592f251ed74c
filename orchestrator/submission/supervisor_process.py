"""Supervisor process of a job: started with the job, and restarted by commands after it died.

Rules: a command restarts those of all jobs of its user, and of no other user; in a Slurm allocation the batch script does it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from orchestrator.core import codec
from orchestrator.core.errors import ClusterError
from orchestrator.core.host import file_age, process_tags
from orchestrator.core.jobdir import full_disk, home, locks, ownership, requests
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.status_types import AllocationEndCause
from orchestrator.core.text import split_fix

CLOSE_S_MAX = 30.0
"""Limit on closing an ended job."""

CLOSE_POLL_S = 0.02

SUBMIT_S_MAX = 30.0
"""How long a submit may take from the plan to the supervisor's lock; after that it counts as cut off."""


def restart_supervisor(job: JobDir) -> str:
    """Start the supervisor of an unended job that has none; return what was done as text, empty for nothing. In a Slurm
    allocation the batch script does so.

    Raises ClusterError when it does not start.
    """
    if job.ended.exists() or not home.is_own_job(job) or home.is_slurm(job):
        return ""
    if _is_supervised(job):
        return ""
    from orchestrator.supervisor import supervisor_watchdog

    give_up_reason = supervisor_watchdog.read_given_up_reason(job)
    start_supervisor(job)
    return f"had died; a new one has taken over{f' ({give_up_reason}; see {job.supervisor_log})' if give_up_reason else ''}"


def _is_supervised(job: JobDir) -> bool:
    """Return whether the job has a supervisor, by its lock. One of another machine is not replaced: the agents and ranks of a
    local job are there."""
    if not job.lock.exists():
        return file_age.age_s(job.plan) < SUBMIT_S_MAX  # its submit is running
    if locks.is_held(job.lock):
        return True
    who = locks.read_holder(job.lock)
    return who is not None and who.host != os.uname().nodename


SUPERVISOR_ENV = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
SSH_ENV = ("SSH_AUTH_SOCK",)
"""The variables that a supervisor needs, and those that it needs for SSH in addition."""

START_S_MAX = 30.0


@ownership.restricted_umask()
def start_supervisor(job: JobDir) -> None:
    """Start the job's supervisor under its watchdog, detached, and wait until it listens. Raises ClusterError when it
    does not start, and UserError for a job that is not this user's alone."""
    import subprocess

    from orchestrator.journal import journal_integrity
    from orchestrator.supervisor import supervisor_watchdog

    home.require_own_job(job)
    home.record_origin(job, job.root)
    over_ssh = _is_over_ssh(job)
    names = (*SUPERVISOR_ENV, *SSH_ENV) if over_ssh else SUPERVISOR_ENV
    env = {name: os.environ[name] for name in names if name in os.environ}
    env[process_tags.NAME] = process_tags.make_tag(job.root, "")  # a rank may have submitted it
    python_options = () if over_ssh else ("-I", "-S")  # paramiko comes from site-packages; all else is in the bundle
    journal_integrity.require_journal(job)
    before_ns, holder_before = supervisor_watchdog.read_start_ns(job), locks.read_holder(job.lock)
    with job.supervisor_log.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [sys.executable, *python_options, str(job.bundle), "guard", str(job.root)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=job.root, start_new_session=True,
        )  # fmt: skip
    deadline_s = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline_s:
        if supervisor_watchdog.read_start_ns(job) != before_ns or process.poll() == 0:
            return
        if full_disk.is_disk_full(job.root) and locks.read_holder(job.lock) != holder_before:  # it waits for room
            return
        if process.returncode is not None:
            break
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # if it came up later, it would act for a job that was given up
    process.wait()
    with job.supervisor_log.open("rb") as log:
        log.seek(log_start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    why, fix = split_fix(lines[-1] if lines else "no output")
    raise ClusterError(f"the supervisor did not start: {why}", str(job.supervisor_log), fix or "see that file")


def _is_over_ssh(job: JobDir) -> bool:
    """Return whether a job uses SSH; False for a damaged plan, which its supervisor reports."""
    try:
        return bool(codec.loads_plain(ownership.read_regular(job.plan))["backend"] == "ssh")
    except (OSError, codec.CodecError, KeyError):
        return False


def close_job(job: JobDir, allocation: str, cause: AllocationEndCause, why: str) -> None:
    """Let a supervisor end a job whose end only Slurm knows. One command at a time does it, and the others wait.

    Raises ClusterError when it has not ended it in time, or the disk refuses, and UserError for a job that is not this
    user's alone.
    """
    home.require_own_job(job)
    try:
        with locks.hold(job.queue.with_suffix(".lock"), CLOSE_S_MAX) as is_mine:
            if is_mine and not _has_ended(job):
                last = requests.read_latest(job.requests)
                if last is None or (last.action, last.allocation) != ("allocation_ended", allocation):
                    requests.send(job.requests, "allocation_ended", allocation=allocation, cause=cause.value, why=why)
                start_supervisor(job)
                deadline_s = time.monotonic() + CLOSE_S_MAX
                while not _has_ended(job) and time.monotonic() < deadline_s:
                    time.sleep(CLOSE_POLL_S)
    except OSError as err:
        raise requests.make_write_error(err, job.root) from err
    if not _has_ended(job):
        what = f"{why}, and the job could not be closed within {CLOSE_S_MAX:g} s"
        raise ClusterError(what, job.id, f"see {job.supervisor_log}")


def _has_ended(job: JobDir) -> bool:
    """Return whether the job has ended, from the folder's list: NFS caches for a minute that a file is missing."""
    try:
        return any(path.name == job.ended.name for path in job.root.iterdir())
    except OSError:
        return False
