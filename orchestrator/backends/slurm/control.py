"""Slurm commands from within an allocation: show, requeue, exclude nodes. Each has a limit; a requeue is retried."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping

from orchestrator.backends.slurm import end_causes
from orchestrator.core.slurm import command, command_output, scontrol
from orchestrator.core.slurm.hostlist import expand

REQUEUE_S_MAX = 600.0
"""How long a requeue is tried while the controller does not answer: its restart takes minutes."""

REQUEUE_PAUSE_S = 5.0
KILL_WAIT_S = 30.0
"""How long Slurm waits from TERM to KILL where it does not say (the default of KillWait)."""

_MUNGE = re.compile(r"munge|authentication|credential", re.IGNORECASE)
"""Words of a refusal while munged restarts."""

_ALREADY_REQUEUED = ("Job is pending execution", "already completing")
"""Slurm's refusals to requeue a job that it has requeued by itself."""


def show_job(job_id: str) -> end_causes.SlurmJobInfo | None:
    """Return what scontrol shows of the job; None when it shows nothing."""
    return end_causes.parse_job(scontrol.show_job(job_id))


def kill_wait_s() -> float:
    """Return how long Slurm waits from TERM to KILL."""
    for line in scontrol.run_scontrol("show", "config")[0].splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "KillWait" and value.split() and value.split()[0].isdigit():
            return float(value.split()[0])
    return KILL_WAIT_S


def requeue(job_id: str, avoid: Iterable[str]) -> str:
    """Give the nodes back and wait for others, without those to avoid; return why that failed, empty when it did not."""
    deadline_s = time.monotonic() + REQUEUE_S_MAX
    while refusal := scontrol.run_scontrol("requeue", job_id)[1]:
        if any(word in refusal for word in _ALREADY_REQUEUED):
            break
        is_transient = command.NO_ANSWER.search(refusal) or _MUNGE.search(refusal)
        if not is_transient or time.monotonic() > deadline_s:
            return refusal
        time.sleep(REQUEUE_PAUSE_S)
    _exclude_nodes(job_id, tuple(avoid))
    return ""


def _describe_shortage(names: str, job: Mapping[str, str]) -> str:
    """Describe the shortage of a partition without the named nodes: Slurm would hold the job for ever, also once they are
    back. Empty where there are enough, or that is unknown."""
    partition = command_output.parse_fields(
        scontrol.run_scontrol("--oneliner", "show", "partition", job.get("Partition", ""))[0]
    )
    total, needed = partition.get("TotalNodes", ""), job.get("NumNodes", "").partition("-")[0]
    try:
        remaining = int(total) - len(set(expand(names)))
        return (
            f"{remaining} of {total} nodes would be left, and the job takes {needed}" if remaining < int(needed) else ""
        )
    except ValueError:
        return ""


def _exclude_nodes(job_id: str, nodes: tuple[str, ...]) -> None:
    """Add nodes to those that the job must not get; if that fails, the next allocation finds out about them again."""
    if not nodes:
        return
    fields = scontrol.show_job(job_id)
    job = end_causes.parse_job(fields)
    names = ",".join([*([job.excluded_nodes] if job and job.excluded_nodes else []), *nodes])
    refusal = _describe_shortage(names, fields)
    refusal = refusal or scontrol.run_scontrol("update", f"JobId={job_id}", f"ExcNodeList={names}")[1]
    if refusal:
        print(f"Slurm may give {', '.join(nodes)} to this job again: {refusal}", flush=True)
