"""Retry schedule of one host: when to check its connection and its agent, and when to try to connect again.

Pure: times in, times out, all of one clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.core.backoff import Backoff
from orchestrator.core.observations import Retryable

RECONNECTS = Backoff(first_s=0.5, factor=2.0, max_s=10.0)
"""Between tries to connect again."""

PERMANENT_S = 30.0
"""Between tries when the host refuses for a reason that does not go away by itself."""

STABLE_S = 10.0
"""A connection that held at least this long is opened again at once when it breaks; else after a pause."""

CONNECTION_CHECK_S_MIN = 0.5
"""Shortest time between two checks of a connection."""

AGENT_CHECK_S_MIN = 2.0
"""Shortest time between two checks of an agent: each takes a process on its host."""

CONNECTION_CHECK_S = 30.0
"""How often a healthy connection is checked, which also keeps routers from forgetting it."""

UNUSED_S = 10.0
"""How often an agent is checked that does not dial over an open connection."""


@dataclass(slots=True)
class RetrySchedule:
    """Times (s) of what was done with a host, and of what is requested. A requested time of infinity: no request."""

    opened_s: float = 0.0
    connection_checked_s: float = 0.0
    connection_check_requested_s: float = math.inf
    agent_checked_s: float = 0.0
    agent_check_requested_s: float = math.inf
    retry_s: float = 0.0
    failures: int = 0  # in a row

    def reset(self) -> None:
        """Forget failures: a new wish does not wait for them."""
        self.retry_s, self.failures = 0.0, 0

    def request_connection_check(self) -> None:
        """Check the connection soon: it may be broken."""
        earliest_s = self.connection_checked_s + CONNECTION_CHECK_S_MIN
        self.connection_check_requested_s = min(self.connection_check_requested_s, earliest_s)

    def request_agent_check(self) -> None:
        """Check the agent soon, and end a pause: it may be dead, or out of reach."""
        self.request_connection_check()
        earliest_s = self.agent_checked_s + AGENT_CHECK_S_MIN
        self.agent_check_requested_s = min(self.agent_check_requested_s, earliest_s)
        self.retry_s = min(self.retry_s, earliest_s)

    def note_connection_check(self, now_s: float) -> None:
        """Note that the connection is checked now."""
        self.connection_checked_s, self.connection_check_requested_s = now_s, math.inf

    def note_agent_check(self, now_s: float) -> None:
        """Note that connection and agent are checked now."""
        self.note_connection_check(now_s)
        self.agent_checked_s, self.agent_check_requested_s = now_s, math.inf

    def note_open(self, now_s: float) -> None:
        """Note that a connection was opened now."""
        self.opened_s = now_s

    def note_break(self, now_s: float) -> None:
        """Note that the connection broke: it is opened again at once, unless it breaks each time."""
        if now_s >= self.opened_s + STABLE_S:
            self.reset()
        else:
            self.note_failure(now_s, Retryable.TRANSIENT)

    def note_failure(self, now_s: float, trouble: Retryable) -> None:
        """Note that a try failed: the more fail in a row, the later the next."""
        self.failures += 1
        pause_s = PERMANENT_S if trouble is Retryable.PERMANENT else RECONNECTS.pause_s(self.failures)
        self.retry_s = now_s + pause_s

    def connection_check_due_s(self) -> float:
        """Return when an open connection is to be checked."""
        return min(self.connection_check_requested_s, self.connection_checked_s + CONNECTION_CHECK_S)

    def agent_check_due_s(self, is_used: bool) -> float:
        """Return when the agent is to be checked; one that uses its connection needs no check unless requested."""
        if is_used:
            return self.agent_check_requested_s
        return min(self.agent_check_requested_s, self.agent_checked_s + UNUSED_S)
