"""Suspects of a silence: the ranks that others seem to wait for, where they are, and what follows when, long before a
verdict.

They only inform: `orch status`, `orch why` and `notify.on: suspect`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from orchestrator.brain.diagnosis import collectives, hang, hang_report, inspections, suspicion
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.brain.scheduling import fence
from orchestrator.core.observations import Activity
from orchestrator.core.status_types import NextAction, Suspicion
from orchestrator.core.text import ranks_label

SILENT_S = 5.0
"""A node that has sent nothing for this long, while no rank makes a step, is named."""

MOMENTARY_STATE_S_MAX = 2.0
"""A process that is held by a debugger, or is a zombie, for less than this is not mentioned."""


def decide(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Name what looks like a hang after two inspections that found all ranks stalled: once in a silence, and for a
    place that was named before only when this silence is longer than any pause that the job has shown."""
    if attempt.phase is not Phase.RUN or attempt.running_at is None or not inspections.living_ranks(facts):
        return []
    if not inspections.are_all_connected(facts) or not hang.is_stalled(facts, attempt, deadlines):
        return []
    culprits = hang.find_suspects(facts, attempt, hang.analyze(facts, attempt))
    unknown, frames = hang_report.culprit_frames(attempt, culprits)
    place = ", ".join((*unknown, *map(str, frames)))
    noticed, since_s = (
        attempt.last_notice(d.NoticeTopic.SUSPECT, place),
        suspicion.gang_progress_at(facts, attempt),
    )
    if noticed is not None and (noticed.at >= since_s or not deadlines.passed(since_s + facts.longest_pause_s)):
        return []
    suspicion_found = current_suspicion(facts, deadlines.now_s)
    what = suspicion_found.what if suspicion_found is not None else ""
    return [d.Notice(deadlines.now_s, what, attempt.number, d.NoticeTopic.SUSPECT, place)]


def current_suspicion(facts: Facts, now_s: float) -> Suspicion | None:
    """Return what looks like a failure now; None where nothing does."""
    attempt = facts.attempt
    if attempt is None or attempt.phase is not Phase.RUN or facts.limits is None:
        return None
    return (
        _stopped_processes(facts, now_s)
        or _silent_node(facts, attempt, now_s)
        or _noticed_suspicion(attempt, now_s)
        or _stall_suspicion(facts, attempt, now_s)
    )


def _noticed_suspicion(attempt: AttemptFacts, now_s: float) -> Suspicion | None:
    """Return a hang or a desync that is only reported, as the user chose."""
    noticed = attempt.active_notice(d.NoticeTopic.HANG) or attempt.last_notice(d.NoticeTopic.DESYNC)
    if noticed is None or (verdict := noticed.verdict) is None:
        return None
    what = f"{verdict.kind.value}: {verdict.summary}"
    frame, for_s = verdict.signature.frame, now_s - verdict.since_s
    return Suspicion(
        what, [*verdict.ranks], verdict.node, for_s, NextAction.NOTHING, where=str(frame or ""), frame=frame
    )


def _silent_node(facts: Facts, attempt: AttemptFacts, now_s: float) -> Suspicion | None:
    """Return the node that has sent nothing for the longest, if no rank makes steps meanwhile."""
    nodes = [node for node in facts.gang if node.agent_state is AgentState.SILENT and facts.is_unfinished(node)]
    node = min(nodes, key=lambda node: node.contact_at, default=None)
    if attempt.running_at is None or node is None:
        return None
    if now_s < max(node.contact_at, facts.stepped_at, attempt.watched_at) + SILENT_S:
        return None
    silent_s, spares_up = (
        now_s - node.contact_at,
        [one for one in facts.spares if one.agent_state is AgentState.UP],
    )
    what = (
        f"{node.name} ({ranks_label(node.ranks)}) has sent no heartbeat for {silent_s:.0f} s, and no rank is stepping"
    )
    in_s = max(0.0, fence.expected_over_at(facts, node) - now_s)
    spare = spares_up[0].name if spares_up else ""
    return Suspicion(what, [*node.ranks], node.name, silent_s, NextAction.LOST, in_s, spare)


