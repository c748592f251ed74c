"""Agent without its supervisor: the fence of its ranks, and on Slurm the requeue of a job whose batch host is lost.

Fence: only steps prove that the gang is complete, since a cut-off rank may keep writing logs. Ranks without a step
in their attempt have a limit of their own. So have ranks that have stepped for long without contact: their supervisor is
disconnected, as on a closed laptop. The supervisor knows all these times, and waits longer itself.

With --no-kill a job whose first node is lost keeps running without its batch script, until the time limit. So an agent
without contact asks Slurm whether the host of the batch script is still among the job's nodes. If not, no supervisor
ever returns to this allocation, and the agent requeues the job.

When Slurm reaches none of a job's nodes it requeues the job by itself, but a complete gang still makes steps and is not
fenced. Its agents still reach the job folder, which names the job's present allocation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.agent.ranks.processes import NodeRanks
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.slurm import scontrol, step_env
from orchestrator.core.wire import orders
from orchestrator.core.wire.agent_config import AgentConfig

DISCONNECTED_S = 90.0
"""For how long ranks must have made steps without contact until their supervisor counts as disconnected. It has ended a
connection without heartbeats long before, and then expects the longer time, see `brain.scheduling.fence`."""


NO_CONTACT_S_MAX = 900.0
"""An agent without ranks leaves after this time without contact: another is started when it is needed."""

NO_CONTACT_PENDING_S_MAX = 7 * 86_400.0
"""The same for an agent with unacknowledged reports, such as the end of ranks: a laptop may stay closed for days."""


def no_contact_s_max(has_pending: bool) -> float:
    """Return for how long an agent without ranks stays without contact."""
    return NO_CONTACT_PENDING_S_MAX if has_pending else NO_CONTACT_S_MAX


class AgentFence:
    """The times (s) that hold for this agent: `base_s` until the supervisor sends others, None for no fence at all;
    `disconnected_timeout_s` while the supervisor is disconnected, if that is longer."""

    def __init__(self, base_s: float | None, disconnected_timeout_s: float = 0.0) -> None:
        self._contact_timeout_s, self._disconnected_timeout_s = base_s, disconnected_timeout_s
        self._startup_timeout_s = 0.0

    def begin(self) -> None:
        """Begin an attempt, and reset the time for ranks without steps, which belonged to earlier ranks."""
        self._startup_timeout_s = 0.0

    def apply(self, order: orders.Fence) -> None:
        """Take the times that the supervisor orders."""
        self._contact_timeout_s, self._startup_timeout_s = order.contact_timeout_s, order.startup_timeout_s

    def exceeded_s(self, ranks: NodeRanks, proved_at: float, connected_at: float, now_s: float) -> float | None:
        """Return the time (s) without contact and step if it is over the limit, else None.

        A supervisor that was connected since is not disconnected: it may know of that connection, though no contact was proved.
        """
        if self._contact_timeout_s is None or now_s - max(proved_at, ranks.progress_at) <= self._contact_timeout_s:
            return None
        ranks.heartbeats()  # this process may have been stopped while its ranks kept running
        no_contact_s = now_s - max(proved_at, ranks.progress_at)
        longer_s = (
            self._disconnected_timeout_s if ranks.progress_at - max(proved_at, connected_at) > DISCONNECTED_S else 0.0
        )
        limit_s = max(self._contact_timeout_s, longer_s if ranks.last_step_ns() else self._startup_timeout_s)
        return no_contact_s if no_contact_s > limit_s else None


ORPHANED_S = 15.0
"""How long contact must be missing."""

STAGGER_S = 5.0
"""How much later each next node of a step asks: the first one to requeue spares the others."""

RETRY_S = 10.0

CHECK_S = 1.0
"""How often an agent without contact reads the job's allocation."""

NAME_CHARS_MAX = 100


