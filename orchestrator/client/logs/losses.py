"""Losses in a rank's log: they show whether a restarted script resumed, or started from the beginning.

The loss is the number after the word `loss`, of training and not of validation, in one line. A loss that
cannot be distinguished from other numbers is skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from orchestrator.core.jobdir import ownership

ATTEMPTS_MAX = 3
"""The number of last attempts whose losses are read: a job may have hundreds."""

HEAD_BYTES = 1 << 20
TAIL_BYTES = 1 << 16

PHASE_CHARS = 200
"""How far before a loss the word for its phase may be."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINE_END = re.compile(r"[\r\n]+")
_LOSS = re.compile(
    r"""(?<![a-z])loss['"]?(?:[ \t]{0,8}[:=][ \t]{0,8}|[ \t]{1,8})['"]?(?:tensor\()?"""
    r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))(?![\w%/]|[-,:.]\d)",
    re.IGNORECASE,
)
_PHASE = re.compile(r"(?<![a-z])(?:(train)|(?:val|valid|eval|test|dev)(?![a-z])|validat|evaluat)", re.IGNORECASE)

_SUMMARY = "train_runtime"
"""In the last line of transformers' Trainer: its loss is a mean over steps that other attempts may have made."""


def read_losses(log: Path) -> tuple[str, str] | None:
    """Return the first and the last loss in a rank's log, as text; None if it has none."""
    try:
        with ownership.open_for_reading(log) as file:
            head = file.read(HEAD_BYTES)
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            is_cut, tail = file.tell() > 0, file.read(TAIL_BYTES)
    except OSError:
        return None
    lines = _lines(tail)
    first = next(_find_losses(_lines(head)), None)
    last = list(_find_losses(lines[1:] if is_cut and len(lines) > 1 else lines))
    return (first, last[-1]) if first and last else None


def _lines(raw: bytes) -> list[str]:
    return _LINE_END.split(_COLOUR.sub("", raw.decode(errors="replace")))


def _find_losses(lines: list[str]) -> Iterator[str]:
    """Yield the training losses, as the last word for a phase before each shows."""
    for line in lines:
        for found in _LOSS.finditer(line) if _SUMMARY not in line else ():
            phases = list(_PHASE.finditer(line, max(0, found.start() - PHASE_CHARS), found.start()))
            if not phases or phases[-1][1]:
                yield found[1]
