"""Comparison of the collectives that ranks wait in: which ranks are missing, or have entered another one.

Only members of one group are compared, by the number of the last collective that they have entered. A rank that waits
for another rank in one group is not a culprit in another group. Within a group, a rank that waits in an earlier
collective than others is not a culprit either: when a connection breaks during a collective, some ranks may already
have completed it. That all have entered a collective is known only if all report it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from orchestrator.core.observations import Activity, Collective, RankInspection
from orchestrator.core.text import ranks_label

NOT_COLLECTIVE = ("in send", "in recv", "in batch_isend_irecv", "in the store", "in the rendezvous")
"""What a rank waits for by its stack that is not a collective."""

VARIABLE_SHAPES = ("gather", "scatter", "all_to_all", "alltoall", "send", "recv", "coalesced")
"""Collectives whose members may well give different shapes."""

ROOTED = ("gather", "scatter", "reduce", "broadcast")
"""Collectives in which a member may finish its part, and exit, long before the others."""

GLOO_LIMIT_S = 1_800.0
NCCL_LIMIT_S = 600.0
"""How long torch lets a collective wait by default: used where a rank waits and does not report its limit."""

Key: TypeAlias = "tuple[str, tuple[int, ...]]"


@dataclass(frozen=True, slots=True)
class Missing:
    """`behind` have not entered what `waiting` wait in, `collective`, and wait for no rank that is behind elsewhere."""

    collective: Collective
    waiting: tuple[int, ...]
    behind: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """The ranks that are in the same collective, of those that should be."""

    ranks: tuple[int, ...]
    collective: Collective


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks have entered different collectives as the same number of one group, or wait for each other in several
    groups; the side with the fewest ranks first."""

    sides: tuple[Side, ...]


@dataclass(frozen=True, slots=True)
class NoneMissing:
    """All ranks have entered every collective that others wait in; none is missing."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Undetermined:
    """What some of the waiting ranks wait in is not known."""


Analysis: TypeAlias = "Missing | Mismatch | NoneMissing | Undetermined"


def current_collective(inspection: RankInspection) -> Collective | None:
    """Return the collective that a waiting rank is in: the one that it has entered last, unless it waits in the store or for one
    rank."""
    if (
        inspection.activity is not Activity.WAITING_FOR_RANKS
        or inspection.phase == "rendezvous"
        or not inspection.collectives
    ):
        return None
    last = min(inspection.collectives, key=lambda one: (one.entered_s, one.group))
    return None if inspection.why in NOT_COLLECTIVE or (inspection.mixed and not _is_in(last, inspection)) else last


def torch_limit_s(waiting: Sequence[RankInspection]) -> float:
    """Return for how long torch lets the waiting ranks wait: until the first of their time limits, which ends them all. 0 for
    no ranks; where no limit is reported, the default of gloo, or of NCCL for ranks with a GPU."""
    reported = [now.limit_s for now in map(current_collective, waiting) if now is not None and now.limit_s is not None]
    defaults = [GLOO_LIMIT_S if inspection.gpu_use is None else NCCL_LIMIT_S for inspection in waiting]
    return min(reported or defaults, default=0.0)


def analyze(inspections: Mapping[int, RankInspection], ended: frozenset[int]) -> Analysis:
    """Return what the waiting ranks wait for; `inspections` are those of living ranks, `ended` are ranks that have exited."""
    waiting = {
        rank: now
        for rank, inspection in sorted(inspections.items())
        if (now := current_collective(inspection)) is not None
    }
    gaps: list[Missing] = []
    for key in sorted({_key(now) for now in waiting.values()}):
        sides = _sides(key, waiting, inspections)
        if sides:
            return Mismatch(sides)
        gap = _find_missing(key, waiting, inspections, ended)
        gaps += [gap] if gap is not None else []
    if gaps:
        return _find_root(gaps, waiting)
    idle = [rank for rank, inspection in inspections.items() if inspection.activity is Activity.WAITING_FOR_RANKS]
    if not waiting or any(rank not in waiting for rank in idle) or ended:
        return Undetermined()
    whole = all(now.ranks and waiting.keys() >= set(now.ranks) for now in waiting.values())
    return NoneMissing(next(iter(waiting.values()))) if whole else Undetermined()


def _key(collective: Collective) -> Key:
    return collective.group, collective.ranks


def _number(key: Key, rank: int, inspections: Mapping[int, RankInspection]) -> int | None:
    """Return how many collectives of a group a rank has entered, None if it reports none at all."""
    inspection = inspections.get(rank)
    if inspection is None or not inspection.collectives:
        return None
    return max((collective.number for collective in inspection.collectives if _key(collective) == key), default=0)


def _sides(key: Key, waits: Mapping[int, Collective], inspections: Mapping[int, RankInspection]) -> tuple[Side, ...]:
    """Return which ranks have entered which collective of a group, at the highest number entered; or at the number in
    which the last of those ranks are seen to wait, which others have left."""
    waiting = {rank: now for rank, now in waits.items() if _key(now) == key}
    top = max(now.number for now in waiting.values())
    numbers_confirmed = [now.number for rank, now in waiting.items() if _is_in(now, inspections[rank])]
    for number in dict.fromkeys((top, min(numbers_confirmed, default=top))):
        kinds: dict[tuple[str, str], list[int]] = {}
        entered = {rank: one for rank, now in waiting.items() if (one := _as_number(now, number)) is not None}
        for rank, one in entered.items():
            kinds.setdefault((one.what, "" if one.what.startswith(VARIABLE_SHAPES) else one.shape), []).append(rank)
        if len(kinds) > 1:
            sides = [Side(tuple(ranks), entered[ranks[0]]) for ranks in kinds.values()]
            return tuple(sorted(sides, key=lambda side: (len(side.ranks), -side.ranks[0])))
    return ()


def _as_number(now: Collective, number: int) -> Collective | None:
    """Return the collective that a rank has entered with that number in a group, None where it is not known."""
    if now.number == number:
        return now
    return next(
        (
            replace(now, number=number, what=earlier.what, shape=earlier.shape)
            for earlier in now.earlier
            if earlier.number == number
        ),
        None,
    )


def _find_missing(
    key: Key,
    waits: Mapping[int, Collective],
    inspections: Mapping[int, RankInspection],
    ended: frozenset[int],
) -> Missing | None:
    """Return the ranks that are missing in a group's latest collective and are not seen to wait in an earlier one."""
    waiting = [rank for rank, now in waits.items() if _key(now) == key]
    top = max(waiting, key=lambda rank: (waits[rank].number, -rank))
    number = waits[top].number
    behind = [rank for rank in key[1] if rank in ended]
    behind += [
        rank
        for rank in key[1]
        if rank in inspections and _is_behind(_number(key, rank, inspections), number)
        if rank not in waiting or not _is_in(waits[rank], inspections[rank])
    ]
    if not behind:
        return None
    return Missing(waits[top], tuple(rank for rank in waiting if rank not in behind), tuple(sorted(behind)))