class NewerAllocation:
    """Reader of the job's present allocation, which is compared with this agent's.

    Reading has a thread of its own: an unreachable NFS folder blocks its readers without limit.
    """

    def __init__(self, file: Path, environ: Mapping[str, str]) -> None:
        """`file` names the job's present allocation; `environ` is that of a Slurm step."""
        self._file = file
        self._own_allocation = step_env.allocation_id(environ)
        self._due_s = float("-inf")
        self._current = ""
        self._thread: threading.Thread | None = None

    def check(self) -> str:
        """Return the other allocation as last read, empty for none; start the next reading. This does not block."""
        now_s, is_reading = time.monotonic(), self._thread is not None and self._thread.is_alive()
        if self._own_allocation and now_s >= self._due_s and not is_reading:
            self._due_s = now_s + CHECK_S
            self._thread = _start_thread(self._read, "newer-allocation")
        return self._current if self._current != self._own_allocation else ""

    def _read(self) -> None:
        """Read the file; an unreadable one changes nothing."""
        try:
            with self._file.open(encoding="ascii") as file:
                self._current = file.read(NAME_CHARS_MAX).strip()
        except (OSError, ValueError):
            return


class LostSupervisor:
    """Checks of the job while the agent has no contact."""

    def __init__(
        self, environ: Mapping[str, str], newer: NewerAllocation, fence_s: float, note: Callable[[str], None]
    ) -> None:
        """`environ` is that of a Slurm step; `note` is called from another thread, too."""
        self._job_id = environ.get("SLURM_JOB_ID", "")
        self._restarts = environ.get("SLURM_RESTART_COUNT") or "0"
        node_id = environ.get("SLURM_NODEID", "")
        self._first_s = ORPHANED_S + STAGGER_S * (int(node_id) if node_id.isdigit() else 0)
        self._due_s = self._first_s
        self._newer_allocation, self._fence_s = newer, fence_s
        self._note = note
        self._thread: threading.Thread | None = None

    def check(self, no_contact_s: float) -> bool:
        """Check the job after this time without contact; return whether the agent must leave at once.

        It must leave when the job is in another allocation: the next attempt there starts as soon as this one must have
        ended.
        """
        self._check_batch_host(no_contact_s)
        other = self._newer_allocation.check() if no_contact_s > self._fence_s else ""
        if other:
            what = f"no contact for {no_contact_s:.0f} s, and the job now runs in allocation {other}"
            self._note(f"{what}: leaving")
        return bool(other)

    def _check_batch_host(self, no_contact_s: float) -> None:
        if no_contact_s < self._first_s:
            self._due_s = self._first_s
        is_asking = self._thread is not None and self._thread.is_alive()
        if no_contact_s < self._due_s or not self._job_id or is_asking:
            return
        self._due_s = no_contact_s + RETRY_S
        self._thread = _start_thread(self._requeue_if_lost, "lost-supervisor")

    def _requeue_if_lost(self) -> None:
        job = scontrol.show_job(self._job_id)
        if not scontrol.is_orphaned(job, self._restarts):
            return
        refusal = scontrol.run_scontrol("requeue", self._job_id)[1]
        outcome = f"cannot be requeued: {refusal}" if refusal else "is requeued"
        self._note(f"{job['BatchHost']} is lost, and the supervisor with it: Slurm job {self._job_id} {outcome}")


def watch_allocation(
    config: AgentConfig, environ: Mapping[str, str], note: Callable[[str], None]
) -> LostSupervisor | None:
    """Return the checks of an agent that runs in a Slurm step, with its environment; None for any other agent."""
    if not config.allocated:
        return None
    assert config.fence_s is not None, "a node of Slurm is not the supervisor's own machine"
    newer = NewerAllocation(JobDir.at(config.root).allocation, environ)
    return LostSupervisor(environ, newer, config.fence_s, note)


def _start_thread(target: Callable[[], None], name: str) -> threading.Thread | None:
    """Start a thread that ends with the process; None where the limit of processes is reached."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
