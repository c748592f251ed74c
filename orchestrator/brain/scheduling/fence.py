"""The fence: how long an agent without contact lets its ranks run, and how long the supervisor waits for that.

An agent that has neither contact nor a step of its ranks stops them after a time that it was given. The supervisor waits
longer, by the longest of all times that the agent may hold, and never gives a shorter one. The time grows with the pauses
between two steps that the job has shown; and, while the ranks of a node have made no step in their attempt, with how long
they were seen to print, read and write. On the supervisor's own machine there is no such time: a lock shows whether an
agent lives.
"""

from __future__ import annotations

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.node_facts import AgentState, NodeFacts

PAUSES = 2.0
QUIET_S_MAX = 1800.0
"""How long an agent goes on without contact: this many of the longest pauses that the job has shown, at most this long."""

ALONE_S_MAX = 900.0
"""How long at most an agent goes on without contact whose ranks have made no step."""

GROWTH = 1.25
"""A new fence is sent when it is at least this many times the last one."""


def orders(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Return the new fences of agents that run ranks, where the time has grown or the last order may be lost."""
    assert facts.limits is not None
    base_s = facts.limits.fence_s
    if base_s is None:
        return []
    found: list[Decision] = []
    for node in facts.gang:
        if node.agent_state is not AgentState.UP or node.started != attempt.number:
            continue
        quiet_s = max(base_s, _pauses_s(facts))
        alone_s = min(_worked_s(facts, attempt, node), ALONE_S_MAX)
        held_s, held_alone_s = max(node.fence_s, base_s), max(node.alone_s, node.fence_s, base_s)
        lost = node.fence_lost and (node.fence_s > base_s or node.alone_s > 0.0)
        if quiet_s >= GROWTH * held_s or alone_s >= GROWTH * held_alone_s or lost:
            quiet_s, alone_s = max(quiet_s, node.fence_s), max(alone_s, node.alone_s)
            why = f"the longest pause of the job was {facts.pause_s:.0f} s"
            why = f"{why}, and its ranks work without steps" if alone_s > quiet_s else why
            found.append(d.Fence(deadlines.now_s, why, attempt.number, node.name, quiet_s, alone_s))
    return found


def silent_s(facts: Facts, node: NodeFacts) -> float:
    """Return how long after the last contact of a node and the last step its ranks must have ended."""
    limits = facts.limits
    assert limits is not None
    if limits.fence_s is None:
        return max(limits.node_silent_s_max, _pauses_s(facts))
    held_s = node.fence_s if _has_stepped(facts, node) else max(node.fence_s, node.alone_s)
    return limits.node_silent_s_max * max(1.0, held_s / limits.fence_s)


def _pauses_s(facts: Facts) -> float:
    return min(PAUSES * facts.pause_s, QUIET_S_MAX)


def _has_stepped(facts: Facts, node: NodeFacts) -> bool:
    """Tell whether a rank of the node has reported a step: then its agent knows of it as well."""
    return any(rank.steps for rank in facts.ranks_on(node.name))


def _worked_s(facts: Facts, attempt: AttemptFacts, node: NodeFacts) -> float:
    """Return for how long the ranks of a node, which have made no step, were seen to print, read or write."""
    if attempt.running_at is None or _has_stepped(facts, node):
        return 0.0
    told_at = max((rank.activity_at for rank in facts.ranks_on(node.name)), default=0.0)
    return max(0.0, told_at - attempt.running_at)
