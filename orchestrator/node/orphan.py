"""What if the first node of an allocation is lost, and the supervisor with it? Its job goes back into the queue.

With --no-kill Slurm lets such a job run on without its batch script, until the time limit. So an agent that has long
had no contact asks whether the host of the batch script is still among the job's nodes; if not, nobody will ever
supervise here again, and it asks for the requeue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from orchestrator.node import scontrol
from orchestrator.node.hostlist import HostlistError, expand

ALONE_S = 15.0
"""For how long there must be no contact."""

TURN_S = 5.0
"""So much later asks each next node of a step: the first one that finds out spares the others."""

AGAIN_S = 30.0


class Orphan:
    """Looks whether this agent's allocation has lost its batch script."""

    def __init__(self, environ: Mapping[str, str], note: Callable[[str], None]) -> None:
        """`environ` is that of a step; `note` is called from another thread."""
        self._job_id = environ.get("SLURM_JOB_ID", "")
        self._restarts = environ.get("SLURM_RESTART_COUNT") or "0"
        turn = environ.get("SLURM_NODEID", "")
        self._first_s = ALONE_S + TURN_S * (int(turn) if turn.isdigit() else 0)
        self._due_s = self._first_s
        self._note = note
        self._thread: threading.Thread | None = None

    def look(self, alone_s: float) -> None:
        """See what is to be done after so long without contact."""
        if not alone_s:
            self._due_s = self._first_s
        if (
            alone_s < self._due_s
            or not self._job_id
            or (self._thread is not None and self._thread.is_alive())
        ):
            return
        self._due_s = alone_s + AGAIN_S
        self._thread = threading.Thread(target=self._find_out, name="orphan", daemon=True)
        self._thread.start()

    def _find_out(self) -> None:
        job = scontrol.show_job(self._job_id)
        if not is_orphaned(job, self._restarts):
            return
        refusal = scontrol.ask("requeue", self._job_id).refusal
        what = f"cannot be requeued: {refusal}" if refusal else "is requeued"
        self._note(f"{job['BatchHost']} is lost, and the supervisor with it: Slurm job {self._job_id} {what}")


def is_orphaned(job: Mapping[str, str], restarts: str) -> bool:
    """Tell from a job's fields whether this very stay runs on without its batch script."""
    if job.get("JobState") != "RUNNING" or job.get("Restarts") != restarts:
        return False
    listed, host = job.get("NodeList", "(null)"), job.get("BatchHost", "")
    try:
        nodes = () if listed == "(null)" else expand(listed)
    except HostlistError:
        return False
    return bool(host and nodes) and host not in nodes
