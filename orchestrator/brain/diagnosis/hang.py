"""Hangs: the verdict on a stalled gang, and its culprits, from the last inspections.

Rules:
1. There is no verdict while any rank makes progress, nor on fewer than two inspections in a row. A node that misses one
   inspection is waited for, since its answer may be late; a node that misses two counts as not inspected.
2. Two things prove a hang: a stopped process, and collectives that do not match or miss a member that has ended.
3. Any other rank that stays in one place is named at once, and ends the attempt only after the stall timeout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.brain.diagnosis import collectives, hang_report, inspections, stall_timeout, suspicion
from orchestrator.brain.diagnosis.collectives import Mismatch, Missing, Unknown, Whole
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Evidence, EvidenceKind, FailureCause, Kind, Verdict
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.model.rank_facts import RankFacts
from orchestrator.core.observations import Activity
from orchestrator.core.text import named, ranks_text

STOPPED_S_MAX = 5.0
"""How long a rank may be seen in state T (stopped) before that is a hang: a pause of 3 s does no harm."""

ZOMBIE_S_MAX = 2.0
"""The same in state Z, its main thread gone and others not: on a busy machine the end of a process takes a moment."""

APART_STEPS = 3
"""Ranks that make steps together are never this many steps apart: all wait for each other in each step."""

UNSEEN_S_MAX = 40.0
"""How long after the limit of the rendezvous a living rank that shows no stack is inspected again before it counts as
one that has not come: on a busy machine an answer may come late."""

IDLE_S = 2.0
"""Ranks that have used no processor for this long before an inspection send nothing to each other."""


def judge(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict on a gang that hangs, or None; deadlines still ahead are left in `deadlines`."""
    if attempt.phase is not Phase.RUN:
        return None
    standing = _stands_still(facts, attempt)
    if standing is not None or attempt.running_at is None or not inspections.living(facts):
        return standing
    if not inspections.all_heard(facts):
        return None  # what a silent node does is not known; see `node_lost`
    late = _no_first_step(facts, attempt, deadlines) or _never_came(facts, attempt, deadlines)
    if late is not None or suspicion.suspect_s(facts) is None:
        return late
    return _verified(facts, attempt, deadlines)


# Failures that need no second inspection


def _stands_still(facts: Facts, attempt: AttemptFacts) -> Verdict | None:
    """A stopped process (T) hangs the gang, unless inspections show progress; one whose main thread is a zombie (Z) never continues."""
    seen = [rank for rank in inspections.living(facts) if facts.nodes[rank.node].agent_state is AgentState.UP]
    states = (("Z", ZOMBIE_S_MAX, "a zombie (state Z)"), ("T", STOPPED_S_MAX, "stopped (state T)"))
    for state, limit_s, words in states:
        since_s = {
            rank.rank: rank.beat_at - rank.state_at
            for rank in seen
            if rank.state == state and not (state == "T" and inspections.moves(attempt, rank))
        }
        if since_s and max(since_s.values()) >= limit_s:
            # When several are stopped together, some of them report it a beat later.
            ranks = [facts.ranks[rank] for rank, still_s in since_s.items() if still_s >= limit_s / 2]
            where = ", ".join(dict.fromkeys(rank.node for rank in ranks))
            who = f"{named([rank.rank for rank in ranks])} on {where} {'is' if len(ranks) == 1 else 'are'} {words}"
            still = f" for {max(since_s.values()):.0f} s" if state == "T" else ""
            return _by_state(facts, ranks, f"{who}{still}", min(rank.state_at for rank in ranks))
    return None


def _by_state(facts: Facts, ranks: list[RankFacts], summary: str, since_s: float) -> Verdict:
    attempt, inspection = facts.attempt, ranks[0].inspection
    assert attempt is not None
    at = f", {inspection.where}" if len(ranks) == 1 and inspection is not None and inspection.where else ""
    return _hang(
        facts, attempt, ranks, summary, Unknown(), culprit=summary + at, since_s=since_s,
        cause=FailureCause.STOPPED, place=(ranks_text(rank.rank for rank in ranks),),
    )  # fmt: skip


