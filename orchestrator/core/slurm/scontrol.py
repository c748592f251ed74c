"""scontrol as a job's own nodes call it: with the environment of the allocation, within a limit, and from a thread."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.core.slurm import command_output
from orchestrator.core.slurm.command import run_command
from orchestrator.core.slurm.hostlist import expand

SCONTROL_S_MAX = 10.0
"""How long a command may take: with its controller down, one gives up by itself after MessageTimeout, 10 s mostly."""

_WITH_CODE = 'scontrol "$@"; printf "\\n%s" $?'


def run_scontrol(*words: str) -> tuple[str, str]:
    """Run scontrol; return its output, and why it refused in one line, empty when it has done what was asked.

    Its exit code alone decides: words on stderr may be those of the loader. A shell prints that code, since an agent may
    reap a child before its code is read.
    """
    result = run_command(("/bin/sh", "-c", _WITH_CODE, "scontrol", *words), None, SCONTROL_S_MAX)
    out, _, code = result.out.rpartition("\n")
    if code == "0":
        return out, ""
    refusal = result.silent.replace("/bin/sh", "scontrol") or " ".join((result.err or out).split())
    return out, refusal or f"scontrol ended with code {code}"


def show_job(job_id: str) -> dict[str, str]:
    """Return the fields of a job; none when scontrol says nothing of it."""
    return command_output.parse_fields(run_scontrol("--oneliner", "show", "job", job_id)[0])


def is_orphaned(job: Mapping[str, str], restarts: str) -> bool:
    """Tell from a job's fields whether its allocation of this restart count runs on without its batch script."""
    if job.get("JobState") != "RUNNING" or job.get("Restarts") != restarts:
        return False
    listed, host = job.get("NodeList", "(null)"), job.get("BatchHost", "")
    try:
        nodes = () if listed == "(null)" else expand(listed)
    except ValueError:
        return False
    return bool(host and nodes) and host not in nodes
