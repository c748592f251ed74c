"""A frame as people write it, `train.py:88 load`."""

from __future__ import annotations

from orchestrator.core.status_types import Frame


def frame(text: str) -> Frame | None:
    """Return a frame; None for an empty text."""
    place, _, function = text.partition(" ")
    file, _, line = place.rpartition(":")
    return Frame(file, int(line), function) if text else None
