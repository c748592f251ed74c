"""Events in, decisions out: a job whose nodes a queue system provides; the rules of `brain/scheduling/allocation.py`."""

from __future__ import annotations

import pytest

from orchestrator.brain.diagnosis import suspects
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import JobGoal
from orchestrator.brain.scheduling import allocation
from orchestrator.core import observations
from orchestrator.core.plan_types import QueueTerms
from orchestrator.core.status_types import AllocationEndCause
from orchestrator.core.wire import orders
from orchestrator.journal.journal_file import JournalEntry
from orchestrator.supervisor import executor, status
from tests.support import jobs
from tests.support.brain_story import OWN, Story, given, names, none_of, only, planned_node

SIGTERM = 15


def _running(*, requeues: bool = True, restarts_max: int = 3) -> Story:
    """Return a job of two nodes that runs in allocation 7.0 on n0 and n1."""
    job = Story(hosts=2, queue=QueueTerms(requeues, 30.0), restarts_max=restarts_max)
    job.hear(*(job.up(node) for node in range(2)))
    job.run_on(0, 1)
    return job


def _ending(cause: AllocationEndCause, ends_at: float | None = None, where: str = "7.0") -> e.AllocationEnding:
    return e.AllocationEnding(0.0, where, cause, "says Slurm", ends_at)


def _over(cause: AllocationEndCause, request: int = 1) -> e.AllocationEnded:
    return e.AllocationEnded(0.0, request, "7.0", cause, "says squeue")


def _stop(job: Story, attempt: int = 1) -> list[d.Decision]:
    return job.hear(*(job.stopped(node, attempt) for node in (0, 1)))


@pytest.mark.parametrize("cause", [AllocationEndCause.PREEMPTED, AllocationEndCause.REQUEUED])
def test_preempted_gang_saves_and_requeues_at_no_cost(
    cause: AllocationEndCause,
) -> None:
    """A preempted gang saves a checkpoint and returns to the queue at no cost."""
    job = _running(restarts_max=0)
    decided = job.hear(_ending(cause))
    assert only(decided, d.Judge).verdict.kind is d.VerdictKind.PREEMPTED
    stops = given(decided, orders.Stop)
    assert [(node, stop.grace_s, stop.may_save) for node, stop in stops] == [
        ("n0", 30.0, True),
        ("n1", 30.0, True),
    ]
    back = only(_stop(job), d.Requeue)
    assert back.avoid == {} and "not counted" in back.why
    only(job.lent("7.1", 0, 1), d.BeginAttempt)
    assert job.brain.facts.restarts_spent == 0


def test_requeued_job_idles_until_next_allocation() -> None:
    """After a requeue the brain waits until there is another allocation."""
    job = _running()
    job.hear(_ending(AllocationEndCause.PREEMPTED))
    assert names(_stop(job), orders.Dismiss) == ["n0", "n1"]
    assert job.wait(5000.0) == []
    assert status.state(job.brain.facts) == "QUEUED"
    assert "waiting in the queue" in status.reason(job.brain.facts)
    assert names(job.lent("7.1", 0, 1), d.Launch) == ["n0", "n1"]
    assert status.state(job.brain.facts) == "RESTARTING"


def test_time_limit_requeues_only_if_user_wants() -> None:
    """The time limit leads back to the queue only where the user wants it."""
    for requeues in (True, False):
        job = _running(requeues=requeues)
        verdict = only(job.hear(_ending(AllocationEndCause.TIME_LIMIT, 60.0)), d.Judge).verdict
        assert (verdict.kind, verdict.retry) == (d.VerdictKind.TIME_LIMIT, requeues)
        decided = _stop(job)
        assert none_of(decided, d.Requeue) != requeues
        assert requeues or only(decided, d.EndJob).end is d.JobEnd.FAILED


def test_grace_ends_before_nodes_are_taken() -> None:
    """The grace period ends before the nodes are taken away."""
    job = _running()
    _, stop = given(job.hear(_ending(AllocationEndCause.TIME_LIMIT, 12.0)), orders.Stop)[0]
    assert stop.grace_s == 12.0 - allocation.REQUEUE_S
    assert none_of(job.wait(12.0 - allocation.REQUEUE_S - 0.1), d.Requeue)
    only(job.wait(0.2), d.Requeue)


def test_externally_requeued_job_uses_full_grace() -> None:
    """A job that was requeued by others has its grace period to the very end."""
    job = _running()
    _, stop = given(job.hear(_ending(AllocationEndCause.REQUEUED, 12.0)), orders.Stop)[0]
    assert stop.grace_s == 12.0


