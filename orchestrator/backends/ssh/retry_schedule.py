"""When is a host asked, its agent looked for, its way tried again? Pure: times in, times out, all of one clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.core.observations import Retryable

BACKOFF_S = 0.5
BACKOFF_S_MAX = 10.0
"""Between tries to open a way again: doubling from the one to the other."""

MISSES_MAX = 10
"""More in a row make no difference."""

LASTING_S = 30.0
"""Between tries when the host refuses for a reason that does not pass by itself."""

HELD_S = 10.0
"""A way that held for so long is opened again at once when it breaks; else after a pause."""

ASK_S_MIN = 0.5
"""A connection is asked no oftener than that."""

SEE_S_MIN = 2.0
"""An agent is looked for no oftener than that, for it takes a process on its host."""

ASK_S = 30.0
"""A way in which nothing seems wrong is asked so often, which also keeps routers from forgetting it."""

UNUSED_S = 10.0
"""An agent that does not dial over an open way is looked for so often."""


@dataclass(slots=True)
class RetrySchedule:
    """What was done with a host when, and what is wished to be done. `misses`: tries that failed in a row."""

    opened_s: float = 0.0
    asked_s: float = 0.0
    ask_wish_s: float = math.inf
    seen_s: float = 0.0
    see_wish_s: float = math.inf
    retry_s: float = 0.0
    misses: int = 0

    def begin(self) -> None:
        """Something new is wished: what failed before is no reason to wait."""
        self.retry_s, self.misses = 0.0, 0

    def wish_to_ask(self) -> None:
        """The connection may be broken."""
        self.ask_wish_s = min(self.ask_wish_s, self.asked_s + ASK_S_MIN)

    def wish_to_see(self) -> None:
        """The agent may be gone, or cannot be reached: it is worth a try now."""
        self.wish_to_ask()
        self.see_wish_s = min(self.see_wish_s, self.seen_s + SEE_S_MIN)
        self.retry_s = min(self.retry_s, self.seen_s + SEE_S_MIN)

    def ask(self, now_s: float) -> None:
        """The connection is asked now."""
        self.asked_s, self.ask_wish_s = now_s, math.inf

    def see(self, now_s: float) -> None:
        """The agent is looked for now."""
        self.ask(now_s)
        self.seen_s, self.see_wish_s = now_s, math.inf

    def open(self, now_s: float) -> None:
        """A connection is open since now."""
        self.opened_s = now_s

    def broke(self, now_s: float) -> None:
        """The connection broke: it is opened again at once, unless it is one that always breaks."""
        if now_s >= self.opened_s + HELD_S:
            self.begin()
        else:
            self.miss(now_s, Retryable.TRANSIENT)

    def miss(self, now_s: float, trouble: Retryable) -> None:
        """A try failed: the more failed in a row, the later the next."""
        pause_s = min(BACKOFF_S * 2**self.misses, BACKOFF_S_MAX)
        self.retry_s = now_s + (LASTING_S if trouble is Retryable.PERMANENT else pause_s)
        self.misses = min(self.misses + 1, MISSES_MAX)

    def ask_due_s(self) -> float:
        """Return when an open connection is to be asked."""
        return min(self.ask_wish_s, self.asked_s + ASK_S)

    def see_due_s(self, is_used: bool) -> float:
        """Return when the agent is to be looked for; one that uses its way is there."""
        return self.see_wish_s if is_used else min(self.see_wish_s, self.seen_s + UNUSED_S)
