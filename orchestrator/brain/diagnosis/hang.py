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
from orchestrator.brain.diagnosis.collectives import Mismatch, Missing, NoneMissing, Undetermined
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Evidence, EvidenceKind, FailureCause, Verdict, VerdictKind
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.model.rank_facts import RankFacts
from orchestrator.core.observations import Activity
from orchestrator.core.text import ranks_label, ranks_text

STOPPED_S_MAX = 5.0
"""How long a rank may be seen in state T (stopped) before that is a hang: a pause of 3 s does no harm."""

ZOMBIE_S_MAX = 2.0
"""The same in state Z, its main thread gone and others not: on a busy machine the end of a process takes a moment."""

STEPS_APART_MAX = 3
"""Ranks that make steps together are never this many steps apart: all wait for each other in each step."""

NO_STACK_S_MAX = 40.0
"""How long after the limit of the rendezvous a living rank that shows no stack is inspected again before it counts as
one that has not come: on a busy machine an answer may come late."""

IDLE_S = 2.0
"""Ranks that have used no processor for this long before an inspection send nothing to each other."""


def judge(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict on a gang that hangs, or None; deadlines still ahead are left in `deadlines`."""
    if attempt.phase is not Phase.RUN:
        return None
    stopped = _judge_stopped_processes(facts, attempt)
    if stopped is not None or attempt.running_at is None or not inspections.living_ranks(facts):
        return stopped
    if not inspections.are_all_connected(facts):
        return None  # what a silent node does is not known; see `node_lost`
    late = _judge_first_step(facts, attempt, deadlines) or _judge_rendezvous(facts, attempt, deadlines)
    if late is not None or suspicion.suspicious_silence_s(facts) is None:
        return late
    return _judge_stalled(facts, attempt, deadlines)


# Failures that need no second inspection


def _judge_stopped_processes(facts: Facts, attempt: AttemptFacts) -> Verdict | None:
    """A stopped process (T) hangs the gang, unless inspections show progress; one whose main thread is a zombie (Z) never continues."""
    connected = [
        rank for rank in inspections.living_ranks(facts) if facts.nodes[rank.node].agent_state is AgentState.UP
    ]
    states = (("Z", ZOMBIE_S_MAX, "a zombie (state Z)"), ("T", STOPPED_S_MAX, "stopped (state T)"))
    for state, limit_s, state_text in states:
        since_s = {
            rank.rank: rank.beat_at - rank.state_at
            for rank in connected
            if rank.state == state and not (state == "T" and inspections.is_moving(attempt, rank))
        }
        if since_s and max(since_s.values()) >= limit_s:
            # When several are stopped together, some of them report it a beat later.
            ranks = [facts.ranks[rank] for rank, still_s in since_s.items() if still_s >= limit_s / 2]
            where = ", ".join(dict.fromkeys(rank.node for rank in ranks))
            who = f"{ranks_label([rank.rank for rank in ranks])} on {where} {'is' if len(ranks) == 1 else 'are'} {state_text}"
            still = f" for {max(since_s.values()):.0f} s" if state == "T" else ""
            return _stopped_verdict(facts, ranks, f"{who}{still}", min(rank.state_at for rank in ranks))
    return None


def _stopped_verdict(facts: Facts, ranks: list[RankFacts], summary: str, since_s: float) -> Verdict:
    attempt, inspection = facts.attempt, ranks[0].inspection
    assert attempt is not None
    at = f", {inspection.where}" if len(ranks) == 1 and inspection is not None and inspection.where else ""
    return _hang_verdict(
        facts, attempt, ranks, summary, Undetermined(), culprit=summary + at, since_s=since_s,
        cause=FailureCause.STOPPED, place=(ranks_text(rank.rank for rank in ranks),),
    )  # fmt: skip


def _judge_first_step(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    assert facts.limits is not None
    limit_s = facts.limits.first_step_timeout_s
    due_s = suspicion.start_limit_at(facts, attempt, limit_s)
    if due_s is None or not deadlines.passed(due_s):
        return None
    summary = f"no first step within {limit_s:g} s (monitor.first_step_timeout)"
    culprits = [rank for rank in inspections.living_ranks(facts) if not inspections.is_waiting(attempt, rank)]
    place, frames = hang_report.culprit_frames(attempt, culprits)
    return _hang_verdict(
        facts, attempt, culprits, summary, analyze(facts, attempt), since_s=due_s,
        culprit=hang_report.describe_culprits(attempt, culprits),
        cause=FailureCause.FIRST_STEP, place=place, frames=frames,
    )  # fmt: skip


def _judge_rendezvous(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Judge ranks that wait at the rendezvous longer than the user's limit: the verdict says which have joined and which have not."""
    assert facts.limits is not None
    limit_s = facts.limits.rendezvous_timeout_s
    due_s = suspicion.start_limit_at(facts, attempt, limit_s)
    if due_s is None:
        return None
    is_inspected = (attempt.inspected_at or 0.0) >= due_s and inspections.is_answered(facts, attempt, deadlines)
    arrived = (
        [rank for rank in inspections.living_ranks(facts) if _is_at_rendezvous(attempt, rank)] if is_inspected else []
    )
    if not arrived or not deadlines.passed(due_s):
        return None
    if _has_rank_without_stack(facts, attempt) and not deadlines.passed(due_s + NO_STACK_S_MAX):
        return None
    arrived_numbers = {rank.rank for rank in arrived}
    missing = [rank for rank in facts.ranks.values() if rank.rank not in arrived_numbers]
    those = ranks_text(rank.rank for rank in missing)
    who = f"ranks {those} have not joined" if missing else "all have joined, but cannot reach one another"
    summary = f"no rendezvous within {limit_s:g} s (monitor.rendezvous_timeout): {who}"
    place, frames = hang_report.culprit_frames(attempt, missing)
    return facts.verdict_on(
        VerdictKind.RENDEZVOUS, summary, ranks=tuple(rank.rank for rank in missing), node=hang_report.common_node(missing),
        culprit=hang_report.describe_culprits(attempt, missing), waiting=f"{ranks_label([rank.rank for rank in arrived])} at the rendezvous",
        proof=hang_report.hang_evidence(facts, attempt), since_s=due_s,
        cause=FailureCause.NEVER_CAME, place=place, frames=frames,
    )  # fmt: skip


def _is_at_rendezvous(attempt: AttemptFacts, rank: RankFacts) -> bool:
    inspection = inspections.last_inspection(attempt, rank)
    return (
        inspection is not None and inspection.phase == "rendezvous" and inspection.activity is not Activity.PROGRESSING
    )


def _has_rank_without_stack(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether a rank lives whose stack the last inspection has not brought."""
    found = (inspections.last_inspection(attempt, rank) for rank in inspections.living_ranks(facts))
    return any(inspection is None or not inspection.stack for inspection in found)


# Failures that two inspections prove


def is_stalled(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> bool:
    """Return whether two inspections in the present silence have found every rank stalled."""
    are_enough = inspections.count_in_silence(facts, attempt) >= inspections.INSPECTIONS_MIN
    if not are_enough or not inspections.is_answered(facts, attempt, deadlines):
        return False
    silence_s = suspicion.suspicious_silence_s(facts)
    if silence_s is None or not deadlines.passed(suspicion.quiet_since(facts, attempt) + silence_s):
        return False
    alive = inspections.living_ranks(facts)
    if any(facts.nodes[rank.node].contact_at < (attempt.inspected_at or 0.0) for rank in alive):
        return False  # each node must have sent something since, still without progress
    if any(facts.nodes[rank.node].inspection_answered == attempt.inspection - 1 for rank in alive):
        return False  # its answer may be late: only who misses two in a row is not seen
    if any(inspections.is_moving(attempt, rank) for rank in alive):
        return False
    known = [inspections.still_s(facts, attempt, rank) for rank in alive]
    return not any(still is not None and still < inspections.STILL_S for still in known)


def _judge_stalled(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Judge a gang of which no rank moves: by states that are proof, or when the stall timeout has passed."""
    if not is_stalled(facts, attempt, deadlines):
        return None
    answer = analyze(facts, attempt)
    alive = _training_ranks(facts, answer)
    stopped = [rank for rank in alive if _is_stopped(facts, attempt, rank)]
    if stopped:
        return _stall_verdict(facts, attempt, answer, stopped)
    culprits = find_suspects(facts, attempt, answer)
    if all(inspections.is_waiting(attempt, rank) for rank in alive) and _is_proven(facts, attempt, alive, answer):
        return _stall_verdict(facts, attempt, answer, culprits)
    blocking = _blocking_ranks(attempt, alive, answer)
    if not stall_timeout.has_expired(facts, attempt, blocking):
        return None
    return _stall_verdict(facts, attempt, answer, culprits, stall_timeout.timeout_s(facts, attempt))


def find_suspects(facts: Facts, attempt: AttemptFacts, answer: collectives.Analysis) -> list[RankFacts]:
    """Return the ranks to name when all are stalled: those that wait for no other rank, else those that wait while they
    handle an exception, else those that others wait for."""
    alive = _training_ranks(facts, answer)
    stopped = [rank for rank in alive if _is_stopped(facts, attempt, rank)]
    not_waiting = stopped or [rank for rank in alive if not inspections.is_waiting(attempt, rank)]
    behind = answer.behind if isinstance(answer, Missing) else ()
    if not_waiting:
        seen = [rank for rank in not_waiting if not inspections.is_doing(attempt, rank, Activity.UNKNOWN)]
        return [rank for rank in not_waiting if rank.rank in behind] or _likely_culprits(not_waiting, facts) or seen
    raised = [rank for rank in alive if (found := inspections.last_inspection(attempt, rank)) and found.raised]
    if raised and len(raised) < len(alive):
        return raised
    match answer:
        case Missing():
            return [facts.ranks[rank] for rank in behind]
        case Mismatch(sides=sides):
            equal = len(sides[0].ranks) == len(sides[-1].ranks)  # then it is not known which side is wrong
            outliers = [rank for side in (sides if equal else sides[:1]) for rank in side.ranks]
            return [facts.ranks[rank] for rank in sorted(outliers)]
        case NoneMissing():
            return []
        case Undetermined():
            return [rank for rank in facts.ranks.values() if rank.ended_well] or _likely_culprits(alive, facts)


def find_awaited(facts: Facts, attempt: AttemptFacts) -> list[RankFacts]:
    """Return the ranks that the last inspection of this silence has found elsewhere while others waited, and those that waited
    for others at the wrong place."""
    if not inspections.count_in_silence(facts, attempt):
        return []
    inspected = [rank for rank in facts.ranks.values() if inspections.last_inspection(attempt, rank) is not None]
    not_waiting = [
        rank
        for rank in inspected
        if not inspections.is_doing(attempt, rank, Activity.WAITING_FOR_RANKS, Activity.UNKNOWN)
        or ((found := inspections.last_inspection(attempt, rank)) and found.phase == "rendezvous" and found.raised)
    ]
    return not_waiting if len(not_waiting) < len(inspected) else []


def _training_ranks(facts: Facts, answer: collectives.Analysis) -> list[RankFacts]:
    """Return the living ranks without those that only serve the others."""
    alive = inspections.living_ranks(facts)
    return [rank for rank in alive if not _serves_others(facts, rank, answer)] or alive


def _is_idle(attempt: AttemptFacts, alive: list[RankFacts]) -> bool:
    """Return whether no rank has used a processor lately: large tensors take their time, but not without one."""
    since_s = (attempt.inspected_at or 0.0) - IDLE_S
    return all(rank.busy_at < since_s for rank in alive)


def _is_proven(facts: Facts, attempt: AttemptFacts, alive: list[RankFacts], answer: collectives.Analysis) -> bool:
    """Return whether ranks that all wait for each other can never continue: some wait in another collective than the rest, or
    a member has ended. False where another thread of a rank may enter the missing collective."""
    seen = inspections.last_inspections(facts, attempt)
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
        case NoneMissing() | Undetermined():
            return False


def _is_stopped(facts: Facts, attempt: AttemptFacts, rank: RankFacts) -> bool:
    """Return whether the process that trains is stopped for long. Heartbeats show only the rank's first process, which may
    be a shell."""
    inspection = inspections.last_inspection(attempt, rank)
    still_s = inspections.still_s(facts, attempt, rank) or 0.0
    return inspection is not None and inspection.state == "T" and still_s >= STOPPED_S_MAX


def _serves_others(facts: Facts, rank: RankFacts, answer: collectives.Analysis) -> bool:
    """Return whether others have made steps without this rank, such as one that serves them: its steps are not waited for,
    nor is it missed in a collective."""
    if rank.steps or (isinstance(answer, Missing) and rank.rank in answer.behind):
        return False
    return max(other.steps for other in facts.ranks.values()) >= STEPS_APART_MAX


def ends_at(facts: Facts, attempt: AttemptFacts, answer: collectives.Analysis) -> float:
    """Return when (job clock) a stalled gang is ended if no rank moves; infinite where it is never ended."""
    over_at = stall_timeout.expires_at(facts, attempt, _blocking_ranks(attempt, _training_ranks(facts, answer), answer))
    return min([over_at, *_start_limits_at(facts, attempt)])


def ends_at_if_before(facts: Facts, attempt: AttemptFacts, before_s: float) -> float:
    """Return when (job clock) a stalled gang is ended if no rank moves; infinite where that is not before a time, so
    that a large gang is rarely compared."""
    soonest_s = min([stall_timeout.expires_at(facts, attempt, []), *_start_limits_at(facts, attempt)])
    return ends_at(facts, attempt, analyze(facts, attempt)) if soonest_s < before_s else math.inf


def _start_limits_at(facts: Facts, attempt: AttemptFacts) -> list[float]:
    """Return when (job clock) the user's limits for what comes before the first step are over."""
    assert facts.limits is not None
    limits = [facts.limits.first_step_timeout_s]
    if any(_is_at_rendezvous(attempt, rank) for rank in inspections.living_ranks(facts)):
        limits.append(facts.limits.rendezvous_timeout_s)
    limits_at = [suspicion.start_limit_at(facts, attempt, limit_s) for limit_s in limits]
    return [limit_at for limit_at in limits_at if limit_at is not None]


def _blocking_ranks(attempt: AttemptFacts, alive: list[RankFacts], answer: collectives.Analysis) -> list[RankFacts]:
    """Return the ranks that must be stalled for the stall timeout: those that others wait for."""
    blocking = [rank for rank in alive if not inspections.is_waiting(attempt, rank)] or alive
    behind = answer.behind if isinstance(answer, Missing) else ()
    return [rank for rank in blocking if rank.rank in behind] or blocking


def _likely_culprits(ranks: list[RankFacts], facts: Facts) -> list[RankFacts]:
    """Return which of the stalled ranks to name: those in a state that cannot run, else those with fewer
    steps than the rest; none where they are all ranks, and alike."""
    if len(ranks) < len(facts.ranks):
        return ranks
    stuck = [rank for rank in ranks if rank.state in ("T", "t", "Z", "D")]
    if stuck:
        return stuck
    most = max(rank.steps for rank in ranks)
    behind = [rank for rank in ranks if rank.steps < most]
    return behind if len(behind) < len(ranks) else []


def analyze(facts: Facts, attempt: AttemptFacts) -> collectives.Analysis:
    """Return what the waiting ranks wait for, by the last inspection."""
    ended = frozenset(rank.rank for rank in facts.ranks.values() if rank.ended_well)
    return collectives.analyze(inspections.last_inspections(facts, attempt), ended)


def _stall_verdict(
    facts: Facts, attempt: AttemptFacts, answer: collectives.Analysis, culprits: list[RankFacts], stall_timeout_s: float = 0.0
) -> Verdict:  # fmt: skip
    """Return the verdict on a stalled gang. `stall_timeout_s`: the stall timeout that passed without proof."""
    gang_at, stepped = suspicion.gang_progress_at(facts, attempt), suspicion.has_stepped(facts)
    since_s = gang_at if stepped else max(gang_at, facts.progress_at)
    missed = "sign of progress" if facts.progress_at <= gang_at else "step" if stepped else "step yet"
    heard_s = max((rank.inspected_at for rank in facts.ranks.values()), default=since_s)
    culprit = hang_report.describe_culprits(attempt, culprits, answer)
    if not culprits and isinstance(answer, NoneMissing):
        culprit = f"no rank is missing: {hang_report.no_traffic_text(facts)}"
    silent = f"no {missed} for {max(heard_s - gang_at, 0.0):.0f} s"
    summary = f"{silent}: {culprit}" if culprit else f"{silent} from any rank"
    is_network = isinstance(answer, NoneMissing) and not culprits
    cause = FailureCause.NETWORK if is_network else FailureCause.STANDSTILL
    place, frames = ((), ()) if is_network else hang_report.culprit_frames(attempt, culprits)
    return _hang_verdict(
        facts, attempt, culprits, summary, answer, culprit=culprit, since_s=since_s, cause=cause, place=place,
        frames=frames, stall_timeout_s=stall_timeout_s,
    )  # fmt: skip


def _hang_verdict(
    facts: Facts, attempt: AttemptFacts, culprits: Sequence[RankFacts], summary: str, answer: collectives.Analysis,
    **verdict_fields: object,
) -> Verdict:  # fmt: skip
    assert facts.limits is not None
    alive = inspections.last_inspections(facts, attempt)
    numbers = {rank.rank for rank in culprits}
    others = {rank: inspection for rank, inspection in alive.items() if rank not in numbers}
    waiting = collectives.describe_waiting(others, answer)
    sides = answer.sides if isinstance(answer, Mismatch) else ()
    timeout_s = verdict_fields.get("stall_timeout_s")
    proof = [*hang_report.uneven_input_evidence(facts), *hang_report.hang_evidence(facts, attempt)]
    for side in reversed(sides):
        at = hang_report.place_text(alive, side.ranks)
        line = f"{ranks_label(side.ranks)}: {collectives.describe_with_shape(side.collective)}{at}"
        proof.insert(0, Evidence(line, EvidenceKind.RANKS))
    if timeout_s:
        is_waited_for = any(one.activity is Activity.WAITING_FOR_RANKS for one in alive.values())
        whose = "of the process group" if is_waited_for else "nothing moved in any process"
        whose = "monitor.hang_timeout" if facts.limits.hang_timeout_s else whose
        proof.insert(0, Evidence(f"no process state proves it; the timeout was {timeout_s:.0f} s ({whose})"))
    return facts.verdict_on(
        VerdictKind.HANG, summary, ranks=tuple(rank.rank for rank in culprits), waiting=waiting,
        node=hang_report.common_node(culprits), proof=tuple(proof), retry=facts.limits.on_hang != "fail", **verdict_fields,  # type: ignore[arg-type]
    )  # fmt: skip
