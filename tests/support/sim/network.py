"""Who reaches whom? The addresses of the virtual hosts, and what a probe of them comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core import observations
from orchestrator.core.wire import orders

from .pool import BRIDGE

if TYPE_CHECKING:
    from .host import Host


def addresses(host: Host) -> tuple[observations.Address, ...]:
    """Return what a host tells of its addresses: all of them, good or not."""
    hosts = host.world.night.hosts
    assert hosts is not None
    mine = [observations.Address(_ip(net, host), f"eth-{net}") for net in hosts.networks(host.index)]
    bridge = [observations.Address(BRIDGE, "docker0")] if hosts.bridge else []
    return tuple(bridge + mine if host.index % 2 else mine + bridge)


def probe(host: Host, order: orders.Probe) -> tuple[tuple[observations.ReachableAddress, ...], tuple[str, ...]]:
    """Return which addresses lead from a host to the one that listens on the port, and how the others failed."""
    reached, missed = [], []
    for address in order.addresses:
        net = _net_to(host, address, order.port)
        if net:
            reached.append(observations.ReachableAddress(address, f"eth-{net}"))
        else:
            missed.append(f"{address}: {'another host answers' if address == BRIDGE else 'no answer'}")
    return tuple(reached), tuple(missed)


def _ip(net: str, host: Host) -> str:
    return f"10.{ord(net) - ord('a')}.0.{host.index + 1}"


def _net_to(host: Host, address: str, port: int) -> str:
    """Return the network over which a host reaches this address and port, empty for none."""
    hosts = host.world.night.hosts
    assert hosts is not None
    for other in host.world.hosts[: hosts.count]:
        agent = other.agent
        whole = other.up and not other.cut_gang and not host.cut_gang
        if agent is None or not agent.listens or agent.port != port or not whole:
            continue
        for net in hosts.networks(other.index):
            if _ip(net, other) == address and net in hosts.networks(host.index):
                return net
    return ""
