"""Submission to Slurm's queue: submitit's executor and job, with the rendered batch script.

Rules: sbatch has a bounded time, and is tried again only while the controller does not answer; a refusal of sbatch is the
user's error, in sbatch's own words, and at the line of the job file where they name an option that comes from there.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.slurm.command import (
    NO_ANSWER,
    NOT_FOUND,
    NOT_STARTED,
    TIMED_OUT,
    CommandResult,
    command,
    environment,
)

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmExecutor

COMMAND_S_MAX = 60.0
"""How long one call of sbatch may take; Slurm itself gives up after about ten seconds without an answer."""

TRIES_MAX = 3
PAUSE_S = 2.0
WORDS_CHARS_MAX = 600

_FIXES = {
    NOT_FOUND: "do it on a login node of the cluster, or load its Slurm (module load slurm)",
    TIMED_OUT: "see with scontrol ping whether Slurm answers, then try again",
    NOT_STARTED: "see to that program",
}
"""What to do when a command could not be run, or has not ended in time."""

Where = Callable[[str], str]
"""From a key of the job file to its place, such as `job.yaml:7: slurm.partition`."""

_BROKEN = re.compile(
    r"authentication|credential|munge|configuration source|plugin|slurm\.conf|security violation|protocol version",
    re.IGNORECASE,
)
_PARTITIONS = "scontrol show partition"
_ABOUT = (
    (
        r"invalid account|account or account/partition|invalid bank",
        "account",
        "sacctmgr show assoc user=$USER",
    ),
    (r"qos", "qos", "sacctmgr show qos"),
    (r"partition", "partition", _PARTITIONS),
    (r"feature", "constraint", "sinfo -o '%20N %f'"),
    (r"reservation", "reservation", "scontrol show reservation"),
    (r"time limit", "time", _PARTITIONS),
    (r"node count", "nodes", _PARTITIONS),
    (r"node name|host ?list", "nodelist exclude", "sinfo -N"),
    (r"generic resource|gres|gpu|tres", "gres gpus-per-node", "sinfo -o '%20N %G'"),
    (r"memory", "mem mem-per-cpu mem-per-gpu", "sinfo -o '%20N %m'"),
    (r"cpu", "cpus-per-task", "sinfo -o '%20N %c'"),
    (r"licen", "licenses", "scontrol show licenses"),
)
"""Words of a refusal, the options that they name, and the command that shows the choices."""

_NODES = "sinfo -o '%20N %.5D %c %z %m %d %G %f'"

_SAME_NAME = (
    *("account", "qos", "partition", "constraint", "reservation", "nodelist"),
    *("exclude", "gres", "mem", "comment", "exclusive"),
)
_FIELDS = {
    **{name: f"slurm.{name}" for name in _SAME_NAME},
    "mail-user": "slurm.mail",
    "mail-type": "slurm.mail",
    "cpus-per-task": "slurm.cpus_per_task",
    "time": "time_limit",
    "gpus-per-node": "gpus_per_node",
    "nodes": "nodes",
    "job-name": "name",
}
"""The field of the job file that an option of the batch script comes from; that of any other is `_RAW`."""

_RAW = "slurm.extra"


def require_commands(environ: Mapping[str, str], where: str) -> None:
    """Raise ClusterError when Slurm jobs cannot be submitted from this machine."""
    missing = [name for name in ("sbatch", "scancel", "squeue", "srun") if not _path_of(name, environ)]
    if missing:
        what = f"there is no {' and no '.join(missing)} here"
        fix = "submit from a login node of the cluster, or load its Slurm (module load slurm)"
        raise ClusterError(what, where, fix)


def submit(job: JobDir, environ: Mapping[str, str], where: Where) -> str:
    """Hand the job's batch script to sbatch; return Slurm's id. Raises UserError when sbatch refuses it, else
    ClusterError."""
    from submitit.core.utils import FailedSubmissionError

    try:
        entered = _executor()(job, environ, where)._submit_command("")
    except FailedSubmissionError as err:
        raise ClusterError(
            str(err).splitlines()[0], "sbatch", "see with squeue whether the job is there"
        ) from err
    return str(entered.job_id)


def test(script: str, environ: Mapping[str, str], where: Where) -> str:
    """Ask sbatch whether it would take a batch script, and return its answer. Raises OrchError as `submit` does."""
    done = _tried(("sbatch", "--test-only"), environ, script)
    if done.code:
        raise _refused(done, script, where)
    return _words(done) or "sbatch would take it"


@functools.cache
def _executor() -> Callable[[JobDir, Mapping[str, str], Where], SlurmExecutor]:
    """Make the class on demand: submitit is slow to import, and most verbs do not need it."""
    from submitit.slurm.slurm import SlurmExecutor, SlurmJob

    class ScriptExecutor(SlurmExecutor):
        """submitit's executor with an already rendered script: it pickles and writes nothing."""

        def __init__(self, job: JobDir, environ: Mapping[str, str], where: Where) -> None:
            super().__init__(job.scripts)
            self._environ = environ
            self._where = where

        @classmethod
        def affinity(cls) -> int:
            """Claim that there is a Slurm, which `require_commands` checks."""
            return 2

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return (Path(self.folder) / "slurm.sh").read_text()

        def _submit_command(self, command: str) -> SlurmJob[None]:
            argv = self._make_submission_command(Path(self.folder) / "slurm.sh")
            done = _tried(argv, self._environ)
            if done.code:
                raise _refused(done, self._make_submission_file_text("", ""), self._where)
            job_id = self._get_job_id_from_submission_command(done.out)
            return SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])

    return ScriptExecutor


