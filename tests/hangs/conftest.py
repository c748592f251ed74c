"""What do the galleries share? A desk for each, and their jobs running side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.local import Desk

from .runs import Entry


@contextmanager
def desk_at(folder: Path) -> Iterator[Desk]:
    """Give a desk with a home in `folder`; afterwards nothing of its jobs may be left."""
    desk = Desk(folder, {**os.environ, "ORCH_HOME": str(folder / "home")})
    try:
        yield desk
    finally:
        left = desk.clear_up()
    assert not left, "processes of ended jobs were left:\n" + "\n".join(left)


def selected(request: pytest.FixtureRequest, entries: Sequence[Entry]) -> list[Entry]:
    """Return those entries whose tests will run in this module, in their order."""
    names = {
        item.callspec.params["entry"].name
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec") and "entry" in item.callspec.params
    }
    return [entry for entry in entries if entry.name in names]


def as_params(entries: Sequence[Entry]) -> list[object]:
    """Return pytest's parameters; those that take long bear the mark `long`."""
    return [
        pytest.param(entry, id=entry.name, marks=[pytest.mark.long] if entry.is_long else [])
        for entry in entries
    ]
