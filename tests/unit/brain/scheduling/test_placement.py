"""Events in, decisions out: which hosts of a pool an attempt uses; the rules of `brain/placement.py`."""

from __future__ import annotations

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.scheduling import placement
from orchestrator.core import observations
from orchestrator.core.errors import Fault
from orchestrator.core.wire import orders, reports
from tests.support.brain_story import Story, names, none_of, only

BUSY, LASTING, PASSING = (
    observations.Retryable.BUSY,
    observations.Retryable.PERMANENT,
    observations.Retryable.TRANSIENT,
)


def _places(decisions: list[d.Decision]) -> list[str]:
    return [name for name, _ in only(decisions, d.Place).nodes]


def _running(hosts: int, spares: int = 0) -> Story:
    """Return a job of two nodes that runs on n0 and n1, with its spares up."""
    story = Story(hosts=hosts, spares=spares)
    story.hear(*(story.up(node) for node in range(2 + spares)))
    story.run_on(0, 1)
    return story


def _lose(story: Story, node: int, *left: int, attempt: int = 1) -> list[d.Decision]:
    """Let a node's agent be gone for good; the other nodes are stopped, and nothing is left of the attempt."""
    story.hear(e.AgentDied(0.0, f"n{node}", "killed"))
    decided = story.hear(*(story.stopped(other, attempt) for other in left))
    return [*decided, *story.wait(21.0)]


def test_hosts_are_launched_in_the_users_order_and_spares_with_them() -> None:
    story = Story(hosts=5, spares=1)
    assert names(story.said, d.Launch) == ["n0", "n1", "n2"]


def test_ranks_are_placed_once_enough_hosts_are_up_in_the_users_order() -> None:
    story = Story(hosts=4)
    assert none_of(story.hear(story.up(1)), d.Place)
    place = only(story.hear(story.up(0)), d.Place)
    assert place.nodes == (("n0", (0,)), ("n1", (1,)))


def test_a_host_that_comes_up_slowly_is_waited_for_a_while_and_then_done_without() -> None:
    story = Story(hosts=3, spares=1)
    assert none_of(story.hear(story.up(1), story.up(2)), d.Place)
    assert _places(story.wait(placement.HOST_START_S_MAX)) == ["n1", "n2"]


def test_beside_a_host_that_comes_up_slowly_another_is_launched() -> None:
    story = Story(hosts=3)
    story.hear(story.up(0))
    assert names(story.wait(placement.HOST_START_S_MAX), d.Launch) == ["n2"]
    assert _places(story.hear(story.up(2))) == ["n0", "n2"]


def test_a_host_that_refuses_is_passed_over_and_never_launched_again() -> None:
    story = Story(hosts=3)
    assert names(story.hear(story.refused(0, LASTING, "wrong key")), d.Launch) == ["n2"]
    story.hear(story.up(1))
    assert _places(story.hear(story.up(2))) == ["n1", "n2"]
    assert "n0" not in names(story.wait(600.0), d.Launch)
    assert placement.unused_reason(story.brain.facts.nodes["n0"]) == Fault("n0", "stage: wrong key")


def test_a_resume_gives_a_host_that_refused_another_chance() -> None:
    story = Story(hosts=2)
    story.hear(story.up(1), story.refused(0, LASTING))
    assert names(story.hear(e.ResumeRequested(0.0, 1)), d.Launch) == ["n0"]


def test_too_few_usable_hosts_end_the_job_once_all_have_answered_and_each_is_named() -> None:
    story = Story(hosts=3)
    story.hear(story.refused(0, LASTING, "old key"))
    assert none_of(story.hear(story.refused(1, LASTING, "no python")), d.Judge), "n2 has not answered"
    verdict = only(story.hear(story.refused(2, LASTING, "no space")), d.Judge).verdict
    assert verdict.kind is d.VerdictKind.LAUNCH and not verdict.retry
    assert verdict.evidence == ("n0: stage: old key", "n1: stage: no python", "n2: stage: no space")
    assert only(story.said, d.EndJob).end is d.JobEnd.FAILED


def test_a_host_that_does_not_answer_is_tried_three_times_and_others_meanwhile() -> None:
    story = Story(hosts=3)
    story.hear(story.up(1))
    assert names(story.hear(story.refused(0, PASSING)), d.Launch) == ["n2"]
    assert _places(story.hear(story.up(2))) == ["n1", "n2"]


