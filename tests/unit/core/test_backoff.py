"""Pauses between tries."""

from __future__ import annotations

from orchestrator.core.backoff import Backoff


def test_pauses_grow_from_first_failure_to_limit() -> None:
    backoff = Backoff(first_s=1.0, factor=2.0, max_s=30.0)
    assert [backoff.pause_s(failures) for failures in (0, 1, 2, 3, 5, 6, 10_000)] == [0, 1, 2, 4, 16, 30, 30]
