"""What does a virtual rank do, and what would a look find of it? And what a node remembers from one look to the next."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core import observations
from tests.support.frames import frame

from . import counts

if TYPE_CHECKING:
    from .gang import Rank

SLEEP_S = 3600.0


@dataclass(frozen=True, slots=True)
class Stance:
    """How a rank stands that makes no step. `cpu`: the share of a processor it uses; `logs`: it writes a line each
    second; `what`: the collective it is in instead of its peers'; `elsewhere`: it waits for others, but not in theirs;
    `others_act`: a thread beside may enter collectives;
    `raised`: the exception that it handles."""

    activity: observations.Activity
    where: str
    why: str = ""
    ends_at: float | None = None
    phase: str = "train"
    cpu: float = 0.0
    logs: bool = False
    what: str = ""
    elsewhere: bool = False
    others_act: bool = False
    raised: observations.Failure | None = None
    since_s: float = 0.0


@dataclass(slots=True)
class Eyes:
    """What one agent remembers: since when each of its ranks has looked the same."""

    before: dict[int, tuple[object, float]] = field(default_factory=dict)

    def look(self, rank: Rank) -> observations.RankInspection:
        """Look at a rank, and compare with the look before."""
        found = _found(rank)
        same = dataclasses.replace(found, collectives=tuple(_ageless(one) for one in found.collectives))
        key, now_s = (rank.pid, rank.gang.count, same), rank.gang.world.now
        known = self.before.get(rank.number)
        if known is None or known[0] != key or found.activity is observations.Activity.PROGRESSING:
            self.before[rank.number] = (key, now_s)
            first = known is None or found.activity is not observations.Activity.PROGRESSING
            return dataclasses.replace(found, activity=observations.Activity.UNKNOWN) if first else found
        return dataclasses.replace(found, still_s=now_s - known[1])


def _ageless(one: observations.Collective) -> observations.Collective:
    return dataclasses.replace(one, entered_s=0.0)


def _found(rank: Rank) -> observations.RankInspection:
    """Return what can be seen of a rank now."""
    gang = rank.gang
    world = gang.world
    gang.settle()
    stance = rank.stance or _plain(rank)
    members = tuple(number for number in range(gang.size) if number != world.night.serves_rank)
    waits = stance.activity is observations.Activity.WAITING_FOR_RANKS
    number = counts.COLLECTIVES_A_STEP * gang.count + (2 if waits and not stance.elsewhere else 1)
    if waits and any(one.host.cut_gang for one in gang.ranks.values()):
        number -= rank.number % 2  # the cut fell into a collective, which some have come through
    entered_s = max(0.0, world.now - max(gang.stepped_s, rank.ready_s))
    one = observations.Collective(
        "0", "default group", members, number, stance.what or "all_reduce", "float32[10]", entered_s, limit_s=world.night.limit_s
    )  # fmt: skip
    if rank.number == world.night.hidden_rank and world.now < world.night.hidden_s:
        return observations.RankInspection(
            rank.number, rank.pid, rank.state, observations.Activity.UNKNOWN, 0.0, None, "it did not answer", "",
            (), (), (), (), (),
        )  # fmt: skip
    there = world.now >= rank.ready_s and not rank.is_silent
    return observations.RankInspection(
        rank.number, rank.pid, rank.state, stance.activity, 0.0, frame(stance.where), stance.why,
        stance.phase, (stance.where,), (one,) if there else (), counts.GROUPS if rank.counted.odd else (), counts.history(rank), (),
        stance.others_act, mixed=(counts.MAIN,) if world.night.sends else (), raised=stance.raised,
    )  # fmt: skip


def _plain(rank: Rank) -> Stance:
    """Return what a rank does that nothing has befallen: it imports, trains, or waits for others."""
    gang = rank.gang
    if rank.state == "T":
        return Stance(observations.Activity.STOPPED, "train.py:9 step", "stopped by a signal")
    if gang.world.now < rank.ready_s:
        return Stance(observations.Activity.PROGRESSING, "train.py:1 <module>", phase="import")
    if not gang.count and any(one.ready_s > gang.world.now for one in gang.ranks.values()):
        return Stance(
            observations.Activity.WAITING_FOR_RANKS,
            "train.py:2 <module>",
            "in a wait for the store",
            phase="rendezvous",
        )
    if rank.serves:
        return Stance(observations.Activity.SLEEPING, "train.py:5 serve", "in sleep(), in a loop")
    if gang.stepping:
        return Stance(observations.Activity.PROGRESSING, "train.py:9 step")
    if gang.world.night.polls:
        return Stance(observations.Activity.SLEEPING, "train.py:6 meet", "in sleep(), in a loop")
    return Stance(observations.Activity.WAITING_FOR_RANKS, "train.py:9 step", "in all_reduce")
