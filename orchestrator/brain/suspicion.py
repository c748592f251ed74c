"""When is silence suspicious, and what breaks it? Pure: facts in, seconds out.

Rules: suspicion only makes one look, and a look harms nobody; what a look proves is another question, see `hang`. The
silence that is suspicious follows from what the job has shown, or is what the user has fixed. What only one rank does
(a line of log, some I/O) puts a look off, but not for ever: a thread that says `waiting` every second is no progress.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from .events import Doing, RankBeat
from .facts import AttemptFacts, Facts, Life, Link, Phase, RankFacts
from .folding import named

START_SUSPECT_S = 30.0
"""How long nothing at all may be heard before step times are known: imports, rendezvous, the first steps."""

EXIT_SUSPECT_S = 5.0
"""The same once some ranks have ended well: the others have nothing to do but to end."""

USUAL_TIMES = 3.0
"""So many usual step times without a sign are suspicious, within the user's floor and ceiling."""

PUT_OFF_TIMES = 0.2
START_PUT_OFF_TIMES = 6.0
"""For so many times the suspicious silence can signs of single ranks alone put off a look; before step times are known,
for so many: there is nothing else to go by."""

PATIENCE_S = 60.0
PATIENCE_TIMES = 20.0
PATIENCE_PAUSES = 2.0
"""How long a rank may stand in one place without a proof that it never goes on: the longest of 60 s, 20 usual step
times, and twice the longest pause between two steps that this attempt has shown (that at most up to the ceiling)."""

BRIEF_S = 2.0
"""A process that is held by a debugger, or is a zombie, for less than this is not told of."""

LONG_PHASES = ("evaluate", "save", "exit", "retry")
LONG_PHASE_TIMES = 5.0
"""In these phases, by its stack and its source (`retry`: it sleeps in a loop that counts to an end or looks at a
clock), a rank may stand so many times longer in one place; and where it computes all the time: a loop over a data
set in one function looks like an endless one."""

IO_SIGN_BYTES = 64 * 1024
"""What a rank reads and writes between two beats counts from here on: less is what monitors do."""

CPU_SIGN_S = 0.05
"""Processor seconds that count as a sign of life before the first step."""

BUSY_SHARE = 0.2
"""A rank is busy that has used this share of a processor since its last beat."""


