"""What the status of a job says about what it waits for between two attempts."""

from __future__ import annotations

from orchestrator.brain.model import events as e
from orchestrator.supervisor import status
from orchestrator.supervisor.wait_texts import Now
from tests.support.brain_story import Story


def test_lost_host_without_replacement_is_named_with_its_limit() -> None:
    text = _reason_after_loss(hosts=2)
    assert "ended: node_lost: n1" in text and text.endswith(
        "; waiting for n1 to come back, until 00:01:00 UTC at the latest"
    )


def test_lost_host_with_replacement_is_not_waited_for() -> None:
    assert "to come back" not in _reason_after_loss(hosts=3)


def _reason_after_loss(hosts: int) -> str:
    story = Story(hosts=hosts)
    story.hear(story.up(0), story.up(1))
    story.run_on(0, 1)
    began_s = story.now_s
    story.hear(e.AgentDied(0.0, "n1", "killed"))
    story.hear(story.stopped(0, 1))
    story.wait(21.0)
    return status.reason(story.brain.facts, Now(story.now_s, story.now_s - began_s))