def test_rank_ended_by_term_waits_for_queue_cause() -> None:
    """A rank that TERM ended is not judged before the queue could give the cause."""
    job = _running()
    assert job.hear(job.exited(1, None, None, signal=SIGTERM)) == []
    assert only(job.hear(_ending(AllocationEndCause.PREEMPTED)), d.Judge).verdict.kind is d.VerdictKind.PREEMPTED
    job = _running()
    job.hear(job.exited(1, None, None, signal=SIGTERM))
    assert only(job.wait(allocation.TERM_S), d.Judge).verdict.kind is d.VerdictKind.CRASH


def test_crash_in_queue_is_judged_at_once() -> None:
    """A crash is judged at once on Slurm too."""
    job = _running()
    verdict = only(job.hear(job.exited(1, failure=OWN)), d.Judge).verdict
    assert (verdict.kind, verdict.ranks) == (d.VerdictKind.CRASH, (1,))


def test_too_few_usable_nodes_requeue_and_cost_budget() -> None:
    job = Story(hosts=2, queue=QueueTerms(True, 30.0), restarts_max=1)
    job.hear(job.up(0), job.refused(1, observations.Retryable.PERMANENT, "no python"))
    assert only(job.said, d.Requeue).avoid == {"n1": "stage: no python"}
    job.said.clear()
    job.lent("7.1", 0, 2)
    job.hear(job.up(0, boot="b"), job.refused(2, observations.Retryable.PERMANENT, "no python"))
    assert none_of(job.said, d.Requeue)
    assert "is spent" in only(job.said, d.EndJob).why


@pytest.mark.parametrize(("restarts_max", "is_requeued"), [(0, False), (1, True)])
def test_lost_node_without_spare_costs_one_restart(restarts_max: int, is_requeued: bool) -> None:
    """A lost node without a spare costs one restart, the requeue to other nodes included."""
    job = _running(restarts_max=restarts_max)
    job.hear(e.AgentDisconnected(0.0, "n1"), e.AgentDied(0.0, "n1", "srun: node failure"))
    assert only(job.wait(allocation.TERM_S + 1.0), d.Judge).verdict.node == "n1"
    job.hear(job.stopped(0))
    job.hear(job.refused(1, observations.Retryable.PERMANENT, "srun: not in this allocation"))
    job.wait(job.limits.node_timeout_s + 5.0)  # until its ranks must be gone
    assert none_of(job.said, d.Requeue) != is_requeued
    assert none_of(job.said, d.EndJob) == is_requeued


def test_agent_lost_before_ranks_is_relaunched_in_allocation() -> None:
    """An agent that was lost before it had ranks is launched again, and the allocation is kept."""
    job = Story(hosts=2, queue=QueueTerms(True, 30.0))
    job.hear(job.up(0), job.up(1))
    job.hear(e.AgentDisconnected(0.0, "n1"), e.AgentDied(0.0, "n1", "killed"))
    assert only(job.said, d.Judge).verdict.kind is d.VerdictKind.NODE_LOST
    assert none_of(job.said, d.Requeue) and names(job.said, d.Launch)[-1] == "n1"


def test_supervisor_lost_with_node_awaits_old_ranks() -> None:
    """A supervisor lost with the first node is a lost node, and the old ranks must have ended."""
    job = _running()
    job.now_s = 100.0
    decided = job.lent("7.1", 1, 2)
    verdict = only(decided, d.Judge).verdict
    assert (verdict.kind, verdict.node) == (d.VerdictKind.NODE_LOST, "n0")
    assert names(decided, d.Launch) == ["n1"], "n0 is not ours any more, and on n2 there was nothing"
    assert none_of(job.wait(19.0), d.BeginAttempt)
    only(job.wait(2.0), d.BeginAttempt)


def test_returning_old_agent_is_stopped_without_grace() -> None:
    """An old agent that comes back is stopped without the grace period of a complete gang."""
    job = _running()
    job.brain.learn(_ending(AllocationEndCause.PREEMPTED))
    job.now_s = 10.0
    assert only(job.lent("7.1", 1, 2), d.Judge).verdict.kind is d.VerdictKind.PREEMPTED
    ((node, stop),) = given(job.hear(job.up(0, running=1)), orders.Stop)
    assert (node, stop.may_save, stop.grace_s) == ("n0", False, job.limits.break_grace_s)
    job.hear(job.up(1, boot="b"))
    assert names(job.hear(job.stopped(0)), orders.Dismiss) == ["n0"]
    assert job.said[-1].attempt == 2


def test_cancel_in_queue_cancels_the_job() -> None:
    job = _running()
    assert "cancelled, not by orch" in only(job.hear(_ending(AllocationEndCause.CANCELLED)), d.Finish).why
    end = only(_stop(job), d.EndJob)
    assert (end.end, end.why) == (d.JobEnd.CANCELLED, "cancelled, not by orch: says Slurm")