def test_no_host_is_held_while_too_few_are_free() -> None:
    story = Story(hosts=2)
    story.hear(story.up(0))
    assert names(story.hear(story.refused(1, BUSY, "held by job-7")), orders.Dismiss) == ["n0"]
    assert placement.is_queued(story.brain.facts)


def test_a_job_that_is_queued_for_longer_than_its_user_lets_it_ends_and_says_who_had_the_hosts() -> None:
    story = Story(hosts=2, queue_timeout_s=100.0)
    story.hear(e.QueueSeen(0.0, ("job-1",)))
    assert none_of(story.wait(99.0), d.Judge)
    verdict = only(story.wait(2.0), d.Judge).verdict
    assert (verdict.kind, verdict.retry) == (d.VerdictKind.START_TIMEOUT, False)
    assert verdict.summary.startswith("queued for 100 s")
    assert verdict.evidence == ("jobs ahead: job-1",)


def test_a_job_that_has_its_hosts_is_not_queued_whatever_the_limit() -> None:
    story = Story(hosts=2, queue_timeout_s=10.0, hang_timeout_s=None)
    story.hear(story.up(0), story.up(1))
    assert none_of(story.wait(30.0), d.Judge)


def test_busy_hosts_are_asked_again_in_one_round() -> None:
    story = Story(hosts=3)
    story.hear(story.refused(0, BUSY), story.refused(1, BUSY))
    assert names(story.wait(placement.BUSY_PAUSE_S), d.Launch) == ["n0", "n1"]
    story.hear(story.up(0))
    assert names(story.hear(story.refused(1, BUSY)), d.Launch) == ["n2"], "n0 is kept: n2 may still be had"
    assert _places(story.hear(story.up(2))) == ["n0", "n2"]


def test_hosts_that_were_busy_long_ago_are_not_taken_for_busy() -> None:
    story = Story(hosts=4)
    story.hear(*(story.refused(node, BUSY) for node in (0, 1)))
    story.hear(*(story.refused(node, BUSY) for node in (2, 3)))
    assert names(story.wait(placement.BUSY_PAUSE_S), d.Launch) == ["n0", "n1"]
    assert names(story.hear(story.refused(0, BUSY), story.refused(1, BUSY)), d.Launch) == ["n2", "n3"]
    assert _places(story.hear(story.up(2), story.up(3))) == ["n2", "n3"]


def test_the_longer_a_job_has_waited_the_more_seldom_it_asks() -> None:
    story = Story(hosts=2)
    story.now_s = 1000.0
    story.hear(story.refused(0, BUSY), story.refused(1, BUSY))
    assert none_of(story.wait(45.0), d.Launch)
    assert names(story.wait(6.0), d.Launch) == ["n0", "n1"]


def test_jobs_ahead_are_waited_for_without_launching_anything() -> None:
    story = Story(hosts=2)
    story.hear(story.up(0), e.QueueSeen(0.0, ("job-1",)))
    assert names(story.said, orders.Dismiss) == ["n0"]
    story.hear(
        e.AgentDisconnected(0.0, "n0", left=True), story.up(1), e.AgentDisconnected(0.0, "n1", left=True)
    )
    assert none_of(story.wait(500.0), d.Launch) and none_of(story.said, d.Judge)
    assert names(story.hear(e.QueueSeen(0.0, ())), d.Launch) == ["n0", "n1"]


def test_waiting_for_others_counts_neither_for_the_start_nor_for_the_time_limit() -> None:
    story = Story(hosts=2, time_limit_s=50.0)
    story.hear(story.up(0))
    for _ in range(20):
        story.hear(story.refused(1, BUSY))
        story.wait(20.0)
    assert none_of(story.said, d.Judge)
    story.hear(story.up(0), story.up(1))
    story.run_on(0, 1)
    for count in (1, 2, 3):
        assert none_of([*story.hear(story.beat(0, count), story.beat(1, count)), *story.wait(15.0)], d.Judge)
    assert only(story.wait(5.0), d.Judge).verdict.kind is d.VerdictKind.TIME_LIMIT


def test_a_spare_steps_in_and_the_other_rank_stays_where_it_is() -> None:
    decided = _lose(_running(4, spares=1), 0, 1)
    assert _places(decided) == ["n2", "n1"]


def test_without_a_spare_another_host_is_launched_beside_the_lost_one() -> None:
    story = _running(3)
    decided = _lose(story, 1, 0)
    begun = decided.index(only(decided, d.BeginAttempt))
    assert names(decided[begun:], d.Launch)[-1] == "n2"
    assert _places(story.hear(story.up(2))) == ["n0", "n2"]


