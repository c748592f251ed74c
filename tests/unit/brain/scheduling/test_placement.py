"""Events in, decisions out: which hosts of a pool an attempt uses; the rules of `brain/scheduling/placement.py`."""

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


def test_hosts_launch_in_user_order_with_spares() -> None:
    story = Story(hosts=5, spares=1)
    assert names(story.said, d.Launch) == ["n0", "n1", "n2"]


def test_ranks_are_placed_once_hosts_suffice() -> None:
    """Ranks are placed once enough hosts are up, in the user's order."""
    story = Story(hosts=4)
    assert none_of(story.hear(story.up(1)), d.Place)
    place = only(story.hear(story.up(0)), d.Place)
    assert place.nodes == (("n0", (0,)), ("n1", (1,)))


def test_slow_host_is_waited_for_then_skipped() -> None:
    story = Story(hosts=3, spares=1)
    assert none_of(story.hear(story.up(1), story.up(2)), d.Place)
    assert _places(story.wait(placement.HOST_START_S_MAX)) == ["n1", "n2"]


def test_another_host_is_launched_beside_slow_one() -> None:
    story = Story(hosts=3)
    story.hear(story.up(0))
    assert names(story.wait(placement.HOST_START_S_MAX), d.Launch) == ["n2"]
    assert _places(story.hear(story.up(2))) == ["n0", "n2"]


def test_refusing_host_is_skipped_and_never_relaunched() -> None:
    """A host that refuses is skipped and never launched again."""
    story = Story(hosts=3)
    assert names(story.hear(story.refused(0, LASTING, "wrong key")), d.Launch) == ["n2"]
    story.hear(story.up(1))
    assert _places(story.hear(story.up(2))) == ["n1", "n2"]
    assert "n0" not in names(story.wait(600.0), d.Launch)
    assert placement.unused_reason(story.brain.facts.nodes["n0"]) == Fault("n0", "stage: wrong key")


def test_resume_retries_host_that_refused() -> None:
    """A resume gives a host that refused another chance."""
    story = Story(hosts=2)
    story.hear(story.up(1), story.refused(0, LASTING))
    assert names(story.hear(e.ResumeRequested(0.0, 1)), d.Launch) == ["n0"]


def test_too_few_usable_hosts_end_job_naming_each() -> None:
    """Too few usable hosts end the job once all have answered, and each is named."""
    story = Story(hosts=3)
    story.hear(story.refused(0, LASTING, "old key"))
    assert none_of(story.hear(story.refused(1, LASTING, "no python")), d.Judge), "n2 has not answered"
    verdict = only(story.hear(story.refused(2, LASTING, "no space")), d.Judge).verdict
    assert verdict.kind is d.VerdictKind.LAUNCH and not verdict.retry
    assert verdict.evidence == ("n0: stage: old key", "n1: stage: no python", "n2: stage: no space")
    assert only(story.said, d.EndJob).end is d.JobEnd.FAILED


def test_silent_host_is_tried_three_times_beside_others() -> None:
    """A host that does not answer is tried three times, and others meanwhile."""
    story = Story(hosts=3)
    story.hear(story.up(1))
    assert names(story.hear(story.refused(0, PASSING)), d.Launch) == ["n2"]
    assert _places(story.hear(story.up(2))) == ["n1", "n2"]


def test_too_few_free_hosts_are_not_held() -> None:
    story = Story(hosts=2)
    story.hear(story.up(0))
    assert names(story.hear(story.refused(1, BUSY, "held by job-7")), orders.Dismiss) == ["n0"]
    assert placement.is_queued(story.brain.facts)


