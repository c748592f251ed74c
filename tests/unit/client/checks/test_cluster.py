"""Is a host that others cannot dial named, before links are measured to it?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from orchestrator.brain.checks import node
from orchestrator.client.checks import cluster
from orchestrator.client.checks.host_sessions import HostSessions
from orchestrator.core.wire import bootstrap as w


class _Alone:
    """Visits to hosts that have no address but loopback."""

    def ask(self, hosts: Iterable[str], *_: object) -> dict[str, w.PortsOpened]:
        return {name: w.PortsOpened((1, 2), (), "") for name in hosts}


def test_host_without_address_is_named_and_links_unmeasured() -> None:
    asked = cluster.CheckRequest(
        job=node.JobNeeds(1, 0, False, 0), programs={}, env={}, sources=(), own_modules=(), folders=(), addresses={}, port=None, interface=None, gpus_held=()
    )  # fmt: skip
    report = cluster.ClusterReport()
    assert cluster._measure_links(cast(HostSessions, _Alone()), ["one", "two"], asked, report) == ({}, {})
    assert [(finding.nodes, finding.what, bool(finding.fix)) for finding in report.findings] == [
        (("one",), "network", True),
        (("two",), "network", True),
    ]
