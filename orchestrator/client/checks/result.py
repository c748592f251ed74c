"""Result of one part of a check, as `orch check` prints it."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.brain.checks.finding import Finding as Judged
from orchestrator.brain.checks.finding import Severity
from orchestrator.core.codec import Json


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: whether it passed, what it found, and how to mend a fault.

    One that is ok and has a fix is a warning. `nodes`: those that it is about, empty for the whole job.
    """

    what: str
    ok: bool
    found: str
    fix: str = ""
    exit_code: int = 0
    nodes: tuple[str, ...] = ()
    is_note: bool = False

    @property
    def severity(self) -> str:
        """`error`, `warning`, `note`, or `ok`."""
        return "error" if not self.ok else "warning" if self.fix else "note" if self.is_note else "ok"

    def as_json(self) -> Json:
        return {
            "what": self.what, "ok": self.ok, "found": self.found, "fix": self.fix,
            "severity": self.severity, "nodes": list(self.nodes),
        }  # fmt: skip


def of_judged(one: Judged, found: str, exit_code: int) -> Finding:
    """Return a judged finding with its words; only an error has the exit code."""
    is_error = one.severity is Severity.ERROR
    return Finding(
        one.what, not is_error, found, one.fix, exit_code if is_error else 0,
        tuple(name for name in one.nodes if name), one.severity is Severity.NOTE,
    )  # fmt: skip
