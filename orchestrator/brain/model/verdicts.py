"""Builder of all verdicts: adds the job's present step, and default values for the fields that are not given."""

from __future__ import annotations

import dataclasses

from orchestrator.brain.model.decisions import Kind, Verdict
from orchestrator.brain.model.facts import Facts


def verdict_on(facts: Facts, kind: Kind, summary: str, **more: object) -> Verdict:
    """Build a verdict; `more` are fields of it."""
    blank = Verdict(kind, (), "", summary, (), kind.value, facts.step, facts.progress_at, True)
    return dataclasses.replace(blank, **more)  # type: ignore[arg-type]
