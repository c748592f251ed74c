"""What if the first node of an allocation is lost, and the supervisor with it? Its job goes back into the queue.

With --no-kill Slurm lets such a job run on without its batch script, until the time limit. So an agent that has long
had no contact asks whether the host of the batch script is still among the job's nodes; if not, nobody will ever
supervise here again, and it asks for the requeue.

Where Slurm has requeued the job by itself, since it reaches none of its nodes, a gang that is whole makes steps and is
not fenced. What its agents still reach is the job folder, which says where the job is now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.core.slurm import scontrol, step_env
from orchestrator.core.slurm.scontrol import is_orphaned

ALONE_S = 15.0
"""For how long there must be no contact."""

TURN_S = 5.0
"""So much later asks each next node of a step: the first one that finds out spares the others."""

AGAIN_S = 10.0

CHECK_S = 1.0
"""How often an agent without contact looks which allocation its job is in."""

NAME_CHARS_MAX = 100


class NewerAllocation:
    """Looks whether the job goes on in another allocation than this agent's. Reading has a thread of its own: a folder
    on NFS that is not there makes whoever touches it wait, for as long as it likes."""

    def __init__(self, file: Path, environ: Mapping[str, str]) -> None:
        """`file` names the job's present allocation; `environ` is that of a step."""
        self._file = file
        self._own = step_env.allocation(environ)
        self._due_s = float("-inf")
        self._said = ""
        self._thread: threading.Thread | None = None

    def check(self) -> str:
        """Return the other allocation, as far as the looks before this one know; empty for none. This does not block."""
        now_s, is_reading = time.monotonic(), self._thread is not None and self._thread.is_alive()
        if self._own and now_s >= self._due_s and not is_reading:
            self._due_s = now_s + CHECK_S
            self._thread = threading.Thread(target=self._read, name="newer_allocation", daemon=True)
            self._thread.start()
        return self._said if self._said != self._own else ""

    def _read(self) -> None:
        """Read the file; one that cannot be read says nothing."""
        try:
            with self._file.open(encoding="ascii") as file:
                self._said = file.read(NAME_CHARS_MAX).strip()
        except (OSError, ValueError):
            return


class LostSupervisor:
    """Looks what has become of the job of an agent that has no contact."""

    def __init__(
        self,
        environ: Mapping[str, str],
        newer_allocation: NewerAllocation,
        fence_s: float,
        note: Callable[[str], None],
    ) -> None:
        """`environ` is that of a step; `note` is called from another thread, too."""
        self._job_id = environ.get("SLURM_JOB_ID", "")
        self._restarts = environ.get("SLURM_RESTART_COUNT") or "0"
        turn = environ.get("SLURM_NODEID", "")
        self._first_s = ALONE_S + TURN_S * (int(turn) if turn.isdigit() else 0)
        self._due_s = self._first_s
        self._newer_allocation, self._fence_s = newer_allocation, fence_s
        self._note = note
        self._thread: threading.Thread | None = None

    def check(self, unheard_s: float) -> bool:
        """See what is to be done after so long without contact; tell whether the agent must go at once.

        That is when the job is elsewhere: the next attempt there begins as soon as this one must have seen it.
        """
        self._check_batch_host(unheard_s)
        other = self._newer_allocation.check() if unheard_s > self._fence_s else ""
        if other:
            self._note(
                f"no contact for {unheard_s:.0f} s, and the job goes on in allocation {other}: leaving"
            )
        return bool(other)

    def _check_batch_host(self, unheard_s: float) -> None:
        if unheard_s < self._first_s:
            self._due_s = self._first_s
        is_asking = self._thread is not None and self._thread.is_alive()
        if unheard_s < self._due_s or not self._job_id or is_asking:
            return
        self._due_s = unheard_s + AGAIN_S
        self._thread = threading.Thread(target=self._find_out, name="lost-supervisor", daemon=True)
        self._thread.start()

    def _find_out(self) -> None:
        job = scontrol.show_job(self._job_id)
        if not is_orphaned(job, self._restarts):
            return
        refusal = scontrol.ask("requeue", self._job_id).refusal
        what = f"cannot be requeued: {refusal}" if refusal else "is requeued"
        self._note(f"{job['BatchHost']} is lost, and the supervisor with it: Slurm job {self._job_id} {what}")
