"""Finding of a check: the nodes it is about, its severity, what was found, and the fix."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

NAMES_MAX = 4


class Severity(enum.Enum):
    """How bad a finding is."""

    # The job is certain to fail there
    ERROR = "error"
    # It may fail, or be slow
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; without nodes it is about all of them. Until it is `finalize`, `found` does not begin with their names.
    `exit_code`: what it makes of a command; `figures`: speeds of a burn-in by part, in TFLOP/s or GB/s."""

    severity: Severity
    nodes: tuple[str, ...]
    what: str
    found: str
    fix: str
    exit_code: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the job may run in spite of it."""
        return self.severity is not Severity.ERROR

    def finalize(self, found: str, exit_code: int) -> Finding:
        """Return the finding with its text for people, and with an exit code if it is an error."""
        nodes = tuple(filter(None, self.nodes))
        return replace(self, nodes=nodes, found=found, exit_code=0 if self.ok else exit_code)

    def as_json(self) -> dict[str, object]:
        """Return it as `orch check --json` prints it."""
        return {
            "what": self.what, "ok": self.ok, "found": self.found, "fix": self.fix,
            "severity": self.severity.value, "nodes": list(self.nodes), "figures": dict(self.figures),
        }  # fmt: skip


def error(what: str, nodes: Sequence[str], found: str, fix: str, exit_code: int = 0) -> Finding:
    """Return a finding with which the job is certain to fail."""
    return Finding(Severity.ERROR, tuple(nodes), what, found, fix, exit_code)


def warning(what: str, nodes: Sequence[str], found: str, fix: str) -> Finding:
    """Return a finding with which the job may fail, or be slow."""
    return Finding(Severity.WARNING, tuple(nodes), what, found, fix)


def note(what: str, nodes: Sequence[str], found: str) -> Finding:
    """Return a finding that is good to know."""
    return Finding(Severity.NOTE, tuple(nodes), what, found, "")


def passed(what: str, found: str, nodes: Sequence[str] = (), figures: Mapping[str, float] | None = None) -> Finding:
    """Return a finding that all is well."""
    return Finding(Severity.OK, tuple(nodes), what, found, "", figures=figures or {})


def join_names(nodes: Sequence[str]) -> str:
    """Return a list of nodes as text: `node1`, `node1 and node2`, `node1, node2, node3, node4 and 12 more`."""
    shown = list(nodes[:NAMES_MAX])
    if len(nodes) > NAMES_MAX:
        return f"{', '.join(shown)} and {len(nodes) - NAMES_MAX} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def describe(finding: Finding) -> str:
    """Return what was found, with the nodes' names in front where it does not name them."""
    has_names = all(name in finding.found for name in finding.nodes)
    return finding.found if has_names else f"{join_names(finding.nodes)}: {finding.found}"


def format_size(n_bytes: int) -> str:
    """Return a size as text: `64 MiB`, `1.5 GiB`."""
    if n_bytes >= 1 << 30:
        return f"{n_bytes / (1 << 30):.1f} GiB"
    return f"{n_bytes / (1 << 20):.0f} MiB" if n_bytes >= 1 << 20 else f"{n_bytes >> 10} KiB"