def test_a_lost_host_without_another_is_waited_for_and_then_ends_the_job() -> None:
    story = _running(2)
    decided = [*_lose(story, 1, 0), *story.wait(61.0)]
    verdict = [decision.verdict for decision in decided if isinstance(decision, d.Judge)][-1]
    assert (verdict.kind, verdict.node, verdict.retry) == (d.VerdictKind.NODE_LOST, "n1", False)
    assert "has not come back within 60 s" in only(story.said, d.EndJob).why


def test_a_lost_host_that_comes_back_in_time_has_its_rank_again() -> None:
    story = _running(2)
    _lose(story, 1, 0)
    assert _places(story.hear(story.up(1, boot="b"))) == ["n0", "n1"]


def test_a_spare_that_is_lost_is_replaced_while_the_gang_runs() -> None:
    story = _running(4, spares=1)
    decided = story.hear(e.AgentDied(0.0, "n2", "killed"))
    assert names(decided, d.Launch) == ["n2"]
    assert names(story.hear(story.refused(2, PASSING)), d.Launch) == ["n3"]


def test_broken_lines_of_a_running_gang_launch_nothing() -> None:
    story = _running(6, spares=1)
    story.hear(*(e.AgentDisconnected(0.0, f"n{node}") for node in range(3)))
    assert none_of(story.wait(15.0), d.Launch)
    story.hear(e.SupervisorStarted(0.0, 7))
    assert none_of(story.wait(15.0), d.Launch)


def test_a_host_that_is_not_needed_any_more_is_let_go() -> None:
    story = _running(3)
    _lose(story, 1, 0)
    story.hear(story.up(2))
    story.hear(story.up(1, boot="b"))
    assert none_of(story.said, orders.Dismiss), "whoever is there may be needed until ranks run"
    story.run_on(0, 2, attempt=2)
    assert names(story.said, orders.Dismiss) == ["n1"]


def test_a_host_where_the_setup_fails_is_done_without_where_there_are_others() -> None:
    story = Story(hosts=3)
    story.hear(story.up(0), story.up(1))
    decided = story.hear(
        e.FromNode(0.0, "n1", reports.PrepareFailed(1, "setup line 1 exited with code 1", ""))
    )
    assert (names(decided, orders.Dismiss), names(decided, d.Launch)) == (["n1"], ["n2"])
    assert _places(story.hear(story.up(2))) == ["n0", "n2"]
    assert "setup line 1" in str(placement.unused_reason(story.brain.facts.nodes["n1"]))


def test_a_launch_that_failed_three_times_is_forgotten_in_the_next_attempt() -> None:
    story = Story(hosts=3, spares=1)
    story.hear(story.up(1), story.up(2))
    for _ in range(3):
        story.hear(story.refused(0, PASSING))
        story.wait(2.0)
    story.run_on(1, 2)
    assert "n0" in names(_lose(story, 1, 2), d.Launch)


def test_a_dismissed_host_is_not_used_until_it_is_up_again() -> None:
    story = Story(hosts=2)
    story.hear(story.up(0), story.refused(1, BUSY))
    story.wait(placement.BUSY_PAUSE_S)
    assert none_of(story.hear(story.up(1)), d.Place), "the agent on n0 is about to leave"


def test_a_placed_host_that_is_gone_before_its_ranks_start_is_lost() -> None:
    story = Story(hosts=3)
    story.hear(story.up(0), story.up(1))
    decided = story.hear(e.AgentDied(0.0, "n1", "killed"))
    assert only(decided, d.Judge).verdict.kind is d.VerdictKind.NODE_LOST
    assert "n2" in names(decided, d.Launch)


def test_a_cancel_while_waiting_for_hosts_ends_the_job_at_once() -> None:
    story = Story(hosts=2)
    story.hear(story.up(0), story.refused(1, BUSY))
    assert only(story.hear(e.CancelRequested(0.0, 1)), d.EndJob).end is d.JobEnd.CANCELLED


def test_a_resume_on_fewer_nodes_keeps_the_first_places() -> None:
    story = _running(3)
    story.hear(e.CancelRequested(0.0, 1), story.stopped(0), story.stopped(1))
    story.hear(e.SupervisorStarted(0.0, 7), story.planned(1), e.ResumeRequested(0.0, 2))
    assert _places(story.hear(story.up(0), story.up(1))) == ["n0"]
