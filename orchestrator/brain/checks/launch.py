"""What is wrong with the hosts on which an attempt is about to start, by the facts that their agents have gathered.

It is said, and nothing is done about it: ranks that cannot work together will show it soon enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.brain.checks import node, sameness
from orchestrator.brain.checks.finding import Finding, Severity, words
from orchestrator.core.host_facts import UNKNOWN, HostFacts

TEXTS_MAX = 5
"""How many findings are said; `orch check` tells them all."""


def texts(known: Mapping[str, HostFacts], ranks: Mapping[str, int]) -> tuple[str, ...]:
    """Return the findings on nodes, by their facts and their numbers of ranks: errors first, each with its fix; one for all
    nodes with the same fault."""
    found = [
        finding
        for name, facts in known.items()
        for finding in node.findings(name, facts, node.Job(ranks[name], 0, True, UNKNOWN))
    ]
    merged: dict[Finding, list[str]] = {}
    for one in (*sameness.findings(known), *found):
        merged.setdefault(replace(one, nodes=()), []).extend(one.nodes)
    findings = [replace(one, nodes=tuple(names)) for one, names in merged.items()]
    findings.sort(key=lambda one: one.severity is not Severity.ERROR)
    said = [f"{words(one)}; fix: {one.fix}" for one in findings[:TEXTS_MAX]]
    if len(findings) > TEXTS_MAX:
        said.append(f"and {len(findings) - TEXTS_MAX} more; fix: see them all with orch check")
    return tuple(said)
