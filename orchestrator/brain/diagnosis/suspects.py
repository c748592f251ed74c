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
from orchestrator.core.shown import Follows, Suspicion
from orchestrator.core.text import named

SILENT_S = 5.0
"""A node that has sent nothing for this long, while no rank makes a step, is named."""

BRIEF_S = 2.0
"""A process that is held by a debugger, or is a zombie, for less than this is not mentioned."""


def decide(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Name what looks like a hang after two inspections that found all ranks stalled: once in a silence, and for a
    place that was named before only when this silence is longer than any pause that the job has shown."""
    if attempt.phase is not Phase.RUN or attempt.running_at is None or not inspections.living(facts):
        return []
    if not inspections.all_heard(facts) or not hang.stands_still(facts, attempt, deadlines):
        return []
    culprits = hang.suspects(facts, attempt, hang.study(facts, attempt))
    unknown, frames = hang_report.places(attempt, culprits)
    place = ", ".join((*unknown, *map(str, frames)))
    named, since_s = attempt.noticed(d.Topic.SUSPECT, place), suspicion.gang_at(facts, attempt)
    if named is not None and (named.at >= since_s or not deadlines.passed(since_s + facts.pause_s)):
        return []
    seen = suspicion_now(facts, deadlines.now_s)
    said = seen.what if seen is not None else ""
    return [d.Notice(deadlines.now_s, said, attempt.number, d.Topic.SUSPECT, place)]


def suspicion_now(facts: Facts, now_s: float) -> Suspicion | None:
    """Return what looks like a failure now; None where nothing does."""
    attempt = facts.attempt
    if attempt is None or attempt.phase is not Phase.RUN or facts.limits is None:
        return None
    return (
        _stopped(facts, now_s)
        or _silent_node(facts, attempt, now_s)
        or _noticed(attempt, now_s)
        or _silence(facts, attempt, now_s)
    )


def _noticed(attempt: AttemptFacts, now_s: float) -> Suspicion | None:
    """Return a hang or a desync that is only reported, as the user chose."""
    noticed = attempt.standing(d.Topic.HANG) or attempt.noticed(d.Topic.DESYNC)
    if noticed is None or (verdict := noticed.verdict) is None:
        return None
    what = f"{verdict.kind.value}: {verdict.summary}"
    frame, for_s = verdict.signature.frame, now_s - verdict.since_s
    return Suspicion(
        what, [*verdict.ranks], verdict.node, for_s, Follows.NOTHING, where=str(frame or ""), frame=frame
    )


def _silent_node(facts: Facts, attempt: AttemptFacts, now_s: float) -> Suspicion | None:
    """Return the node that has sent nothing for the longest, if no rank makes steps meanwhile."""
    nodes = [node for node in facts.gang if node.agent_state is AgentState.SILENT and facts.unfinished(node)]
    node = min(nodes, key=lambda node: node.contact_at, default=None)
    if attempt.running_at is None or node is None:
        return None
    if now_s < max(node.contact_at, facts.stepped_at, attempt.watched_at) + SILENT_S:
        return None
    silent_s, ready = (
        now_s - node.contact_at,
        [one for one in facts.spares if one.agent_state is AgentState.UP],
    )
    what = f"{node.name} ({named(node.ranks)}) has sent no heartbeat for {silent_s:.0f} s, and no rank is stepping"
    in_s = max(0.0, fence.expected_over_at(facts, node) - now_s)
    spare = ready[0].name if ready else ""
    return Suspicion(what, [*node.ranks], node.name, silent_s, Follows.LOST, in_s, spare)


def _silence(facts: Facts, attempt: AttemptFacts, now_s: float) -> Suspicion | None:
    """Return that no rank makes steps, though one runs, and which ranks block the others, as far as inspections show."""
    silence_s = suspicion.suspect_s(facts)
    since_s, gang_at = suspicion.quiet_since(facts, attempt), suspicion.gang_at(facts, attempt)
    if attempt.running_at is None or silence_s is None or now_s < since_s + silence_s or facts.ranks_done:
        return None
    known, has_stepped = suspicion.usual_s(facts), suspicion.has_stepped(facts)
    for_s = now_s - gang_at
    usual = f" (usual: {known:.2g} s)" if known is not None else ""
    silent = f"no step {'' if has_stepped else 'yet '}for {for_s:.0f} s{usual}"
    if not _is_seen(facts, attempt):
        return Suspicion(f"{silent}: inspecting", [], "", for_s, Follows.UNKNOWN)
    working = [rank for rank in inspections.living(facts) if inspections.moves(attempt, rank)]
    answer = hang.study(facts, attempt)
    culprits = working or hang.suspects(facts, attempt, answer)
    what = f"{silent}: {_who(facts, attempt, culprits, answer, bool(working))}"
    ranks, node = [rank.rank for rank in culprits], hang_report.node_of(culprits)
    found = inspections.result(attempt, culprits[0]) if culprits else None
    frame = found.where if found is not None else None
    seen = Suspicion(what, ranks, node, for_s, Follows.MOVES, where=str(frame or ""), frame=frame)
    if working:
        return seen
    ends_at = hang.ends_at(facts, attempt, answer)
    if ends_at == math.inf or (facts.limits is not None and facts.limits.on_hang == "notify"):
        return replace(seen, follows=Follows.NOTHING)
    return replace(seen, follows=Follows.ENDS, in_s=max(0.0, ends_at - now_s))


def _stopped(facts: Facts, now_s: float) -> Suspicion | None:
    """Return the processes that are stopped."""
    words = {"T": "stopped", "t": "held by a debugger", "Z": "a zombie"}
    ranks = [
        rank
        for rank in facts.ranks.values()
        if rank.rank_state is RankState.ALIVE
        and rank.state in words
        and (node := facts.node(rank.node)) is not None  # one of an allocation that is over may be gone
        and node.agent_state is AgentState.UP
        # A rank that ends is a zombie for a moment, and a tool that reads native frames stops it for a moment.
        and (rank.state == "T" or now_s >= rank.state_at + BRIEF_S)
    ]
    if not ranks or facts.limits is None:
        return None
    lines = [
        f"rank {rank.rank} on {rank.node} is {words[rank.state]} (state {rank.state}) for {now_s - rank.state_at:.0f} s"
        for rank in ranks
    ]
    what = "; ".join(lines[:3]) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")
    first = min(ranks, key=lambda rank: rank.state_at)
    ends_s = {"T": hang.STOPPED_S_MAX, "Z": hang.ZOMBIE_S_MAX}.get(first.state)
    numbers, where, for_s = [rank.rank for rank in ranks], hang_report.node_of(ranks), now_s - first.state_at
    if facts.limits.on_hang == "notify":
        return Suspicion(what, numbers, where, for_s, Follows.NOTHING)
    if ends_s is None:
        return Suspicion(what, numbers, where, for_s, Follows.UNKNOWN)
    return Suspicion(what, numbers, where, for_s, Follows.ENDS, max(0.0, ends_s - for_s))


def _is_seen(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether inspections have found what each rank does in the present silence."""
    if attempt.inspected_at is None or attempt.inspected_at < suspicion.quiet_since(facts, attempt):
        return False
    seen = inspections.results(facts, attempt)
    return bool(seen) and all(inspection.activity is not Activity.UNKNOWN for inspection in seen.values())


def _who(
    facts: Facts, attempt: AttemptFacts, culprits: list[RankFacts], answer: collectives.Answer, works: bool
) -> str:
    """Return which ranks make progress, else where the suspects are, and what the others wait in. Ranks wait for each other only
    where several do, each for others."""
    numbers = {rank.rank for rank in culprits}
    seen = inspections.results(facts, attempt)
    others = {rank: inspection for rank, inspection in seen.items() if rank not in numbers}
    waiting = collectives.waiting_text(others, collectives.Unknown() if works else answer)
    parts = (hang_report.who(attempt, culprits, answer), waiting)
    if any(parts):
        return "; ".join(part for part in parts if part)
    alive = inspections.living(facts)
    together = len(alive) > 1 and all(inspections.waits(attempt, rank) for rank in alive)
    return "all ranks wait for each other" if together else "inspections do not show what ranks wait for"
