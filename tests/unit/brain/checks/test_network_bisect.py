"""Does the bisection name the one bad node, or both ends of a bad link, in few trials?"""

from __future__ import annotations

import itertools
import math

import pytest

from orchestrator.brain.checks.network import find_suspects


def find(nodes: list[str], bad: list[set[str]]) -> tuple[tuple[str, ...], int]:
    """Bisect where a trial fails if it holds all nodes of a bad set; return the suspects and the number of trials."""
    trials = []

    def succeeds(tried: tuple[str, ...]) -> bool:
        trials.append(tried)
        return not any(one <= set(tried) for one in bad)

    return find_suspects(nodes, succeeds), len(trials)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 65])
def test_one_bad_node_is_named_wherever_it_is(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    for bad in nodes:
        found, trials = find(nodes, [{bad}])
        assert found == (bad,) and trials <= 2 * math.ceil(math.log2(count) if count > 1 else 0)


def test_bad_link_has_two_ends() -> None:
    nodes = [f"n{number}" for number in range(6)]
    for pair in itertools.combinations(nodes, 2):
        assert find(nodes, [set(pair)])[0] == pair


def test_two_bad_nodes_are_both_named() -> None:
    assert find(list("abcdef"), [{"b"}, {"e"}])[0] == ("b", "e")
