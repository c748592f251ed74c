"""Submission to Slurm's queue: sbatch gets the rendered batch script, and returns the id of the job.

Rules: sbatch has a time limit, and is retried only while the controller does not answer; a refusal of sbatch is the user's
error, with sbatch's own message.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence

from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.slurm.command import (
    NO_ANSWER,
    NOT_FOUND,
    NOT_STARTED,
    TIMED_OUT,
    CommandResult,
    run_command,
    sbatch_environment,
)

COMMAND_S_MAX = 60.0
"""How long one call of sbatch may take; Slurm itself gives up after about ten seconds without an answer."""

TRIES_MAX = 3
PAUSE_S = 2.0
OUTPUT_CHARS_MAX = 600

_FIXES = {
    NOT_FOUND: "do it on a login node of the cluster, or load its Slurm (module load slurm)",
    TIMED_OUT: "check with scontrol ping whether Slurm answers, then try again",
    NOT_STARTED: "check that program",
}
"""What to do when a command could not be run, or has not ended in time."""

Where = Callable[[str], str]
"""From a key of the job file to its place, such as `job.yaml:7: slurm.partition`."""

_ID = re.compile(r"(?:Submitted batch job )?([0-9]+)(?:;\S+| on cluster \S+)?")
"""The line in which sbatch has the id, with `--parsable` and without; a site's plugins and wrappers may print others."""

_SBATCH_REASON = re.compile(r"(Batch job submission failed|allocation failure): .+")
"""The line of sbatch with the reason why a job was refused; around it is the site's own text."""

_CLUSTER_FAULT = re.compile(
    r"authentication|credential|munge|configuration source|plugin|slurm\.conf|security violation|protocol version",
    re.IGNORECASE,
)
_FIX = "compare what the job asks for (orch render) with what there is: "
_FIX += "sinfo -o '%P %N %.5D %c %z %m %d %G %f', sacctmgr show assoc user=$USER"


def require_commands(environ: Mapping[str, str], where: str) -> None:
    """Raise ClusterError when Slurm jobs cannot be submitted from this machine."""
    missing = [name for name in ("sbatch", "scancel", "squeue", "srun") if not _path_of(name, environ)]
    if missing:
        what = f"not found on this machine: {', '.join(missing)}"
        fix = "submit from a login node of the cluster, or load its Slurm (module load slurm)"
        raise ClusterError(what, where, fix)


def submit(job: JobDir, environ: Mapping[str, str], where: Where) -> str:
    """Hand the job's batch script to sbatch; return Slurm's id. Raises UserError when sbatch refuses it, else
    ClusterError."""
    done = _run_with_retries(("sbatch", "--parsable", str(job.scripts / "slurm.sh")), environ)
    if done.code:
        raise _refusal_error(done, where)
    ids = [found[1] for line in done.out.splitlines() if (found := _ID.fullmatch(line.strip()))]
    if not ids:
        what = f"sbatch printed no job id: {_output_line(done)}"
        raise ClusterError(what, "sbatch", "check with squeue whether the job was queued")
    return ids[-1]


def test_only(script: str, environ: Mapping[str, str], where: Where) -> str:
    """Ask sbatch whether it would take a batch script, and return its answer. Raises OrchError as `submit` does."""
    done = _run_with_retries(("sbatch", "--test-only"), environ, script)
    if done.code:
        raise _refusal_error(done, where)
    return _output_line(done) or "sbatch would take it"


def _run_with_retries(argv: Sequence[str], environ: Mapping[str, str], text: str = "") -> CommandResult:
    """Run a command of Slurm, again while the controller does not answer. A job that was queued although sbatch reports a
    failure does no harm: its script starts nothing, since the job folder does not have its id.

    Raises ClusterError when the command cannot be run, or the controller still does not answer.
    """
    for tries in range(1, TRIES_MAX + 1):
        done = _run(argv, environ, text)
        if not done.code or not NO_ANSWER.search(_reason(done)):
            return done
        if tries < TRIES_MAX:
            time.sleep(PAUSE_S * tries)
    fix = "try again when it answers: scontrol ping"
    raise ClusterError(f"Slurm does not answer: {_output_line(done)}", argv[0], fix)


def _run(argv: Sequence[str], environ: Mapping[str, str], text: str) -> CommandResult:
    done = run_command(argv, sbatch_environment(environ), COMMAND_S_MAX, text)
    if done.silent:
        raise ClusterError(done.silent, argv[0], _FIXES[done.code])
    return done


def _path_of(program: str, environ: Mapping[str, str]) -> str | None:
    return shutil.which(program, path=environ.get("PATH", os.defpath))


def _output_line(done: CommandResult) -> str:
    """Return the output of a command in one line, without its own name."""
    lines = [
        re.sub(r"^sbatch: (error: |fatal: )?", "", line).strip() for line in (done.err.strip() or done.out).splitlines()
    ]
    words = "; ".join(dict.fromkeys(line for line in lines if line))
    return words[:OUTPUT_CHARS_MAX] or f"it ended with code {done.code}"


def _reason(done: CommandResult) -> str:
    """Return the words in which the class of a refusal is looked for: sbatch's own line, or all where there is none."""
    words = _output_line(done)
    return found[0] if (found := _SBATCH_REASON.search(words)) else words


def _refusal_error(done: CommandResult, where: Where) -> OrchError:
    """Return the error for a script that sbatch did not take."""
    words = _output_line(done)
    if _CLUSTER_FAULT.search(_reason(done)):
        fix = (
            "run orch where `sinfo` works, on a login node of the cluster; if it fails there too, ask its administrator"
        )
        return ClusterError(f"sbatch cannot reach Slurm: {words}", "", fix)
    return UserError(f"sbatch refuses the job: {words}", where("slurm"), _FIX)