def _tried(argv: Sequence[str], environ: Mapping[str, str], text: str = "") -> CommandResult:
    """Run a command of Slurm, again while the controller does not answer. A job that was queued although sbatch reports a
    failure does no harm: its script starts nothing, since the job folder does not have its id.

    Raises ClusterError when the command cannot be run, or the controller still does not answer.
    """
    for tries in range(1, TRIES_MAX + 1):
        done = _run(argv, environ, text)
        if not done.code or not NO_ANSWER.search(_words(done)):
            return done
        if tries < TRIES_MAX:
            time.sleep(PAUSE_S * tries)
    fix = "try again when it answers: scontrol ping"
    raise ClusterError(f"Slurm does not answer: {_words(done)}", argv[0], fix)


def _run(argv: Sequence[str], environ: Mapping[str, str], text: str) -> CommandResult:
    done = command(argv, environment(environ), COMMAND_S_MAX, text)
    if done.silent:
        raise ClusterError(done.silent, argv[0], _FIXES[done.code])
    return done


def _path_of(program: str, environ: Mapping[str, str]) -> str | None:
    return shutil.which(program, path=environ.get("PATH", os.defpath))


def _words(done: CommandResult) -> str:
    """Return the output of a command in one line, without its own name."""
    lines = [
        re.sub(r"^sbatch: (error: |fatal: )?", "", line).strip()
        for line in (done.err or done.out).splitlines()
    ]
    words = "; ".join(dict.fromkeys(line for line in lines if line))
    return words[:WORDS_CHARS_MAX] or f"it ended with code {done.code}"


def _refused(done: CommandResult, script: str, where: Where) -> OrchError:
    """Return the error for a script that sbatch did not take."""
    words = _words(done)
    if _BROKEN.search(words):
        fix = "this is between this machine and its Slurm; ask who looks after it"
        return ClusterError(f"sbatch cannot reach Slurm: {words}", "", fix)
    option, fix = _named(words, script)
    key = _FIELDS.get(option, _RAW) if option else "slurm"
    return UserError(f"sbatch refuses the job: {words}", where(key), fix)


def _named(words: str, script: str) -> tuple[str, str]:
    """Return the option of a script that a refusal names, empty without one, and the fix."""
    written = re.search(r"(?<![\w-])--([a-z-]+)", words)
    if written is not None and f"#SBATCH --{written[1]}" in script:
        return written[1], "see man sbatch"
    for pattern, options, shows in _ABOUT:
        named = [option for option in options.split() if f"#SBATCH --{option}=" in script]
        if named and re.search(pattern, words, re.IGNORECASE):
            return named[0], f"see what there is with: {shows}"
    return "", f"compare what the job asks for (orch render) with what there is: {_NODES}"
