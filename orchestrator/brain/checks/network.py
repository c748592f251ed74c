"""Check of the network: which pairs of nodes are measured when, which links or nodes are cut off or slow, and which make an
all-reduce fail.

Pairs of one round have no node in common, so that they do not disturb each other. A link is slow when it is slow against
the median of all others, both by factor and by an amount that matters; before it is named, it is measured once more
while nothing else is.

The shortest beginning of a list of nodes that fails ends with a bad node, and so does the shortest end of it that fails begin
with one. A single bad node is both; a bad link has its two ends at both ends.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from orchestrator.brain.checks.finding import Finding, error, note, warning
from orchestrator.core.host_facts import Link

SLOW_FACTOR = 4.0
"""A link with less than this part of the median throughput is slow."""

LATE_FACTOR = 10.0
LATE_S_MIN = 0.010
"""A link with this multiple of the median round trip, and this much more than it, is slow: a busy machine takes
milliseconds."""

LINKS_MIN = 3
"""With fewer links there is no median to compare with."""

Pair = tuple[str, str]
Trial = Callable[[tuple[str, ...]], bool]
"""Runs an all-reduce over these nodes, and returns whether it succeeded."""


def schedule_rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return every pair of nodes once, in rounds of disjoint pairs: a round-robin tournament by the circle method."""
    places = {node: place for place, node in enumerate(nodes)}
    ring: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    half = len(ring) // 2
    schedule = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        met = [(one, other) for one, other in pairs if one is not None and other is not None]
        schedule.append([pair if places[pair[0]] < places[pair[1]] else pair[::-1] for pair in met])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return schedule


def find_slow_links(links: Mapping[Pair, Link]) -> list[Pair]:
    """Return the links that are slow against the median of the whole ones; a link is measured from its dialling end."""
    working = _working_links(links)
    if len(working) < LINKS_MIN:
        return []
    rate, rtt_s = medians(working.values())
    late_s = max(rtt_s * LATE_FACTOR, rtt_s + LATE_S_MIN)
    return [pair for pair, link in working.items() if link.bytes_per_s * SLOW_FACTOR < rate or link.rtt_s > late_s]


def _working_links(links: Mapping[Pair, Link]) -> dict[Pair, Link]:
    return {pair: link for pair, link in links.items() if not link.is_cut and link.bytes_per_s}


def medians(links: Iterable[Link]) -> tuple[float, float]:
    """Return the usual throughput (bytes/s) and round trip (s) of links, of which there is at least one."""
    rates, times = zip(*((link.bytes_per_s, link.rtt_s) for link in links), strict=True)
    return statistics.median(rates), statistics.median(times)


def findings(links: Mapping[Pair, Link], pairs_left: int) -> Iterator[Finding]:
    """Yield what is wrong with the links, measured from both ends; a node before the links that it explains."""
    yield from _find_cut_links(links)
    yield from _find_slow(links)
    if pairs_left:
        yield note("network", (), f"{pairs_left} pairs of nodes were not measured: the time limit was reached")


def _find_cut_links(links: Mapping[Pair, Link]) -> Iterator[Finding]:
    cut = {pair: link for pair, link in links.items() if link.is_cut}
    cut_nodes = _nodes_with_only_bad_links(cut, links)
    for node in cut_nodes:
        node_links = {pair: link for pair, link in cut.items() if node in pair}
        yield _cut_finding([node], node_links, f"no other node and {node} reach each other")
    other_cuts = {pair: link for pair, link in cut.items() if not set(pair) & set(cut_nodes)}
    shown: set[frozenset[str]] = set()
    for pair, link in other_cuts.items():
        if frozenset(pair) in shown:
            continue
        shown.add(frozenset(pair))
        one, other = pair
        both = (other, one) in other_cuts or (other, one) not in links
        found = f"{one} and {other} do not reach each other" if both else f"{one} does not reach {other}"
        yield _cut_finding(pair, {pair: link}, found)


def _cut_finding(nodes: Sequence[str], links: Mapping[Pair, Link], found: str) -> Finding:
    """Return a finding with the first reason, and the fix for what is blocked: one kind of port, or all."""
    rendezvous = any(link.faults[0] for link in links.values())
    others = any(any(link.faults[1:]) for link in links.values())
    why = next(fault for link in links.values() for fault in link.faults if fault)
    if rendezvous and others:
        fix = "open the TCP ports between the nodes, or name a network that they share in rendezvous.interface"
    elif rendezvous:
        found += " on the port of the rendezvous"
        fix = "open 20000 to 29999 between the nodes, or set rendezvous.port to one that is open"
    else:
        found += " on the ports that gloo and NCCL use"
        fix = "open 32768 to 60999 between the nodes (net.ipv4.ip_local_port_range), or name another network in rendezvous.interface"
    return error("network", nodes, f"{found}: {why}", fix)


def _find_slow(links: Mapping[Pair, Link]) -> Iterator[Finding]:
    bad = {pair: links[pair] for pair in find_slow_links(links)}
    if not bad:
        return
    working = _working_links(links)
    rate, rtt_s = medians(working.values())
    usual = f"the median of all links is {rate / 1e6:.0f} MB/s and {rtt_s * 1000:.2g} ms"
    fix = "check cable, switch port and duplex (ethtool), or leave it out"
    slow_nodes = _nodes_with_only_bad_links(bad, working)
    for node in slow_nodes:
        worst = min((link for pair, link in bad.items() if node in pair), key=lambda one: one.bytes_per_s)
        yield warning("network", [node], f"every link of {node} is slow: {_speed(worst)}, {usual}", fix)
    for (one, other), link in bad.items():
        if one not in slow_nodes and other not in slow_nodes:
            found = f"the link from {one} to {other} is slow: {_speed(link)}, {usual}"
            yield warning("network", (one, other), found, fix)


def _speed(link: Link) -> str:
    return f"{link.bytes_per_s / 1e6:.0f} MB/s and {link.rtt_s * 1000:.2g} ms"


def _nodes_with_only_bad_links(bad: Mapping[Pair, Link], measured: Mapping[Pair, Link]) -> list[str]:
    """Return the nodes all of whose links are bad, in one direction at least, where other nodes have good ones."""
    nodes = list(dict.fromkeys(node for pair in measured for node in pair))
    links_bad = {frozenset(pair) for pair in bad}
    good = {node for pair in measured if frozenset(pair) not in links_bad for node in pair}
    only_bad = [node for node in nodes if node not in good]
    return only_bad if len(nodes) > 2 and len(only_bad) < len(nodes) else []


def find_suspects(nodes: Sequence[str], succeeds: Trial) -> tuple[str, ...]:
    """Return the node, or the two nodes, with which an all-reduce over all of them fails; it is known to fail."""
    last = _shortest_failing(nodes, succeeds)
    first = _shortest_failing(nodes[::-1], succeeds)
    return (last,) if first == last else tuple(sorted((first, last), key=list(nodes).index))


def _shortest_failing(nodes: Sequence[str], succeeds: Trial) -> str:
    """Return the last node of the shortest beginning that fails."""
    counts = range(1, len(nodes))
    return nodes[bisect.bisect_left(counts, True, key=lambda count: not succeeds(tuple(nodes[:count])))]
