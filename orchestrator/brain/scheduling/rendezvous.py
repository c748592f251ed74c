"""Rendezvous of the ranks: which addresses are probed, which one is used, and the verdict if none works.

The point is an address of the first node that every other node has reached, by a handshake with the first node's agent
on the port itself; each node uses the interface that led there.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision, FailureCause, Verdict, VerdictKind
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.node_facts import AgentState, NodeFacts, RendezvousFacts
from orchestrator.core.wire.orders import Probe


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """The address of the first node, its port, and the interface of each node (empty: the system's choice)."""

    address: str
    port: int
    interfaces: dict[str, str]


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A node that reaches no address of the first one, or only addresses that other nodes do not reach; and what
    it tried."""

    node: NodeFacts
    first: NodeFacts
    tried: tuple[str, ...]


def probe_orders(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Return the orders to probe the first node's addresses, where it offers any."""
    first, *others = facts.gang
    if first.ready_attempt < attempt.number or not first.rendezvous.addresses:
        return []
    addresses = tuple(address.ip for address in first.rendezvous.addresses)
    return [
        d.To(
            deadlines.now_s, f"does {node.name} reach {first.name}?", node.name,
            Probe(attempt.number, addresses, first.rendezvous.port),
        )
        for node in others
        if node.agent_state is AgentState.UP and max(node.ordered.probe, node.rendezvous.probed) < attempt.number
    ]  # fmt: skip


def is_probing_done(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether every node that has to probe has reported."""
    first, *others = facts.gang
    return not first.rendezvous.addresses or all(node.rendezvous.probed == attempt.number for node in others)


def rendezvous_point(facts: Facts) -> RendezvousPoint | Unreachable:
    """Return the rendezvous address, by the first node's preference, or the node that cannot reach it. All nodes must have
    probed."""
    first, *others = facts.gang
    offer = first.rendezvous
    if not offer.addresses:
        return RendezvousPoint(offer.address, offer.port, {})
    for address in offer.addresses:
        routes = {node.name: _interface(node.rendezvous, address.ip) for node in others}
        if all(interface is not None for interface in routes.values()):
            interfaces = {name: interface or "" for name, interface in routes.items()}
            return RendezvousPoint(address.ip, offer.port, {first.name: address.interface, **interfaces})
    worst = min(others, key=lambda node: len(node.rendezvous.reached))
    return Unreachable(worst, first, worst.rendezvous.probe_failures)


def verdict(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict on nodes that cannot reach each other, or None while they may."""
    if attempt.placed_at is None or attempt.phase is not Phase.PREPARE:
        return None
    if not facts.gang[0].rendezvous.addresses or not is_probing_done(facts, attempt):
        return None
    meeting_point = rendezvous_point(facts)
    if isinstance(meeting_point, RendezvousPoint):
        return None
    node, first = meeting_point.node, meeting_point.first
    tried = "; ".join(meeting_point.tried) or "it reaches other addresses of it than the rest of the nodes do"
    summary = f"{node.name} cannot reach {first.name}, where the ranks meet: {tried}"
    culprit = first if _is_first_cut_off(facts, first) else node
    return facts.verdict_on(
        VerdictKind.RENDEZVOUS, summary, cause=FailureCause.UNREACHABLE, place=(node.name, first.name), node=culprit.name,
        proof=tuple(d.Evidence(_reach_text(other)) for other in facts.gang[1:]), since_s=node.contact_at,
    )  # fmt: skip


def _is_first_cut_off(facts: Facts, first: NodeFacts) -> bool:
    """Return whether the first node itself is cut off: none of several nodes reaches it, or one after the other did not."""
    others = facts.gang[1:]
    verdicts = [past.verdict for past in facts.past_attempts if past.verdict and past.number > facts.resumed_after]
    signatures = [verdict.signature for verdict in verdicts]
    is_repeated = any(s.cause is FailureCause.UNREACHABLE and s.place[-1] == first.name for s in signatures)
    return not any(node.rendezvous.reached for node in others) and (len(others) > 1 or is_repeated)


def _reach_text(node: NodeFacts) -> str:
    probe = node.rendezvous
    routes = ", ".join(f"{route.address} over {route.interface}" for route in probe.reached) or "nothing"
    return f"{node.name} reaches {routes}" + (
        f"; not {'; '.join(probe.probe_failures)}" if probe.probe_failures else ""
    )


def _interface(probe: RendezvousFacts, address: str) -> str | None:
    return next((route.interface for route in probe.reached if route.address == address), None)
