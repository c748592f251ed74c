"""Fence: how long an agent without contact lets its ranks run, and how long the supervisor waits for that.

Agent: without contact and without proof of a complete gang it stops its ranks after a time that it was given.
- A step proves that all ranks had made the one before it. So the agent counts from the step before the last.
- The time grows with the pauses between two steps that the job has shown; and, while the ranks of a node have made no
  step in their attempt, with how long they were seen to print, read and write.
- It is longer where ranks have long made steps without contact: then the supervisor is away, and not the gang broken.

Supervisor: it waits longer than the longest of all times that the agent may hold, and never gives a shorter one.
- If another node of the gang reports after that time, and no rank has made a step, it counts from the last contact and
  the last step (`is_proven_over`).
- If no other node reports, the gang may make steps unseen: it judges after `node_timeout_s`, and counts from the time
  when the gang was broken.
- On its own machine there is no such time: a lock shows whether an agent lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.node_facts import AgentState, NodeFacts
from orchestrator.brain.model.rank_facts import RankState
from orchestrator.core.plan_types import Limits
from orchestrator.core.wire.orders import Fence

PAUSE_FACTOR = 3.0
CONTACT_TIMEOUT_S_MAX = 1800.0
"""How long an agent continues without contact: this many times the longest pause of the job so far, at most this long.
Two pauses may pass between two steps that count, see above."""

STARTUP_TIMEOUT_S_MAX = 900.0
"""How long at most an agent continues without contact before the first step of its ranks."""

GROWTH = 1.25
"""A new fence is sent when it is at least this many times the last one."""

MARGIN = 0.25
MARGIN_S_MIN = 4.0
"""How much longer than its agent the supervisor waits, as a share and at least: ranks take a while to die of SIGKILL."""

SUPERVISOR_AWAY_STEPS_S = 4.0
"""If the gang has made steps for this long after the last contact with a node, its agent may consider the supervisor away.
The agent itself takes longer to do so, see `agent.process.lost_supervisor.AWAY_S`."""


def fence_orders(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Return the new fences of agents that run ranks, where the time has grown or the last order may be lost."""
    assert facts.limits is not None
    base_s = facts.limits.fence_s
    if base_s is None:
        return []
    decisions: list[Decision] = []
    for node in facts.gang:
        if node.agent_state is not AgentState.UP or node.started_attempt != attempt.number:
            continue
        contact_timeout_s = max(base_s, _pauses_s(facts))
        startup_timeout_s = min(_startup_activity_s(facts, attempt, node), STARTUP_TIMEOUT_S_MAX)
        current_timeout_s, current_startup_timeout_s = (
            max(node.fence_s, base_s),
            max(node.startup_timeout_s, node.fence_s, base_s),
        )
        is_order_uncertain = node.is_fence_uncertain and (node.fence_s > base_s or node.startup_timeout_s > 0.0)
        if (
            contact_timeout_s >= GROWTH * current_timeout_s
            or startup_timeout_s >= GROWTH * current_startup_timeout_s
            or is_order_uncertain
        ):
            contact_timeout_s, startup_timeout_s = (
                max(contact_timeout_s, node.fence_s),
                max(startup_timeout_s, node.startup_timeout_s),
            )
            why = f"the longest pause of the job was {facts.longest_pause_s:.0f} s"
            why = f"{why}, and its ranks work without steps" if startup_timeout_s > contact_timeout_s else why
            decisions.append(
                d.To(
                    deadlines.now_s,
                    why,
                    node.name,
                    Fence(attempt.number, contact_timeout_s, startup_timeout_s),
                )
            )
    return decisions


def silence_s_max(facts: Facts, node: NodeFacts) -> float:
    """Return how long after the last contact with a node and the last step its ranks must have ended, if no other node
    shows that the gang is stalled."""
    limits = facts.limits
    assert limits is not None
    if limits.fence_s is None:
        return max(limits.node_timeout_s, _pauses_s(facts))
    return max(
        limits.node_timeout_s,
        _certain_end_s(facts, max(_agent_timeout_s(facts, node, limits.fence_s), limits.disconnected_timeout_s)),
    )


def broken_gang_over_at(facts: Facts, attempt: AttemptFacts) -> float | None:
    """Return when (job clock) a broken gang gave its last sign of life; None for one that is not known to be broken."""
    broken_at = facts.broken_at()
    if broken_at is None:
        return None
    return max(facts.stepped_at, attempt.stop_at or 0.0, broken_at)


def is_clear(facts: Facts, attempt: AttemptFacts, node: NodeFacts, over_at: float | None, deadlines: Deadlines) -> bool:
    """Return whether nothing of the attempt runs on the node: seen, or certain because its agent fences itself.

    An agent without contact and without a step of its ranks kills them well before the time of `fence` is over. Other
    nodes may show when that was, see `is_proven_over`. Else a broken gang makes no steps after `over_at`: nothing runs on
    a silent node once that time has passed since then and since the last contact. An agent of an old allocation notices
    its end and does not wait for its fence.
    """
    assert facts.limits is not None
    if node.is_clear(attempt.number):
        return True
    if node.agent_state is AgentState.UP:
        return False
    if is_proven_over(facts, node, deadlines):
        return True
    if over_at is None or facts.limits.fence_s is None:
        return False
    last_sign_s = max(node.contact_at, over_at)
    is_past = attempt.allocation_lost_at is not None
    wait_s = _old_allocation_s_max(facts.limits) if is_past else silence_s_max(facts, node)
    return deadlines.passed(last_sign_s + wait_s)


