"""Lost nodes: the verdict `node_lost`, on an agent that died with its ranks or that has been silent for too long.

The end of a connection alone proves nothing. A node is lost when its agent is known to have died, when it stopped its ranks
by itself, or when it has sent nothing for the time of `fence.silence_s_max` while the gang has made no step: a step of any rank
proves that all ranks live. Where other nodes show that the gang is stalled, it is lost as soon as its agent has
certainly stopped its ranks. Before its ranks were started, a placed host of a pool is lost after `node_timeout_s`.
"""

from __future__ import annotations

from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Evidence, EvidenceKind, FailureCause, Verdict, VerdictKind
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.node_facts import AgentState, NodeFacts
from orchestrator.brain.scheduling import allocation, fence
from orchestrator.core.errors import Fault
from orchestrator.core.text import ranks_label


def judge(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict on a node that is lost, or None; deadlines still ahead are left in `deadlines`."""
    for node in facts.nodes.values():
        if node.agent_loss is not None and not allocation.may_be_queue_action(facts, node.agent_loss.at, deadlines):
            return lost_verdict(facts, node, node.agent_loss.reason)
    if attempt.phase is not Phase.RUN:
        return _lost_before_start(facts, attempt, deadlines)
    stepped_at = facts.stepped_at
    for node in facts.nodes.values():
        if (
            node.agent_state in (AgentState.UP, AgentState.SILENT)
            and facts.is_unfinished(node)
            and _is_silent_too_long(facts, node, stepped_at, deadlines)
        ):
            silent_s = deadlines.now_s - node.contact_at
            return lost_verdict(facts, node, f"no heartbeat for {silent_s:.0f} s, and no rank is stepping")
    return None


def _lost_before_start(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Judge a placed node of a pool that is lost before its ranks were started: others may take its place."""
    assert facts.limits is not None
    if facts.pool is None or attempt.placed_at is None:
        return None
    for node in facts.gang:
        if node.agent_state is AgentState.ABSENT:
            fault = node.launch_fault or Fault(node.name, "")
            reason = f": {fault.what}" if fault.what else ""
            return lost_verdict(facts, node, f"its agent was lost before its ranks were started{reason}", fault.fix)
        if node.agent_state is AgentState.SILENT and deadlines.passed(node.contact_at + facts.limits.node_timeout_s):
            silent_s = deadlines.now_s - node.contact_at
            return lost_verdict(facts, node, f"no heartbeat for {silent_s:.0f} s before its ranks started")
    return None


def _is_silent_too_long(facts: Facts, node: NodeFacts, stepped_at: float, deadlines: Deadlines) -> bool:
    if fence.is_proven_over(facts, node, deadlines):
        return True
    return deadlines.passed(max(node.contact_at, stepped_at) + fence.silence_s_max(facts, node))


def lost_verdict(facts: Facts, node: NodeFacts, how: str, fix: str = "") -> Verdict:
    """Return the verdict that a node is lost; ranks of others that ended badly are its victims."""
    victims = [rank.rank for rank in facts.ranks.values() if rank.failed]
    proof = [Evidence(how, EvidenceKind.SUMMARY, node.name, fix)]
    if victims:
        proof.append(Evidence(f"its victims: {ranks_label(victims)}"))
    return facts.verdict_on(
        VerdictKind.NODE_LOST, f"{node.name} ({ranks_label(node.ranks)}): {how}", ranks=node.ranks,
        node=node.name, cause=FailureCause.NODE, place=(node.name,), proof=tuple(proof),
        since_s=max(facts.stepped_at, node.contact_at),
    )  # fmt: skip