def test_cancel_while_allocation_ends_is_a_cancel() -> None:
    job = _running()
    job.hear(_ending(AllocationEndCause.PREEMPTED))
    job.hear(e.CancelRequested(0.0, 1))
    assert only(_stop(job), d.EndJob).end is d.JobEnd.CANCELLED


@pytest.mark.parametrize(
    ("cause", "end", "kind"),
    [
        (AllocationEndCause.TIME_LIMIT, d.JobEnd.FAILED, d.VerdictKind.TIME_LIMIT),
        (AllocationEndCause.FAILED, d.JobEnd.FAILED, d.VerdictKind.NODE_LOST),
        (AllocationEndCause.NODE_LOST, d.JobEnd.FAILED, d.VerdictKind.NODE_LOST),
        (AllocationEndCause.CANCELLED, d.JobEnd.CANCELLED, None),
    ],
)
def test_final_queue_state_ends_the_job(cause: AllocationEndCause, end: d.JobEnd, kind: d.VerdictKind | None) -> None:
    job = _running()
    job.brain.learn(e.SupervisorStarted(job.now_s, 2))
    decided = job.hear(_over(cause))
    assert only(decided, d.EndJob).end is end
    assert kind is None or only(decided, d.Judge).verdict.kind is kind


def test_final_queue_state_is_stale_with_connected_agents() -> None:
    assert _running().hear(_over(AllocationEndCause.FAILED)) == []


def test_queue_state_of_replaced_allocation_is_ignored() -> None:
    """The queue state of an allocation that was replaced does not end the job."""
    job = _running()
    job.lent("7.1", 0, 1)
    assert none_of(job.hear(_over(AllocationEndCause.FAILED)), d.EndJob), "7.0 is over, and 7.1 has just begun"
    job.lent("9.0", 0, 1)
    assert none_of(job.hear(_over(AllocationEndCause.CANCELLED, 2)), d.EndJob)
    assert job.brain.facts.last_request == 2 and job.brain.facts.goal is JobGoal.RUN


@pytest.mark.parametrize("named", ["7.1", "7.2", "7"])
def test_queue_state_of_current_or_later_allocation_counts(named: str) -> None:
    """The queue's state of the current allocation, a later one or the whole job counts."""
    job = _running()
    job.lent("7.1", 0, 1)
    over = e.AllocationEnded(0.0, 1, named, AllocationEndCause.FAILED, "says squeue")
    assert only(job.hear(over), d.EndJob).end is d.JobEnd.FAILED


def test_job_that_never_began_ends_by_queue_state() -> None:
    for cause, end in (
        (AllocationEndCause.CANCELLED, d.JobEnd.CANCELLED),
        (AllocationEndCause.FAILED, d.JobEnd.FAILED),
    ):
        job = Story(hosts=2)
        job.brain.facts.attempt = None
        assert only(job.hear(_over(cause)), d.EndJob).end is end


def test_state_of_older_allocation_is_ignored() -> None:
    assert _running().hear(_ending(AllocationEndCause.PREEMPTED, where="6.0")) == []


def test_agents_of_ended_queue_job_are_not_awaited() -> None:
    job = _running()
    job.hear(_ending(AllocationEndCause.CANCELLED))
    _stop(job)
    assert executor.undismissed_hosts(job.brain.facts, job.now_s + 1.0) == ()


def test_post_mortem_shows_queue_time_of_restart() -> None:
    """The post-mortem shows how much of a restart was spent in the queue."""
    job = _running()
    job.now_s = 10.0
    told: list[e.Event | d.Decision] = [
        d.BeginAttempt(0.0, "submitted", 1, None),
        *job.hear(_ending(AllocationEndCause.PREEMPTED)),
    ]
    told += _stop(job)
    job.now_s = 310.0
    told += [e.AllocationBegan(310.0, "7.1")]
    attempts = jobs.record(
        JournalEntry(n, news.at, news.at, "m", "", 0, news) for n, news in enumerate([*_planned(), *told])
    ).attempts
    assert attempts[0].queued_s == 300.0


def test_stopped_rank_on_former_node_is_no_suspicion() -> None:
    """A stopped rank on a node that the next allocation lacks is no suspicion."""
    job = _running()
    job.hear(job.beat(1, 9, "T"))
    assert suspects.current_suspicion(job.brain.facts, job.now_s)
    there = (planned_node("n0"), planned_node("n2"))
    job.brain.learn(e.AllocationBegan(job.now_s, "7.1"))
    job.brain.learn(e.Planned(job.now_s, there, job.limits, job.pool(2)))
    assert suspects.current_suspicion(job.brain.facts, job.now_s) is None  # status is shown before anything is decided


def _planned() -> list[e.Event]:
    first = Story(hosts=2, queue=QueueTerms(True, 30.0))
    return [e.AllocationBegan(0.0, "7.0"), first.planned(2), first.up(0), first.up(1)]
