"""Events in, verdicts out: the rules of `brain/diagnose.py`."""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import observations
from orchestrator.core.wire import reports
from orchestrator.core.wire.reports import RankHeartbeat
from tests.support.brain_story import VICTIM, Story, none_of, only
from tests.support.frames import frame


def _running(nodes: int = 2, **limits: object) -> Story:
    story = Story(nodes, **limits)  # type: ignore[arg-type]
    story.run()
    return story


def test_a_culprit_is_judged_at_once_and_named_with_its_place() -> None:
    verdict = only(_running().hear(Story().exited(1, count=7)), d.Judge).verdict
    assert (verdict.kind, verdict.ranks, verdict.node, verdict.step) == (d.VerdictKind.CRASH, (1,), "n1", 7)
    assert "ValueError: loss is nan at train.py:42" in verdict.summary


def test_a_victim_waits_a_moment_for_its_culprit() -> None:
    story = _running()
    assert not story.hear(story.exited(0, failure=VICTIM))
    verdict = only(story.hear(story.exited(1)), d.Judge).verdict
    assert verdict.ranks == (1,) and "after it ended badly: rank 0 at train.py:50" in verdict.evidence


def test_a_rank_that_a_mismatch_has_aborted_is_named_with_its_peer_and_both_places() -> None:
    story = _running()
    aborted = observations.Failure(
        "", "op.preamble.length <= op.nbytes. 8 vs 4", "stacks", frame("train.py:7 reduce")
    )
    assert not story.hear(story.exited(0, None, failure=aborted, signal=6))
    assert none_of(story.wait(2.0), d.Judge)
    peer = story.exited(1, failure=dataclasses.replace(VICTIM, where=frame("train.py:9 gather")))
    verdict = only(story.hear(peer), d.Judge).verdict
    assert verdict.summary == "rank 0 on n0: was killed by SIGABRT (6) at train.py:7 reduce"
    assert "after it ended badly: rank 1 at train.py:9 gather" in verdict.evidence


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("requests.exceptions.ConnectionError", "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"),
        ("redis.exceptions.TimeoutError", "Timed out waiting for a connection"),
        ("RuntimeError", "DataLoader timed out after 120 seconds"),
        ("RuntimeError", "Timed out waiting for file lock /data/.lock"),
        ("TimeoutError", "timed out after 30s waiting for lock /data/.lock"),
        ("RuntimeError", "peer access is not supported between these two devices"),
    ],
)  # fmt: skip
def test_a_rank_whose_own_connection_or_wait_has_failed_is_the_culprit_also_when_its_victim_is_heard_first(
    type: str, message: str
) -> None:
    story = _running()
    story.hear(story.exited(0, failure=VICTIM))
    own = observations.Failure(type, message, "Traceback", frame("data.py:7"))
    assert only(story.hear(story.exited(1, failure=own)), d.Judge).verdict.ranks == (1,)


