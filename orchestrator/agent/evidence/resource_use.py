"""Resource use of a rank between two samples: processor shares and wake-ups. Pure."""

from __future__ import annotations

from orchestrator.agent.evidence.sample import RankSample


def woke(now: RankSample, then: RankSample, tid: int) -> bool:
    """Tell whether a thread, or a child's main thread, has run since the previous sample, even if both samples found it
    stopped."""
    return now.before.wakes.get(tid) != then.after.wakes.get(tid)


def span_s(now: RankSample, then: RankSample) -> float:
    """Return the time between two samples."""
    return max(now.before.at_s - then.after.at_s, 1e-3)


def main_share(now: RankSample, then: RankSample) -> float:
    """Return the share of the time in which the judged thread was on a processor, or waited for one."""
    return (now.before.main_s - then.after.main_s) / span_s(now, then)


def other_threads_share(now: RankSample, then: RankSample) -> float:
    """Return the share of the time in which the threads other than the judged one were on a processor; 1.0 is one
    thread all the time."""
    spent_s = now.before.process_s - then.after.process_s
    return max(0.0, spent_s / span_s(now, then) - main_share(now, then))


def child_share(now: RankSample, then: RankSample, pid: int) -> float:
    """Return the share of the time in which a child was on a processor, or waited for one."""
    now_s, then_s = now.before.children_s.get(pid), then.after.children_s.get(pid)
    if now_s is None or then_s is None:
        return 0.0
    return (now_s - then_s) / span_s(now, then)
