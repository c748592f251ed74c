"""Output of squeue, sacct and scontrol about a job, parsed, and described for people. Pure.

Rules: only formats that are the same since Slurm 20 are read: `squeue -o`, `sacct -P`, `scontrol show -o`, never JSON.
An unknown state is shown as it is, and never counts as the end of a job.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from orchestrator.core.errors import Fault
from orchestrator.core.slurm import job_states
from orchestrator.core.status_types import AllocationEndCause

SQUEUE_FORMAT = "%i|%T|%S|%D|%N|%r|%Z"
"""Id, state, start, number of nodes, nodes, reason, folder: free text comes last."""

_FOLDER = re.compile(r"\|((?:/.*|\(null\))?)$")
"""The folder after a reason; a reason may have `|` in it as well, but not before a `/`."""

SACCT_FORMAT = "JobID,State,ExitCode,NodeList"

NO_LOG_EXIT = "0:53"
"""The exit code that slurmd (22.05) gives a batch job whose output file it cannot open; no script ends with it."""

NO_BUNDLE_EXIT = "66:0"
"""That of orch's batch script where it cannot read the job's folder: later versions make the folder of the output file."""

_START_ERRNOS = (errno.E2BIG, errno.EAGAIN, errno.ENOMEM, errno.EACCES)
"""The exit codes that slurmstepd (22.05) gives to a program that it could not execute: the error's number."""

UNKNOWN_ID = "Invalid job id"
"""Message of squeue and scontrol for a job that slurmctld does not have in memory."""

_UNSCHEDULABLE = {
    "partitionnodelimit": "nodes=…",
    "partitiontimelimit": "time_limit=…",
    "dependencyneversatisfied|reservationdeleted": "slurm.extra=[]",
    "(invalid)?account(notallowed)?": "slurm.account=…",
    "(invalid)?qos(notallowed)?": "slurm.qos=…",
    "partitionconfig|badconstraints|maxmemperlimit": "KEY=VALUE; sinfo -o '%P %l %D %c %m %G %f' shows what there is",
    "(assoc|qos)(max.*(perjob|pernode|wall)|min).*": "KEY=VALUE; sacctmgr show qos, and assoc, show the limits",
}
"""Reasons that do not go away by waiting, as patterns of their first word, and what to change in the job. None of them
ends a job, since an administrator may change the limits."""


@dataclass(frozen=True, slots=True)
class QueueJob:
    """A job as Slurm last described it."""

    id: str
    # Slurm's word; `FORGOTTEN` where Slurm knows no such job, `UNKNOWN` where it has never answered
    state: str
    reason: str = ""
    # Of a waiting job, UTC, ISO 8601
    expected_start: str | None = None
    # As Slurm writes them, `node[1-4]`
    nodes: str = ""
    count: int = 0
    # The user who cancelled it
    by: str = ""
    # Of the batch script: `1:0` is code and signal
    exit: str = ""
    # How often it was requeued, from scontrol only
    restarts: int | None = None
    # Where its batch script runs; empty where that is not known
    folder: str = ""
    # The node on which that runs or ran, from scontrol only
    batch_host: str = ""
    # Why Slurm did not answer the last question, empty when it did
    unanswered: str = ""
    # How old all this is
    age_s: float = 0.0
    # What to do about it where Slurm has lost it
    fix: str = ""

    @property
    def stage(self) -> job_states.Stage:
        """The stage of the job."""
        if self.state == "FORGOTTEN":
            return job_states.Stage.NOT_FOUND
        if self.state == "UNKNOWN":
            return job_states.Stage.NO_ANSWER
        return job_states.stage_of(self.state)

    @property
    def is_held(self) -> bool:
        """Whether it waits until a person releases it."""
        return self.stage is job_states.Stage.WAITING and (
            "held" in self.reason.lower() or self.state in ("REQUEUE_HOLD", "SPECIAL_EXIT")
        )

    @property
    def cause(self) -> AllocationEndCause:
        """Why it is over."""
        return job_states.end_of(self.state)[0]


