"""Pauses between retries. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DOUBLINGS_MAX = 30
"""More failures make no difference."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential pauses: `first_s` after one failure, `factor` times as long after each further one, up to `max_s`."""

    first_s: float
    factor: float
    max_s: float

    def pause_s(self, failures: int) -> float:
        """Return the pause after this many consecutive failures; none without a failure."""
        if failures <= 0:
            return 0.0
        return min(self.first_s * self.factor ** min(failures - 1, DOUBLINGS_MAX), self.max_s)
