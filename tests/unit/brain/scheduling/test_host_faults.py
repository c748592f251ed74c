"""Events in, decisions out: what a sick GPU changes when ranks crash or hang on its host; the rules of `host_faults`."""

from __future__ import annotations

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.scheduling import allocation
from orchestrator.core import observations
from orchestrator.core.observations import GpuState
from orchestrator.core.plan_types import QueueTerms
from orchestrator.core.wire import orders, reports
from tests.support.brain_story import Story, look, names, none_of, only

SICK = GpuState("3", "wants a reset", "14:02:11 UTC")
HOT = GpuState("3", remarks=("lower clocks: it is too hot",))
CITED = "n1: its GPU 3 wants a reset since 14:02:11 UTC; fix: see nvidia-smi -q there; reset the GPU or reboot the host"


def gpus(node: int, *states: GpuState, attempt: int = 1) -> e.FromNode:
    return e.FromNode(0.0, f"n{node}", reports.GpusChanged(attempt, states))


def _running(hosts: int = 3, spares: int = 1, restarts_max: int = 3) -> Story:
    story = Story(hosts=hosts, spares=spares, restarts_max=restarts_max)
    story.hear(*(story.up(node) for node in range(2 + spares)))
    story.run_on(0, 1)
    return story


def _crash(story: Story, rank: int = 1, attempt: int = 1) -> d.Verdict:
    return only(story.hear(story.exited(rank, attempt=attempt)), d.Judge).verdict


def _stop(story: Story, attempt: int = 1) -> list[d.Decision]:
    return [*story.hear(story.stopped(0, attempt), story.stopped(1, attempt)), *story.wait(20.0)]


def _places(decisions: list[d.Decision]) -> list[str]:
    return [name for name, _ in only(decisions, d.Place).nodes]


def test_sick_gpu_alone_ends_nothing() -> None:
    story = _running()
    assert story.hear(gpus(1, SICK)) == []
    assert none_of(story.wait(15.0), d.Judge)


def test_crash_on_host_with_sick_gpu_leaves_host_and_costs_nothing() -> None:
    story = _running()
    story.hear(gpus(1, SICK))
    verdict = _crash(story)
    assert (verdict.kind, verdict.node, verdict.evidence[0]) == (d.VerdictKind.CRASH, "n1", CITED)
    decided = _stop(story)
    assert _places(decided) == ["n0", "n2"]
    begun = only(decided, d.BeginAttempt)
    assert "not counted in restart.max; n1 is not used again: its GPU 3 wants a reset since" in begun.why
    assert begun.at == story.brain.facts.past_attempts[-1].attempt.judged_at, "without a pause"
    assert story.brain.facts.restarts_spent == 0
    story.run_on(0, 2, attempt=2)
    assert names(story.said, orders.Dismiss) == ["n1"]


def test_gpu_seen_to_be_sick_after_verdict_counts_as_well() -> None:
    story = _running()
    verdict = _crash(story)
    assert not verdict.host_fault
    story.hear(gpus(1, SICK))
    attempt = story.brain.facts.attempt
    assert attempt is not None and attempt.verdict is not None and attempt.verdict.evidence[0] == CITED
    assert _places(_stop(story)) == ["n0", "n2"]
    assert story.brain.facts.restarts_spent == 0


def test_gpu_seen_to_be_sick_in_next_attempt_changes_nothing_there() -> None:
    story = _running()
    _crash(story)
    assert _places(_stop(story)) == ["n0", "n1"]
    assert none_of(story.hear(gpus(1, SICK)), d.Place)
    assert story.brain.facts.restarts_spent == 1


def test_innocent_hosts_are_used_again() -> None:
    """Another host has the sick GPU; or the GPU has remarks only; or it is healthy again; or its agent is a new one."""
    for news in (
        [gpus(0, SICK)],
        [gpus(1, HOT)],
        [gpus(1, SICK), gpus(1)],
    ):
        story = _running()
        for one in news:
            story.hear(one)
        assert not _crash(story).host_fault
        assert _places(_stop(story)) == ["n0", "n1"]
        assert story.brain.facts.restarts_spent == 1


def test_new_agent_has_said_nothing_of_gpus() -> None:
    story = _running()
    story.hear(gpus(1, SICK))
    story.hear(story.up(1, running=1, ready=1))
    assert list(story.brain.facts.nodes["n1"].gpus) == [SICK], "the same agent is back"
    story.hear(story.up(1, boot="b"))
    assert list(story.brain.facts.nodes["n1"].gpus) == []


def test_without_another_host_all_is_as_after_any_crash() -> None:
    story = _running(hosts=2, spares=0)
    story.hear(gpus(1, SICK))
    assert _crash(story).evidence[0] == CITED
    decided = _stop(story)
    assert _places(decided) == ["n0", "n1"] and story.brain.facts.restarts_spent == 1
    assert "is not used again" not in only(decided, d.BeginAttempt).why


