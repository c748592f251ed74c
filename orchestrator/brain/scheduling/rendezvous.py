"""Where do the ranks meet? Pure: what each node said of its addresses and of those of the first, in; an address out.

Rules: only an address that every other node has reached is taken, by a handshake with the first node's agent on the
very port; each node uses the interface that led there.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision
from orchestrator.brain.model.facts import AgentState, AttemptFacts, Facts, NodeFacts


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """The address of the first node, its port, and the interface of each node (empty: whichever)."""

    address: str
    port: int
    interfaces: dict[str, str]


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A node that reaches the first one nowhere, or where the others do not; what it tried."""

    node: NodeFacts
    first: NodeFacts
    tried: tuple[str, ...]


def probes(facts: Facts, attempt: AttemptFacts, watch: Deadlines) -> list[Decision]:
    """Let the other nodes try the first one's addresses, where it offers any."""
    first, *others = facts.gang
    if first.ready < attempt.number or not first.addresses:
        return []
    addresses = tuple(address.ip for address in first.addresses)
    return [
        d.Probe(
            watch.now_s, f"does {node.name} reach {first.name}?", attempt.number, node.name, addresses, first.port
        )
        for node in others
        if node.agent_state is AgentState.UP and max(node.ordered_probe, node.probed) < attempt.number
    ]  # fmt: skip


def are_probed(facts: Facts, attempt: AttemptFacts) -> bool:
    """Tell whether every node that has to try has tried."""
    first, *others = facts.gang
    return not first.addresses or all(node.probed == attempt.number for node in others)


def rendezvous_point(facts: Facts) -> RendezvousPoint | Unreachable:
    """Return where the gang meets, best address of the first node first, or who cannot come. All have probed."""
    first, *others = facts.gang
    if not first.addresses:
        return RendezvousPoint(first.address, first.port, {})
    for address in first.addresses:
        routes = {node.name: _interface(node, address.ip) for node in others}
        if all(interface is not None for interface in routes.values()):
            found = {name: interface or "" for name, interface in routes.items()}
            return RendezvousPoint(address.ip, first.port, {first.name: address.interface, **found})
    worst = min(others, key=lambda node: len(node.reached))
    return Unreachable(worst, first, worst.missed)


def _interface(node: NodeFacts, address: str) -> str | None:
    return next((one.interface for one in node.reached if one.address == address), None)
