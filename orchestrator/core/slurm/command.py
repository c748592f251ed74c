"""Slurm's commands: one runner, a bounded time for each call, and the messages of a controller that does not answer."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PASSED_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR"),
    *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SSL_CERT_FILE"),
)
"""Variables that are passed to sbatch, and so to the batch script. No other SLURM_*: inside a job those describe that job,
and sbatch and srun take them for options. `sbatch_options` has the SBATCH_* that are honoured."""

ASK_S_MAX = 6.0
"""How long Slurm may take to answer a question; with slurmctld down its commands give up after 9 to 12 s."""

NOT_FOUND, TIMED_OUT, NOT_STARTED = 127, 124, 126
"""The `code` of a command that is not installed, has not ended in time, or could not be started."""

NO_ANSWER = re.compile(
    r"unable to contact|timed out|gave no answer|zero bytes|standby mode|not responding|slurmctld.*busy"
    r"|resource temporarily unavailable|connection (refused|reset)|communication (connection|failure)"
    r"|unable to confirm allocation",
    re.IGNORECASE,
)
"""Words of a refusal that says nothing of the job: the controller does not answer, and a later try may go through."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Output and exit code of a command; `silent`: why there is no output, such as that the command was not found."""

    out: str
    err: str
    code: int
    silent: str = ""


def run_command(
    argv: Sequence[str], env: Mapping[str, str] | None, limit_s: float = ASK_S_MAX, text: str = ""
) -> CommandResult:
    """Run one of Slurm's commands with `text` as its input. `env`: all of its environment, None for that of this process."""
    try:
        done = subprocess.run(
            argv, input=text, capture_output=True, encoding="utf-8", errors="replace", env=env, timeout=limit_s,
            check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return CommandResult("", "", NOT_FOUND, f"there is no {argv[0]} on this machine")
    except subprocess.TimeoutExpired:
        return CommandResult("", "", TIMED_OUT, f"{argv[0]} gave no answer within {limit_s:g} s")
    except OSError as err:
        return CommandResult("", "", NOT_STARTED, f"{argv[0]} cannot be run: {err.strerror}")
    return CommandResult(done.stdout, done.stderr, done.returncode)


def sbatch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what sbatch is given of an environment."""
    return {name: environ[name] for name in PASSED_VARIABLES if name in environ}
