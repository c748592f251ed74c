"""Is every pair met once in disjoint rounds, and is a cut or slow link or node named, with the fix for what is blocked?"""

from __future__ import annotations

import itertools

import pytest

from orchestrator.brain.checks.finding import Severity
from orchestrator.brain.checks.network import Pair, find_slow_links, findings, schedule_rounds
from orchestrator.core.host_facts import Link

GOOD = Link("10.0.0.1", 0.0001, 1e9, ("", ""))
CUT = Link("", 0.0, 0.0, ("10.0.0.2:20000 timed out", "10.0.0.2:40000 timed out"))
NODES = ["n1", "n2", "n3", "n4"]


def links(changed: dict[Pair, Link], nodes: list[str] = NODES) -> dict[Pair, Link]:
    return {pair: changed.get(pair, GOOD) for pair in itertools.permutations(nodes, 2)}


def both(one: str, other: str, link: Link) -> dict[Pair, Link]:
    return {(one, other): link, (other, one): link}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 33])
def test_rounds_pair_all_nodes_once_without_repeats(count: int) -> None:
    """Every pair is tested once, and no node is twice in a round."""
    nodes = [f"n{number}" for number in range(count)]
    schedule = schedule_rounds(nodes)
    assert sorted(itertools.chain(*schedule)) == sorted(itertools.combinations(nodes, 2))
    for one in schedule:
        assert len({node for pair in one for node in pair}) == 2 * len(one)
    assert len(schedule) <= max(count, 1)


def test_healthy_links_have_no_finding() -> None:
    assert list(findings(links({}), 0)) == [] and list(findings({}, 0)) == []


def test_a_cut_pair_is_named() -> None:
    (found,) = findings(links(both("n2", "n4", CUT)), 0)
    assert (found.severity, found.nodes) == (Severity.ERROR, ("n2", "n4"))
    assert found.found == "n2 and n4 do not reach each other: 10.0.0.2:20000 timed out"


def test_one_way_cut_is_reported_as_such() -> None:
    (found,) = findings(links({("n2", "n4"): CUT}), 0)
    assert found.found.startswith("n2 does not reach n4: ")


def test_unreachable_node_is_named_alone() -> None:
    cut = {("n1", "n3"): CUT, ("n2", "n3"): CUT, ("n4", "n3"): CUT}
    (found,) = findings(links(cut), 0)
    assert found.nodes == ("n3",) and found.found.startswith("no other node and n3 reach each other: ")


def test_mutually_unreachable_nodes_are_a_pair() -> None:
    """Two nodes that do not reach each other are a pair."""
    (found,) = findings(links(both("n1", "n2", CUT), ["n1", "n2"]), 0)
    assert found.nodes == ("n1", "n2")


@pytest.mark.parametrize(
    ("faults", "words", "fix"),
    [
        (
            ("10.0.0.2:20000 refused", ""),
            "on the port of the rendezvous: 10.0.0.2:20000 refused",
            "rendezvous.port",
        ),
        (
            ("", "10.0.0.2:40000 refused"),
            "on the ports that gloo and NCCL use: 10.0.0.2:40000",
            "32768 to 60999",
        ),
    ],
)
def test_closed_port_range_has_its_own_fix(faults: tuple[str, ...], words: str, fix: str) -> None:
    (found,) = findings(links(both("n1", "n2", Link("10.0.0.2", 0.0, 0.0, faults))), 0)
    assert words in found.found and fix in found.fix


SLOW = Link("10.0.0.1", 0.0001, 2e8, ("", ""))
LATE = Link("10.0.0.1", 0.050, 9e8, ("", ""))


@pytest.mark.parametrize("link", [SLOW, LATE])
def test_a_slow_link_is_named_against_the_median(link: Link) -> None:
    (found,) = findings(links({("n1", "n2"): link}), 0)
    assert (found.severity, found.nodes) == (Severity.WARNING, ("n1", "n2"))
    assert (
        found.found.startswith("the link from n1 to n2 is slow: ")
        and "the median of all links is 1000 MB/s" in found.found
    )


def test_node_with_only_slow_links_is_named_alone() -> None:
    (found,) = findings(
        links({(one, other): SLOW for one, other in itertools.permutations(NODES, 2) if one == "n4"}), 0
    )
    assert found.nodes == ("n4",) and found.found.startswith("every link of n4 is slow: 200 MB/s")


def test_quarter_of_median_or_millisecond_is_fast() -> None:
    """A quarter of the median is not slow, nor is a millisecond."""
    busy = Link("10.0.0.1", 0.0015, 2.6e8, ("", ""))
    assert find_slow_links(links({("n1", "n2"): busy})) == []
    assert find_slow_links({("n1", "n2"): SLOW, ("n2", "n1"): GOOD}) == [], "two links have no median"


def test_pairs_that_were_not_measured_are_counted() -> None:
    (found,) = findings(links({}), 7)
    assert found.severity is Severity.NOTE and found.found.startswith("7 pairs of nodes were not measured")
