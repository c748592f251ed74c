"""When may the supervisor of an ended job go? Pure: facts and times in, an answer out.

Rules: agents that can be reached are given the time to leave, and longer while something still travels; one that
cannot be reached must not be left running when its host comes back, so it is waited for, within a limit.
"""

from __future__ import annotations

from orchestrator.brain.model.facts import AgentState, Facts

DISMISS_S_MAX = 5.0
"""How long agents may take to leave when nothing travels any more."""

SHIP_S_MAX = 300.0
"""How long what travels is waited for; `orch collect` brings the rest."""

LINGER_S_MAX = 600.0
"""How long after the end hosts are tried whose agents could not be dismissed."""


def is_done(ended_at: float, moved_at: float, connected: bool, now_s: float) -> bool:
    """Tell whether all agents have left, or have had the time to. `moved_at`: when something last came home."""
    last_s = min(max(ended_at, moved_at), ended_at + SHIP_S_MAX)
    return not connected or now_s > last_s + DISMISS_S_MAX


def unreached(facts: Facts, now_s: float) -> tuple[str, ...]:
    """Return the hosts on which an agent may still be that nobody could dismiss; none when they were waited for.

    A queue system ends by itself what is left on its nodes.
    """
    if (
        facts.pool is None
        or facts.queue is not None
        or facts.ended_at is None
        or now_s > facts.ended_at + LINGER_S_MAX
    ):
        return ()
    return tuple(
        node.name
        for node in facts.every_node()
        if node.agent_present or node.agent_state is AgentState.LAUNCHING
    )
