"""Counts of collectives at steps of an optimizer, as `desync` compares them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class CountKey(NamedTuple):
    """What can be compared: the collectives of the group `key` by the steps of one optimizer."""

    key: str
    optimizer: int


@dataclass(slots=True)
class Tally:
    """How many collectives each rank had run after one step of an optimizer; `step`: the attempt's own step, the least
    that a rank reported with it; `ranks_with`: how many ranks have each count."""

    step: int
    counts: dict[int, int] = field(default_factory=dict)
    ranks_with: dict[int, int] = field(default_factory=dict)

    def enter(self, rank: int, count: int, step: int) -> bool:
        """Add a rank's count; return whether all earlier counts are equal to it."""
        ranks_with, before = self.ranks_with, self.counts.get(rank)
        equal = not ranks_with or (len(ranks_with) == 1 and count in ranks_with)
        if before is not None:
            ranks_with[before] -= 1
            if not ranks_with[before]:
                del ranks_with[before]
        self.counts[rank] = count
        ranks_with[count] = ranks_with.get(count, 0) + 1
        self.step = min(self.step, step)
        return equal
