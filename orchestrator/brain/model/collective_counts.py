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
    that a rank reported with it; `ranks_per_count`: how many ranks have each count."""

    step: int
    counts: dict[int, int] = field(default_factory=dict)
    ranks_per_count: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, count: int, step: int) -> bool:
        """Add a rank's count; return whether all earlier counts are equal to it."""
        ranks_per_count, previous_count = self.ranks_per_count, self.counts.get(rank)
        are_equal = not ranks_per_count or (len(ranks_per_count) == 1 and count in ranks_per_count)
        if previous_count is not None:
            ranks_per_count[previous_count] -= 1
            if not ranks_per_count[previous_count]:
                del ranks_per_count[previous_count]
        self.counts[rank] = count
        ranks_per_count[count] = ranks_per_count.get(count, 0) + 1
        self.step = min(self.step, step)
        return are_equal
