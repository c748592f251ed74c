"""Texts of what a job waits for between two attempts: the end of old ranks, a lost host, a checkpoint. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.scheduling import fence, placement
from orchestrator.core.jobdir.status_file import iso, time_of_day

MISSING_SHOWN = 4
"""The number of awaited nodes that a reason names."""


@dataclass(frozen=True, slots=True)
class Now:
    """The present on both clocks, to turn job clock readings into times of day and ages."""

    job_s: float
    wall_s: float

    def iso(self, at_s: float | None) -> str | None:
        """Return the time of day of a job clock reading."""
        return None if at_s is None else iso(self.wall_s - (self.job_s - at_s))

    def age_s(self, at_s: float) -> float:
        """Return how long ago a job clock reading was."""
        return round(max(0.0, self.job_s - at_s), 1)


def fence_text(facts: Facts, attempt: AttemptFacts, now: Now | None) -> str:
    """Return which silent nodes a restart waits for, so that two attempts never run at the same time, until when at most,
    and which spare then takes over."""
    silent = [
        node
        for node in facts.every_node()
        if node.agent_state is not AgentState.UP and not node.is_clear(attempt.number)
    ]
    if attempt.phase is not Phase.STOP or not silent or facts.limits is None or facts.broken_at() is None:
        return ""
    names = ", ".join(node.name for node in silent[:MISSING_SHOWN])
    until_s = max(fence.clear_at(facts, attempt, node, now.job_s) for node in silent) if now else math.inf
    at = now.iso(until_s) if now and until_s < math.inf else None
    until = f", until {time_of_day(at)} at the latest" if at else ""
    spare = next((node.name for node in facts.spares if node.agent_state is AgentState.UP), "")
    takeover = f"; then {spare} takes over" if spare else ""
    return f"; waiting for the end of ranks on {names}{until}{takeover}"


def compare_text(facts: Facts) -> str:
    """Return which checkpoint is verified before the next attempt begins from it."""
    attempt = facts.attempt
    if attempt is None or attempt.compare_ordered_at is None or attempt.checkpoint_to_compare not in facts.checkpoints:
        return ""
    return f"; {facts.checkpoints[attempt.checkpoint_to_compare].main} is verified first"


def host_text(facts: Facts, attempt: AttemptFacts, now: Now | None) -> str:
    """Return which lost host an attempt waits for, as no other can replace it, and until when."""
    awaited = placement.awaited_host(facts, attempt, now.job_s) if now else None
    at = now.iso(awaited[1]) if now and awaited else None
    return (
        f"; waiting for {awaited[0].name} to come back, until {time_of_day(at)} at the latest" if awaited and at else ""
    )
