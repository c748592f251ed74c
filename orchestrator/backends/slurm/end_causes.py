"""Causes of an allocation's end. Pure: what Slurm's daemons have printed and what scontrol shows of the job come in.

The daemon that signals a job's processes prints the reason into the job's own output, just before: `*** JOB 12 ON node1
CANCELLED AT 2026-11-21T06:22:58 DUE TO PREEMPTION ***` (slurmstepd, mgr.c and req.c). That needs no controller.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.backends.api import AllocationEnd
from orchestrator.core.slurm import job_states
from orchestrator.core.status_types import AllocationEndCause

_DAEMON_LINE = re.compile(r"\*\*\* (JOB|STEP) (\d+)(?:\.\S+)? ON \S+ (?:CANCELLED|FAILED)([^*]*)\*\*\*")
_DUE = re.compile(r"DUE TO (TIME LIMIT|PREEMPTION|JOB REQUEUE|NODE FAILURE)", re.IGNORECASE)
_STATES = {
    "TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "JOB REQUEUE": "REQUEUED", "NODE FAILURE": "NODE_FAIL",
}  # fmt: skip
"""The state of a job that each reason of a daemon means."""

EARLY_S_MAX = 120.0
"""How much too early Slurm may send the signal that was requested at submit: a minute, by its manual, and the interval of
its checks."""

_SIGNAL = re.compile(r"--signal=B:USR1@(\d+)")
_DURATION = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class SlurmJobInfo:
    """What scontrol shows of a job."""

    state: str
    restarts: int
    is_preempted: bool
    remaining_s: float | None  # until its time limit, or until its end if it is being preempted
    excluded_nodes: str
    has_no_limit: bool  # of time

    @property
    def is_running(self) -> bool:
        """Whether it keeps its nodes."""
        return self.stage is job_states.Stage.RUNNING and not self.is_preempted

    @property
    def stage(self) -> job_states.Stage:
        """Stage of its state."""
        return job_states.stage_of(self.state)


def parse_job(fields: Mapping[str, str]) -> SlurmJobInfo | None:
    """Return the job of the fields of `scontrol show job`; None when they show no job."""
    if "JobState" not in fields:
        return None
    preempted_at, ends_at = _parse_time_s(fields, "PreemptTime"), _parse_time_s(fields, "EndTime")
    remaining_s = _remaining_s(fields)
    if preempted_at is not None and ends_at is not None:
        remaining_s = max(0.0, ends_at - preempted_at)
    restarts = fields.get("Restarts", "0")
    excluded_nodes = fields.get("ExcNodeList", "(null)")
    return SlurmJobInfo(
        fields["JobState"],
        int(restarts) if restarts.isdigit() else 0,
        preempted_at is not None,
        remaining_s,
        "" if excluded_nodes == "(null)" else excluded_nodes,
        fields.get("TimeLimit") == "UNLIMITED",
    )


def _parse_time_s(fields: Mapping[str, str], name: str) -> float | None:
    """Return a time in seconds, of a clock without a zone: only differences between two such times mean anything."""
    try:
        return datetime.datetime.fromisoformat(fields.get(name, "")).replace(tzinfo=datetime.timezone.utc).timestamp()
    except ValueError:  # `Unknown`, `None`
        return None


def _remaining_s(fields: Mapping[str, str]) -> float | None:
    limit_s, run_s = (_duration_s(fields.get(name, "")) for name in ("TimeLimit", "RunTime"))
    return None if limit_s is None or run_s is None else max(0.0, limit_s - run_s)


def _duration_s(text: str) -> float | None:
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds


def find_printed_end(job_id: str, lines: Iterable[str], left_s: float) -> AllocationEnd | None:
    """Return the ending that the daemons' output gives for a job with `left_s` until KILL; the last line that counts."""
    ending = None
    for line in lines:
        match = _DAEMON_LINE.search(line)
        if match is None or match[2] != job_id:
            continue
        if due := _DUE.search(match[3]):
            ending = _make_end(_STATES[due[1].upper()], left_s)
        elif match[1] == "JOB" and ending is None:
            ending = _make_end("CANCELLED", left_s)
    return ending


def _make_end(state: str, left_s: float | None) -> AllocationEnd:
    return AllocationEnd(*job_states.end_of(state), left_s)


def find_job_end(job: SlurmJobInfo, restarts: int, kill_left_s: float) -> AllocationEnd | None:
    """Return the ending that scontrol shows of a job that was requeued `restarts` times before; None when it shows none."""
    if job.is_preempted:
        return _make_end("PREEMPTED", job.remaining_s)
    if job.restarts > restarts or job.stage is job_states.Stage.WAITING:
        return _make_end("REQUEUED", kill_left_s)
    if job.stage is job_states.Stage.OVER:
        return _make_end(job.state, kill_left_s)
    return None


def read_notice_s(options: Iterable[str]) -> float:
    """Return how long before the time limit, at the earliest, Slurm sends the signal that these options of sbatch
    request; infinite where they request none."""
    matches = [match for option in options if (match := _SIGNAL.fullmatch(option))]
    return float(matches[-1][1]) + EARLY_S_MAX if matches else float("inf")


def find_limit_end(job: SlurmJobInfo | None, notice_s: float) -> AllocationEnd | None:
    """Return the ending that the signal requested at submit announces, for some time before the time limit; None when
    the limit is further away: then Slurm has not sent it."""
    if job is not None and (job.has_no_limit or (job.remaining_s is not None and job.remaining_s > notice_s)):
        return None
    return AllocationEnd(
        AllocationEndCause.TIME_LIMIT,
        "Slurm has sent the signal that announces it",
        job.remaining_s if job else None,
    )


def explain_term(job: SlurmJobInfo | None, kill_left_s: float) -> AllocationEnd | None:
    """Return the ending that an unexplained TERM means. Where Slurm ends the job, it was cancelled: Slurm explains every
    other end. Where Slurm does not answer or gives no reason, the job is to resume if it gets nodes again."""
    if job is None or job.stage is job_states.Stage.UNKNOWN:
        return AllocationEnd(
            AllocationEndCause.REQUEUED,
            "its processes were signalled to end, and Slurm gives no reason",
            kill_left_s,
        )
    if job.is_running:
        return None
    return _make_end("CANCELLED", kill_left_s)
