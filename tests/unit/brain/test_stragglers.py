"""Is a rank that holds up its peers named, and only one that does so for long?"""

from __future__ import annotations

from orchestrator.brain import stragglers
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.core.observations import GpuState
from orchestrator.core.wire import reports
from orchestrator.core.wire.reports import RankHeartbeat
from tests.support.brain_story import Story, only


def running() -> Story:
    story = Story(4, fence_s=None)
    story.run()
    return story


def report(story: Story, own_work_s: list[float], count: int) -> list[d.Decision]:
    """Let ten seconds pass, and every rank tell how long its own work takes."""
    story.now_s += 10.0
    said = []
    for rank, one in enumerate(own_work_s):
        beat = RankHeartbeat(rank, count, "S", 0, 0.0, own_work_s=one + count * 1e-9)
        said += story.hear(e.FromNode(0.0, f"n{rank}", reports.Heartbeat(1, (beat,))))
    return said


def test_lasting_straggler_is_reported_once_with_host() -> None:
    """A rank that is slow for long is reported once with factor and host."""
    story, said = running(), []
    for count in range(100, 800, 100):
        said += report(story, [0.1, 0.1, 0.18, 0.11], count)
    remark = only(said, d.Notice)
    assert (remark.topic, remark.key) == (d.NoticeTopic.SLOW, "2")
    assert remark.why == "slow: rank 2 on n2, 1.8 x its peers (180 ms a step) since step 100"
    assert [rank.rank for rank in stragglers.slow_ranks(story.brain.facts)] == [2]


def test_remarks_on_gpus_of_its_node_are_told_with_straggler() -> None:
    story, said = running(), []
    hot = GpuState("3", remarks=("lower clocks: it is too hot",))
    story.hear(e.FromNode(0.0, "n2", reports.GpusChanged(1, (hot,))))
    for count in range(100, 800, 100):
        said += report(story, [0.1, 0.1, 0.18, 0.11], count)
    assert only(said, d.Notice).why.endswith("since step 100; GPU 3: lower clocks: it is too hot")


def test_rank_slow_once_is_no_straggler() -> None:
    story, said = running(), []
    for count in range(100, 800, 100):
        said += report(story, [0.1, 0.1, 0.5 if count == 300 else 0.1, 0.1], count)
    assert not said
    assert not stragglers.slow_ranks(story.brain.facts)


def test_few_milliseconds_difference_is_chance() -> None:
    story, said = running(), []
    for count in range(100, 800, 100):
        said += report(story, [0.001, 0.001, 0.003, 0.001], count)
    assert not said


def test_recovered_rank_is_no_straggler() -> None:
    story = running()
    for count in range(100, 600, 100):
        report(story, [0.1, 0.1, 0.2, 0.1], count)
    assert stragglers.slow_ranks(story.brain.facts)
    report(story, [0.1, 0.1, 0.1, 0.1], 600)
    assert not stragglers.slow_ranks(story.brain.facts)


def test_large_job_samples_peers_from_everywhere() -> None:
    size = 3 * stragglers.PEERS_MAX
    works_s = [0.2 if rank < size // 3 else 0.1 for rank in range(size)]  # the first nodes are slow
    beats = [RankHeartbeat(rank, 1, "S", 0, 0.0, own_work_s=work_s) for rank, work_s in enumerate(works_s)]
    facts = Facts(ranks={one.rank: RankFacts(one.rank, "n", RankState.ALIVE, beat=one) for one in beats})
    for rank in (1, size - 2):
        stragglers.compare_work(facts, facts.ranks[rank], 1.0)
    assert facts.ranks[1].straggler is not None and facts.ranks[1].straggler.peers_s == 0.1
    assert facts.ranks[size - 2].straggler is None
