"""Suspicion: how long a silence must last to be suspicious, and which signs of life break it.

Suspicion only causes an inspection, which harms no rank; what an inspection proves is decided in `hang`. The silence
that is suspicious follows from what the job has shown. What only one rank does (a log line,
some I/O) delays an inspection, but not for ever: a thread that prints `waiting` every second makes no progress.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.rank_facts import RankFacts
from orchestrator.core.wire.reports import RankHeartbeat

START_SUSPECT_S = 30.0
"""How long there may be no sign of life at all before step times are known: imports, rendezvous, the first steps."""

EXIT_SUSPECT_S = 5.0
"""The same once some ranks have ended well: the others have nothing to do but to end."""

USUAL_STEPS_FACTOR = 3.0
"""The number of usual step times without a sign that is suspicious."""

SUSPECT_S_MIN, SUSPECT_S_MAX = 5.0, 600.0
"""The shortest and the longest silence that is suspicious, whatever the job has shown."""

DELAY_FACTOR_MAX = 0.2
"""How many times the suspicious silence signs of single ranks can delay an inspection."""

IO_SIGN_BYTES = 64 * 1024
"""Bytes read and written between two heartbeats count from here on: monitors do less."""

CPU_SIGN_S = 0.05
"""Processor seconds that count as a sign of life before the first step."""

BUSY_SHARE = 0.2
"""A rank that has used this share of a processor since its last beat is busy."""


class Weight(enum.Enum):
    """The weight of a sign of life."""

    GANG = "the whole gang advances"
    RANK = "one rank does something: it delays an inspection, for a while"
    START = "the same, before the first step only"
    LOOK = "no rank that shows it is judged"
    NONE = "nothing"


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life, its meaning as text, and its weight; `shows` recognises it in a heartbeat, where a
    heartbeat can show it."""

    name: str
    weight: Weight
    meaning: str
    shows: Callable[[RankFacts, RankHeartbeat], bool] | None = None


SIGNS = (
    Sign(
        "step", Weight.GANG, "an optimizer step was made",
        lambda rank, beat: beat.steps > rank.steps or beat.optimizer_steps > rank.beat.optimizer_steps,
    ),
    Sign(
        "backward pass", Weight.GANG, "a backward pass was begun in a job that has made no step, from the 16th of a rank on",
        lambda rank, beat: beat.passes > rank.beat.passes,
    ),
    Sign("log", Weight.RANK, "the rank's log has grown", lambda rank, beat: beat.log_bytes > rank.log_bytes),
    Sign(
        "I/O", Weight.RANK, "64 KiB or more read or written between two heartbeats: data, a checkpoint that grows",
        lambda rank, beat: beat.io_bytes >= rank.beat.io_bytes + IO_SIGN_BYTES,
    ),
    Sign(
        "processor", Weight.START, "0.05 s of processor time between two heartbeats: imports, compilation",
        lambda rank, beat: not beat.steps and beat.cpu_s >= rank.cpu_s + CPU_SIGN_S,
    ),
    Sign("collective", Weight.LOOK, "between two inspections the rank has entered another collective"),
    Sign("stack", Weight.LOOK, "between two inspections its stack, or that of another thread or a child, has moved"),
    Sign(
        "data", Weight.LOOK,
        "between two inspections a thread or a child that reads or writes has progressed: an upload, a slow transfer",
    ),
    Sign("GPU", Weight.NONE, "a GPU that is busy: kernels of a collective spin while they wait"),
)  # fmt: skip
"""All signs of life and their weights: this table decides, and the documents show it."""


def signs(rank: RankFacts, beat: RankHeartbeat) -> tuple[Sign, ...]:
    """Return the new signs of life in a heartbeat."""
    return tuple(sign for sign in SIGNS if sign.shows is not None and sign.shows(rank, beat))


def is_busy(rank: RankFacts, beat: RankHeartbeat, at: float) -> bool:
    """Return whether the rank uses much of a processor, or would: on a busy machine it is ready to run and gets little."""
    share_s = BUSY_SHARE * (at - rank.beat_at)
    return beat.state == "R" or beat.cpu_s - rank.cpu_s >= max(CPU_SIGN_S, share_s)


