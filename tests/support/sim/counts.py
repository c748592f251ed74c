"""How many collectives has a virtual rank run, and what of it do its beats and looks tell?

Three groups: one that all training runs in, one of a thread that saves now and then and lags behind on some ranks, and
one of a pipeline, whose stages send unequal numbers of times. Only the first can be out of step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core import observations

from .night import Fault, Harm

if TYPE_CHECKING:
    from .gang import Rank

COLLECTIVES_A_STEP = 3
MAIN, SAVES, STAGES = GROUPS = ("aaaa0000", "bbbb1111", "cccc2222")
MARKS_MAX = 4
LAG_STEPS = 7
PROBED_STEPS, PROBE_STEPS = 20, 7
"""After every so many steps one rank may make so many of another optimizer, alone and without a collective."""
"""So many steps later than its peers every second rank's thread has saved."""


@dataclass(slots=True)
class Counted:
    """`odd`: so many collectives more (or fewer) has a rank run since its step `since`; `told`: the last step that its
    beats have told of."""

    odd: int = 0
    since: int = 0
    told: int = 0

    def is_odd_at(self, step: int) -> bool:
        return self.odd != 0 and step >= self.since


def fall_out_of_step(rank: Rank, fault: Fault) -> None:
    """Let the rank skip or add a collective in its next step, unless one of its gang has done so already."""
    if not any(one.counted.odd for one in rank.gang.ranks.values()):
        rank.counted.odd = -1 if fault.harm is Harm.SKIPS_ONE else 1
        rank.counted.since = rank.gang.count + 1


def marks(rank: Rank) -> tuple[observations.CollectiveCounts, ...]:
    """Return some marks of the steps since the last beat, at steps that other ranks choose too."""
    last, before = rank.gang.count, rank.counted.told
    rank.counted.told, apart = last, 1
    while last // (2 * apart) - before // (2 * apart) >= 2:
        apart *= 2
    steps = [step for step in range(before + 1, last + 1) if step % apart == 0]
    return tuple(_mark(rank, step) for step in steps[-MARKS_MAX:])


def history(rank: Rank) -> tuple[observations.CollectiveCounts, ...]:
    """Return the first step, the last one, and those at which a count grew by another number than before; nothing of
    ranks that were never out of step, which would only fill transcripts."""
    last, counted = rank.gang.count, rank.counted
    if not counted.odd or last < counted.since:
        return ()
    steps = sorted({1, counted.since, counted.since + 1, last})
    return tuple(_mark(rank, step) for step in steps if step <= last)


def _mark(rank: Rank, step: int) -> observations.CollectiveCounts:
    odd = rank.counted.odd if rank.counted.is_odd_at(step) else 0
    lag = LAG_STEPS * (rank.number % 2)
    saves = max(0, step - lag) // rank.gang.world.night.thread_saves_steps
    probed = rank.number == rank.gang.world.night.probe_rank
    made = step + PROBE_STEPS * (step // PROBED_STEPS) if probed else step
    return observations.CollectiveCounts(
        made, 0, step, (COLLECTIVES_A_STEP * step + odd, saves, (rank.number + 1) * step)
    )
