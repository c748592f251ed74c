"""Events in, what follows out: restarts, budget, stops, cancel and resume."""

from __future__ import annotations

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.observations import Failure
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from tests.support.brain_story import Story, given, names, none_of, only
from tests.support.frames import frame


def _crashed(**limits: object) -> Story:
    story = Story(**limits)  # type: ignore[arg-type]
    story.run()
    story.hear(story.exited(0))
    return story


def test_ranks_start_only_when_all_nodes_are_ready() -> None:
    story = Story(2)
    story.hear(story.up(0), story.up(1))
    assert not story.hear(story.prepared(0))
    starts = given(story.hear(story.prepared(1)), orders.Start)
    assert [(node, start.address, start.port) for node, start in starts] == [
        ("n0", "10.0.0.1", 5001),
        ("n1", "10.0.0.1", 5001),
    ]


def test_next_attempt_waits_until_all_nodes_stopped() -> None:
    story = _crashed()
    assert not story.hear(story.stopped(0))
    assert only(story.hear(story.stopped(1)), d.BeginAttempt).attempt == 2


def test_a_cut_node_is_fenced_before_restart() -> None:
    story = _crashed()
    story.hear(e.AgentDisconnected(0.0, "n1"), story.stopped(0))
    assert none_of(story.wait(19.0), d.BeginAttempt)
    assert only(story.wait(2.0), d.BeginAttempt).attempt == 2


def test_possibly_complete_gang_is_never_fenced() -> None:
    story = Story(1)
    story.run()
    story.hear(e.AgentDisconnected(0.0, "n0"))
    story.wait(500.0)
    assert none_of(story.said[2:], d.EndJob)
    assert [x.attempt for x in story.said if isinstance(x, d.BeginAttempt)] == [1]
    end = only(story.wait(200.0), d.EndJob)
    assert end.end is d.JobEnd.FAILED and "cannot be reached" in end.why


def test_stop_is_repeated_after_broken_connection() -> None:
    """A stop is sent again when its connection broke."""
    story = _crashed()
    story.hear(e.AgentDisconnected(0.0, "n1"))
    assert names(story.hear(story.up(1, running=1, ready=1)), orders.Stop) == ["n1"]


def test_unkillable_processes_end_job_only_if_agent_heard() -> None:
    """Processes that outlive KILL end the job only if their agent was heard since."""
    story = _crashed()
    story.hear(story.stopped(0))
    assert none_of(story.wait(90.0), d.EndJob)
    assert "survive SIGKILL" in only(story.hear(story.beat(1, 0)), d.EndJob).why


def test_resume_after_giving_up_stops_leftovers_first() -> None:
    """A resume after giving up stops what is left before it begins."""
    story = _crashed()
    story.hear(story.stopped(0))
    story.wait(90.0)
    story.hear(story.beat(1, 0))
    decided = story.hear(e.ResumeRequested(0.0, 1))
    assert names(decided, orders.Stop) == ["n1"] and none_of(decided, d.BeginAttempt)
    assert only(story.hear(story.stopped(1)), d.BeginAttempt).attempt == 2


def test_node_left_out_by_resume_is_stopped_first() -> None:
    """A node that a resume leaves out is still stopped first."""
    story = _crashed()
    story.hear(story.stopped(0))
    story.wait(90.0)
    story.hear(story.beat(1, 0))
    decided = story.hear(story.planned(1), e.ResumeRequested(0.0, 1))
    assert none_of(decided, d.BeginAttempt)
    assert only(story.hear(story.stopped(1)), d.BeginAttempt).attempt == 2


def test_restart_max_0_never_restarts() -> None:
    assert only(_crashed(restarts_max=0).stop_all(), d.EndJob).end is d.JobEnd.FAILED


def test_exit_code_in_never_is_not_restarted() -> None:
    """An exit code that is listed under never is not restarted."""
    assert only(_crashed(never_on_exit_codes=(1,)).stop_all(), d.EndJob).end is d.JobEnd.FAILED


def test_same_failure_at_same_step_is_no_progress() -> None:
    story = _crashed()
    story.stop_all()
    story.run(2)
    story.hear(story.exited(1, attempt=2))
    assert story.brain.facts.attempt is not None and story.brain.facts.attempt.verdict is not None
    assert story.brain.facts.attempt.verdict.kind is d.VerdictKind.NO_PROGRESS


def test_same_fatal_signal_before_steps_is_no_progress() -> None:
    """A fatal signal at the same location again is no progress, on any rank, before any step."""
    story = Story(2)
    where = Failure("", "", "stacks", frame("train.py:3 read"))
    for attempt, rank in ((1, 0), (2, 1)):
        story.run(attempt)
        story.hear(story.exited(rank, None, where, attempt=attempt, signal=11))
        story.stop_all(attempt)
    assert story.brain.facts.attempt is not None and story.brain.facts.attempt.verdict is not None
    assert story.brain.facts.attempt.verdict.kind is d.VerdictKind.NO_PROGRESS


def test_only_attempts_without_progress_spend_the_budget() -> None:
    story = Story(1, restarts_max=1)
    for attempt in range(1, 6):
        story.run(attempt)
        story.hear(story.saved(attempt, attempt), story.exited(0, attempt=attempt, count=attempt))
        story.stop_all(attempt)
    assert story.brain.facts.restarts_spent == 0 and story.brain.facts.end is None


def test_cancel_while_preparing_ends_job_at_once() -> None:
    story = Story(2)
    assert only(story.hear(e.CancelRequested(0.0, 1)), d.EndJob).end is d.JobEnd.CANCELLED


def test_cancel_gives_complete_gang_its_grace() -> None:
    story = Story(2)
    story.run()
    stops = given(story.hear(e.CancelRequested(0.0, 1)), orders.Stop)
    assert [stop.grace_s for _, stop in stops] == [5.0, 5.0]
    assert only(story.stop_all(), d.EndJob).end is d.JobEnd.CANCELLED


def test_cancel_during_backoff_ends_job_at_once() -> None:
    story = Story(1, backoff_s=100.0, backoff_max_s=100.0)
    for attempt in (1, 2):
        story.run(attempt)
        story.hear(story.exited(0, None, None, signal=attempt + 9, attempt=attempt))
        story.stop_all(attempt)
    assert story.brain.facts.end is None
    assert only(story.hear(e.CancelRequested(0.0, 1)), d.EndJob).end is d.JobEnd.CANCELLED


def test_cancel_after_last_exit_changes_nothing() -> None:
    story = Story(1)
    story.run()
    story.hear(story.exited(0, 0, None), e.CancelRequested(0.0, 1))
    assert only(story.stop_all(), d.EndJob).end is d.JobEnd.SUCCEEDED


def test_folded_heartbeats_replay_to_same_facts() -> None:
    live, replayed = Story(1), Story(1)
    for story in (live, replayed):
        story.run()
    live.brain.take_heartbeats()
    for count in (1, 2, 2, 2):
        live.now_s += 1.0
        live.brain.learn(e.FromNode(live.now_s, "n0", reports.Heartbeat(1, (RankHeartbeat(0, count, "S", 0, 0.0),))))
    for beat in live.brain.take_heartbeats():
        replayed.brain.learn(beat)
    assert replayed.brain.facts == live.brain.facts