def _stall_suspicion(facts: Facts, attempt: AttemptFacts, now_s: float) -> Suspicion | None:
    """Return that no rank makes steps, though one runs, and which ranks block the others, as far as inspections show."""
    silence_s = suspicion.suspicious_silence_s(facts)
    since_s, gang_at = suspicion.quiet_since(facts, attempt), suspicion.gang_progress_at(facts, attempt)
    if attempt.running_at is None or silence_s is None or now_s < since_s + silence_s or facts.are_ranks_done:
        return None
    usual_pass_s = suspicion.usual_pass_s(facts)
    usual_s, for_s = usual_pass_s or suspicion.usual_step_s(facts), now_s - gang_at
    usual = f" (usual: {usual_s:.2g} s)" if usual_s is not None else ""
    missed = "backward pass" if usual_pass_s else "step" if suspicion.has_stepped(facts) else "step yet"
    silent = f"no {missed} for {for_s:.0f} s{usual}"
    if not _are_all_inspected(facts, attempt):
        return Suspicion(f"{silent}: inspecting", [], "", for_s, NextAction.UNKNOWN)
    working = [rank for rank in inspections.living_ranks(facts) if inspections.is_moving(attempt, rank)]
    answer = hang.analyze(facts, attempt)
    culprits = working or hang.find_suspects(facts, attempt, answer)
    what = f"{silent}: {_describe_ranks(facts, attempt, culprits, answer, bool(working))}"
    ranks, node = [rank.rank for rank in culprits], hang_report.common_node(culprits)
    found = inspections.last_inspection(attempt, culprits[0]) if culprits else None
    frame = found.where if found is not None else None
    suspicion_found = Suspicion(what, ranks, node, for_s, NextAction.MOVES, where=str(frame or ""), frame=frame)
    if working:
        return suspicion_found
    ends_at = hang.ends_at(facts, attempt, answer)
    if ends_at == math.inf or (facts.limits is not None and facts.limits.on_hang == "notify"):
        return replace(suspicion_found, follows=NextAction.NOTHING)
    return replace(suspicion_found, follows=NextAction.ENDS, in_s=max(0.0, ends_at - now_s))


def _stopped_processes(facts: Facts, now_s: float) -> Suspicion | None:
    """Return the processes that are stopped."""
    state_texts = {"T": "stopped", "t": "held by a debugger", "Z": "a zombie"}
    ranks = [
        rank
        for rank in facts.ranks.values()
        if rank.rank_state is RankState.ALIVE
        and rank.state in state_texts
        and (node := facts.node(rank.node)) is not None  # one of an allocation that is over may be gone
        and node.agent_state is AgentState.UP
        # A rank that ends is a zombie for a moment, and a tool that reads native frames stops it for a moment.
        and (rank.state == "T" or now_s >= rank.state_at + MOMENTARY_STATE_S_MAX)
    ]
    if not ranks or facts.limits is None:
        return None
    lines = [
        f"rank {rank.rank} on {rank.node} is {state_texts[rank.state]} (state {rank.state}) for {now_s - rank.state_at:.0f} s"
        for rank in ranks
    ]
    what = "; ".join(lines[:3]) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")
    first = min(ranks, key=lambda rank: rank.state_at)
    ends_s = {"T": hang.STOPPED_S_MAX, "Z": hang.ZOMBIE_S_MAX}.get(first.state)
    numbers, where, for_s = (
        [rank.rank for rank in ranks],
        hang_report.common_node(ranks),
        now_s - first.state_at,
    )
    if facts.limits.on_hang == "notify":
        return Suspicion(what, numbers, where, for_s, NextAction.NOTHING)
    if ends_s is None:
        return Suspicion(what, numbers, where, for_s, NextAction.UNKNOWN)
    return Suspicion(what, numbers, where, for_s, NextAction.ENDS, max(0.0, ends_s - for_s))


def _are_all_inspected(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether inspections have found what each rank does in the present silence."""
    if attempt.inspected_at is None or attempt.inspected_at < suspicion.quiet_since(facts, attempt):
        return False
    inspected = inspections.last_inspections(facts, attempt)
    return bool(inspected) and all(inspection.activity is not Activity.UNKNOWN for inspection in inspected.values())


def _describe_ranks(
    facts: Facts,
    attempt: AttemptFacts,
    culprits: list[RankFacts],
    answer: collectives.Analysis,
    is_working: bool,
) -> str:
    """Return which ranks make progress, else where the suspects are, and what the others wait in. Ranks wait for each other only
    where several do, each for others."""
    numbers = {rank.rank for rank in culprits}
    inspected = inspections.last_inspections(facts, attempt)
    others = {rank: inspection for rank, inspection in inspected.items() if rank not in numbers}
    waiting = collectives.describe_waiting(others, collectives.Undetermined() if is_working else answer)
    parts = (hang_report.describe_culprits(attempt, culprits, answer), waiting)
    if any(parts):
        return "; ".join(part for part in parts if part)
    alive = inspections.living_ranks(facts)
    together = len(alive) > 1 and all(inspections.is_waiting(attempt, rank) for rank in alive)
    return "all ranks wait for each other" if together else "inspections do not show what ranks wait for"
