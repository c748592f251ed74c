"""Faults of hosts that a failed attempt shows: its ranks crashed or hung on a host whose GPU is sick.

A sick GPU alone ends nothing. Where ranks crash or hang on its host, the verdict names it as evidence. If another host can take
over, the next attempt avoids this one, and the failure costs no restart budget. If none can, the job continues as after any
failure of its kind: on the same host, at the cost of the budget.
"""

from __future__ import annotations

import dataclasses

from orchestrator.brain.model.decisions import Evidence, EvidenceKind, Verdict, VerdictKind
from orchestrator.brain.model.facts import Facts, Phase
from orchestrator.brain.model.node_facts import GPU_FIX, NodeFacts
from orchestrator.brain.scheduling import placement
from orchestrator.core.observations import GpuState

_KINDS = (VerdictKind.CRASH, VerdictKind.HANG)


def cite(facts: Facts, verdict: Verdict) -> Verdict:
    """Return the verdict, with the sick GPUs of its node as evidence and as its host fault if there are any."""
    node = facts.nodes.get(verdict.node)
    faults = [gpu.fault_text for gpu in node.gpus if gpu.fault] if node is not None else []
    if not faults or verdict.kind not in _KINDS or verdict.host_fault:
        return verdict
    text = "; ".join(faults)
    evidence = Evidence(text, EvidenceKind.HOST, verdict.node, GPU_FIX)
    return dataclasses.replace(verdict, host_fault=text, proof=(evidence, *verdict.proof))


def leaves_host(facts: Facts, verdict: Verdict) -> bool:
    """Return whether the next attempt avoids the host of a verdict, because the host is at fault and another can take over."""
    may_restart = verdict.retry and facts.limits is not None and facts.limits.restarts_max > 0
    return bool(verdict.host_fault) and may_restart and placement.has_substitute(facts)


def fold_gpus(facts: Facts, node: NodeFacts, gpus: tuple[GpuState, ...]) -> None:
    """Fold the states of a node's GPUs. An agent asks for them when a rank crashes, so they may come after the verdict."""
    node.gpus = gpus
    attempt = facts.attempt
    if attempt is None or attempt.phase is not Phase.STOP or attempt.verdict is None or facts.end is not None:
        return
    if attempt.verdict.node == node.name and not attempt.verdict.host_fault:
        attempt.verdict = cite(facts, attempt.verdict)
        attempt.leaves_host = leaves_host(facts, attempt.verdict)


def readmit(facts: Facts) -> None:
    """Use hosts with a sick GPU again if without them the job would have too few, as far as is known now."""
    if facts.attempt is not None and facts.attempt.leaves_host:
        facts.attempt.leaves_host = placement.has_substitute(facts)
    if facts.pool is None or placement.count_free(facts) >= facts.pool.nodes:
        return
    for node in facts.nodes.values():
        if node.is_excluded_for_gpu:
            node.excluded = None
