"""What ranks did with their time, and what failures cost: each kind where its rule says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.wire import reports
from orchestrator.journal import goodput
from orchestrator.journal.goodput import Goodput, Loss
from tests.support import jobs

RANKS = 4
CRASH = Loss(1, "crash", "node-0")
SAVE = ResumePoint(jobs.CKPT, 20, 1)
RUNNING = [*jobs.submitted(), *jobs.running(1, 1.0, 20)]


def _account(news: Sequence[News], until_s: float | None = None, submitted_s: float = 0.0) -> Goodput:
    record = jobs.record(jobs.entries(news))
    if until_s is not None and record.latest is not None:  # a supervisor that keeps writing facts
        later_s = max(0.0, jobs.BEGAN_S + until_s - record.latest.wall_s)
        at, wall_s = record.latest.at + later_s, record.latest.wall_s + later_s
        record.latest = dataclasses.replace(record.latest, at=at, wall_s=wall_s)
    return goodput.from_record(record, jobs.BEGAN_S + submitted_s)


def _course(of: Goodput, rank: int = 0) -> list[tuple[str, float, float]]:
    """Return a rank's spans: kind, begin and end (seconds since the job began)."""
    began_s = jobs.BEGAN_S
    return [
        (span.kind.value, round(span.begin_wall_s - began_s, 1), round(span.end_wall_s - began_s, 1))
        for span in of.spans
        if span.rank <= rank < span.rank + span.ranks
    ]


def test_crash_costs_repeated_steps_detection_and_recovery() -> None:
    """A crash costs repeated steps, its detection and the way back."""
    found = _account(jobs.crashed_once(), until_s=20.0)
    first, again = 4.0, 10.1
    lost = first + (5.5 - first) * 20 / 23
    assert _course(found) == [
        ("queued", 0.0, 0.1),
        ("startup", 0.1, first),
        ("productive", first, round(lost, 1)),
        ("wasted", round(lost, 1), 5.5),
        ("detecting", 5.5, 5.7),
        ("recovering", 5.7, 7.0),
        ("recovering", 7.0, again),
        ("productive", again, 20.0),
    ]
    assert found.losses() == {CRASH: pytest.approx(RANKS * (again - lost))}
    assert found.ratio == pytest.approx((lost - first + 20.0 - again) / 20.0)
    assert sum(found.rank_seconds().values()) == pytest.approx(RANKS * 20.0)


def test_time_before_supervisor_is_queue_time() -> None:
    assert _course(_account(RUNNING, until_s=9.0, submitted_s=-100.0))[0] == ("queued", -100.0, 0.1)


def test_start_from_older_checkpoint_takes_later_steps() -> None:
    """An attempt that starts from an older checkpoint takes the steps of all attempts after it."""
    older = [
        *jobs.crashed_once(),
        *jobs.crash(2, 12.0, 5, 25),
        jobs.again(3, 13.0, None),
        *jobs.running(3, 13.1, 5),
    ]
    spent = _account(older, until_s=20.0)
    assert {kind for kind, _, end_s in _course(spent) if end_s <= 12.0} == {"queued", "startup", "wasted", "detecting", "recovering"}  # fmt: skip


def test_time_between_end_and_resume_does_not_count() -> None:
    ended = jobs.end(1, 9.0, d.JobEnd.SUCCEEDED, "every rank exited with code 0")
    news = [*RUNNING, d.Finish(8.0, "done", 1), ended, e.ResumeRequested(100.0, 1), jobs.again(2, 101.0, SAVE), *jobs.running(2, 101.1, 5)]  # fmt: skip
    assert _course(_account(news, until_s=110.0))[2:] == [
        ("productive", 4.0, 8.0),
        ("stopping", 8.0, 9.0),
        ("startup", 100.0, 101.0),
        ("startup", 101.0, 104.1),
        ("productive", 104.1, 110.0),
    ]


def test_failure_after_resume_is_recovered_like_others() -> None:
    ended = [d.Finish(8.0, "done", 1), jobs.end(1, 9.0, d.JobEnd.FAILED, "done")]
    lost = d.Verdict(
        d.VerdictKind.NODE_LOST,
        (),
        "node-1",
        "gone",
        (),
        d.FailureSignature(d.VerdictKind.NODE_LOST),
        None,
        0.0,
        True,
    )
    resumed = [e.ResumeRequested(100.0, 1), jobs.again(2, 101.0, SAVE), d.Judge(105.0, "gone", 2, lost)]
    found = _account([*RUNNING, *ended, *resumed, jobs.again(3, 106.0, SAVE), *jobs.running(3, 107.0, 5)], 120.0)
    assert ("recovering", 105.0, 106.0) in _course(found)
    assert found.losses() == {Loss(2, "node_lost", "node-1"): pytest.approx(RANKS * (110.0 - 101.0))}


def test_job_without_steps_has_no_goodput() -> None:
    news = [*jobs.submitted(), *jobs.running(1, 1.0), d.Finish(60.0, "every rank exited with code 0", 1)]
    found = _account(news)
    assert (_course(found)[1:], found.ratio) == ([("startup", 0.1, 60.0)], None)


