"""Hangs: the verdict on a gang that stands still, and its culprits, from the last inspections.

Nothing is judged while any rank moves, nor on fewer than two inspections in a row. A state that cannot resolve by
itself is a proof when all other ranks wait: stopped, ended, locked up, waiting for a person's input, in another
collective. Any other rank that stands in one place is given time: without a proof no rank is killed early. A limit that
the user has fixed replaces this patience; two inspections are still needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.brain.diagnosis import collectives, hang_report, inspections, suspicion
from orchestrator.brain.diagnosis.collectives import Mismatch, Missing, Unknown, Whole
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Kind, Verdict
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.model.rank_facts import RankFacts
from orchestrator.brain.model.verdicts import verdict_on
from orchestrator.core.observations import Activity
from orchestrator.core.text import named, ranks_text

STOPPED_S_MAX = 5.0
"""How long a rank may be seen in state T (stopped) before that is a hang: a pause of 3 s does no harm."""

ZOMBIE_S_MAX = 2.0
"""The same in state Z, its main thread gone and others not: on a busy machine the end of a process takes a moment."""

EXIT_S_MAX = 7.0
"""How long a rank may live after it reported that it exits."""

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
    return _never_left(facts, attempt) or _verified(facts, attempt, deadlines)


# What needs no second inspection


def _stands_still(facts: Facts, attempt: AttemptFacts) -> Verdict | None:
    """A stopped process (T) hangs the gang, unless inspections see it go on; one whose main thread is a zombie (Z) never comes back."""
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


def _never_left(facts: Facts, attempt: AttemptFacts) -> Verdict | None:
    """A rank that exits has nothing to do but to end; a destructor may block that. Freeing much memory takes
    a while, on a processor or in the kernel (state D), and so may what a destructor reads or sends."""
    for rank in inspections.living(facts):
        if not rank.exiting:
            continue
        here_s = rank.beat_at - rank.exiting_at
        busy = rank.state == "D" or rank.busy_at >= rank.beat_at - IDLE_S
        last = rank.inspection
        proved = not busy and last is not None and last.activity is Activity.EXITING and last.proven
        if here_s >= (EXIT_S_MAX if proved else suspicion.patience_s(facts, attempt, longer=True)):
            summary = f"rank {rank.rank} on {rank.node} said its last word {here_s:.0f} s ago and never left"
            return _by_state(facts, [rank], summary, rank.exiting_at)
    return None


def _by_state(facts: Facts, ranks: list[RankFacts], summary: str, since_s: float) -> Verdict:
    """Return the verdict on ranks whose state alone says enough."""
    attempt, inspection = facts.attempt, ranks[0].inspection
    assert attempt is not None
    place = "has left" if ranks[0].exiting else "stopped"
    at = f", {inspection.where}" if len(ranks) == 1 and inspection is not None and inspection.where else ""
    return _hang(
        facts, attempt, ranks, summary, Unknown(), culprit=summary + at, since_s=since_s,
        signature=f"hang {place} {named([rank.rank for rank in ranks])}",
    )  # fmt: skip


def _no_first_step(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    assert facts.limits is not None
    limit_s = facts.limits.first_step_s_max
    due_s = suspicion.limit_at(facts, attempt, limit_s)
    if due_s is None or not deadlines.passed(due_s):
        return None
    summary = f"no first step within {limit_s:g} s (monitor.first_step_timeout)"
    culprits = [rank for rank in inspections.living(facts) if not inspections.waits(attempt, rank)]
    return _hang(
        facts, attempt, culprits, summary, study(facts, attempt), since_s=due_s,
        culprit=hang_report.who(attempt, culprits), signature=f"hang first step {hang_report.places(attempt, culprits)}",
    )  # fmt: skip


def _never_came(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Ranks that wait at the rendezvous do so for the user's limit, then the verdict says which have come and which have not."""
    assert facts.limits is not None
    limit_s = facts.limits.rendezvous_s_max
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
    who = f"ranks {those} have not come" if missing else "all have come, and do not reach one another"
    summary = f"no rendezvous within {limit_s:g} s (monitor.rendezvous_timeout): {who}"
    return verdict_on(
        facts, Kind.RENDEZVOUS, summary, ranks=tuple(rank.rank for rank in missing), node=hang_report.node_of(missing),
        culprit=hang_report.who(attempt, missing), waiting=f"{named([rank.rank for rank in came])} at the rendezvous",
        evidence=hang_report.evidence(facts, attempt), since_s=due_s,
        signature=f"rendezvous {hang_report.places(attempt, missing)}",
    )  # fmt: skip


