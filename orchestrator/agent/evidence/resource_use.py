"""What a rank has spent between two looks. Pure."""

from __future__ import annotations

from orchestrator.agent.evidence.sample import RankSample


def woke(now: RankSample, then: RankSample, tid: int) -> bool:
    """Tell whether a thread, or a child's main one, has gone on since the look before: it may have been stopped twice."""
    return now.before.wakes.get(tid) != then.after.wakes.get(tid)


def span_s(now: RankSample, then: RankSample) -> float:
    """Return how much time lies between two looks."""
    return max(now.before.at_s - then.after.at_s, 1e-3)


def main_share(now: RankSample, then: RankSample) -> float:
    """Return which share of the time the thread that is judged was on a processor, or wanted one."""
    return (now.before.main_s - then.after.main_s) / span_s(now, then)


def beside_share(now: RankSample, then: RankSample) -> float:
    """Return which share of the time the threads beside the one that is judged were on a processor; 1.0 is one of them
    always."""
    spent_s = now.before.process_s - then.after.process_s
    return max(0.0, spent_s / span_s(now, then) - main_share(now, then))


def child_share(now: RankSample, then: RankSample, pid: int) -> float:
    """Return which share of the time a child was on a processor, or wanted one."""
    now_s, then_s = now.before.children_s.get(pid), then.after.children_s.get(pid)
    if now_s is None or then_s is None:
        return 0.0
    return (now_s - then_s) / span_s(now, then)
