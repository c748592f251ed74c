"""How does a night read? One line for each event and decision, for people and for golden files."""

from __future__ import annotations

import dataclasses
import enum

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import News
from orchestrator.core.checkpoints.checkpoint import Checkpoint
from orchestrator.core.checkpoints.resume_choice import ResumePoint, SkippedCheckpoint
from orchestrator.core.plan_types import PlannedNode
from orchestrator.core.status_types import Frame
from orchestrator.journal.journal_file import unwrap_message

from .world import World

LINES_MAX = 60
"""How many of the last lines a broken night shows."""

_SILENT = ("at", "why", "attempt", "node", "limits")


def tale(world: World) -> list[str]:
    """Return the night line by line: `!` what befell it, `>` what was heard, `<` what was decided."""
    return [f"{at:8.2f} {_line(what)}" for at, what in world.ledger.notes]


def _line(what: News | str) -> str:
    if isinstance(what, str):
        return f"! {what}"
    mark = "<" if isinstance(what, d.Decision) else ">"
    node = f" {what.node}" if hasattr(what, "node") else ""
    held = unwrap_message(what)
    attempt = f" #{held.attempt}" if hasattr(held, "attempt") else ""
    rest = [
        f"{field.name}={_value(getattr(held, field.name))}"
        for field in dataclasses.fields(held)
        if field.name not in _SILENT and getattr(held, field.name) not in (None, "", False, ())
    ]
    why = f"  -- {what.why}" if isinstance(what, d.Decision) else ""
    return " ".join([f"{mark} {type(held).__name__}{attempt}{node}", *rest]) + why


def _value(value: object) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, ResumePoint):
        return f"{value.save}:{value.path}@{value.step}"
    if isinstance(value, Frame):
        return str(value)
    if isinstance(value, Checkpoint):
        why = f" ({value.why})" if value.why else ""
        more = f" coming from {value.locations[0].host}" if value.is_in_transit else ""
        more += f" compared by {value.compared}" if value.compared and not why else ""
        return f"{value.number}:{value.main}@{value.step} {value.state.value}{more}{why}"
    if isinstance(value, SkippedCheckpoint):
        return f"{value.save}:{value.main} {value.why}"
    if isinstance(value, d.Verdict):
        ranks = ",".join(map(str, value.ranks)) or "-"
        evidence = "".join(f"\n{'':13}{line}" for text in value.evidence for line in text.splitlines())
        signature = " ".join(value.signature.texts)
        return (
            f"{value.kind.value} ranks {ranks} node {value.node or '-'} step {value.step} since {value.since_s:.2f} "
            f"retry {value.retry} [{signature}]: {value.summary}{evidence}"
        )
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, PlannedNode):
        return _value((value.name, value.ranks))
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], tuple):
        return f"{value[0]}/{_value(value[1])}"
    if isinstance(value, tuple):
        return "(" + ",".join(_value(item) for item in value) + ")"
    if dataclasses.is_dataclass(value):
        held = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return "/".join(_value(one) for one in held if one not in (None, ""))
    return str(value)
