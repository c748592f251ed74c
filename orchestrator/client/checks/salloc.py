"""Allocation for a check outside of one: salloc with the job's options, and its position in the queue until it starts.

salloc keeps the nodes while its command runs, a `cat` on a pipe of this process: however this process ends,
they are released. While salloc waits, a signal of the terminal ends both.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping

from orchestrator.backends.api import LaunchError
from orchestrator.client.checks.host_sessions import SESSIONS_S_MAX
from orchestrator.client.checks.srun import SlurmCommand
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.slurm import command_output, sbatch_options
from orchestrator.core.slurm.command import sbatch_environment
from orchestrator.core.slurm.queue import SlurmQueue
from orchestrator.spec.load import SpecFile

LIMIT_S = SESSIONS_S_MAX + 300.0
"""The time limit of the allocation, unless the job's is shorter: a short job is placed sooner."""

QUEUE_POLL_S = 2.0
QUEUE_POLL_S_MAX = 60.0
"""The first interval between two queries of the queue, which doubles each time, and the longest."""

END_S_MAX = 0.5
"""How long salloc may take to end with its command, before it is terminated."""

_BATCH_ONLY = ("--requeue", "--signal=", "--open-mode=", "--mail-")
"""Options of the job that salloc does not know, and mail, which is for jobs."""

_HOLD_COMMAND = 'echo "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST"; exec cat'


@contextlib.contextmanager
def allocation(
    file: SpecFile,
    options: tuple[str, ...],
    environ: Mapping[str, str],
    say: Callable[[str], None],
    burn_s: float = 0.0,
) -> Iterator[dict[str, str]]:
    """Wait for nodes as the job would get them; give the environment in which srun uses them, as a batch script has it.

    `say` receives the position in the queue. Raises UserError for a job that would wait for ever, ClusterError if salloc refuses.
    """
    own_options = [option for option in options if not option.startswith(_BATCH_ONLY)]
    own_options.append(f"--job-name=check-{file.spec.name}")
    if burn_s or (file.spec.time_limit or 0.0) > LIMIT_S:
        own_options.append(f"--time={(LIMIT_S + 2 * burn_s) / sbatch_options.MINUTE_S:.0f}")
    env = sbatch_environment(environ)
    try:
        salloc = SlurmCommand(("salloc", *own_options, "/bin/sh", "-c", _HOLD_COMMAND), env, own_session=False)
    except LaunchError as err:
        raise ClusterError(err.reason, "", err.fix) from err
    try:
        job_id, _, nodes = _await_grant(salloc, file, SlurmQueue(lambda: environ), say).strip().partition(" ")
        yield {**env, "SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": nodes}
    finally:
        salloc.close(END_S_MAX)


def _await_grant(salloc: SlurmCommand, file: SpecFile, queue: SlurmQueue, say: Callable[[str], None]) -> str:
    """Return the first line of salloc's command; until then report the position in the queue whenever it changes."""
    last_text, wait_s = "", QUEUE_POLL_S
    while True:
        with contextlib.suppress(TimeoutError):
            line = salloc.line(wait_s)
            if line is None:
                errors = [re.sub("^salloc: (error: )?", "", one) for one in salloc.errors.splitlines()]
                raise ClusterError(f"salloc allocated no nodes: {'; '.join(errors[-3:])}", "", _SALLOC_HINT)
            return line.decode()
        wait_s = min(2 * wait_s, QUEUE_POLL_S_MAX)
        if (pending := re.search(r"job allocation (\d+)", salloc.errors)) is None:
            continue
        job = queue.query([pending[1]])[pending[1]]
        what = command_output.describe_job(job, "").what
        if change := command_output.needed_change(job):
            raise UserError(what, file.where("slurm"), f"change the job file, or use --set {change}")
        what += queue.queue_position(job.id) + command_output.expected_start_text(job.expected_start)
        if what != last_text:
            say(f"{what}; Ctrl-C stops waiting")
        last_text = what


_SALLOC_HINT = "run salloc by hand to see why; inside an allocation `orch check` checks its nodes"
