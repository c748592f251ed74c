"""Departure of an agent: when one without ranks leaves by itself, and what its files still need.

- A dismissed agent waits until its logs have arrived, and its checkpoints in memory are on disk.
- An agent that is ended by a signal has a few seconds for the checkpoints: who sends TERM sends KILL soon.
- One that may not be part of the job any more copies nothing to a shared disk: a newer checkpoint may be there.
"""

from __future__ import annotations

import time

from orchestrator.agent.outputs.checkpoint_memory import CheckpointMemory
from orchestrator.agent.outputs.log_shipper import LogShipper
from orchestrator.agent.process.lost_supervisor import no_contact_s_max
from orchestrator.agent.process.supervisor_link import SupervisorLink
from orchestrator.core.jobdir.layout import JobDir

SIGNALLED_S_MAX = 8.0
"""How long after a signal checkpoints are copied to disk: `bootstrap.cleanup` kills an agent after its `EXIT_S_MAX`."""


class Departure:
    """Departure of one agent."""

    def __init__(
        self, job: JobDir, link: SupervisorLink, shipper: LogShipper | None, memory: CheckpointMemory | None
    ) -> None:
        """`shipper`: None where logs are not sent; `memory`: None where checkpoints are written to disk."""
        self._job, self._link, self._shipper, self._memory = job, link, shipper, memory
        self.dismissed_at: float | None = None
        self._drain_by_s = float("-inf")

    def dismiss(self) -> None:
        """Note that the supervisor has dismissed the agent."""
        self.dismissed_at = self.dismissed_at or time.monotonic()
        self._drain_by_s = float("inf")

    def note_signal(self) -> None:
        """Note that a signal ends the agent."""
        self._drain_by_s = max(self._drain_by_s, time.monotonic() + SIGNALLED_S_MAX)

    @property
    def is_urgent(self) -> bool:
        """Whether there is no time for a last scan: the next agent finds on disk what is not reported, but nothing in memory."""
        return self.dismissed_at is None and (self._memory is None or time.monotonic() > self._drain_by_s)

    def is_due(self, no_contact_s: float) -> bool:
        """Return whether an agent without ranks leaves by itself: after this time without contact, or since the job is over."""
        is_over = not self._link.connected and self._job.ended.exists()
        is_abandoned = no_contact_s > no_contact_s_max(self._link.has_pending)
        if is_over or (is_abandoned and self._shipper is not None):  # nobody else writes to the disk
            self._drain_by_s = float("inf")
        return is_over or is_abandoned

    def finish(self) -> None:
        """Close the folder in memory and the connection."""
        if self._memory is not None:
            self._memory.poll()
            self._memory.close()
        if self.dismissed_at is not None:
            self._link.say_goodbye()
        self._link.close()

    def is_ready(self, attempts: tuple[int, ...]) -> bool:
        """Return whether nothing more is waited for. `attempts`: whose logs still grow."""
        is_drained = self._memory is None or time.monotonic() > self._drain_by_s or self._memory.drain()
        if self._shipper is None or self.dismissed_at is None:
            return is_drained
        return self._shipper.is_done(attempts, self.dismissed_at, self._link.disconnected_s) and is_drained
