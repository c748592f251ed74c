"""Events in, decisions out: the address where ranks meet, and nodes that cannot reach it; see
`brain/scheduling/rendezvous.py`."""

from __future__ import annotations

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.wire import orders, reports
from tests.support.brain_story import Story, given, names, none_of, only

LAN, FAST, BRIDGE = "10.0.0.1", "192.168.0.1", "172.17.0.1"


def _prepared(nodes: int = 2, hosts: int = 3) -> Story:
    """Return a job on a pool whose nodes are ready and have not been asked yet whom they reach."""
    story = Story(nodes, hosts=hosts)
    story.hear(*(story.up(node) for node in range(nodes)))
    story.hear(*(story.prepared(node) for node in range(1, nodes)))
    return story


def _starts(decisions: list[d.Decision]) -> dict[str, tuple[str, str]]:
    return {node: (start.address, start.interface) for node, start in given(decisions, orders.Start)}


def test_nodes_probe_first_nodes_addresses_before_start() -> None:
    """All others try the first node's addresses before ranks start."""
    story = _prepared(3)
    decided = story.hear(story.prepared(0, 1, BRIDGE, LAN))
    assert names(decided, orders.Probe) == ["n1", "n2"] and none_of(decided, orders.Start)
    _, probe = given(decided, orders.Probe)[0]
    assert (probe.addresses, probe.port) == ((BRIDGE, LAN), 5001)
    assert none_of(story.hear(story.probed(1, LAN)), orders.Start), "n2 has not answered"
    assert set(_starts(story.hear(story.probed(2, LAN)))) == {"n0", "n1", "n2"}


def test_ranks_use_first_address_reached_by_all() -> None:
    """Ranks meet at the first address that all reach, each over its own interface."""
    story = _prepared(3)
    story.hear(story.prepared(0, 1, BRIDGE, FAST, LAN), story.probed(1, FAST, LAN))
    starts = _starts(story.hear(story.probed(2, LAN)))
    assert starts == {"n0": (LAN, f"eth-{LAN}"), "n1": (LAN, f"via-{LAN}"), "n2": (LAN, f"via-{LAN}")}


def test_single_node_needs_no_probe() -> None:
    story = _prepared(1)
    assert _starts(story.hear(story.prepared(0))) == {"n0": ("10.0.0.1", "")}


def test_node_not_reaching_first_is_named_with_addresses() -> None:
    """A node that cannot reach the first is named with what it tried."""
    story = _prepared()
    story.hear(story.prepared(0, 1, LAN))
    verdict = only(story.hear(story.probed(1, missed=(f"{LAN}: timed out",))), d.Judge).verdict
    assert (verdict.kind, verdict.node) == (d.VerdictKind.RENDEZVOUS, "n1")
    assert verdict.summary == f"n1 cannot reach n0, where the ranks meet: {LAN}: timed out"


def test_node_not_reaching_first_is_replaced_if_possible() -> None:
    """A node that cannot reach the first one is replaced where there are others."""
    story = _prepared()
    story.hear(story.prepared(0, 1, LAN))
    assert names(story.hear(story.probed(1)), d.Launch) == ["n2"]
    place = only(story.hear(story.up(2)), d.Place)
    assert [name for name, _ in place.nodes] == ["n0", "n2"]


def test_node_not_reaching_first_is_retried_without_others() -> None:
    """Without others a node that cannot reach the first one is tried again."""
    story = _prepared(hosts=2)
    story.hear(story.prepared(0, 1, LAN))
    place = only(story.hear(story.probed(1)), d.Place)
    assert (place.attempt, [name for name, _ in place.nodes]) == (2, ["n0", "n1"])


def test_first_node_reached_by_none_is_isolated() -> None:
    story = _prepared(3, hosts=4)
    story.hear(story.prepared(0, 1, LAN), story.probed(1))
    decided = story.hear(story.probed(2))
    assert only(decided, d.Judge).verdict.node == "n0"
    assert [name for name, _ in only(story.hear(story.up(3)), d.Place).nodes] == ["n3", "n1", "n2"]


def test_first_node_missed_by_successive_nodes_is_isolated() -> None:
    """A first node that one node after the other cannot reach is isolated, and the accused one is cleared."""
    story = _prepared()
    story.hear(story.prepared(0, 1, LAN), story.probed(1), story.up(2))
    story.hear(story.prepared(0, 2, LAN), story.prepared(2, 2))
    decided = [*story.hear(story.probed(2, attempt=2)), *story.wait(5.0)]
    assert only(decided, d.Judge).verdict.node == "n0"
    assert [name for name, _ in only(decided, d.Place).nodes] == ["n1", "n2"]


def test_nodes_reaching_different_addresses_have_no_rendezvous() -> None:
    story = _prepared(3)
    story.hear(story.prepared(0, 1, FAST, LAN), story.probed(1, FAST))
    assert only(story.hear(story.probed(2, LAN)), d.Judge).verdict.kind is d.VerdictKind.RENDEZVOUS


def test_later_probe_answer_changes_nothing() -> None:
    story = _prepared()
    story.hear(story.prepared(0, 1, LAN), e.AgentDisconnected(0.0, "n1"))
    assert names(story.hear(story.up(1, ready=1)), orders.Probe) == ["n1"], "the first question may not have arrived"
    assert _starts(story.hear(story.probed(1, LAN)))
    assert not story.hear(story.probed(1, missed=(f"{LAN}: connection refused",)), e.AgentDisconnected(0.0, "n1"))
    again = _starts(story.hear(story.up(1, ready=1)))
    assert again == {"n1": (LAN, f"via-{LAN}")}, "its ranks are started where the others already are"


def test_new_attempt_probes_again() -> None:
    story = _prepared()
    story.hear(story.prepared(0, 1, LAN))
    story.hear(story.probed(1, LAN), *(e.FromNode(0.0, f"n{node}", reports.Started(1, (100,))) for node in (0, 1)))
    story.hear(story.exited(0))
    story.stop_all()
    decided = story.hear(story.prepared(0, 2, LAN), story.prepared(1, 2))
    assert names(decided, orders.Probe) == ["n1"] and none_of(decided, orders.Start)