class Weight(enum.Enum):
    """What a sign of life is worth."""

    GANG = "the whole gang goes on"
    RANK = "one rank does something: it puts a look off, for a while"
    START = "the same, before the first step only"
    LOOK = "no rank that shows it is judged"
    NONE = "nothing"


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life, how it is told, and what it is worth; `shows` reads it off a beat, where beats tell it."""

    name: str
    weight: Weight
    told: str
    shows: Callable[[RankFacts, RankBeat], bool] | None = None


SIGNS = (
    Sign("step", Weight.GANG, "an optimizer step was made", lambda rank, beat: beat.count > rank.count),
    Sign("log", Weight.RANK, "the rank's log has grown", lambda rank, beat: beat.log_bytes > rank.log_bytes),
    Sign(
        "I/O", Weight.RANK, "64 KiB or more read or written between two beats: data, a checkpoint that grows",
        lambda rank, beat: beat.io_bytes >= rank.io_bytes + IO_SIGN_BYTES,
    ),
    Sign(
        "processor", Weight.START, "0.05 s of processor time between two beats: imports, compilation",
        lambda rank, beat: not beat.count and beat.cpu_s >= rank.cpu_s + CPU_SIGN_S,
    ),
    Sign("collective", Weight.LOOK, "between two looks the rank has entered another collective"),
    Sign("stack", Weight.LOOK, "between two looks its stack, its children or their I/O have moved"),
    Sign("GPU", Weight.NONE, "a GPU that is busy: kernels of a collective spin while they wait"),
)  # fmt: skip
"""All signs of life and their weights: this table decides, and the documents show it."""


def signs(rank: RankFacts, beat: RankBeat) -> tuple[Sign, ...]:
    """Return the signs of life that a beat shows and that were not there before."""
    return tuple(sign for sign in SIGNS if sign.shows is not None and sign.shows(rank, beat))


def is_busy(rank: RankFacts, beat: RankBeat, at: float) -> bool:
    """Tell whether the rank uses much of a processor, or would: on a busy machine it is ready to run and gets little."""
    share_s = BUSY_SHARE * (at - rank.beat_at)
    return beat.state == "R" or beat.cpu_s - rank.cpu_s >= max(CPU_SIGN_S, share_s)


# How long


def usual_s(facts: Facts) -> float | None:
    """Return the usual time of a step: that of the slowest rank, None before it is known."""
    return max((rank.usual_s for rank in facts.ranks.values() if rank.usual_s is not None), default=None)


def has_stepped(facts: Facts) -> bool:
    """Tell whether the current attempt has made a step."""
    return any(rank.count for rank in facts.ranks.values())


def suspect_s(facts: Facts) -> float | None:
    """Return how long a silence is suspicious now, None where none is."""
    assert facts.limits is not None
    limits = facts.limits
    if limits.hang_s_max is None or limits.hang_s_max > 0:
        return limits.hang_s_max
    usual = usual_s(facts)
    if any(rank.ended_well for rank in facts.ranks.values()):
        wanted_s = EXIT_SUSPECT_S
    elif usual is None:
        wanted_s = START_SUSPECT_S
    else:
        wanted_s = USUAL_TIMES * usual
    return min(max(wanted_s, limits.hang_s_floor), limits.hang_s_ceiling)


def is_fixed(facts: Facts) -> bool:
    """Tell whether the user has fixed how long a silence is a hang."""
    return facts.limits is not None and bool(facts.limits.hang_s_max)


def patience_s(facts: Facts, phase: str = "", longer: bool = False) -> float:
    """Return how long a rank may stand in one place, in a phase by its stack, before that alone is a hang."""
    assert facts.limits is not None
    if is_fixed(facts):
        return 0.0
    ceiling_s = facts.limits.hang_s_ceiling
    if not has_stepped(facts):
        return max(ceiling_s, PATIENCE_S)
    pause_s = min(PATIENCE_PAUSES * max(rank.pause_s for rank in facts.ranks.values()), ceiling_s)
    plain_s = max(PATIENCE_S, PATIENCE_TIMES * (usual_s(facts) or 0.0), pause_s)
    wanted_s = plain_s * (LONG_PHASE_TIMES if longer or phase in LONG_PHASES else 1.0)
    return min(wanted_s, works_s(facts) or wanted_s)


def works_s(facts: Facts) -> float | None:
    """Return how long a rank may work while others wait for it and nothing else is heard; None: as long as it likes."""
    assert facts.limits is not None
    if not has_stepped(facts):
        return None
    least_s = max(facts.limits.hang_s_ceiling, facts.limits.hang_s_max or 0.0)
    return max(least_s, PATIENCE_TIMES * (usual_s(facts) or 0.0))


def limit_at(facts: Facts, attempt: AttemptFacts, limit_s: float | None) -> float | None:
    """Return when (job clock) a limit for what comes before the first step is over; None without one, or after it."""
    assert attempt.running_at is not None
    if limit_s is None or has_stepped(facts):
        return None
    return max(attempt.running_at, attempt.watched_at) + limit_s


# Since when


def gang_at(facts: Facts, attempt: AttemptFacts) -> float:
    """Return when (job clock) the gang was last known to go on as a whole. What nobody watched does not count, and
    that a rank ends well is a step of its own."""
    ended_at = max((rank.died_at for rank in facts.ranks.values() if rank.ended_well), default=0.0)
    return max(attempt.running_at or 0.0, attempt.watched_at, facts.stepped_at, ended_at)


def quiet_since(facts: Facts, attempt: AttemptFacts) -> float:
    """Return since when (job clock) nothing speaks against a look."""
    since_s, silence_s = gang_at(facts, attempt), suspect_s(facts)
    if is_fixed(facts) or silence_s is None:
        return max(since_s, facts.progress_at)
    times = START_PUT_OFF_TIMES if usual_s(facts) is None else PUT_OFF_TIMES
    return max(since_s, min(facts.progress_at, since_s + times * silence_s))


def silent_since(facts: Facts, attempt: AttemptFacts) -> float:
    """Return since when (job clock) nothing speaks against a hang without a proof. Where there are steps, log lines
    and I/O do so for as long as the ceiling; where there are none, they are all that one has, and processor time
    alone does."""
    assert facts.limits is not None
    since_s = gang_at(facts, attempt)
    if is_fixed(facts):
        return max(since_s, facts.progress_at)
    if not has_stepped(facts):
        since_s = max(since_s, *(rank.told_at for rank in facts.ranks.values()))
    return max(since_s, min(facts.progress_at, since_s + facts.limits.hang_s_ceiling))


# In words


def text(facts: Facts, now_s: float) -> str:
    """Say in one line what looks like a hang now; empty where nothing does."""
    attempt = facts.attempt
    if attempt is None or attempt.phase is not Phase.RUN or facts.limits is None:
        return ""
    stopped = _standing(facts, now_s)
    if stopped:
        return stopped
    noticed = attempt.noticed or attempt.desynced
    if noticed is not None:
        return f"{noticed.kind.value}: {noticed.summary}"
    silence_s = suspect_s(facts)
    since_s = quiet_since(facts, attempt)
    if attempt.running_at is None or silence_s is None or now_s < since_s + silence_s:
        return ""
    known = usual_s(facts)
    what = f"no step for {now_s - gang_at(facts, attempt):.0f} s"
    usual = f" (usual: {known:.2g} s)" if known is not None else ""
    return f"{what if has_stepped(facts) else f'nothing heard for {now_s - since_s:.0f} s'}{usual}: {_found(facts)}"


def _standing(facts: Facts, now_s: float) -> str:
    """Say which processes are stopped."""
    words = {"T": "stopped", "t": "held by a debugger", "Z": "a zombie"}
    said = [
        f"rank {rank.rank} on {rank.node} is {words[rank.state]} (state {rank.state}) for {now_s - rank.state_at:.0f} s"
        for rank in facts.ranks.values()
        if rank.life is Life.ALIVE
        and rank.state in words
        and facts.nodes[rank.node].link is Link.UP
        # A rank that ends is a zombie for a moment, and whoever looks at native frames holds it for one.
        and (rank.state == "T" or now_s >= rank.state_at + BRIEF_S)
    ]
    return "; ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")


_DOES = {
    Doing.WORKS: ("works", "work"), Doing.SPINS: ("spins", "spin"), Doing.SLEEPS: ("sleeps", "sleep"),
    Doing.BLOCKED: ("is blocked", "are blocked"), Doing.STOPPED: ("is stopped", "are stopped"),
    Doing.LEAVING: ("is leaving", "are leaving"),
}  # fmt: skip
"""What one rank does, and what several do."""


def _found(facts: Facts) -> str:
    """Say what the last look has found of ranks that do not wait for others."""
    attempt = facts.attempt
    if attempt is None or attempt.look_at is None or attempt.look_at < quiet_since(facts, attempt):
        return "looking"
    odd: dict[tuple[Doing, str], list[RankFacts]] = {}
    for rank in facts.ranks.values():
        look = rank.look
        if rank.life is Life.ALIVE and look is not None and look.doing not in (Doing.WAITS, Doing.UNSEEN):
            odd.setdefault((look.doing, look.where), []).append(rank)
    said = [
        f"{named([rank.rank for rank in ranks])} {_DOES[doing][len(ranks) > 1]}"
        + (f" at {where}" if where else "")
        for (doing, where), ranks in list(odd.items())[:3]
    ]
    alone = [ranks[0].look for ranks in odd.values() if len(odd) == len(ranks) == 1]
    why = f" ({alone[0].why})" if alone and alone[0] is not None and alone[0].why else ""
    more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
    return f"{', '.join(said)}{why}{more}" if odd else "looking"