def test_without_pool_all_is_as_after_any_crash() -> None:
    story = Story()
    story.run()
    story.hear(gpus(1, SICK))
    assert _crash(story).evidence[0] == CITED
    assert "restart 1 of 3" in only([*story.stop_all(), *story.wait(20.0)], d.BeginAttempt).why


def test_busy_host_is_no_substitute() -> None:
    story = Story(hosts=3)
    story.hear(story.refused(0, observations.Retryable.BUSY, "job-7"), story.up(1), story.up(2))
    story.run_on(1, 2)
    story.hear(gpus(1, SICK))
    only(story.hear(e.FromNode(0.0, "n1", reports.Exited(1, 0, None, 11, 0, None, False, False))), d.Judge)
    decided = [*story.hear(story.stopped(1), story.stopped(2)), *story.wait(20.0)]
    assert _places(decided) == ["n1", "n2"]


def test_host_is_used_again_if_no_other_can_be_had() -> None:
    for trouble in (observations.Retryable.BUSY, observations.Retryable.PERMANENT):
        story = _running(spares=0)
        story.hear(gpus(1, SICK))
        _crash(story)
        decided = _stop(story)
        assert names(decided, d.Launch) == ["n2"] and none_of(decided, d.Place)
        assert none_of(decided, orders.Dismiss), "it is kept until another host is there"
        assert _places(story.hear(story.refused(2, trouble))) == ["n0", "n1"]
        story.run_on(0, 1, attempt=2)
        only(story.hear(story.exited(1, code=None, signal=9, failure=None, attempt=2)), d.Judge)
        _stop(story, 2)
        assert story.brain.facts.restarts_spent == 1, "the next crash there counts"


def test_crash_that_no_restart_can_fix_ends_job() -> None:
    syntax = observations.Failure("SyntaxError", "invalid syntax", "", None)
    story = _running()
    story.hear(gpus(1, SICK))
    only(story.hear(story.exited(1, failure=syntax)), d.Judge)
    assert only(_stop(story), d.EndJob).end is d.JobEnd.FAILED


def test_restart_max_0_restarts_no_job() -> None:
    story = _running(restarts_max=0)
    story.hear(gpus(1, SICK))
    _crash(story)
    assert only(_stop(story), d.EndJob).end is d.JobEnd.FAILED


def test_same_failure_again_is_judged_on_another_host() -> None:
    """The same failure at the same place: on a host with a sick GPU it says nothing of the script, on another host it does."""
    story = _running(hosts=4)
    _crash(story, rank=1)
    _stop(story)
    story.run_on(0, 1, attempt=2)
    story.hear(gpus(1, SICK, attempt=2))
    assert _crash(story, attempt=2).kind is d.VerdictKind.CRASH
    decided = _stop(story, 2)
    assert _places(decided) == ["n0", "n2"]
    story.run_on(0, 2, attempt=3)
    third = e.FromNode(0.0, "n2", reports.Exited(3, 1, 1, None, 0, story.exited(1).report.failure, False, False))  # type: ignore[union-attr]
    assert only(story.hear(third), d.Judge).verdict.kind is d.VerdictKind.NO_PROGRESS


def test_hang_on_host_with_sick_gpu_is_its_fault() -> None:
    story = _running()
    story.hear(gpus(1, SICK), *(story.beat(node, 5) for node in (0, 1)))
    said: list[d.Decision] = []
    for _ in range(10):
        story.now_s += 2.0
        said += story.hear(story.beat(0, 5), story.beat(1, 5, "T"))
        said += story.hear(*story.looked(*_looks()))
    verdict = only(said, d.Judge).verdict
    assert (verdict.kind, verdict.node, verdict.evidence[0]) == (d.VerdictKind.HANG, "n1", CITED)
    assert _places(_stop(story)) == ["n0", "n2"]


def _looks() -> tuple[observations.RankInspection, ...]:
    return look(0, observations.Activity.WAITING_FOR_RANKS), look(1, observations.Activity.STOPPED)


def test_spare_of_allocation_takes_over_and_requeue_avoids_node() -> None:
    story = Story(hosts=3, spares=1, queue=QueueTerms(True, 60.0))
    story.hear(*(story.up(node) for node in range(3)))
    story.run_on(0, 1)
    story.hear(gpus(1, SICK))
    _crash(story)
    story.wait(5.0)
    assert _places(_stop(story)) == ["n0", "n2"]
    avoided = allocation.nodes_to_avoid(story.brain.facts)
    assert list(avoided) == ["n1"] and "its GPU 3 wants a reset" in avoided["n1"]


def test_allocation_without_spare_keeps_node() -> None:
    story = Story(hosts=2, queue=QueueTerms(True, 60.0))
    story.hear(story.up(0), story.up(1))
    story.run_on(0, 1)
    story.hear(gpus(1, SICK))
    _crash(story)
    story.wait(5.0)
    assert _places(_stop(story)) == ["n0", "n1"] and story.brain.facts.restarts_spent == 1
