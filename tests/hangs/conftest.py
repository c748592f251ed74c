"""What do the galleries share? The choice of those that are played.

Without the mark `soak` that is about a twelfth, of some a larger part, others at each commit.
"""

from __future__ import annotations

import hashlib
import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from .runs import Entry


def selected(request: pytest.FixtureRequest, entries: Sequence[Entry]) -> list[Entry]:
    """Return those entries whose tests will run in this module, in their order."""
    names = {
        item.callspec.params["entry"].name
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec") and "entry" in item.callspec.params
    }
    return [entry for entry in entries if entry.name in names]


QUIET = frozenset({"finished_early_and_closed_its_sockets"})
"""Within a second of the first victim its culprit must be gone, too, which takes longer on a busy machine."""


def as_params(entries: Sequence[Entry], one_in: Callable[[Entry], int]) -> list[object]:
    """Return pytest's parameters, of which one in so many is played at each commit; the others bear the mark `soak`.

    The commit's hash chooses; of entries with the same share it is always the same number, at least one.
    """
    commit = _commit()
    by_turn = sorted(entries, key=lambda one: hashlib.sha256(f"{commit} {one.name}".encode()).digest())
    played: list[Entry] = []
    for share in {one_in(entry) for entry in entries}:
        alike = [entry for entry in by_turn if one_in(entry) == share]
        played += alike[: math.ceil(len(alike) / share)]

    def marks(entry: Entry) -> list[pytest.MarkDecorator]:
        return [pytest.mark.quiet] * (entry.name in QUIET) + [pytest.mark.soak] * (entry not in played)

    return [pytest.param(entry, id=entry.name, marks=marks(entry)) for entry in entries]


def _commit() -> str:
    """Return the hash of the commit, or nothing where this is not a checkout."""
    argv = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(argv, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10)
    return done.stdout.strip()