def test_where_all_look_like_victims_the_culprit_is_the_one_whose_exception_is_not_of_the_gang() -> None:
    gloo = dataclasses.replace(VICTIM, message="[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    store = dataclasses.replace(gloo, message="DataLoader: [c10d] wait timeout after 300000ms, keys: rank_3")
    own = observations.Failure("ConnectionRefusedError", "[Errno 111] Connection refused", "Traceback", None)
    story = Story(3)
    story.run()
    story.hear(story.exited(0, failure=gloo), story.exited(2, failure=store), story.exited(1, failure=own))
    assert only(story.wait(20.0), d.Judge).verdict.ranks == (1,)


def test_a_victim_without_a_culprit_is_judged_after_the_moment() -> None:
    story = _running()
    story.hear(story.exited(0, failure=VICTIM), story.beat(1, 0))
    assert only(story.wait(2.0), d.Judge).verdict.ranks == (0,)


def test_victims_of_a_node_that_fell_silent_wait_for_it_and_name_it() -> None:
    story = _running()
    story.now_s = 5.0
    assert not story.hear(story.exited(0, failure=VICTIM))
    verdict = only(story.wait(25.0), d.Judge).verdict
    assert (verdict.kind, verdict.node) == (d.VerdictKind.NODE_LOST, "n1")


@pytest.mark.parametrize(
    ("oom", "kind", "said"),
    [
        (True, d.VerdictKind.OOM, "out of memory (OOM kill"),
        (False, d.VerdictKind.CRASH, "not out of memory (no OOM kill"),
    ],
)
def test_sigkill_beside_the_oom_killer_is_oom(oom: bool, kind: d.VerdictKind, said: str) -> None:
    story = _running()
    verdict = only(story.hear(story.exited(0, None, None, signal=9, oom=oom)), d.Judge).verdict
    assert verdict.kind is kind
    assert verdict.evidence[-1] == f"{said} on n0 during this attempt)"


@pytest.mark.parametrize(("where", "is_again"), [("train.py:3 step", True), ("", False)])
def test_a_fault_at_the_same_line_before_any_step_is_the_same_failure(where: str, is_again: bool) -> None:
    story = Story(1)
    failure = observations.Failure("", "", "a stack", frame(where)) if where else None
    for attempt in (1, 2):
        story.run(attempt)
        told = story.hear(story.exited(0, None, failure, signal=11, attempt=attempt))
        kind = only(told, d.Judge).verdict.kind
        story.stop_all(attempt)
        story.wait(5.0)
    assert kind is (d.VerdictKind.NO_PROGRESS if is_again else d.VerdictKind.CRASH)


def test_a_syntax_error_before_the_first_step_is_not_tried_again() -> None:
    story = _running()
    story.hear(
        story.exited(
            0, failure=observations.Failure("SyntaxError", "invalid syntax", "", frame("train.py:3"))
        )
    )
    assert only(story.stop_all(), d.EndJob).end is d.JobEnd.FAILED


def test_an_exit_code_without_an_exception_comes_with_the_last_words_of_the_log() -> None:
    story = _running()
    said = observations.Failure("", "train.py: error: unrecognized arguments: --stepz 4", "", None)
    verdict = only(story.hear(story.exited(0, 2, failure=said)), d.Judge).verdict
    assert verdict.summary == "rank 0 on n0: exited with code 2"
    assert verdict.evidence[-1] == f"its log ends with: {said.message}"


def test_a_taken_port_before_the_first_step_is_a_rendezvous_failure() -> None:
    story = _running()
    failure = observations.Failure(
        "DistNetworkError", "The server socket has failed to listen: EADDRINUSE", "", None
    )
    assert (
        only(story.hear(story.exited(0, failure=failure)), d.Judge).verdict.kind is d.VerdictKind.RENDEZVOUS
    )


def test_the_rank_that_could_not_use_its_address_is_named_whoever_gave_up_first() -> None:
    """As torch 2.13 says it when the host of one of three ranks does not resolve."""
    waited = "wait timeout after 8000ms, keys: /default_pg/0//cpu//0/0"
    few = "Timed out after 9 seconds waiting for clients. 2/3 clients joined."
    unresolved = "The client socket has timed out after 8000ms while trying to connect to (n7.lan, 29500)."
    said = {
        2: observations.Failure("torch.distributed.DistStoreError", waited, "", frame("train.py:5")),
        0: observations.Failure("torch.distributed.DistStoreError", few, "", frame("train.py:5")),
        1: observations.Failure("torch.distributed.DistNetworkError", unresolved, "", frame("train.py:5")),
    }
    story = _running(3)
    for rank, failure in said.items():
        assert none_of(story.wait(0.6), d.Judge)
        story.hear(story.exited(rank, failure=failure))
    verdict = only(story.said, d.Judge).verdict
    assert (verdict.kind, verdict.ranks) == (d.VerdictKind.RENDEZVOUS, (1,))
    assert any("the store at n7.lan, port 29500" in line for line in verdict.evidence)


def test_ranks_that_fence_themselves_are_not_a_success() -> None:
    story = _running(1)
    story.hear(story.exited(0, None, None, signal=9, ordered=True))
    judge = only(story.hear(story.stopped(0, how="fenced")), d.Judge)
    assert judge.verdict.kind is d.VerdictKind.NODE_LOST


def test_a_rank_that_leaves_with_code_0_while_being_stopped_has_not_done_its_work() -> None:
    story = _running(1)
    assert none_of(story.hear(story.exited(0, 0, None, ordered=True)), d.Finish)


def test_ranks_stopped_without_an_order_are_judged() -> None:
    story = _running()
    assert only(story.hear(story.stopped(0)), d.Judge).verdict.kind is d.VerdictKind.NODE_LOST


def test_a_silent_node_is_no_matter_while_the_gang_makes_steps() -> None:
    story = _running()
    story.hear(e.AgentDisconnected(0.0, "n1"))
    for count in range(1, 20):
        story.now_s += 5.0
        assert none_of(story.hear(story.beat(0, count)), d.Judge)


def test_log_lines_do_not_speak_for_a_silent_node() -> None:
    story = _running()
    story.hear(e.AgentDisconnected(0.0, "n1"))
    decided: list[d.Decision] = []
    for count in range(1, 6):
        story.now_s += 5.0
        decided += story.hear(
            e.FromNode(0.0, "n0", reports.Heartbeat(1, (RankHeartbeat(0, 0, "S", count * 10, 0.0),)))
        )
    assert only(decided, d.Judge).verdict.node == "n1"


def test_a_node_whose_ranks_are_done_may_fall_silent() -> None:
    story = _running()
    story.hear(story.exited(1, 0, None), e.AgentDisconnected(0.0, "n1"), story.beat(0, 3))
    story.now_s += 25.0
    assert none_of(story.hear(story.beat(0, 3)), d.Judge)


def test_a_new_supervisor_counts_no_silence_from_before() -> None:
    story = _running()
    story.now_s += 500.0
    story.hear(e.SupervisorStarted(0.0, 7))
    assert not story.wait(19.0)
    assert only(story.wait(2.0), d.Judge).verdict.kind is d.VerdictKind.NODE_LOST


def test_a_new_agent_says_that_the_ranks_of_the_old_one_are_dead() -> None:
    story = _running()
    assert only(story.hear(story.up(1, boot="b")), d.Judge).verdict.node == "n1"


def test_a_host_that_was_up_before_may_take_its_time_to_reboot() -> None:
    story = _running()
    story.hear(e.AgentDied(0.0, "n1", "killed"), story.stopped(0))
    for _ in range(6):
        story.hear(e.LaunchFailed(0.0, "n1", "connect", "no route to host", observations.Retryable.TRANSIENT))
        story.wait(30.0)
    assert story.brain.facts.end is None and len([x for x in story.said if isinstance(x, d.Launch)]) >= 4


def test_an_agent_that_never_started_ends_the_job() -> None:
    story = Story(1)
    for _ in range(3):
        story.hear(e.LaunchFailed(0.0, "n0", "start", "no python3 there", observations.Retryable.TRANSIENT))
        story.wait(5.0)
    assert only(story.said, d.EndJob).end is d.JobEnd.FAILED


def test_the_rank_that_ended_early_stands_before_the_one_that_lost_it() -> None:
    story = _running()
    story.hear(story.exited(1, code=0))
    story.hear(story.exited(0, failure=VICTIM))
    verdict = only(story.wait(2.0), d.Judge).verdict
    assert verdict.summary.startswith(
        "rank 1 ended with code 0 before the others were done: rank 0 on n0: RuntimeError"
    )
    assert (verdict.ranks, verdict.node) == ((1,), "n1")


def test_the_last_of_a_gang_whose_others_are_done_is_named_itself() -> None:
    story = Story(4)
    story.run()
    story.hear(*(story.exited(rank, code=0) for rank in (0, 1, 2)))
    story.hear(story.exited(3, failure=VICTIM))
    verdict = only(story.wait(2.0), d.Judge).verdict
    assert (verdict.ranks, verdict.node) == ((3,), "n3")
    assert verdict.summary.startswith("ranks 0-2 ended with code 0 before the others were done: rank 3 on n3")


def test_a_start_that_takes_too_long_is_told_of_the_node_that_is_not_ready() -> None:
    story = Story(3)
    story.hear(story.up(0), story.up(1), story.up(2), story.prepared(0), story.prepared(2))
    verdict = only(story.wait(61.0), d.Judge).verdict
    assert verdict.kind is d.VerdictKind.START_TIMEOUT
    assert verdict.summary == "not all ranks were started within 60 s; n1: its setup has not ended"
    ready = tuple(f"n{node}: its ranks were not started" for node in (0, 2))
    assert verdict.evidence == ("n1: its setup has not ended", *ready)
