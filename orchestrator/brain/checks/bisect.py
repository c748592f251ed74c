"""Search for the nodes that make an all-reduce fail: two bisections by halves, 2 log2(n) trials of ever fewer nodes.

The shortest beginning of the list that fails ends with a bad node, and so does the shortest end of it that fails begin
with one. A single bad node is both; a bad link has its two ends at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Trial = Callable[[tuple[str, ...]], bool]
"""Runs an all-reduce over these nodes, and tells whether it succeeded."""


def suspects(nodes: Sequence[str], succeeds: Trial) -> tuple[str, ...]:
    """Return the node, or the two nodes, with which an all-reduce over all of them fails; it is known to fail."""
    last = _shortest_failing(nodes, succeeds)
    first = _shortest_failing(nodes[::-1], succeeds)
    return (last,) if first == last else tuple(sorted((first, last), key=list(nodes).index))


def _shortest_failing(nodes: Sequence[str], succeeds: Trial) -> str:
    """Return the last node of the shortest beginning that fails."""
    good, bad = 0, len(nodes)
    while bad - good > 1:
        middle = (good + bad) // 2
        if succeeds(tuple(nodes[:middle])):
            good = middle
        else:
            bad = middle
    return nodes[bad - 1]
