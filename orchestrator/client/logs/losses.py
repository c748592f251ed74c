"""Losses that a rank has logged: they show whether a restarted script went on, or began from the start again.

Read as people read a log: the number after the word `loss`, of training and not of validation.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ATTEMPTS_MAX = 3
"""Of how many attempts, the last ones, the losses are read: a job may have hundreds."""

HEAD_BYTES = 1 << 20
TAIL_BYTES = 1 << 16

_LOSS = re.compile(
    rb"(?i)(?<![a-z])(?<!val[ _/])(?<!eval[ _/])(?<!test[ _/])(?<!validation[ _/])loss['\"]?\s*[:=]?\s*"
    rb"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)\b)"
)


def of_log(log: Path) -> tuple[str, str] | None:
    """Return the first and the last loss in a rank's log, as they stand there; None where it has none."""
    try:
        with log.open("rb") as file:
            head = file.read(HEAD_BYTES)
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            tail = file.read(TAIL_BYTES)
    except OSError:
        return None
    first, last = _LOSS.search(head), list(_LOSS.finditer(tail))
    return (first[1].decode(), last[-1][1].decode()) if first and last else None
