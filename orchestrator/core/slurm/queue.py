"""Client of Slurm's queue: one squeue for all jobs, whose answer is cached for two seconds.

Rules: if Slurm does not answer, its last answer is kept, with its age and the reason. A job that squeue no longer lists
is not lost for sure, see `SlurmQueue.confirm`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from orchestrator.core.jobdir import ownership
from orchestrator.core.slurm import command_output
from orchestrator.core.slurm.command import ASK_S_MAX, CommandResult, run_command, sbatch_environment
from orchestrator.core.slurm.job_states import Stage

AGE_S_MAX = 2.0
"""How old an answer of squeue may be before Slurm is asked again."""

CHANGE_S_MAX = 20.0
"""How long it may take to change something."""

CANCEL_APART_S = 5.0
OUTPUT_CHARS_MAX = 300


class SlurmQueue:
    """Slurm's queue, as this process sees it."""

    def __init__(
        self,
        environ: Callable[[], Mapping[str, str]] = lambda: os.environ,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environ = environ
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._jobs: dict[str, command_output.QueueJob] = {}
        self._answered_at = float("-inf")
        self._asked_ids: frozenset[str] = frozenset()
        self._asked_at = float("-inf")
        self._unanswered = ""
        self._cancelled_at: dict[str, float] = {}
        self._cluster_name = ""

    def query(self, ids: Iterable[str]) -> dict[str, command_output.QueueJob]:
        """Return each of these jobs as Slurm describes it, at most `AGE_S_MAX` old, or its last answer while it gives none."""
        requested_ids = list(dict.fromkeys(ids))
        with self._lock:
            is_old = self._clock_s() - self._asked_at > AGE_S_MAX
            if requested_ids and (is_old or not self._asked_ids.issuperset(requested_ids)):
                others = [job.id for job in self._jobs.values() if not is_over(job)]
                self._query_squeue(list(dict.fromkeys([*requested_ids, *others])))
            return {job_id: self._cached_job(job_id) for job_id in requested_ids}

    def confirm(self, job: command_output.QueueJob) -> command_output.QueueJob:
        """Check a job that has ended by squeue, or that squeue does not list, with scontrol and then sacct, which may know who
        ended it and how. `unanswered` is set if neither squeue nor scontrol knows the job's state."""
        shown = self._command("scontrol", "show", "job", "-o", job.id)
        current = command_output.parse_scontrol_job(shown.out)
        if current is None and job.stage is Stage.NOT_FOUND and command_output.UNKNOWN_ID not in shown.err:
            return replace(job, unanswered=_refusal(shown, "scontrol"))
        current = current or job
        if not is_over(current):
            return current
        options = ("-n", "-X", "-P", "--duplicates", f"--format={command_output.SACCT_FORMAT}", "-j", job.id)
        kept = command_output.parse_sacct(self._command("sacct", *options).out, ownership.user_name).get(job.id)
        if kept is None or (current.stage is Stage.OVER and kept.state != current.state):
            return current
        return replace(kept, restarts=current.restarts, folder=current.folder, batch_host=current.batch_host)

    def queue_position(self, job_id: str) -> str:
        """Return the position of a waiting job in its partition, as text."""
        listed = self._command("squeue", "-h", "--states=PENDING", "--sort=-p,i", "-o", "%i|%P")
        return command_output.queue_position(listed.out, job_id)

    def cancel(self, job_id: str, *, again: bool = False) -> str:
        """Cancel a job; return Slurm's message if it refuses, else an empty text.

        `again`: the job may have been cancelled just now, and is not cancelled twice within `CANCEL_APART_S`.
        """
        with self._lock:
            now_s = self._clock_s()
            if again and now_s - self._cancelled_at.get(job_id, float("-inf")) < CANCEL_APART_S:
                return ""
            self._cancelled_at[job_id] = now_s
        result = self._command("scancel", job_id, limit_s=CHANGE_S_MAX)
        self.invalidate()
        return "" if not result.code else _refusal(result, "scancel")

    def invalidate(self) -> None:
        """Drop the cached answer, since something was changed."""
        with self._lock:
            self._asked_at = float("-inf")

    def cluster_name(self) -> str:
        """Return the name of this machine's cluster, asked for once; empty while Slurm does not answer."""
        if not self._cluster_name:
            config = self._command("scontrol", "show", "config")
            self._cluster_name = command_output.parse_cluster_name(config.out)
        return self._cluster_name

    def _command(self, *argv: str, limit_s: float = ASK_S_MAX) -> CommandResult:
        """Run a command without the user's formats (SQUEUE_FORMAT, SLURM_TIME_FORMAT), and without what another job of
        Slurm has left in the environment."""
        return run_command(argv, {**sbatch_environment(self._environ()), "TZ": "UTC", "LC_ALL": "C"}, limit_s)

    def _cached_job(self, job_id: str) -> command_output.QueueJob:
        job = self._jobs.get(job_id)
        if job is None:
            return command_output.QueueJob(job_id, "UNKNOWN", unanswered=self._unanswered)
        age_s = max(0.0, self._clock_s() - self._answered_at)
        return replace(job, unanswered=self._unanswered, age_s=round(age_s, 1))

    def _query_squeue(self, ids: list[str]) -> None:
        """Ask squeue for jobs, and keep its answer, or why it gives none."""
        options = ("-h", "--states=all", "-o", command_output.SQUEUE_FORMAT, "-j", ",".join(ids))
        result = self._command("squeue", *options)
        # squeue refuses a single unknown id; of several it lists those that it knows
        self._unanswered = (
            "" if result.code == 0 or command_output.UNKNOWN_ID in result.err else _refusal(result, "squeue")
        )
        self._asked_ids, self._asked_at = frozenset(ids), self._clock_s()
        if not self._unanswered:
            listed = command_output.parse_squeue(result.out)
            self._jobs = {job_id: listed.get(job_id, command_output.QueueJob(job_id, "FORGOTTEN")) for job_id in ids}
            self._answered_at = self._asked_at


def _refusal(result: CommandResult, program: str) -> str:
    """Return why a command has failed, in its last line."""
    lines = [line.strip() for line in result.err.splitlines() if line.strip()]
    return result.silent or "".join(lines[-1:])[:OUTPUT_CHARS_MAX] or f"{program} ended with {result.code}"


def is_over(job: command_output.QueueJob) -> bool:
    """Return whether a job will never run again, as far as Slurm says."""
    return job.stage in (Stage.OVER, Stage.NOT_FOUND)
