"""The books of a night: do the kinds of the ranks' time add up to all of it, whatever has happened?"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

from orchestrator.journal import goodput
from orchestrator.journal.goodput import Span, TimeKind

from .ledger import Violation

if TYPE_CHECKING:
    from .world import World

ROUNDING_S = 0.001


def check(world: World) -> None:
    """Raise when spans of a rank overlap or leave gaps, or do not add up to all time from submission to the end."""
    lines = [json.loads(line) for line in world.journal.lines]
    found = goodput.from_record(world.journal.shadow)
    rows: dict[int, list[Span]] = {}
    for span in sorted(found.spans, key=lambda span: span.begin_wall_s):
        for rank in range(span.rank, span.rank + span.ranks):
            rows.setdefault(rank, []).append(span)
        if span.end_wall_s <= span.begin_wall_s:
            raise Violation(f"a span of no length: {span}")
    for before, after in itertools.chain.from_iterable(map(itertools.pairwise, rows.values())):
        if after.begin_wall_s < before.end_wall_s:
            raise Violation(f"spans overlap: {before}, {after}")
        is_resumed = any(before.end_wall_s - ROUNDING_S <= over_at < after.begin_wall_s for over_at in _ends(lines))
        if after.begin_wall_s > before.end_wall_s and before.kind is not TimeKind.IDLE and not is_resumed:
            raise Violation(f"a gap: {before}, {after}")
    sums = found.rank_seconds()
    booked_s, all_s = sum(sums.values()) - sums[TimeKind.IDLE], _rank_seconds(lines)
    if abs(booked_s - all_s) > ROUNDING_S * max(1.0, len(found.spans)):
        raise Violation(f"{booked_s:.3f} rank-seconds are booked, and {all_s:.3f} have passed: {sums}")
    if sum(found.losses().values()) > sum(sums.values()) - sums[TimeKind.PRODUCTIVE] + ROUNDING_S:
        raise Violation("failures cost more than was lost")


def _ends(lines: list[dict[str, object]]) -> list[float]:
    return [float(str(line["at"])) for line in lines if line["kind"] == "EndJob"]


def _rank_seconds(lines: list[dict[str, object]]) -> float:
    """Return wall time × ranks from the first line to the last, without the time between an end and a resume."""
    at = all_s = 0.0
    counts = [_count(line) for line in lines if line["kind"] == "Planned"][:1]
    planned, ranks, is_over = counts[0], counts[0], False
    for line in lines:
        now_s = max(at, float(str(line["at"])))
        all_s += 0.0 if is_over else ranks * (now_s - at)
        at = now_s
        match line["kind"]:
            case "Planned":
                planned = _count(line)
            case "BeginAttempt":
                ranks = planned
            case "EndJob":
                is_over = True
            case "ResumeRequested":
                is_over = False
            case _:
                pass
    return all_s


def _count(line: dict[str, object]) -> int:
    pool, nodes = line["pool"], line["nodes"]
    if isinstance(pool, dict):
        return int(pool["nodes"]) * int(pool["ranks_each"])
    assert isinstance(nodes, list)
    return sum(len(node["ranks"]) for node in nodes)
