"""The fence of an agent: for how long its ranks go on when neither the supervisor is heard nor a step is made.

Rules: only steps prove that the gang is whole, for a rank that is cut off may write logs for ever; ranks that have made
none in their attempt may go on for as long as was told for such. The times are the supervisor's, which waits longer.
"""

from __future__ import annotations

from orchestrator.agent.rank.processes import NodeRanks
from orchestrator.core.wire import messages as m


class Fence:
    """The times that hold for this agent now; `base_s` as long as none was told, None for no fence at all."""

    def __init__(self, base_s: float | None) -> None:
        self._quiet_s = base_s
        self._alone_s = 0.0

    def begin(self) -> None:
        """Another attempt starts here: what was told of ranks without steps was told of others."""
        self._alone_s = 0.0

    def take(self, order: m.Fence) -> None:
        """Go by what the supervisor says now."""
        self._quiet_s, self._alone_s = order.quiet_s, order.alone_s

    def over_s(self, ranks: NodeRanks, heard_at: float, now_s: float) -> float | None:
        """Return for how long all was quiet if that is too long, else None."""
        if self._quiet_s is None or now_s - max(heard_at, ranks.progress_at) <= self._quiet_s:
            return None
        ranks.heartbeats()  # this process may have been stopped for a while, and its ranks not
        quiet_s = now_s - max(heard_at, ranks.progress_at)
        limit_s = self._quiet_s if ranks.last_step_ns() else max(self._quiet_s, self._alone_s)
        return quiet_s if quiet_s > limit_s else None
