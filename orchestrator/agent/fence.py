"""Fence of an agent: the time for which its ranks go on without contact to the supervisor and without a step.

Rules: only steps prove that the gang is whole, since a cut-off rank may write logs without end. Ranks without a step
in their attempt have a limit of their own. The supervisor sets both times, and waits longer itself.
"""

from __future__ import annotations

from orchestrator.agent.start.processes import NodeRanks
from orchestrator.core.wire import messages as m


class Fence:
    """The times (s) that hold for this agent: `base_s` until the supervisor sends others, None for no fence at all."""

    def __init__(self, base_s: float | None) -> None:
        self._quiet_s = base_s
        self._alone_s = 0.0

    def begin(self) -> None:
        """Begin an attempt, and reset the time for ranks without steps, which belonged to earlier ranks."""
        self._alone_s = 0.0

    def take(self, order: m.Fence) -> None:
        """Take the times that the supervisor orders."""
        self._quiet_s, self._alone_s = order.quiet_s, order.alone_s

    def over_s(self, ranks: NodeRanks, proved_at: float, now_s: float) -> float | None:
        """Return the time (s) without contact and step if it is over the limit, else None."""
        if self._quiet_s is None or now_s - max(proved_at, ranks.progress_at) <= self._quiet_s:
            return None
        ranks.heartbeats()  # this process may have been stopped while its ranks went on
        quiet_s = now_s - max(proved_at, ranks.progress_at)
        limit_s = self._quiet_s if ranks.last_step_ns() else max(self._quiet_s, self._alone_s)
        return quiet_s if quiet_s > limit_s else None