def _is_in(collective: Collective, inspection: RankInspection) -> bool:
    """Return whether a rank is still in that collective: gloo's flight recorder does not know, but the stack may show it."""
    return inspection.why == f"in {collective.what}"


def _is_behind(number: int | None, top: int) -> bool:
    return number is not None and number < top


def _find_root(gaps: list[Missing], waits: Mapping[int, Collective]) -> Analysis:
    """Return the gap whose missing ranks are not victims; where all are victims, they wait for each other."""
    victims = {rank for gap in gaps for rank in gap.waiting}
    for gap in gaps:
        free = tuple(rank for rank in gap.behind if rank not in victims)
        if free:
            return Missing(gap.collective, gap.waiting, free)
    sides = [Side(gap.waiting, waits[gap.waiting[0]]) for gap in gaps if gap.waiting]
    return Mismatch(tuple(sorted(sides, key=lambda side: (len(side.ranks), -side.ranks[0]))))


# As text


def describe(collective: Collective) -> str:
    """Return `all_reduce #9,655 (default group)`."""
    return f"{collective.what} #{collective.number:,} ({collective.label or collective.group})"


def describe_with_shape(collective: Collective) -> str:
    """Return the same with the shape."""
    return (
        f"{collective.what} #{collective.number:,}"
        + (f" of {collective.shape}" if collective.shape else "")
        + f" ({collective.label or collective.group})"
    )


def describe_waiting(inspections: Mapping[int, RankInspection], answer: Analysis) -> str:
    """Say what all waiting ranks wait in: `ranks 0,1,3-7 in all_reduce #9,655 (default group), entered 9 s ago`."""
    groups: dict[str, list[int]] = {}
    ages_s: dict[str, float] = {}
    limits: dict[str, str] = {}
    for rank, inspection in sorted(inspections.items()):
        if inspection.activity is not Activity.WAITING_FOR_RANKS:
            continue
        now = current_collective(inspection)
        place_text = f"in {describe(now)}" if now is not None else _describe_other_wait(inspection)
        groups.setdefault(place_text, []).append(rank)
        if now is not None:
            ages_s[place_text] = max(ages_s.get(place_text, 0.0), now.entered_s)
            limits[place_text] = "" if now.limit_s is None else f", time limit {now.limit_s:.0f} s"
    lines = [
        f"{ranks_label(ranks)} {said}" + (f", entered {ages_s[said]:.0f} s ago{limits[said]}" if said in ages_s else "")
        for said, ranks in sorted(groups.items(), key=lambda one: -len(one[1]))
    ]
    if isinstance(answer, Missing):
        lines.append(f"{ranks_label(answer.behind)} never entered it")
    return "; ".join(lines)


def _describe_other_wait(inspection: RankInspection) -> str:
    """Return where a rank outside of any collective waits for others."""
    if inspection.phase == "rendezvous":
        return f"at the rendezvous{f' ({inspection.raised.text})' if inspection.raised is not None else ''}"
    return (inspection.why or "wait for others") + (f", {inspection.where}" if inspection.where else "")
