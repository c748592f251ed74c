"""Outbox of an agent: reports that the supervisor has not acknowledged, sent again on every new connection."""

from __future__ import annotations

from collections import deque

from orchestrator.core.wire.messages import ReliableReport

REPORTS_MAX = 10_000
"""More than any job produces between two contacts; past it the oldest are dropped."""


class Outbox:
    """Numbered reports, oldest first."""

    def __init__(self) -> None:
        self._reports: deque[tuple[int, ReliableReport]] = deque()
        self._last_seq = 0

    def keep(self, report: ReliableReport) -> int:
        """Keep a report and return its number, from 1."""
        self._last_seq += 1
        if len(self._reports) >= REPORTS_MAX:
            self._reports.popleft()
        self._reports.append((self._last_seq, report))
        return self._last_seq

    def acknowledge(self, seq: int) -> None:
        """Drop all reports up to `seq`."""
        while self._reports and self._reports[0][0] <= seq:
            self._reports.popleft()

    def pending(self) -> tuple[tuple[int, ReliableReport], ...]:
        """Return the unacknowledged reports with their numbers, in order."""
        return tuple(self._reports)
