"""How long does a silent node's agent go by itself, and how long is waited for that? Events in, decisions out."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.scheduling import fence
from orchestrator.brain.scheduling.fence import CONTACT_TIMEOUT_S_MAX, STARTUP_TIMEOUT_S_MAX
from orchestrator.core.observations import Framework
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from tests.support.brain_story import Story, given, none_of

BASE_S, SILENT_S = 12.0, 20.0
"""What an agent is told at its start, and how long is waited for that; see `brain_story.LIMITS`."""


def _running(**limits: Any) -> Story:
    story = Story(2, hang_timeout_s=None, **limits)
    story.run()
    return story


def _fences(decided: list[d.Decision]) -> list[tuple[str, float, float]]:
    return [(node, fence.contact_timeout_s, fence.startup_timeout_s) for node, fence in given(decided, orders.Fence)]


def _step(story: Story, count: int, after_s: float) -> list[d.Decision]:
    """Both ranks make a step after a pause in which they are heard."""
    story.now_s += after_s
    return story.hear(story.beat(0, count), story.beat(1, count))


def _print(story: Story, log_bytes: int, after_s: float, count: int = 0) -> list[d.Decision]:
    story.now_s += after_s
    beats = [RankHeartbeat(rank, count, "S", log_bytes, 0.0) for rank in range(2)]
    return story.hear(*(e.FromNode(0.0, f"n{beat.rank}", reports.Heartbeat(1, (beat,))) for beat in beats))


def _breaks(story: Story, after_s: float) -> None:
    """The line to n1 breaks, then rank 0 crashes."""
    story.hear(e.AgentDisconnected(0.0, "n1"))
    story.now_s += after_s
    story.hear(story.exited(0))
    story.hear(story.stopped(0))


def _begins(decided: list[d.Decision]) -> bool:
    return any(isinstance(one, d.BeginAttempt) for one in decided)


def test_long_pause_sends_tripled_fence_time_once() -> None:
    """A pause sends both agents once a fence time three times as long."""
    story = _running()
    _step(story, 1, 1.0)
    assert _fences(_step(story, 2, 50.0)) == [("n0", 150.0, 0.0), ("n1", 150.0, 0.0)]
    assert none_of(_step(story, 3, 50.0), orders.Fence)
    assert none_of(_step(story, 4, 55.0), orders.Fence)
    assert _fences(_step(story, 5, 5000.0))[0][1] == CONTACT_TIMEOUT_S_MAX


def test_next_attempt_waits_beyond_longest_fence_time() -> None:
    """The next attempt waits longer than the longest time that an agent was sent."""
    story = _running()
    _step(story, 1, 1.0)
    _step(story, 2, 60.0)
    _breaks(story, 1.0)
    longest_s = 1.25 * (3 * 60.0 + 60.0)
    assert not _begins(story.wait(longest_s - 2.0))
    assert _begins(story.wait(4.0))


def test_sent_fence_time_is_waited_for_without_receipt() -> None:
    """A fence time that was sent is waited for, even if nothing shows that it was received."""
    story = _running()
    _step(story, 1, 1.0)
    story.now_s += 60.0
    story.hear(story.beat(0, 2), story.beat(1, 2))
    story.hear(e.SupervisorStarted(0.0, 2))
    _breaks(story, 1.0)
    assert not _begins(story.wait(3 * 60.0 + 5.0))


def test_fence_time_is_sent_again_over_new_connection() -> None:
    story = _running()
    _step(story, 1, 1.0)
    _step(story, 2, 50.0)
    story.hear(e.AgentDisconnected(0.0, "n1"))
    assert _fences(story.hear(story.up(1, running=1))) == [("n1", 150.0, 0.0)]


def test_silent_node_is_kept_within_known_pause() -> None:
    """A silent node is not given up within a pause that the job has shown."""
    story = _running()
    _step(story, 1, 1.0)
    _step(story, 2, 50.0)
    story.hear(e.AgentDisconnected(0.0, "n1"))
    assert none_of(story.wait(100.0), d.Judge)
    assert any(isinstance(one, d.Judge) for one in story.wait(200.0))


SEEN = {"node_timeout_s": 60.0, "fence_s": 16.0, "disconnected_timeout_s": 48.0}
"""What `monitor.node_timeout: auto` is for several nodes."""


def _judged_s(story: Story, heard: tuple[int, ...] = (0,), for_s: int = 200) -> float | None:
    """Return how long it takes to judge while these nodes are heard each second whose ranks make no step."""
    since_s = story.now_s
    for _ in range(for_s):
        story.now_s += 1.0
        beats = [story.beat(node, story.brain.facts.ranks[node].steps) for node in heard]
        if any(isinstance(one, d.Judge) for one in story.hear(*beats)):
            return story.now_s - since_s
    return None


def _cut_off(**limits: Any) -> Story:
    """Two steps in a second each, then nothing more is heard of n1."""
    story = _running(**{**SEEN, **limits})
    _step(story, 1, 1.0)
    _step(story, 2, 1.0)
    story.hear(e.AgentDisconnected(0.0, "n1"))
    return story


def test_silent_fenced_node_is_lost_if_others_stuck() -> None:
    """A silent node is lost at once when its ranks must have ended and others are seen to be stuck."""
    story = _cut_off()
    facts = story.brain.facts
    assert fence.expected_over_at(facts, facts.nodes["n1"]) - story.now_s == 21.25
    assert _judged_s(story) == 22.0  # (16 s + a pause of 1 s) * 1.25
    assert _begins(story.hear(story.exited(0), story.stopped(0)) or story.wait(1.0)), "not counted from the verdict"


def test_silent_node_with_unseen_steps_gets_longer() -> None:
    """A silent node has the longer time where the gang may make steps unseen."""
    assert _judged_s(_cut_off(), heard=()) == 62.0
    back = _cut_off()
    back.hear(e.AgentDisconnected(0.0, "n0"))
    back.now_s += 30.0
    assert none_of(back.hear(back.up(0, running=1)), d.Judge), "its ranks may have made steps meanwhile"
    alone = _cut_off()
    alone.brain.facts.ranks[1].beat = dataclasses.replace(alone.brain.facts.ranks[1].beat, alone=Framework.TORCH)
    assert _judged_s(alone) == 62.0
    done = _running(**SEEN)
    _step(done, 1, 1.0)
    done.hear(done.exited(0, 0, None), e.AgentDisconnected(0.0, "n1"))
    assert _judged_s(done, heard=()) is not None and done.now_s > 60.0


def test_agent_long_without_supervisor_has_longer_time() -> None:
    story = _cut_off()
    for count in range(3, 10):  # the gang goes on, and only then it is cut off
        story.now_s += 1.0
        story.hear(story.beat(0, count))
    assert _judged_s(story) == 62.0
    other = _cut_off()
    other.hear(e.SupervisorStarted(0.0, 2))
    other.hear(other.up(0, running=1))
    assert _judged_s(other) == 62.0


def test_working_ranks_without_steps_earn_time() -> None:
    story = _running()
    assert none_of(_print(story, 1, 10.0), orders.Fence)
    assert _fences(_print(story, 2, 20.0)) == [("n0", BASE_S, 30.0), ("n1", BASE_S, 30.0)]
    assert none_of(_print(story, 3, 2.0), orders.Fence)
    assert none_of(_print(story, 3, 500.0), orders.Fence), "nothing new was printed"
    assert _fences(_print(story, 4, 3000.0))[0][2] == STARTUP_TIMEOUT_S_MAX
    _breaks(story, 1.0)
    assert not _begins(story.wait(STARTUP_TIMEOUT_S_MAX))
    assert _begins(story.wait(STARTUP_TIMEOUT_S_MAX))


def test_first_step_ends_time_of_stepless_ranks() -> None:
    story = _running()
    _print(story, 2, 100.0)
    _print(story, 3, 1.0, count=1)
    _breaks(story, 1.0)
    assert _begins(story.wait(SILENT_S + 1.0))


def test_time_of_stepless_ranks_ends_with_attempt() -> None:
    story = _running()
    _print(story, 2, 100.0)
    story.hear(story.exited(0))
    story.stop_all()
    story.wait(30.0)
    story.run(2)
    assert story.brain.facts.nodes["n1"].startup_timeout_s == 0.0


def test_fence_uses_no_time_where_locks_show_agents() -> None:
    """Where locks show whether agents live, no fence time is used."""
    story = _running(fence_s=None)
    _step(story, 1, 1.0)
    assert none_of(_step(story, 2, 50.0), orders.Fence)
    _breaks(story, 1.0)
    assert not _begins(story.wait(500.0))
    assert _begins(story.hear(story.up(1, boot="b")))
