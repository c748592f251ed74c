"""Suspects of a silence, in words: the ranks that others seem to wait for, and where they stand, long before
anything is certain.

They only inform: `orch status`, `orch why` and `notify.on: suspect`.
"""

from __future__ import annotations

from orchestrator.brain.diagnosis import collectives, hang, hang_report, inspections, suspicion
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.model.rank_facts import RankState
from orchestrator.core.observations import Activity

BRIEF_S = 2.0
"""A process that is held by a debugger, or is a zombie, for less than this is not mentioned."""


def decide(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Name what looks like a hang after two inspections that found all ranks unmoved: once in a silence, and for a
    place that was named before only when this silence is longer than any pause that the job has shown."""
    if attempt.phase is not Phase.RUN or attempt.running_at is None or not inspections.living(facts):
        return []
    if not inspections.all_heard(facts) or not hang.stands_still(facts, attempt, deadlines):
        return []
    place = hang_report.places(attempt, hang.suspects(facts, attempt, hang.study(facts, attempt)))
    named_at, since_s = attempt.suspects.get(place), suspicion.gang_at(facts, attempt)
    if named_at is not None and (named_at >= since_s or not deadlines.passed(since_s + facts.pause_s)):
        return []
    return [d.Suspect(deadlines.now_s, text(facts, deadlines.now_s), attempt.number, place)]


def text(facts: Facts, now_s: float) -> str:
    """Say in one line what looks like a hang now; empty where nothing does."""
    attempt = facts.attempt
    if attempt is None or attempt.phase is not Phase.RUN or facts.limits is None:
        return ""
    stopped = _standing(facts, now_s)
    if stopped:
        return stopped
    noticed = attempt.alert or attempt.desynced
    if noticed is not None:
        return f"{noticed.kind.value}: {noticed.summary}"
    silence_s = suspicion.suspect_s(facts)
    since_s = suspicion.quiet_since(facts, attempt)
    if attempt.running_at is None or silence_s is None or now_s < since_s + silence_s:
        return ""
    known = suspicion.usual_s(facts)
    what = f"no step for {now_s - suspicion.gang_at(facts, attempt):.0f} s"
    usual = f" (usual: {known:.2g} s)" if known is not None else ""
    silent = what if suspicion.has_stepped(facts) else f"nothing heard for {now_s - since_s:.0f} s"
    return f"{silent}{usual}: {_found(facts, attempt)}"


def _standing(facts: Facts, now_s: float) -> str:
    """Say which processes are stopped."""
    words = {"T": "stopped", "t": "held by a debugger", "Z": "a zombie"}
    lines = [
        f"rank {rank.rank} on {rank.node} is {words[rank.state]} (state {rank.state}) for {now_s - rank.state_at:.0f} s"
        for rank in facts.ranks.values()
        if rank.rank_state is RankState.ALIVE
        and rank.state in words
        and (node := facts.node(rank.node)) is not None  # one of an allocation that is over may be gone
        and node.agent_state is AgentState.UP
        # A rank that ends is a zombie for a moment, and a tool that reads native frames stops it for a moment.
        and (rank.state == "T" or now_s >= rank.state_at + BRIEF_S)
    ]
    return "; ".join(lines[:3]) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")


def _found(facts: Facts, attempt: AttemptFacts) -> str:
    """Say what the last inspection has found: which ranks work, else which ones stand where, and in what the
    others wait."""
    if attempt.inspected_at is None or attempt.inspected_at < suspicion.quiet_since(facts, attempt):
        return "looking"
    seen = inspections.results(facts, attempt)
    if any(inspection.activity is Activity.UNKNOWN for inspection in seen.values()) or not seen:
        return "looking"
    working = [rank for rank in inspections.living(facts) if inspections.moves(attempt, rank)]
    answer = hang.study(facts, attempt)
    culprits = working or hang.suspects(facts, attempt, answer)
    numbers = {rank.rank for rank in culprits}
    others = {rank: inspection for rank, inspection in seen.items() if rank not in numbers}
    waiting = collectives.waiting_text(others, collectives.Unknown() if working else answer)
    parts = (hang_report.who(attempt, culprits, answer), waiting)
    return "; ".join(part for part in parts if part) or "all ranks wait for each other"