def _no_first_step(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    assert facts.limits is not None
    limit_s = facts.limits.first_step_timeout_s
    due_s = suspicion.limit_at(facts, attempt, limit_s)
    if due_s is None or not deadlines.passed(due_s):
        return None
    summary = f"no first step within {limit_s:g} s (monitor.first_step_timeout)"
    culprits = [rank for rank in inspections.living(facts) if not inspections.waits(attempt, rank)]
    place, frames = hang_report.places(attempt, culprits)
    return _hang(
        facts, attempt, culprits, summary, study(facts, attempt), since_s=due_s,
        culprit=hang_report.who(attempt, culprits),
        cause=FailureCause.FIRST_STEP, place=place, frames=frames,
    )  # fmt: skip


def _never_came(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Judge ranks that wait at the rendezvous longer than the user's limit: the verdict says which have joined and which have not."""
    assert facts.limits is not None
    limit_s = facts.limits.rendezvous_timeout_s
    due_s = suspicion.limit_at(facts, attempt, limit_s)
    if due_s is None:
        return None
    seen = (attempt.inspected_at or 0.0) >= due_s and inspections.is_answered(facts, attempt, deadlines)
    came = [rank for rank in inspections.living(facts) if _is_at_rendezvous(attempt, rank)] if seen else []
    if not came or not deadlines.passed(due_s):
        return None
    if _has_unseen(facts, attempt) and not deadlines.passed(due_s + UNSEEN_S_MAX):
        return None
    there = {rank.rank for rank in came}
    missing = [rank for rank in facts.ranks.values() if rank.rank not in there]
    those = ranks_text(rank.rank for rank in missing)
    who = f"ranks {those} have not joined" if missing else "all have joined, but cannot reach one another"
    summary = f"no rendezvous within {limit_s:g} s (monitor.rendezvous_timeout): {who}"
    place, frames = hang_report.places(attempt, missing)
    return facts.verdict_on(
        Kind.RENDEZVOUS, summary, ranks=tuple(rank.rank for rank in missing), node=hang_report.node_of(missing),
        culprit=hang_report.who(attempt, missing), waiting=f"{named([rank.rank for rank in came])} at the rendezvous",
        proof=hang_report.evidence(facts, attempt), since_s=due_s,
        cause=FailureCause.NEVER_CAME, place=place, frames=frames,
    )  # fmt: skip


def _is_at_rendezvous(attempt: AttemptFacts, rank: RankFacts) -> bool:
    inspection = inspections.result(attempt, rank)
    return (
        inspection is not None
        and inspection.phase == "rendezvous"
        and inspection.activity is not Activity.PROGRESSING
    )


def _has_unseen(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether a rank lives whose stack the last inspection has not brought."""
    found = (inspections.result(attempt, rank) for rank in inspections.living(facts))
    return any(inspection is None or not inspection.stack for inspection in found)


# Failures that two inspections prove


def stands_still(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> bool:
    """Return whether two inspections in the present silence have found every rank stalled."""
    are_enough = inspections.in_round(facts, attempt) >= inspections.INSPECTIONS_MIN
    if not are_enough or not inspections.is_answered(facts, attempt, deadlines):
        return False
    silence_s = suspicion.suspect_s(facts)
    if silence_s is None or not deadlines.passed(suspicion.quiet_since(facts, attempt) + silence_s):
        return False
    alive = inspections.living(facts)
    if any(facts.nodes[rank.node].contact_at < (attempt.inspected_at or 0.0) for rank in alive):
        return False  # each node must have sent something since, still without progress
    if any(facts.nodes[rank.node].inspected == attempt.inspection - 1 for rank in alive):
        return False  # its answer may be late: only who misses two in a row is not seen
    if any(inspections.moves(attempt, rank) for rank in alive):
        return False
    known = [inspections.still_s(facts, attempt, rank) for rank in alive]
    return not any(still is not None and still < inspections.STILL_S for still in known)


def _verified(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Judge a gang of which no rank moves: by states that are proof, or when the stall timeout has passed."""
    if not stands_still(facts, attempt, deadlines):
        return None
    answer = study(facts, attempt)
    alive = _judged(facts, answer)
    stopped = [rank for rank in alive if _is_stopped(facts, attempt, rank)]
    if stopped:
        return _silence(facts, attempt, answer, stopped)
    culprits = suspects(facts, attempt, answer)
    if all(inspections.waits(attempt, rank) for rank in alive) and _is_proof(facts, attempt, alive, answer):
        return _silence(facts, attempt, answer, culprits)
    late = _late(attempt, alive, answer)
    if not stall_timeout.is_over(facts, attempt, late):
        return None
    return _silence(facts, attempt, answer, culprits, stall_timeout.limit_s(facts, attempt))


def suspects(facts: Facts, attempt: AttemptFacts, answer: collectives.Answer) -> list[RankFacts]:
    """Return the ranks to name when all are stalled: those that wait for no other rank, else those that wait while they
    handle an exception, else those that others wait for."""
    alive = _judged(facts, answer)
    stopped = [rank for rank in alive if _is_stopped(facts, attempt, rank)]
    unsure = stopped or [rank for rank in alive if not inspections.waits(attempt, rank)]
    behind = answer.behind if isinstance(answer, Missing) else ()
    if unsure:
        seen = [rank for rank in unsure if not inspections.does(attempt, rank, Activity.UNKNOWN)]
        return [rank for rank in unsure if rank.rank in behind] or _likely(unsure, facts) or seen
    raised = [rank for rank in alive if (found := inspections.result(attempt, rank)) and found.raised]
    if raised and len(raised) < len(alive):
        return raised
    match answer:
        case Missing():
            return [facts.ranks[rank] for rank in behind]
        case Mismatch(sides=sides):
            equal = len(sides[0].ranks) == len(sides[-1].ranks)  # then it is not known which side is wrong
            odd = [rank for side in (sides if equal else sides[:1]) for rank in side.ranks]
            return [facts.ranks[rank] for rank in sorted(odd)]
        case Whole():
            return []
        case Unknown():
            return [rank for rank in facts.ranks.values() if rank.ended_well] or _likely(alive, facts)


def awaited(facts: Facts, attempt: AttemptFacts) -> list[RankFacts]:
    """Return the ranks that the last inspection of this silence has found elsewhere while others waited, and those that waited
    for others at the wrong place."""
    if not inspections.in_round(facts, attempt):
        return []
    seen = [rank for rank in facts.ranks.values() if inspections.result(attempt, rank) is not None]
    away = [
        rank
        for rank in seen
        if not inspections.does(attempt, rank, Activity.WAITING_FOR_RANKS, Activity.UNKNOWN)
        or ((found := inspections.result(attempt, rank)) and found.phase == "rendezvous" and found.raised)
    ]
    return away if len(away) < len(seen) else []


def _judged(facts: Facts, answer: collectives.Answer) -> list[RankFacts]:
    """Return the living ranks without those that only serve the others."""
    alive = inspections.living(facts)
    return [rank for rank in alive if not _is_apart(facts, rank, answer)] or alive


def _is_idle(attempt: AttemptFacts, alive: list[RankFacts]) -> bool:
    """Return whether no rank has used a processor lately: large tensors take their time, but not without one."""
    since_s = (attempt.inspected_at or 0.0) - IDLE_S
    return all(rank.busy_at < since_s for rank in alive)


def _is_proof(
    facts: Facts, attempt: AttemptFacts, alive: list[RankFacts], answer: collectives.Answer
) -> bool:
    """Return whether ranks that all wait for each other can never continue: some wait in another collective than the rest, or
    a member has ended. False where another thread of a rank may enter the missing collective."""
    seen = inspections.results(facts, attempt)
    if any(inspection.others_act for inspection in seen.values()):
        return False
    match answer:
        case Mismatch():
            return True
        case Missing(collective=collective, behind=behind):
            if collective.what in collectives.ROOTED:
                return False
            # A living rank that is behind waits where all have come: that may be slow, or no collective at all.
            return _is_idle(attempt, alive) and all(facts.ranks[rank].ended_well for rank in behind)
        case Whole() | Unknown():
            return False


def _is_stopped(facts: Facts, attempt: AttemptFacts, rank: RankFacts) -> bool:
    """Return whether the process that trains is stopped for long. Heartbeats show only the rank's first process, which may
    be a shell."""
    inspection = inspections.result(attempt, rank)
    still_s = inspections.still_s(facts, attempt, rank) or 0.0
    return inspection is not None and inspection.state == "T" and still_s >= STOPPED_S_MAX


def _is_apart(facts: Facts, rank: RankFacts, answer: collectives.Answer) -> bool:
    """Return whether others have made steps without this rank, such as one that serves them: its steps are not waited for,
    nor is it missed in a collective."""
    if rank.steps or (isinstance(answer, Missing) and rank.rank in answer.behind):
        return False
    return max(other.steps for other in facts.ranks.values()) >= APART_STEPS


def ends_at(facts: Facts, attempt: AttemptFacts, answer: collectives.Answer) -> float:
    """Return when (job clock) a stalled gang is ended if no rank moves; infinite where it is never ended."""
    over_at = stall_timeout.over_at(facts, attempt, _late(attempt, _judged(facts, answer), answer))
    return min([over_at, *_start_limits_at(facts, attempt)])


def ends_before(facts: Facts, attempt: AttemptFacts, before_s: float) -> float:
    """Return when (job clock) a stalled gang is ended if no rank moves; infinite where that is not before a time, so
    that a large gang is rarely compared."""
    soonest_s = min([stall_timeout.over_at(facts, attempt, []), *_start_limits_at(facts, attempt)])
    return ends_at(facts, attempt, study(facts, attempt)) if soonest_s < before_s else math.inf


def _start_limits_at(facts: Facts, attempt: AttemptFacts) -> list[float]:
    """Return when (job clock) the user's limits for what comes before the first step are over."""
    assert facts.limits is not None
    limits = [facts.limits.first_step_timeout_s]
    if any(_is_at_rendezvous(attempt, rank) for rank in inspections.living(facts)):
        limits.append(facts.limits.rendezvous_timeout_s)
    limits_at = [suspicion.limit_at(facts, attempt, limit_s) for limit_s in limits]
    return [limit_at for limit_at in limits_at if limit_at is not None]


def _late(attempt: AttemptFacts, alive: list[RankFacts], answer: collectives.Answer) -> list[RankFacts]:
    """Return the ranks that must be stalled for the stall timeout: those that others wait for."""
    late = [rank for rank in alive if not inspections.waits(attempt, rank)] or alive
    behind = answer.behind if isinstance(answer, Missing) else ()
    return [rank for rank in late if rank.rank in behind] or late


def _likely(ranks: list[RankFacts], facts: Facts) -> list[RankFacts]:
    """Return which of the stalled ranks to name: those in a state that cannot run, else those with fewer
    steps than the rest; none where they are all ranks, and alike."""
    if len(ranks) < len(facts.ranks):
        return ranks
    stuck = [rank for rank in ranks if rank.state in ("T", "t", "Z", "D")]
    if stuck:
        return stuck
    most = max(rank.steps for rank in ranks)
    late = [rank for rank in ranks if rank.steps < most]
    return late if len(late) < len(ranks) else []


def study(facts: Facts, attempt: AttemptFacts) -> collectives.Answer:
    """Return what the waiting ranks wait for, by the last inspection."""
    ended = frozenset(rank.rank for rank in facts.ranks.values() if rank.ended_well)
    return collectives.study(inspections.results(facts, attempt), ended)


def _silence(
    facts: Facts, attempt: AttemptFacts, answer: collectives.Answer, culprits: list[RankFacts], patience_s: float = 0.0
) -> Verdict:  # fmt: skip
    """Return the verdict on a stalled gang. `patience_s`: the stall timeout that passed without proof."""
    gang_at, stepped = suspicion.gang_at(facts, attempt), suspicion.has_stepped(facts)
    since_s = gang_at if stepped else max(gang_at, facts.progress_at)
    missed = "sign of progress" if facts.progress_at <= gang_at else "step" if stepped else "step yet"
    heard_s = max((rank.inspected_at for rank in facts.ranks.values()), default=since_s)
    culprit = hang_report.who(attempt, culprits, answer)
    if not culprits and isinstance(answer, Whole):
        culprit = f"no rank is missing: {hang_report.nothing_flows(facts)}"
    silent = f"no {missed} for {max(heard_s - gang_at, 0.0):.0f} s"
    summary = f"{silent}: {culprit}" if culprit else f"{silent} from any rank"
    is_network = isinstance(answer, Whole) and not culprits
    cause = FailureCause.NETWORK if is_network else FailureCause.STANDSTILL
    place, frames = ((), ()) if is_network else hang_report.places(attempt, culprits)
    return _hang(
        facts, attempt, culprits, summary, answer, culprit=culprit, since_s=since_s, cause=cause, place=place,
        frames=frames, patience_s=patience_s,
    )  # fmt: skip


def _hang(
    facts: Facts, attempt: AttemptFacts, culprits: Sequence[RankFacts], summary: str, answer: collectives.Answer,
    **more: object,
) -> Verdict:  # fmt: skip
    assert facts.limits is not None
    alive = inspections.results(facts, attempt)
    numbers = {rank.rank for rank in culprits}
    others = {rank: inspection for rank, inspection in alive.items() if rank not in numbers}
    waiting = collectives.waiting_text(others, answer)
    sides = answer.sides if isinstance(answer, Mismatch) else ()
    spent_s = more.get("patience_s")
    proof = [*hang_report.uneven(facts), *hang_report.evidence(facts, attempt)]
    for side in reversed(sides):
        at = hang_report.at_place(alive, side.ranks)
        line = f"{named(side.ranks)}: {collectives.shaped(side.collective)}{at}"
        proof.insert(0, Evidence(line, EvidenceKind.RANKS))
    if spent_s:
        is_waited_for = any(one.activity is Activity.WAITING_FOR_RANKS for one in alive.values())
        whose = "of the process group" if is_waited_for else "nothing moved in any process"
        whose = "monitor.hang_timeout" if facts.limits.hang_timeout_s else whose
        proof.insert(0, Evidence(f"no process state proves it; the timeout was {spent_s:.0f} s ({whose})"))
    return facts.verdict_on(
        Kind.HANG, summary, ranks=tuple(rank.rank for rank in culprits), waiting=waiting,
        node=hang_report.node_of(culprits), proof=tuple(proof), retry=facts.limits.on_hang != "fail", **more,  # type: ignore[arg-type]
    )  # fmt: skip