def test_job_queued_beyond_limit_ends_naming_holders() -> None:
    """A job that is queued for longer than its limit ends and names the holders of the hosts."""
    story = Story(hosts=2, queue_timeout_s=100.0)
    story.hear(e.QueueSeen(0.0, ("job-1",)))
    assert none_of(story.wait(99.0), d.Judge)
    verdict = only(story.wait(2.0), d.Judge).verdict
    assert (verdict.kind, verdict.retry) == (d.VerdictKind.START_TIMEOUT, False)
    assert verdict.summary.startswith("queued for 100 s")
    assert verdict.evidence == ("jobs ahead: job-1",)


def test_job_with_hosts_is_not_queued() -> None:
    """A job that has its hosts is not queued, whatever the limit."""
    story = Story(hosts=2, queue_timeout_s=10.0, hang_timeout_s=None)
    story.hear(story.up(0), story.up(1))
    assert none_of(story.wait(30.0), d.Judge)


def test_busy_hosts_are_tried_again_in_one_round() -> None:
    story = Story(hosts=3)
    story.hear(story.refused(0, BUSY), story.refused(1, BUSY))
    assert names(story.wait(placement.BUSY_PAUSE_S), d.Launch) == ["n0", "n1"]
    story.hear(story.up(0))
    assert names(story.hear(story.refused(1, BUSY)), d.Launch) == ["n2"], "n0 is kept: n2 may still be had"
    assert _places(story.hear(story.up(2))) == ["n0", "n2"]


def test_hosts_busy_long_ago_are_not_busy() -> None:
    story = Story(hosts=4)
    story.hear(*(story.refused(node, BUSY) for node in (0, 1)))
    story.hear(*(story.refused(node, BUSY) for node in (2, 3)))
    assert names(story.wait(placement.BUSY_PAUSE_S), d.Launch) == ["n0", "n1"]
    assert names(story.hear(story.refused(0, BUSY), story.refused(1, BUSY)), d.Launch) == ["n2", "n3"]
    assert _places(story.hear(story.up(2), story.up(3))) == ["n2", "n3"]


def test_waiting_job_asks_less_often() -> None:
    """The longer a job has waited, the more rarely it asks."""
    story = Story(hosts=2)
    story.now_s = 1000.0
    story.hear(story.refused(0, BUSY), story.refused(1, BUSY))
    assert none_of(story.wait(45.0), d.Launch)
    assert names(story.wait(6.0), d.Launch) == ["n0", "n1"]


def test_jobs_ahead_are_waited_for_without_launch() -> None:
    story = Story(hosts=2)
    story.hear(story.up(0), e.QueueSeen(0.0, ("job-1",)))
    assert names(story.said, orders.Dismiss) == ["n0"]
    story.hear(e.AgentDisconnected(0.0, "n0", left=True), story.up(1), e.AgentDisconnected(0.0, "n1", left=True))
    assert none_of(story.wait(500.0), d.Launch) and none_of(story.said, d.Judge)
    assert names(story.hear(e.QueueSeen(0.0, ())), d.Launch) == ["n0", "n1"]


def test_queue_time_counts_for_no_limit() -> None:
    """Waiting for others counts neither for the start nor for the time limit."""
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


def test_spare_replaces_node_and_other_rank_stays() -> None:
    """A spare takes over, and the other rank stays where it is."""
    decided = _lose(_running(4, spares=1), 0, 1)
    assert _places(decided) == ["n2", "n1"]


def test_lost_host_without_spare_launches_another() -> None:
    story = _running(3)
    decided = _lose(story, 1, 0)
    begun = decided.index(only(decided, d.BeginAttempt))
    assert names(decided[begun:], d.Launch)[-1] == "n2"
    assert _places(story.hear(story.up(2))) == ["n0", "n2"]


def test_lost_host_without_replacement_is_awaited_then_fails() -> None:
    """A lost host without a replacement is waited for, and then the job ends."""
    story = _running(2)
    decided = [*_lose(story, 1, 0), *story.wait(61.0)]
    verdict = [decision.verdict for decision in decided if isinstance(decision, d.Judge)][-1]
    assert (verdict.kind, verdict.node, verdict.retry) == (d.VerdictKind.NODE_LOST, "n1", False)
    assert "has not come back within 60 s" in only(story.said, d.EndJob).why