def test_time_after_last_rank_ended_is_not_stepping() -> None:
    """The time after the last rank has ended well is not time of steps."""
    exits = [
        e.FromNode(10.0 + rank, f"node-{rank // 2}", reports.Exited(1, rank, 0, None, 20, None, False, False))
        for rank in range(RANKS)
    ]
    news = [*jobs.submitted(), *jobs.running(1, 1.0, 20), *exits]  # a line behind the ranks goes on
    assert _course(_account(news, until_s=138.0))[-2:] == [
        ("productive", 4.0, 13.0),
        ("stopping", 13.0, 138.0),
    ]
    done = [*news, d.Finish(60.0, "every rank exited with code 0", 1)]
    assert _course(_account(done))[-2:] == [("productive", 4.0, 13.0), ("stopping", 13.0, 60.0)]


def test_hang_ended_by_user_is_charged_as_hang() -> None:
    hang = d.Verdict(
        d.VerdictKind.HANG,
        (2,),
        "node-1",
        "rank 2 hangs",
        (),
        d.FailureSignature(d.VerdictKind.HANG),
        20,
        6.0,
        True,
    )
    noticed = d.Notice(30.0, hang.summary, 1, d.NoticeTopic.HANG, verdict=hang)
    asked = d.Finish(40.0, "a restart requested by the user", 1, d.AttemptEnd.RESTART)
    found = _account([*RUNNING, noticed, asked, jobs.again(2, 41.0, SAVE), *jobs.running(2, 41.1, 5)])
    assert ("detecting", 6.0, 40.0) in _course(found)
    assert list(found.losses()) == [Loss(1, "hang", "node-1")]
    withdrawn = d.Notice(35.0, "the job makes progress again", 1, d.NoticeTopic.HANG, withdrawn=True)
    found = _account([*RUNNING, noticed, withdrawn, asked, jobs.again(2, 41.0, SAVE), *jobs.running(2, 41.1, 5)])
    assert list(found.losses()) == [Loss(1, "restart", "")]


def test_window_cuts_spans_and_failure_costs() -> None:
    found = _account(jobs.crashed_once(), until_s=20.0)
    later = found.since(jobs.BEGAN_S + 6.0)
    assert sum(later.rank_seconds().values()) == pytest.approx(RANKS * 14.0)
    assert later.losses() == {CRASH: pytest.approx(RANKS * (10.1 - 6.0))}


def test_ranks_with_same_activity_share_a_span() -> None:
    record = jobs.record(jobs.entries(jobs.crashed_once()))
    together = goodput.from_record(record)
    assert {span.ranks for span in together.spans} == {RANKS}


def test_sleeping_machine_counts_as_its_last_activity() -> None:
    """The job clock may stand still while a submit machine sleeps, and its hosts train on."""
    entries = jobs.entries(jobs.crashed_once())
    awake = goodput.from_record(jobs.record(entries)).rank_seconds()
    second = [number for number, entry in enumerate(entries) if isinstance(entry.news, d.BeginAttempt)][1]
    for entry in entries[second:]:
        object.__setattr__(entry, "wall_s", entry.wall_s + 3600.0)
    asleep = goodput.from_record(jobs.record(entries)).rank_seconds()
    assert sum(asleep.values()) - sum(awake.values()) == pytest.approx(RANKS * 3600.0)


def test_clock_set_back_removes_no_time() -> None:
    entries = jobs.entries(jobs.crashed_once())
    right = goodput.from_record(jobs.record(entries))
    for entry in entries[-10:]:
        object.__setattr__(entry, "wall_s", entry.wall_s - 3600.0)
    assert goodput.from_record(jobs.record(entries)) == right


def test_spare_time_is_extra() -> None:
    spans = [goodput.Span(0, 1, kind, 0.0, 10.0, ranks) for kind, ranks in (
        (goodput.TimeKind.PRODUCTIVE, 3), (goodput.TimeKind.STARTUP, 1), (goodput.TimeKind.IDLE, 4))]  # fmt: skip
    assert Goodput(tuple(spans)).ratio == 0.75


def test_stall_of_kept_checkpoint_is_no_useful_training() -> None:
    """It is counted once for checkpoints of one interval, and not where its steps were repeated."""
    news = jobs.crashed_once()
    at = next(number for number, one in enumerate(news) if isinstance(one, e.CheckpointChanged))
    news[at : at + 1] = [
        jobs.saved(4.5, stall_s=0.25),
        jobs.saved(4.5, number=2, main="best.pt", stall_s=0.25),
        jobs.saved(4.6, number=3, main="step-22.pt", steps=22, stall_s=0.5),
    ]
    before, found = (
        _account(jobs.crashed_once(), until_s=20.0).rank_seconds(),
        _account(news, until_s=20.0).rank_seconds(),
    )
    assert before[goodput.TimeKind.CHECKPOINT] == 0.0
    assert found[goodput.TimeKind.CHECKPOINT] == pytest.approx(RANKS * 0.25)
    assert found[goodput.TimeKind.PRODUCTIVE] == pytest.approx(before[goodput.TimeKind.PRODUCTIVE] - RANKS * 0.25)
    assert found[goodput.TimeKind.WASTED] == pytest.approx(before[goodput.TimeKind.WASTED])