def is_proven_over(facts: Facts, node: NodeFacts, deadlines: Deadlines) -> bool:
    """Return whether the ranks of a silent node have certainly ended, since other nodes show that the gang is stalled.

    A gang is stalled if another node reported after the agent's timeout, and no step was made. It must be one
    gang: its ranks wait for each other, and none of them has ended well.
    """
    time = _time_since_last_step(facts, node)
    known_at = max((_steps_known_at(facts, other) for other in facts.gang), default=0.0)
    return time is not None and known_at >= time.fenced_at and deadlines.passed(time.over_at)


def expected_over_at(facts: Facts, node: NodeFacts) -> float:
    """Return when (job clock) a silent node will count as lost if it stays silent and no step is made."""
    time = _time_since_last_step(facts, node)
    if time is not None and any(_steps_known_at(facts, other) for other in facts.gang):
        return time.over_at
    return max(node.contact_at, facts.stepped_at) + silence_s_max(facts, node)


@dataclass(frozen=True, slots=True)
class _AgentTime:
    """When (job clock) the agent of a silent node stops its ranks, and when they have surely ended."""

    fenced_at: float
    over_at: float


def _time_since_last_step(facts: Facts, node: NodeFacts) -> _AgentTime | None:
    """Return the time of a silent node's agent, counted from the last contact and the last step; None where steps of others
    say nothing of its ranks."""
    attempt, limits = facts.attempt, facts.limits
    if attempt is None or limits is None or limits.fence_s is None or node.agent_state is AgentState.UP:
        return None
    is_one_gang = facts.ended_well_at is None and attempt.allocation_lost_at is None
    if not is_one_gang or not _steps_together(facts, node):
        return None
    held_s = _agent_timeout_s(facts, node, limits.fence_s)
    is_unheard = node.contact_at <= attempt.watched_at
    if is_unheard or facts.stepped_at > node.contact_at + SUPERVISOR_AWAY_STEPS_S:
        held_s = max(held_s, limits.disconnected_timeout_s)
    quiet_at = max(node.contact_at, facts.stepped_at)
    return _AgentTime(quiet_at + held_s, quiet_at + _certain_end_s(facts, held_s))


def _old_allocation_s_max(limits: Limits) -> float:
    """Return how long after its last contact an agent of an old allocation must have left."""
    return max(limits.node_timeout_s, (limits.fence_s or 0.0) + MARGIN_S_MIN)


def _agent_timeout_s(facts: Facts, node: NodeFacts, base_s: float) -> float:
    """Return the longest time that the node's agent may hold, unless its supervisor is away."""
    return max(base_s, node.fence_s if _has_stepped(facts, node) else max(node.fence_s, node.startup_timeout_s))


def _certain_end_s(facts: Facts, held_s: float) -> float:
    """Return after how long the ranks of an agent that holds a time have ended. Ranks may be a pause apart."""
    apart_s = held_s + facts.longest_pause_s
    return apart_s + max(MARGIN_S_MIN, MARGIN * apart_s)


def clear_at(facts: Facts, attempt: AttemptFacts, node: NodeFacts, now_s: float) -> float:
    """Return when (job clock) nothing of an attempt that is being stopped can be left on a silent node; infinite where only
    its agent can report it."""
    deadlines = Deadlines(now_s)
    is_over = is_clear(facts, attempt, node, broken_gang_over_at(facts, attempt), deadlines)
    return now_s if is_over else deadlines.wake_s


def _pauses_s(facts: Facts) -> float:
    return min(PAUSE_FACTOR * facts.longest_pause_s, CONTACT_TIMEOUT_S_MAX)


def _has_stepped(facts: Facts, node: NodeFacts) -> bool:
    """Return whether a rank of the node has reported a step: then its agent knows of it as well."""
    return any(rank.steps for rank in facts.ranks_on(node.name))


def _steps_together(facts: Facts, node: NodeFacts) -> bool:
    """Return whether the ranks of the node have made steps, in a process group with others as far as is known."""
    return _has_stepped(facts, node) and all(rank.beat.alone is None for rank in facts.ranks_on(node.name))


def _steps_known_at(facts: Facts, node: NodeFacts) -> float:
    """Return until when all steps of a node's ranks are known; 0 for a node that does not report them. An agent that has
    just reconnected has not reported them yet; an agent that was lost with its ranks never will."""
    if node.agent_state is not AgentState.UP or node.agent_loss is not None:
        return 0.0
    beaten = [rank.beat_at for rank in facts.ranks_on(node.name) if rank.rank_state is RankState.ALIVE]
    return min(beaten, default=node.contact_at)


def _startup_activity_s(facts: Facts, attempt: AttemptFacts, node: NodeFacts) -> float:
    """Return for how long the ranks of a node, which have made no step, were seen to print, read or write."""
    if attempt.running_at is None or _has_stepped(facts, node):
        return 0.0
    activity_at = max((rank.activity_at for rank in facts.ranks_on(node.name)), default=0.0)
    return max(0.0, activity_at - attempt.running_at)