def parse_squeue(text: str) -> dict[str, QueueJob]:
    """Read what `squeue -h -o SQUEUE_FORMAT` prints, with times in UTC."""
    jobs = {}
    for line in text.splitlines():
        parts = line.split("|", 5)
        if len(parts) < 6:
            continue
        job_id, state, start, count, nodes, rest = (part.strip() for part in parts)
        ending = _FOLDER.search(rest)
        reason, folder = (rest[: ending.start()], ending[1]) if ending else (rest, "")
        job = QueueJob(
            job_id, state.upper(), _or_empty(reason),
            nodes=_or_empty(nodes), count=_number(count), folder=_or_empty(folder),
        )  # fmt: skip
        if job.stage is job_states.Stage.WAITING:
            job = replace(job, expected_start=_utc(start), nodes="")
        jobs[job_id] = job
    return jobs


def _number(word: str) -> int:
    return int(word) if word.isdigit() else 0


def parse_sacct(text: str, name_of: Callable[[int], str]) -> dict[str, QueueJob]:
    """Read what `sacct -n -X -P --duplicates` prints; a job that was requeued has a line for each time, the latest last.

    Only jobs that are over count: accounting is late for other jobs, or has never completed their lines.
    """
    jobs: dict[str, QueueJob] = {}
    for line in text.splitlines():
        parts = line.split("|", 3)
        if len(parts) < 4:
            continue
        job_id, said, code, nodes = (part.strip() for part in parts)
        state, _, by = said.upper().partition(" BY ")
        user = name_of(int(by)) if by.isdigit() else by.lower()
        nodes = "" if nodes == "None assigned" else _or_empty(nodes)
        jobs[job_id] = QueueJob(job_id, state.rstrip("+"), nodes=nodes, by=user, exit=code)
    return {job_id: job for job_id, job in jobs.items() if job.stage is job_states.Stage.OVER}


def parse_fields(text: str) -> dict[str, str]:
    """Read a line of `NAME=value`, as `scontrol show job -o ID` prints it, the first of each name. Values may hold blanks,
    and texts of the job itself may look like fields: those come later than what they could be taken for."""
    values: dict[str, str] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals:
            values.setdefault(name, value)
    return values


def parse_scontrol_job(text: str) -> QueueJob | None:
    """Read what `scontrol show job -o ID` prints."""
    job = parse_fields(text)
    if "JobId" not in job or "JobState" not in job:
        return None
    restarts = job.get("Restarts", "")
    return QueueJob(
        job["JobId"],
        job["JobState"].upper(),
        _or_empty(job.get("Reason", "")).replace("_", " "),
        nodes=_or_empty(job.get("NodeList", "")),
        exit=job.get("ExitCode", ""),
        restarts=int(restarts) if restarts.isdigit() else 0,
        folder=path[1] if (path := re.search(r"\sWorkDir=(/.*?)(?=\s+\w+=|\s*$)", text)) else "",
        batch_host=_or_empty(job.get("BatchHost", "")),
    )


def parse_cluster_name(text: str) -> str:
    """Read the cluster's name in what `scontrol show config` prints; empty where it is missing."""
    match = re.search(r"(?m)^ClusterName\s*=(.*)$", text)
    return _or_empty(match[1].strip()) if match else ""


def _or_empty(word: str) -> str:
    return "" if word in ("None", "(null)", "N/A", "n/a", "Unknown") else word


def _utc(word: str) -> str | None:
    return f"{word}Z" if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", word) else None


# Words for people


def queue_position(text: str, job_id: str) -> str:
    """Return a job's position in the queue, from `squeue -o '%i|%P'` of the waiting jobs in order; empty if it is not listed."""
    rows = [line.strip().partition("|") for line in text.splitlines()]
    partition = next((partition for one, _, partition in rows if one == job_id), "")
    waiting = [one for one, _, partition_of_one in rows if partition_of_one == partition]
    return f", number {waiting.index(job_id) + 1} of {len(waiting)} in partition {partition}" if partition else ""


def expected_start_text(expected: str | None) -> str:
    """Return when Slurm expects to start a waiting job; empty while it does not say."""
    return f", expected to start at {expected[:16].replace('T', ' ')} UTC" if expected else ""


def describe_job(job: QueueJob, name: str) -> Fault:
    """Describe a job in one line, with the fix where something must be done. `name`: orch's own name of it."""
    match job.stage:
        case job_states.Stage.WAITING:
            return _describe_waiting(job, name)
        case job_states.Stage.RUNNING if job.state == "SUSPENDED":
            where = f" on {job.nodes}" if job.nodes else ""
            return Fault("", f"Slurm has suspended its job {job.id}{where}", f"scontrol resume {job.id}")
        case job_states.Stage.RUNNING | job_states.Stage.LEAVING | job_states.Stage.UNKNOWN:
            return Fault("", f"Slurm job {job.id} is {job.state}{f' on {job.nodes}' if job.nodes else ''}")
        case job_states.Stage.OVER | job_states.Stage.NOT_FOUND:
            return describe_end(job)
        case job_states.Stage.NO_ANSWER:
            return Fault("", f"Slurm has not reported job {job.id} yet")


