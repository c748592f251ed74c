"""Deadlines of one call of `decide`: which have passed, and the nearest one that has not."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Deadlines:
    """The job clock during one call of `decide`. At its end, `wake_s` is the earliest deadline that was checked and has not
    passed."""

    now_s: float
    wake_s: float = field(default=float("inf"))

    def passed(self, deadline_s: float) -> bool:
        """Return whether `deadline_s` has passed; if not, remember it."""
        if self.now_s >= deadline_s:
            return True
        self.wake_s = min(self.wake_s, deadline_s)
        return False
