"""Suspicion: how long a silence must last to be suspicious, which signs of life break it, and how long patience lasts.

Suspicion only causes an inspection, which harms no rank; what an inspection proves is decided in `hang`. The silence
that is suspicious follows from what the job has shown, or is what the user has fixed. What only one rank does (a line
of log, some I/O) delays an inspection, but not without end: a thread that prints `waiting` every second makes no
progress.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.brain.model.events import RankHeartbeat
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.rank_facts import RankFacts
from orchestrator.core.observations import Activity, RankInspection

START_SUSPECT_S = 30.0
"""How long there may be no sign of life at all before step times are known: imports, rendezvous, the first steps."""

EXIT_SUSPECT_S = 5.0
"""The same once some ranks have ended well: the others have nothing to do but to end."""

USUAL_TIMES = 3.0
"""The number of usual step times without a sign that is suspicious, within the user's floor and ceiling."""

PUT_OFF_TIMES = 0.2
START_PUT_OFF_TIMES = 6.0
"""How many times the suspicious silence signs of single ranks can delay an inspection, and the same before step times are
known, when there is nothing else to go by."""

PATIENCE_S = 300.0
PATIENCE_LONGER = 2.0
PATIENCE_STEPS = 20.0
PATIENCE_PAUSES = 3.0
"""How long a rank may stand in one place when no state proves that it never goes on: 5 min where it is blocked, and twice
that where it computes, spins, sleeps, polls, saves, evaluates or exits, or where no rank is seen to wait for others. Not
less than 20 usual steps, or three times the longest pause between two steps that the job has shown."""

LONG_PHASES = ("evaluate", "save", "exit")
"""What a rank is in by its stack when it may take longer."""

IO_SIGN_BYTES = 64 * 1024
"""What a rank reads and writes between two beats counts from here on: less is what monitors do."""

CPU_SIGN_S = 0.05
"""Processor seconds that count as a sign of life before the first step."""

BUSY_SHARE = 0.2
"""A rank that has used this share of a processor since its last beat is busy."""