def is_stuck(job: QueueJob) -> bool:
    """Return whether a waiting job needs a person to act before it can start."""
    return job.stage is job_states.Stage.WAITING and (job.is_held or bool(needed_change(job)))


def needed_change(job: QueueJob) -> str:
    """Return what to change in a job that cannot start as it is; empty for one that can."""
    first = re.split(r"[,\s(]", job.reason, maxsplit=1)[0].lower()
    return next((change for pattern, change in _UNSCHEDULABLE.items() if re.fullmatch(pattern, first)), "")


def _describe_waiting(job: QueueJob, name: str) -> Fault:
    why = f": {job.reason}" if job.reason else ""
    if job.is_held:
        is_admins = "admin" in job.reason.lower()
        fix = "ask the administrator of the cluster" if is_admins else f"scontrol release {job.id}"
        by = " by an administrator" if is_admins else ""
        return Fault("", f"Slurm job {job.id} is held{by}{why}", fix)
    if change := needed_change(job):
        fix = f"orch cancel {name}, then orch resume {name} --set {change}"
        return Fault("", f"Slurm job {job.id} cannot start as it is{why}", fix)
    return Fault("", f"Slurm job {job.id} waits in the queue{why}")


_END_TEXTS = {
    "TIMEOUT": ("was ended at its time limit", "raise time_limit, or set time_limit_action: requeue"),
    "DEADLINE": ("was ended at its deadline", ""),
    "PREEMPTED": ("was preempted, and Slurm has not put it back into the queue", ""),
    "BOOT_FAIL": ("was given nodes that did not boot", ""),
    "OUT_OF_MEMORY": ("used more memory than it requested", "raise slurm.mem"),
    "COMPLETED": ("has ended before the job did", ""),
}
"""How a job has ended, by its state, and the fix; other states need more than the state."""


def describe_end(job: QueueJob) -> Fault:
    """Describe in one line how a job that is over has ended, with the fix where there is one."""
    name = f"Slurm job {job.id}"
    code, _, number = job.exit.partition(":")
    first = f"its first node ({job.batch_host})" if job.batch_host else "its first node"
    if job.state == "FAILED" and job.exit in (NO_LOG_EXIT, NO_BUNDLE_EXIT):
        fix = "submit it again with ORCH_HOME set to a folder that all nodes see and this user can write to"
        what = f"{name} could not start: {first} could not open the log in the job's folder"
        if job.exit == NO_BUNDLE_EXIT:
            what = f"{name} could not start: {first} could not read the job's folder"
        return Fault("", what, fix)
    why = start_failure_text(code) if job.state == "FAILED" and number in ("", "0") else ""
    if why:
        return Fault(
            "",
            f"{name} has ended with exit code {code}: no program could be started on {first}: {why}",
        )
    match job.state:
        case state if state in _END_TEXTS:
            what, fix = _END_TEXTS[state]
            return Fault("", f"{name} {what}", fix)
        case "CANCELLED":
            return Fault("", f"{name} was cancelled{f' by {job.by}' if job.by else ''}")
        case "NODE_FAIL":
            return Fault("", f"{name} lost a node that it needs{f' ({job.nodes})' if job.nodes else ''}")
        case "FORGOTTEN" if job.reason:
            return Fault("", f"Slurm lost job {job.id}: {job.reason}", job.fix)
        case "FORGOTTEN":
            return Fault("", f"Slurm no longer knows job {job.id}")
        case _:
            how = f" with exit code {code}" if code else ""
            how = f" with signal {number}" if number not in ("", "0") else how
            host = f" on {job.batch_host}" if job.batch_host else ""
            return Fault("", f"{name} has ended{how}{host}: {job.state}")


def start_failure_text(code: str) -> str:
    """Return why no program could be started; empty if the exit code does not show it. Only slurmd's own log has more. All
    that orch starts prints something first."""
    if not code.isdigit() or int(code) not in _START_ERRNOS:
        return ""
    limit = ", see ulimit -u there" if int(code) == errno.EAGAIN else ""
    return f"{os.strerror(int(code))}{limit}"