def test_lost_host_back_in_time_keeps_rank() -> None:
    """A lost host that comes back in time has its rank again."""
    story = _running(2)
    _lose(story, 1, 0)
    assert _places(story.hear(story.up(1, boot="b"))) == ["n0", "n1"]


def test_lost_spare_is_replaced_while_gang_runs() -> None:
    story = _running(4, spares=1)
    decided = story.hear(e.AgentDied(0.0, "n2", "killed"))
    assert names(decided, d.Launch) == ["n2"]
    assert names(story.hear(story.refused(2, PASSING)), d.Launch) == ["n3"]


def test_broken_connections_of_running_gang_launch_nothing() -> None:
    story = _running(6, spares=1)
    story.hear(*(e.AgentDisconnected(0.0, f"n{node}") for node in range(3)))
    assert none_of(story.wait(15.0), d.Launch)
    story.hear(e.SupervisorStarted(0.0, 7))
    assert none_of(story.wait(15.0), d.Launch)


def test_unneeded_host_is_released() -> None:
    """A host that is not needed any more is released."""
    story = _running(3)
    _lose(story, 1, 0)
    story.hear(story.up(2))
    story.hear(story.up(1, boot="b"))
    assert none_of(story.said, orders.Dismiss), "whoever is there may be needed until ranks run"
    story.run_on(0, 2, attempt=2)
    assert names(story.said, orders.Dismiss) == ["n1"]


def test_host_with_failing_setup_is_skipped_if_possible() -> None:
    story = Story(hosts=3)
    story.hear(story.up(0), story.up(1))
    decided = story.hear(e.FromNode(0.0, "n1", reports.PrepareFailed(1, "setup line 1 exited with code 1", "")))
    assert (names(decided, orders.Dismiss), names(decided, d.Launch)) == (["n1"], ["n2"])
    assert _places(story.hear(story.up(2))) == ["n0", "n2"]
    assert "setup line 1" in str(placement.unused_reason(story.brain.facts.nodes["n1"]))


def test_third_failed_launch_is_forgotten_next_attempt() -> None:
    """A launch that failed three times is forgotten in the next attempt."""
    story = Story(hosts=3, spares=1)
    story.hear(story.up(1), story.up(2))
    for _ in range(3):
        story.hear(story.refused(0, PASSING))
        story.wait(2.0)
    story.run_on(1, 2)
    assert "n0" in names(_lose(story, 1, 2), d.Launch)


def test_dismissed_host_is_unused_until_up_again() -> None:
    story = Story(hosts=2)
    story.hear(story.up(0), story.refused(1, BUSY))
    story.wait(placement.BUSY_PAUSE_S)
    assert none_of(story.hear(story.up(1)), d.Place), "the agent on n0 is about to leave"


def test_placed_host_gone_before_start_is_lost() -> None:
    story = Story(hosts=3)
    story.hear(story.up(0), story.up(1))
    decided = story.hear(e.AgentDied(0.0, "n1", "killed"))
    assert only(decided, d.Judge).verdict.kind is d.VerdictKind.NODE_LOST
    assert "n2" in names(decided, d.Launch)


def test_cancel_while_waiting_for_hosts_ends_job() -> None:
    story = Story(hosts=2)
    story.hear(story.up(0), story.refused(1, BUSY))
    assert only(story.hear(e.CancelRequested(0.0, 1)), d.EndJob).end is d.JobEnd.CANCELLED


def test_resume_on_fewer_nodes_keeps_first_places() -> None:
    story = _running(3)
    story.hear(e.CancelRequested(0.0, 1), story.stopped(0), story.stopped(1))
    story.hear(e.SupervisorStarted(0.0, 7), story.planned(1), e.ResumeRequested(0.0, 2))
    assert _places(story.hear(story.up(0), story.up(1))) == ["n0"]
