"""Does the supervisor of an ended job stay for as long as it is needed, and no longer?"""

from __future__ import annotations

from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import AgentState
from orchestrator.core import observations
from orchestrator.supervisor import shutdown
from tests.support.brain_story import Story


def _left(*events: e.Event) -> tuple[str, ...]:
    """Return who is waited for when an agent was up on n0, these events followed, and the job has ended."""
    story = Story(hosts=2)
    facts = story.brain.facts
    for event in (story.up(0), *events):
        story.hear(event)
    facts.ended_at = 100.0
    for node in facts.nodes.values():
        node.agent_state = AgentState.ABSENT if node.agent_state is AgentState.LAUNCHING else node.agent_state
    return shutdown.unreached(facts, 101.0)


def test_it_goes_when_all_agents_have_left() -> None:
    assert shutdown.is_done(100.0, 0.0, False, 100.1)


def test_agents_have_a_moment_to_leave() -> None:
    assert not shutdown.is_done(100.0, 0.0, True, 104.9)
    assert shutdown.is_done(100.0, 0.0, True, 105.1)


def test_what_still_comes_home_is_waited_for_but_not_for_ever() -> None:
    assert not shutdown.is_done(100.0, 130.0, True, 134.0)
    assert shutdown.is_done(100.0, 130.0, True, 135.1)
    assert shutdown.is_done(100.0, 1000.0, True, 405.1)


def test_a_host_whose_agent_could_not_be_dismissed_is_tried_for_a_while() -> None:
    story = Story(hosts=2)
    facts = story.brain.facts
    story.hear(story.up(0), e.AgentDisconnected(0.0, "n0"))
    facts.ended_at = 100.0
    facts.nodes["n1"].agent_state = AgentState.ABSENT
    assert shutdown.unreached(facts, 100.0 + shutdown.LINGER_S_MAX) == ("n0",)
    assert shutdown.unreached(facts, 100.1 + shutdown.LINGER_S_MAX) == ()


def test_one_that_is_still_coming_up_is_waited_for_too() -> None:
    facts = Story(hosts=1).brain.facts
    facts.ended_at, facts.nodes["n0"].agent_state = 100.0, AgentState.LAUNCHING
    assert shutdown.unreached(facts, 101.0) == ("n0",)


def test_an_agent_that_was_told_to_leave_is_waited_for_until_it_says_that_it_does() -> None:
    ahead = e.QueueSeen(0.0, ("job-1",))  # so it is dismissed
    assert _left(ahead) == ("n0",)
    assert _left(ahead, e.AgentDisconnected(0.0, "n0")) == ("n0",)
    assert _left(ahead, e.AgentDisconnected(0.0, "n0", left=True)) == ()


def test_an_agent_that_could_not_be_reached_again_may_still_be_there() -> None:
    silent, failed = (
        e.AgentDisconnected(0.0, "n0"),
        e.LaunchFailed(0.0, "n0", "connect", "no", observations.Retryable.TRANSIENT),
    )
    assert _left(silent, failed) == ("n0",)
    assert _left(silent, failed, e.AgentDied(0.0, "n0", "the host was restarted")) == ()