class Weight(enum.Enum):
    """What a sign of life is worth."""

    GANG = "the whole gang goes on"
    RANK = "one rank does something: it delays an inspection, for a while"
    START = "the same, before the first step only"
    LOOK = "no rank that shows it is judged"
    NONE = "nothing"


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life, its meaning in words, and what it is worth; `shows` recognises it in a heartbeat, where a
    heartbeat can show it."""

    name: str
    weight: Weight
    meaning: str
    shows: Callable[[RankFacts, RankHeartbeat], bool] | None = None


SIGNS = (
    Sign(
        "step", Weight.GANG, "an optimizer step was made",
        lambda rank, beat: beat.steps > rank.steps or beat.optimizer_steps > rank.optimizer_steps,
    ),
    Sign("log", Weight.RANK, "the rank's log has grown", lambda rank, beat: beat.log_bytes > rank.log_bytes),
    Sign(
        "I/O", Weight.RANK, "64 KiB or more read or written between two beats: data, a checkpoint that grows",
        lambda rank, beat: beat.io_bytes >= rank.io_bytes + IO_SIGN_BYTES,
    ),
    Sign(
        "processor", Weight.START, "0.05 s of processor time between two beats: imports, compilation",
        lambda rank, beat: not beat.steps and beat.cpu_s >= rank.cpu_s + CPU_SIGN_S,
    ),
    Sign("collective", Weight.LOOK, "between two inspections the rank has entered another collective"),
    Sign("stack", Weight.LOOK, "between two inspections its stack, or that of another thread or a child, has moved"),
    Sign(
        "data", Weight.LOOK,
        "between two inspections a thread or a child that reads or writes has gone on: an upload, a trickle",
    ),
    Sign("GPU", Weight.NONE, "a GPU that is busy: kernels of a collective spin while they wait"),
)  # fmt: skip
"""All signs of life and their weights: this table decides, and the documents show it."""


def signs(rank: RankFacts, beat: RankHeartbeat) -> tuple[Sign, ...]:
    """Return the signs of life that a beat shows and that were not there before."""
    return tuple(sign for sign in SIGNS if sign.shows is not None and sign.shows(rank, beat))


def is_busy(rank: RankFacts, beat: RankHeartbeat, at: float) -> bool:
    """Tell whether the rank uses much of a processor, or would: on a busy machine it is ready to run and gets little."""
    share_s = BUSY_SHARE * (at - rank.beat_at)
    return beat.state == "R" or beat.cpu_s - rank.cpu_s >= max(CPU_SIGN_S, share_s)


# How long


def usual_s(facts: Facts) -> float | None:
    """Return the usual time of a step: that of the slowest rank, None before it is known."""
    if not facts.usual_is_known:
        medians = [rank.median_step_s for rank in facts.ranks.values() if rank.median_step_s is not None]
        facts.usual_s, facts.usual_is_known = max(medians, default=None), True
    return facts.usual_s


def has_stepped(facts: Facts) -> bool:
    """Tell whether the current attempt has made a step."""
    return facts.made > 0


def suspect_s(facts: Facts) -> float | None:
    """Return how long a silence must last now to be suspicious, None where none is."""
    assert facts.limits is not None
    limits = facts.limits
    if limits.hang_s_max is None or limits.hang_s_max > 0:
        return limits.hang_s_max
    usual = usual_s(facts)
    if facts.ended_well_at is not None:
        wanted_s = EXIT_SUSPECT_S
    elif usual is None:
        wanted_s = START_SUSPECT_S
    else:
        wanted_s = USUAL_TIMES * usual
    return min(max(wanted_s, limits.hang_floor_s), limits.hang_ceiling_s)


def is_fixed(facts: Facts) -> bool:
    """Tell whether the user has fixed how long a silence is a hang."""
    return facts.limits is not None and bool(facts.limits.hang_s_max)


def patience_s(facts: Facts, attempt: AttemptFacts, longer: bool = False) -> float:
    """Return how long a rank may stand in one place before that alone is a hang; infinite where the user wants no such
    verdict. Never above the ceiling, unless one usual pause or 20 usual steps of the job are longer than that."""
    assert facts.limits is not None
    limits, usual_steps_s = facts.limits, PATIENCE_STEPS * (usual_s(facts) or 0.0)
    if is_fixed(facts):
        return 0.0
    if limits.patience_s is None:
        return math.inf
    ceiling_s = max(limits.hang_ceiling_s, usual_steps_s, facts.pause_s)
    if attempt.patient or not has_stepped(facts):
        return ceiling_s
    wanted_s = (limits.patience_s or PATIENCE_S) * (PATIENCE_LONGER if longer else 1.0)
    return min(max(wanted_s, usual_steps_s, PATIENCE_PAUSES * facts.pause_s), ceiling_s)


def takes_longer(inspection: RankInspection) -> bool:
    """Tell whether what a rank stands in may well take long: it computes, sleeps, polls, saves, evaluates or exits."""
    own = (
        inspection.activity in (Activity.SPINNING, Activity.SLEEPING, Activity.EXITING)
        or inspection.phase in LONG_PHASES
    )
    return own or (inspection.activity is Activity.BLOCKED and inspection.ends_s is not None)


def limit_at(facts: Facts, attempt: AttemptFacts, limit_s: float | None) -> float | None:
    """Return when (job clock) a limit for what comes before the first step is over; None without one, or after it."""
    assert attempt.running_at is not None
    if limit_s is None or has_stepped(facts):
        return None
    return max(attempt.running_at, attempt.watched_at) + limit_s


# Since when


def gang_at(facts: Facts, attempt: AttemptFacts) -> float:
    """Return when (job clock) the gang was last known to go on as a whole. Time without a supervisor does not count,
    and a rank that ends well counts as a step."""
    return max(attempt.running_at or 0.0, attempt.watched_at, facts.stepped_at, facts.ended_well_at or 0.0)


def quiet_since(facts: Facts, attempt: AttemptFacts) -> float:
    """Return since when (job clock) nothing speaks against an inspection."""
    since_s, silence_s = gang_at(facts, attempt), suspect_s(facts)
    if is_fixed(facts) or silence_s is None:
        return max(since_s, facts.progress_at)
    times = START_PUT_OFF_TIMES if usual_s(facts) is None else PUT_OFF_TIMES
    return max(since_s, min(facts.progress_at, since_s + times * silence_s))


def silent_since(facts: Facts, attempt: AttemptFacts) -> float:
    """Return since when (job clock) nothing speaks against a hang without a proof. Log lines and I/O put this off
    by the ceiling at most; before the first step they do so without limit, and processor time does so by the
    ceiling at most."""
    assert facts.limits is not None
    since_s = gang_at(facts, attempt)
    if is_fixed(facts):
        return max(since_s, facts.progress_at)
    if not has_stepped(facts):
        since_s = max(since_s, *(rank.activity_at for rank in facts.ranks.values()))
    return max(since_s, min(facts.progress_at, since_s + facts.limits.hang_ceiling_s))