# How long


def usual_step_s(facts: Facts) -> float | None:
    """Return the usual time of a step: that of the slowest rank, None before it is known."""
    if not facts.is_usual_known:
        beats = [rank.beat for rank in facts.ranks.values()]
        medians_s = [beat.median_step_s for beat in beats if beat.median_step_s is not None]
        facts.usual_step_s, facts.is_usual_known = max(medians_s, default=None), True
    return facts.usual_step_s


def has_stepped(facts: Facts) -> bool:
    """Return whether the current attempt has made a step."""
    return facts.steps_made > 0


def usual_pass_s(facts: Facts) -> float | None:
    """Return the usual time of a backward pass in a job that has made no step, None where none is known."""
    if has_stepped(facts) or not facts.passed_at:
        return None
    return max((rank.beat.median_pass_s or 0.0 for rank in facts.ranks.values()), default=0.0) or None


def suspicious_silence_s(facts: Facts) -> float | None:
    """Return how long a silence must last now to be suspicious, None where none is."""
    assert facts.limits is not None
    if facts.limits.hang_timeout_s is None:
        return None
    usual = usual_step_s(facts)
    if facts.ended_well_at is not None:
        silence_s = EXIT_SUSPECT_S
    elif usual is None:
        usual_s = usual_pass_s(facts)
        silence_s = START_SUSPECT_S if usual_s is None else min(START_SUSPECT_S, USUAL_STEPS_FACTOR * usual_s)
    else:
        silence_s = USUAL_STEPS_FACTOR * usual
    return min(max(silence_s, SUSPECT_S_MIN), SUSPECT_S_MAX, facts.limits.hang_timeout_s or SUSPECT_S_MAX)


def is_stepping(facts: Facts, rank: RankFacts, now_s: float) -> bool:
    """Return whether a rank is still stepping: its last step is not much older than usual."""
    return now_s < rank.step_at + max(USUAL_STEPS_FACTOR * (usual_step_s(facts) or 0.0), SUSPECT_S_MIN)


def start_limit_at(facts: Facts, attempt: AttemptFacts, limit_s: float | None) -> float | None:
    """Return when (job clock) a limit for what comes before the first step is over; None without one, or after it."""
    assert attempt.running_at is not None
    if limit_s is None or has_stepped(facts):
        return None
    return max(attempt.running_at, attempt.watched_at) + limit_s


# Since when


def gang_progress_at(facts: Facts, attempt: AttemptFacts) -> float:
    """Return when (job clock) the gang last made progress as a whole. Time without a supervisor does not count,
    and a rank that ends well counts as a step. Backward passes count only where no rank makes steps."""
    stepped_at = facts.stepped_at if has_stepped(facts) else facts.passed_at
    return max(attempt.running_at or 0.0, attempt.watched_at, stepped_at, facts.ended_well_at or 0.0)


def quiet_since(facts: Facts, attempt: AttemptFacts) -> float:
    """Return since when (job clock) no sign of life delays an inspection."""
    since_s, silence_s = gang_progress_at(facts, attempt), suspicious_silence_s(facts)
    if silence_s is None:
        return max(since_s, facts.progress_at)
    return max(since_s, min(facts.progress_at, since_s + DELAY_FACTOR_MAX * silence_s))


def stalled_since(facts: Facts, attempt: AttemptFacts, is_waited_for: bool) -> float:
    """Return since when (job clock) the gang may be hanging without proof: since the last step. Signs of life of
    single ranks (processor time, log lines, I/O) count as well: where the user has set a time, before the first step; else
    where no rank is seen to wait for others (`is_waited_for`).
    """
    assert facts.limits is not None
    since_s, is_set = gang_progress_at(facts, attempt), bool(facts.limits.hang_timeout_s)
    if has_stepped(facts) if is_set else is_waited_for:
        return since_s
    busy_at = () if is_set else [rank.busy_at for rank in facts.ranks.values()]
    return max(since_s, facts.progress_at, *busy_at)