def _is_at_rendezvous(attempt: AttemptFacts, rank: RankFacts) -> bool:
    inspection = inspections.result(attempt, rank)
    return (
        inspection is not None
        and inspection.phase == "rendezvous"
        and inspection.activity is not Activity.PROGRESSING
    )


def _has_unseen(facts: Facts, attempt: AttemptFacts) -> bool:
    """Tell whether a rank lives whose stack the last inspection has not brought."""
    found = (inspections.result(attempt, rank) for rank in inspections.living(facts))
    return any(inspection is None or not inspection.stack for inspection in found)


# What two inspections prove


def stands_still(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> bool:
    """Tell whether two inspections in the present silence have found every rank unmoved."""
    are_enough = inspections.in_round(facts, attempt) >= inspections.LOOKS_MIN
    if not are_enough or not inspections.is_answered(facts, attempt, deadlines):
        return False
    silence_s = suspicion.suspect_s(facts)
    if silence_s is None or not deadlines.passed(suspicion.quiet_since(facts, attempt) + silence_s):
        return False
    alive = inspections.living(facts)
    if any(facts.nodes[rank.node].contact_at < (attempt.inspected_at or 0.0) for rank in alive):
        return False  # each node must have sent something since, still without progress
    if any(inspections.moves(attempt, rank) for rank in alive):
        return False
    known = [inspections.still_s(facts, attempt, rank) for rank in alive]
    return not any(still is not None and still < inspections.STILL_S for still in known)


def _verified(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Judge a gang of which no rank moves: by states that are proof, or when all patience is over."""
    if not stands_still(facts, attempt, deadlines):
        return None
    answer = study(facts, attempt)
    alive = _judged(facts, answer)
    certain = [] if isinstance(answer, Whole) else _proved(facts, attempt, alive)
    if certain:
        return _silence(facts, attempt, answer, certain)
    culprits = suspects(facts, attempt, answer)
    if all(inspections.waits(attempt, rank) for rank in alive) and _is_proof(facts, attempt, alive, answer):
        return _silence(facts, attempt, answer, culprits)
    late = [rank for rank in alive if not inspections.waits(attempt, rank)] or alive
    behind = answer.behind if isinstance(answer, Missing) else ()
    late = [rank for rank in late if rank.rank in behind] or late
    if not _is_over(facts, attempt, late):
        return None
    patience_s = max(_patience_s(facts, attempt, rank) for rank in late)
    return _silence(facts, attempt, answer, culprits, patience_s)


def suspects(facts: Facts, attempt: AttemptFacts, answer: collectives.Answer) -> list[RankFacts]:
    """Return the ranks to name when all stand still: those that wait for no other rank, else those that others wait for."""
    alive = _judged(facts, answer)
    certain = [rank for rank in alive if _is_certain(facts, attempt, rank)]
    unsure = certain or [rank for rank in alive if not inspections.waits(attempt, rank)]
    behind = answer.behind if isinstance(answer, Missing) else ()
    if unsure:
        return [rank for rank in unsure if rank.rank in behind] or _likely(unsure, facts)
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


def _judged(facts: Facts, answer: collectives.Answer) -> list[RankFacts]:
    """Return the living ranks without those that only serve the others."""
    alive = inspections.living(facts)
    return [rank for rank in alive if not _is_apart(facts, rank, answer)] or alive


def _is_idle(attempt: AttemptFacts, alive: list[RankFacts]) -> bool:
    """Tell whether no rank has used a processor lately: large tensors take their time, but not without one."""
    since_s = (attempt.inspected_at or 0.0) - IDLE_S
    return all(rank.busy_at < since_s for rank in alive)


def _proved(facts: Facts, attempt: AttemptFacts, alive: list[RankFacts]) -> list[RankFacts]:
    """Return the ranks that are proved to hold up the gang: ranks that cannot go on by themselves while all others
    wait. What one rank can never do by itself another may yet let it do, as long as that one can go on; and where no
    rank is seen to wait for others, each may be all that the program is to do."""
    certain = [rank for rank in alive if _is_certain(facts, attempt, rank)]
    waiting = [rank for rank in alive if inspections.waits(attempt, rank)]
    return certain if waiting and len(certain) + len(waiting) == len(alive) else []


def _is_proof(
    facts: Facts, attempt: AttemptFacts, alive: list[RankFacts], answer: collectives.Answer
) -> bool:
    """Tell whether ranks that all wait for each other can never go on: some wait in another collective than the rest, or
    a member has ended. Not where another thread of a rank may enter what is missing."""
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


def _is_certain(facts: Facts, attempt: AttemptFacts, rank: RankFacts) -> bool:
    """Tell whether the rank can never go on by itself, whatever the others do. A sleep must outlast patience."""
    inspection = inspections.result(attempt, rank)
    if inspection is None or inspection.activity is Activity.WAITING_FOR_RANKS:
        return False
    if inspection.activity is Activity.EXITING or inspection.state == "t":
        return False  # see `_never_left`; and a debugger that holds a rank lets it go
    if inspection.activity is Activity.STOPPED:
        seen_s = rank.inspected_at - rank.state_at if rank.state == "T" else 0.0
        return max(seen_s, inspections.still_s(facts, attempt, rank) or 0.0) >= STOPPED_S_MAX
    if inspection.activity is Activity.SLEEPING:
        patience_s = suspicion.patience_s(facts, attempt, longer=True)
        return inspection.proven and inspection.ends_s is not None and inspection.ends_s > patience_s
    return inspection.proven


def _is_apart(facts: Facts, rank: RankFacts, answer: collectives.Answer) -> bool:
    """Tell whether others have made steps without this rank, such as one that serves them: its steps are not waited for,
    nor is it missed in a collective."""
    if rank.steps or (isinstance(answer, Missing) and rank.rank in answer.behind):
        return False
    return max(other.steps for other in facts.ranks.values()) >= APART_STEPS


def _is_over(facts: Facts, attempt: AttemptFacts, ranks: list[RankFacts]) -> bool:
    """Tell whether ranks have stood in one place for longer than their activity there may take."""
    assert facts.limits is not None
    heard_s = max(rank.inspected_at for rank in facts.ranks.values())
    silent_s = heard_s - suspicion.silent_since(facts, attempt)
    if _is_free(facts, attempt, ranks):
        return False
    for rank in ranks:
        inspection, still_s = inspections.result(attempt, rank), inspections.still_s(facts, attempt, rank)
        patience_s = _patience_s(facts, attempt, rank)
        if still_s is None:
            blind_s = 0.0 if suspicion.is_fixed(facts) else max(facts.limits.hang_ceiling_s, patience_s)
            patience_s, still_s = blind_s, silent_s
        elif inspection is not None:  # on a busy machine everything takes longer, but not without end
            still_s -= min(inspection.starved_s, still_s / 2)
        # Inspections cannot show what stood still before the first one: the silence that led to it counts instead.
        if silent_s < patience_s or still_s + (suspicion.suspect_s(facts) or 0.0) < patience_s:
            return False
    return True


def _patience_s(facts: Facts, attempt: AttemptFacts, rank: RankFacts) -> float:
    """Return for how long a rank may stand where it does: the longest that fits what it was seen in since it last moved."""
    still_s = inspections.still_s(facts, attempt, rank)
    waited_for = any(inspections.waits(attempt, one) for one in inspections.living(facts))
    took_longer = still_s is not None and rank.longer_at >= rank.inspected_at - still_s
    is_whole = inspections.waits(attempt, rank)  # then all wait for each other, and the network may come back
    return suspicion.patience_s(facts, attempt, longer=took_longer or is_whole or not waited_for)


def _is_free(facts: Facts, attempt: AttemptFacts, ranks: list[RankFacts]) -> bool:
    """Tell whether ranks may go on like this for as long as they like: no rank is seen to wait for another, and they
    compute or sleep. No launcher would end that; a user who wants that sets `monitor.hang_patience`."""
    assert facts.limits is not None
    if suspicion.is_fixed(facts) or (facts.limits.patience_s and suspicion.has_stepped(facts)):
        return False
    if any(inspections.waits(attempt, rank) for rank in inspections.living(facts)):
        return False
    return all(inspections.does(attempt, rank, Activity.SPINNING, Activity.SLEEPING) for rank in ranks)


def _likely(ranks: list[RankFacts], facts: Facts) -> list[RankFacts]:
    """Return which of the ranks that stand still to name: those in a state that cannot run, else those with fewer
    steps than the rest; none where all are alike."""
    if len(ranks) < len(facts.ranks):
        return ranks
    stuck = [rank for rank in ranks if rank.state in ("T", "t", "Z", "D")]
    if stuck:
        return stuck
    most = max(rank.steps for rank in ranks)
    late = [rank for rank in ranks if rank.steps < most]
    return late if len(late) < len(ranks) else []


def study(facts: Facts, attempt: AttemptFacts) -> collectives.Answer:
    """Return what keeps the ranks that wait, by the last inspection."""
    ended = frozenset(rank.rank for rank in facts.ranks.values() if rank.ended_well)
    return collectives.study(inspections.results(facts, attempt), ended)


def _silence(
    facts: Facts, attempt: AttemptFacts, answer: collectives.Answer, culprits: list[RankFacts], patience_s: float = 0.0
) -> Verdict:  # fmt: skip
    """Return the verdict on a gang that stands still. `patience_s`: how long it was waited for without proof."""
    since_s, stepped = suspicion.gang_at(facts, attempt), suspicion.has_stepped(facts)
    quiet = facts.progress_at <= since_s or not stepped
    since_s = since_s if stepped else max(since_s, facts.progress_at)
    heard_s = max((rank.inspected_at for rank in facts.ranks.values()), default=since_s)
    culprit = hang_report.who(attempt, culprits, answer)
    if not culprits and isinstance(answer, Whole):
        culprit = f"nobody is missing: {hang_report.nothing_flows(facts)}"
    silent = f"no {'sign of progress' if quiet else 'step'} for {max(heard_s - since_s, 0.0):.0f} s"
    summary = f"{silent}: {culprit}" if culprit else f"{silent} from any rank"
    where = "network" if isinstance(answer, Whole) and not culprits else hang_report.places(attempt, culprits)
    return _hang(
        facts, attempt, culprits, summary, answer, culprit=culprit, since_s=since_s, signature=f"hang {where}",
        patience_s=patience_s,
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
    unproved = (
        [f"no state proves it; patience was {spent_s:.0f} s (monitor.hang_patience)"] if spent_s else []
    )
    by_side = tuple(
        f"{named(side.ranks)}: {collectives.shaped(side.collective)}{hang_report.at_place(alive, side.ranks)}"
        for side in sides
    )
    return verdict_on(
        facts, Kind.HANG, summary, ranks=tuple(rank.rank for rank in culprits), waiting=waiting,
        node=hang_report.node_of(culprits), evidence=(*unproved, *by_side, *hang_report.evidence(facts, attempt)), retry=facts.limits.on_hang != "fail", **more,
    )  # fmt: skip
