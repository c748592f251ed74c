"""A short way to tell the brain what inspections find of a gang that stands still. For the tests of its rules."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import observations
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from orchestrator.journal.journal_file import unwrap_message
from tests.support.brain_story import Story, look, none_of, notices, only

WAITS, WORKS, SPINS, BLOCKED, SLEEPS, STOPPED = (
    observations.Activity.WAITING_FOR_RANKS, observations.Activity.PROGRESSING, observations.Activity.SPINNING, observations.Activity.BLOCKED, observations.Activity.SLEEPING,
    observations.Activity.STOPPED,
)  # fmt: skip
ALL = (0, 1, 2, 3)


def gang_of(nodes: int = 4, *, steps: int = 9, **limits: object) -> Story:
    """Return a job whose silence is judged by what it has shown, and which has made some steps."""
    story = Story(nodes, **{"hang_timeout_s": 0.0, "node_timeout_s": 5000.0, **limits})  # type: ignore[arg-type]
    story.run()
    if steps:
        beats(story, steps)
    return story


def beats(story: Story, count: int, **more: Any) -> list[d.Decision]:
    return story.hear(*(beat(rank, count, **more) for rank in story.brain.facts.ranks))


def beat(rank: int, count: int, state: str = "S", **more: Any) -> e.FromNode:
    fields: dict[str, Any] = {"log_bytes": 0, "cpu_s": 0.0, "median_step_s": 0.1 if count else None, **more}
    return e.FromNode(0.0, f"n{rank}", reports.Heartbeat(1, (RankHeartbeat(rank, count, state, **fields),)))


def entered(
    rank: int, number: int, what: str = "all_reduce", shape: str = "float32[10]", members: tuple[int, ...] = ALL,
    group: str = "0", where: str = "train.py:9 step", activity: observations.Activity = WAITS, entered_s: float = 5.0,
    limit_s: float | None = 600.0, **more: object,
) -> observations.RankInspection:  # fmt: skip
    """Return the inspection of a rank that has entered `number` collectives of a group."""
    one = observations.Collective(
        group, "default group" if group == "0" else "", members, number, what, shape, entered_s, limit_s=limit_s
    )  # fmt: skip
    return look(rank, activity, where=where, stack=(where,), collectives=(one,), **more)


def silence(story: Story, *found: observations.RankInspection, for_s: float = 14.0) -> list[d.Decision]:
    """Let nothing be heard for a while but what inspections find, always the same."""
    first_s: float | None = None
    began = seen = len(story.said)
    for _ in range(int(for_s * 2)):
        if any(isinstance(unwrap_message(one), orders.Inspect) for one in story.wait(0.5)):
            first_s = story.now_s if first_s is None else first_s
            stood_s = story.now_s - first_s
            moved = [
                stood(one, stood_s) for one in found if story.brain.facts.ranks[one.rank].rank_state.value == "alive"
            ]
            story.hear(*story.looked(*moved))
        new, seen = story.said[seen:], len(story.said)
        if not none_of(new, d.Judge) or notices(new, d.NoticeTopic.HANG):
            break
    return story.said[began:]


def stood(one: observations.RankInspection, stood_s: float) -> observations.RankInspection:
    if one.activity is WORKS:
        return one
    if not stood_s:  # a first look cannot tell
        return dataclasses.replace(one, activity=observations.Activity.UNKNOWN)
    return dataclasses.replace(one, still_s=stood_s)


def judged(story: Story, *found: observations.RankInspection, for_s: float = 14.0) -> d.Verdict:
    return only(silence(story, *found, for_s=for_s), d.Judge).verdict
