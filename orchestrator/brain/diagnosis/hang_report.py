"""Text of a hang verdict: culprits, places, evidence, and the stacks of many ranks in a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.brain.diagnosis import collectives, inspections
from orchestrator.brain.diagnosis.collectives import Mismatch
from orchestrator.brain.model.decisions import Evidence, EvidenceKind
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.core import text
from orchestrator.core.observations import Activity, RankInspection
from orchestrator.core.status_types import Frame
from orchestrator.core.text import ranks_label

CULPRITS_SHOWN = 4

STACKS_SHOWN = 12
"""The number of groups of ranks that are shown; the rest is only counted."""

FRAMES_SHOWN = 4
INSIDE_SHOWN = 2
"""The number of the user's frames that are shown of each group, and of the frames inside their innermost call."""


def place_text(alive: dict[int, RankInspection], ranks: tuple[int, ...]) -> str:
    """Return where the first of some ranks is, ` at train.py:44 step`; nothing where that is not known."""
    where = alive[ranks[0]].where if ranks and ranks[0] in alive else None
    return f" at {where}" if where else ""


def describe_culprits(
    attempt: AttemptFacts, culprits: Sequence[RankFacts], answer: collectives.Analysis | None = None
) -> str:
    """Say where culprits are and what they do: `rank 2 on gpu03: in read() of data/shard-17.bin, train.py:88 load`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in culprits:
        groups.setdefault((rank.node, _describe_activity(attempt, rank, answer)), []).append(rank.rank)
    lines = [f"{ranks_label(ranks)} on {node}: {what}" for (node, what), ranks in groups.items()]
    more = len(lines) - CULPRITS_SHOWN
    return "; ".join(lines[:CULPRITS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _describe_activity(attempt: AttemptFacts, rank: RankFacts, answer: collectives.Analysis | None) -> str:
    """Return what a rank does, as text."""
    if rank.rank_state is RankState.EXITED:
        return f"ended with code 0 after {rank.steps:,} steps" if rank.ended_well else "has ended"
    inspection = inspections.last_inspection(attempt, rank)
    if inspection is None:
        return "was not inspected"
    now = collectives.current_collective(inspection)
    if isinstance(answer, Mismatch) and now is not None:
        why = f"in {collectives.describe_with_shape(now)}"
        why = inspection.raised.describe_with(why) if inspection.raised is not None else why
    else:
        why = inspection.why or (
            f"in {collectives.describe(now)}" if now is not None else _ACTIVITY_TEXTS[inspection.activity]
        )
    line = f": {inspection.line}" if inspection.line else ""
    return f"{why}, {inspection.where}{line}" if inspection.where else why


_ACTIVITY_TEXTS = {
    Activity.WAITING_FOR_RANKS: "waits for others", Activity.PROGRESSING: "computes without end", Activity.SPINNING: "uses processor time in one place",
    Activity.SLEEPING: "sleeps", Activity.BLOCKED: "is blocked", Activity.STOPPED: "is stopped", Activity.EXITING: "is about to end",
    Activity.UNKNOWN: "cannot be inspected",
}  # fmt: skip


def culprit_frames(attempt: AttemptFacts, culprits: Sequence[RankFacts]) -> tuple[tuple[str, ...], tuple[Frame, ...]]:
    """Return what a repeated hang is recognised by: the frames of the culprits, whichever ranks these are; their ranks if no
    frame is known."""
    frames = {
        inspection.where
        for rank in culprits
        if (inspection := inspections.last_inspection(attempt, rank)) and inspection.where
    }
    place = () if frames else (f"ranks {text.ranks_text(r.rank for r in culprits)}",)
    return place, tuple(sorted(frames, key=str))


def common_node(culprits: Sequence[RankFacts]) -> str:
    """Return the node of the culprits, empty where they are on several."""
    names = {rank.node for rank in culprits}
    return names.pop() if len(names) == 1 else ""


def no_traffic_text(facts: Facts) -> str:
    """Name the nodes between whose ranks nothing flows."""
    names = [node.name for node in facts.gang]
    if len(names) < 2:
        return "no data flows between its ranks"
    more = f" and {len(names) - CULPRITS_SHOWN} more" if len(names) > CULPRITS_SHOWN else ""
    return f"no data flows between {', '.join(names[:CULPRITS_SHOWN])}{more}"


def hang_evidence(facts: Facts, attempt: AttemptFacts) -> tuple[Evidence, ...]:
    """Return how the hang is known: what was inspected, the stacks, and what could not be seen."""
    alive = inspections.living_ranks(facts)
    by_rank = inspections.last_inspections(facts, attempt)
    inspected = list(by_rank.values())
    if not inspected:
        return ()
    stills = [s for rank in alive if (s := inspections.still_s(facts, attempt, rank)) is not None]
    made = inspections.count_in_silence(facts, attempt)
    times = {0: "once", 1: "once", 2: "twice"}.get(made, f"{made} times")
    ways = [f"stacks of {len(inspected)} ranks, {times}"]
    if made > 1 and stills and min(stills) >= inspections.STILL_S:
        ways[0] += (", {:.0f} s apart" if made == 2 else " in {:.0f} s").format(min(stills)) + ", unchanged"
    ways += ["collective sequence numbers"] if any(inspection.collectives for inspection in inspected) else []
    ways += ["/proc state"]
    ways += ["GPU use"] if any(inspection.gpu_use is not None for inspection in inspected) else []
    quiet = sorted({rank.node for rank in alive if rank.rank not in by_rank})
    unanswered = (f"no answer to the last inspection from {', '.join(quiet)}",) if quiet else ()
    notes = (*_gpu_use_text(inspected), *unanswered, *_unavailable_texts(inspected))
    return (Evidence(" · ".join(ways), EvidenceKind.WAYS), *stack_lines(inspected), *map(Evidence, notes))


UNEVEN_FIX = (
    "give all ranks the same number of batches (DistributedSampler, drop_last), or wrap the loop in torch's Join"
)


def uneven_input_evidence(facts: Facts) -> tuple[Evidence, ...]:
    """Return that some ranks ended in good order while others, which have made as many steps, still wait. Whether these are
    in their loop, or behind it, step counts do not show."""
    done = [rank for rank in facts.ranks.values() if rank.ended_well and rank.steps]
    others = [rank for rank in facts.ranks.values() if not (rank.ended_well or rank.beat.exiting)]
    steps = max((rank.steps for rank in done), default=0)
    if not done or not others or max(rank.steps for rank in others) < steps:
        return ()
    left, rest = (ranks_label([rank.rank for rank in ranks]) for ranks in (done, others))
    return (
        Evidence(
            f"{left} ended after {steps:,} steps, and {rest} did not: if these are still in the loop, the input is uneven",
            fix=UNEVEN_FIX,
        ),
    )


def _gpu_use_text(seen: Sequence[RankInspection]) -> tuple[str, ...]:
    """Say how busy GPUs are: one that waits in a collective of NCCL is, too."""
    groups: dict[str, list[int]] = {}
    for inspection in seen:
        if inspection.gpu_use is not None:
            groups.setdefault(f"{inspection.gpu_use:.0%}", []).append(inspection.rank)
    shares_text = ", ".join(
        f"{ranks_label(ranks)} {share}" for share, ranks in sorted(groups.items(), key=lambda one: one[1])
    )
    return (f"GPU use: {shares_text}",) if shares_text else ()


def _unavailable_texts(seen: Sequence[RankInspection]) -> tuple[str, ...]:
    """Return which ways of inspection did not work, and on which ranks."""
    groups: dict[str, list[int]] = {}
    for inspection in seen:
        for lack in inspection.unavailable:
            groups.setdefault(lack, []).append(inspection.rank)
    return tuple(f"not inspected ({ranks_label(ranks)}): {lack}" for lack, ranks in sorted(groups.items()))


# Stacks of many ranks in a few lines


def group_alike(results: Iterable[RankInspection]) -> list[tuple[tuple[int, ...], RankInspection]]:
    """Return groups of ranks in the same place, with the inspection of the first of them: smallest groups first,
    since the odd rank is the one to find."""
    groups: dict[tuple[object, ...], list[RankInspection]] = {}
    for inspection in results:
        groups.setdefault((inspection.activity, inspection.where, inspection.why, inspection.stack), []).append(
            inspection
        )
    folded = [(tuple(sorted(one.rank for one in group)), group[0]) for group in groups.values()]
    return sorted(folded, key=lambda one: (len(one[0]), one[0]))


def traceback_frames(inspection: RankInspection) -> tuple[str, ...]:
    """Return frames of a rank's main thread as a traceback has them, outermost first: the user's, and inside their call."""
    where = str(inspection.where or "")
    inside, users = text.split_stack(where, inspection.stack, inspection.inside)
    outside = users[:FRAMES_SHOWN][::-1]
    cut = ("…",) if len(users) > FRAMES_SHOWN else ()
    cut_inside = ("…",) if len(inside) > INSIDE_SHOWN else ()
    return (*cut, *outside, *cut_inside, *inside[:INSIDE_SHOWN][::-1])


def stack_lines(results: Iterable[RankInspection]) -> list[Evidence]:
    """Return one line for each group of ranks in the same place: `ranks 0-5,7 wait, in all_reduce: frame > frame`."""
    groups = group_alike(results)
    shown = [Evidence(_stack_line(*group), EvidenceKind.RANKS) for group in groups[:STACKS_SHOWN]]
    rest = sum(len(ranks) for ranks, _ in groups[STACKS_SHOWN:])
    return [*shown, Evidence(f"{rest} more ranks, each at another place")] if rest else shown


def _stack_line(ranks: tuple[int, ...], inspection: RankInspection) -> str:
    why = "" if inspection.state == "T" else inspection.why  # state T, stopped, says everything
    activity_text = ", ".join(text for text in (inspection.activity.text, why) if text)
    stack = " > ".join(traceback_frames(inspection)) or "no stack"
    return f"{ranks_label(ranks)} (state {inspection.state or '?'}; {activity_text}): {stack}"
