"""Finding of a check: the nodes it is about, how bad it is, what was found, and how to mend it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

NAMES_MAX = 4


class Severity(enum.Enum):
    """How bad a finding is."""

    # The job is certain to fail there
    ERROR = "error"
    # It may fail, or be slow
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `found` does not begin with the nodes' names; a finding without nodes is about all of them."""

    severity: Severity
    nodes: tuple[str, ...]
    what: str
    found: str
    fix: str


def error(what: str, nodes: Sequence[str], found: str, fix: str) -> Finding:
    """Return a finding with which the job is certain to fail."""
    return Finding(Severity.ERROR, tuple(nodes), what, found, fix)


def warning(what: str, nodes: Sequence[str], found: str, fix: str) -> Finding:
    """Return a finding with which the job may fail, or be slow."""
    return Finding(Severity.WARNING, tuple(nodes), what, found, fix)


def note(what: str, nodes: Sequence[str], found: str) -> Finding:
    """Return a finding that is good to know."""
    return Finding(Severity.NOTE, tuple(nodes), what, found, "")


def names(nodes: Sequence[str]) -> str:
    """Return nodes in words: `node1`, `node1 and node2`, `node1, node2, node3, node4 and 12 more`."""
    shown = list(nodes[:NAMES_MAX])
    if len(nodes) > NAMES_MAX:
        return f"{', '.join(shown)} and {len(nodes) - NAMES_MAX} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def words(one: Finding) -> str:
    """Return what was found, with the nodes' names in front where it does not name them."""
    has_names = all(name in one.found for name in one.nodes)
    return one.found if has_names else f"{names(one.nodes)}: {one.found}"


def size(n_bytes: int) -> str:
    """Return a size in words: `64 MiB`, `1.5 GiB`."""
    if n_bytes >= 1 << 30:
        return f"{n_bytes / (1 << 30):.1f} GiB"
    return f"{n_bytes / (1 << 20):.0f} MiB" if n_bytes >= 1 << 20 else f"{n_bytes >> 10} KiB"
