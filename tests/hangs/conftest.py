"""What do the galleries share? The choice of those that are played.

Without the mark `soak` that is a twelfth, of some a larger part, others at each commit.
"""

from __future__ import annotations

import hashlib
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
    """Return pytest's parameters, of which one in so many is played at each commit; the others bear the mark `soak`."""
    commit = _commit()

    def marks(entry: Entry) -> list[pytest.MarkDecorator]:
        is_played = _is_in_turn(entry, commit, one_in(entry))
        return [pytest.mark.quiet] * (entry.name in QUIET) + [pytest.mark.soak] * (not is_played)

    return [pytest.param(entry, id=entry.name, marks=marks(entry)) for entry in entries]


def _is_in_turn(entry: Entry, commit: str, one_in: int) -> bool:
    """Tell whether an entry is of the part that the commit's hash chooses."""
    return hashlib.sha256(f"{commit} {entry.name}".encode()).digest()[0] % one_in == 0


def _commit() -> str:
    """Return the hash of the commit, or nothing where this is not a checkout."""
    argv = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(
        argv, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10
    )
    return done.stdout.strip()
