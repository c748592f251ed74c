"""Events in, verdicts out: the rules of `brain/diagnosis/diagnose.py`."""

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


def test_culprit_is_judged_at_once_with_location() -> None:
    verdict = only(_running().hear(Story().exited(1, count=7)), d.Judge).verdict
    assert (verdict.kind, verdict.ranks, verdict.node, verdict.step) == (d.VerdictKind.CRASH, (1,), "n1", 7)
    assert "ValueError: loss is nan at train.py:42" in verdict.summary


def test_victim_waits_briefly_for_culprit() -> None:
    story = _running()
    assert not story.hear(story.exited(0, failure=VICTIM))
    verdict = only(story.hear(story.exited(1)), d.Judge).verdict
    assert verdict.ranks == (1,) and "after it ended badly: rank 0 at train.py:50" in verdict.evidence


def test_rank_aborted_by_mismatch_is_named_with_peer() -> None:
    """A rank that a mismatch has aborted is named with its peer and both locations."""
    story = _running()
    aborted = observations.Failure("", "op.preamble.length <= op.nbytes. 8 vs 4", "stacks", frame("train.py:7 reduce"))
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
def test_rank_with_failed_connection_is_culprit_despite_order(type: str, message: str) -> None:
    """A rank whose own connection or wait failed is the culprit, even if its victim is heard first."""
    story = _running()
    story.hear(story.exited(0, failure=VICTIM))
    own = observations.Failure(type, message, "Traceback", frame("data.py:7"))
    assert only(story.hear(story.exited(1, failure=own)), d.Judge).verdict.ranks == (1,)


def test_non_gang_exception_is_culprit_among_apparent_victims() -> None:
    """Where all look like victims, the culprit is the rank whose exception is not of the gang."""
    gloo = dataclasses.replace(VICTIM, message="[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    store = dataclasses.replace(gloo, message="DataLoader: [c10d] wait timeout after 300000ms, keys: rank_3")
    own = observations.Failure("ConnectionRefusedError", "[Errno 111] Connection refused", "Traceback", None)
    story = Story(3)
    story.run()
    story.hear(story.exited(0, failure=gloo), story.exited(2, failure=store), story.exited(1, failure=own))
    assert only(story.wait(20.0), d.Judge).verdict.ranks == (1,)


def test_victim_without_culprit_is_judged_after_delay() -> None:
    story = _running()
    story.hear(story.exited(0, failure=VICTIM), story.beat(1, 0))
    assert only(story.wait(2.0), d.Judge).verdict.ranks == (0,)


def test_victims_of_silent_node_wait_and_name_it() -> None:
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


def test_others_on_a_full_gpu_are_named_before_the_traceback() -> None:
    story = Story(2)
    story.run()
    full = observations.Failure("torch.OutOfMemoryError", "CUDA out of memory.", "Traceback ...", None)
    user = "GPU 1 was used by pid 4711 (python3, user alice, 61,440 MiB)"
    exited = reports.Exited(1, 1, 1, None, 0, full, False, False, gpu_users=(user,))
    judge = only(story.hear(e.FromNode(0.0, "n1", exited)), d.Judge)
    texts = [evidence.text for evidence in judge.verdict.proof]
    assert judge.verdict.kind is d.VerdictKind.OOM and texts.index(user) < texts.index("Traceback ...")


def test_full_memory_for_checkpoints_is_named_with_its_field() -> None:
    """A rank whose checkpoint had no room in memory is told so, with the field, before its traceback."""
    story = Story(2)
    story.run()
    full = observations.Failure("OSError", "[Errno 28] No space left on device", "Traceback ...", frame("train.py:9"))
    exited = reports.Exited(1, 1, 1, None, 0, full, False, False, memory_full="64.0 of 64.0 GB used")
    verdict = only(story.hear(e.FromNode(0.0, "n1", exited)), d.Judge).verdict
    said = "rank 1: no room for its checkpoint in memory (checkpoint.memory, 64.0 of 64.0 GB used): the next attempt writes to disk"
    texts = [evidence.text for evidence in verdict.proof]
    assert verdict.kind is d.VerdictKind.CRASH and verdict.retry
    assert texts.index(said) < texts.index("Traceback ...")


@pytest.mark.parametrize(("where", "is_again"), [("train.py:3 step", True), ("", False)])
def test_same_line_without_steps_is_same_failure(where: str, is_again: bool) -> None:
    story = Story(1)
    failure = observations.Failure("", "", "a stack", frame(where)) if where else None
    for attempt in (1, 2):
        story.run(attempt)
        told = story.hear(story.exited(0, None, failure, signal=11, attempt=attempt))
        kind = only(told, d.Judge).verdict.kind
        story.stop_all(attempt)
        story.wait(5.0)
    assert kind is (d.VerdictKind.NO_PROGRESS if is_again else d.VerdictKind.CRASH)


def test_syntax_error_before_first_step_is_not_retried() -> None:
    """A syntax error before the first step is not tried again."""
    story = _running()
    story.hear(story.exited(0, failure=observations.Failure("SyntaxError", "invalid syntax", "", frame("train.py:3"))))
    assert only(story.stop_all(), d.EndJob).end is d.JobEnd.FAILED


def test_exit_code_without_exception_has_last_log_lines() -> None:
    story = _running()
    said = observations.Failure("", "train.py: error: unrecognized arguments: --stepz 4", "", None)
    verdict = only(story.hear(story.exited(0, 2, failure=said)), d.Judge).verdict
    assert verdict.summary == "rank 0 on n0: exited with code 2"
    assert verdict.evidence[-1] == f"its log ends with: {said.message}"


def test_taken_port_before_first_step_is_rendezvous_failure() -> None:
    story = _running()
    failure = observations.Failure("DistNetworkError", "The server socket has failed to listen: EADDRINUSE", "", None)
    assert only(story.hear(story.exited(0, failure=failure)), d.Judge).verdict.kind is d.VerdictKind.RENDEZVOUS


def test_rank_with_unusable_address_is_always_named() -> None:
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


def test_self_fenced_ranks_are_no_success() -> None:
    """Ranks that fence themselves are not a success."""
    story = _running(1)
    story.hear(story.exited(0, None, None, signal=9, ordered=True))
    judge = only(story.hear(story.stopped(0, how="fenced")), d.Judge)
    assert judge.verdict.kind is d.VerdictKind.NODE_LOST


def test_rank_exiting_0_while_stopped_is_not_done() -> None:
    """A rank that exits with code 0 while it is stopped has not finished its work."""
    story = _running(1)
    assert none_of(story.hear(story.exited(0, 0, None, ordered=True)), d.Finish)


def test_ranks_stopped_without_order_are_judged() -> None:
    story = _running()
    assert only(story.hear(story.stopped(0)), d.Judge).verdict.kind is d.VerdictKind.NODE_LOST


def test_silent_node_is_tolerated_while_gang_steps() -> None:
    story = _running()
    story.hear(e.AgentDisconnected(0.0, "n1"))
    for count in range(1, 20):
        story.now_s += 5.0
        assert none_of(story.hear(story.beat(0, count)), d.Judge)


def test_log_lines_do_not_prove_silent_node_alive() -> None:
    story = _running()
    story.hear(e.AgentDisconnected(0.0, "n1"))
    decided: list[d.Decision] = []
    for count in range(1, 6):
        story.now_s += 5.0
        decided += story.hear(e.FromNode(0.0, "n0", reports.Heartbeat(1, (RankHeartbeat(0, 0, "S", count * 10, 0.0),))))
    assert only(decided, d.Judge).verdict.node == "n1"


def test_node_with_finished_ranks_may_be_silent() -> None:
    story = _running()
    story.hear(story.exited(1, 0, None), e.AgentDisconnected(0.0, "n1"), story.beat(0, 3))
    story.now_s += 25.0
    assert none_of(story.hear(story.beat(0, 3)), d.Judge)


def test_new_supervisor_ignores_earlier_silence() -> None:
    """A new supervisor counts no silence from before its start."""
    story = _running()
    story.now_s += 500.0
    story.hear(e.SupervisorStarted(0.0, 7))
    assert not story.wait(19.0)
    assert only(story.wait(2.0), d.Judge).verdict.kind is d.VerdictKind.NODE_LOST


def test_new_agent_means_old_ranks_are_dead() -> None:
    story = _running()
    assert only(story.hear(story.up(1, boot="b")), d.Judge).verdict.node == "n1"


def test_known_host_gets_time_to_reboot() -> None:
    story = _running()
    story.hear(e.AgentDied(0.0, "n1", "killed"), story.stopped(0))
    for _ in range(6):
        story.hear(e.LaunchFailed(0.0, "n1", "connect", "no route to host", observations.Retryable.TRANSIENT))
        story.wait(30.0)
    assert story.brain.facts.end is None and len([x for x in story.said if isinstance(x, d.Launch)]) >= 4


def test_agent_that_never_started_ends_the_job() -> None:
    story = Story(1)
    for _ in range(3):
        story.hear(e.LaunchFailed(0.0, "n0", "start", "no python3 there", observations.Retryable.TRANSIENT))
        story.wait(5.0)
    assert only(story.said, d.EndJob).end is d.JobEnd.FAILED


def test_rank_that_ended_early_precedes_its_victim() -> None:
    """The rank that ended early is listed before the one that lost it."""
    story = _running()
    story.hear(story.exited(1, code=0))
    story.hear(story.exited(0, failure=VICTIM))
    verdict = only(story.wait(2.0), d.Judge).verdict
    assert verdict.summary.startswith(
        "rank 1 ended with code 0 before the others were done: rank 0 on n0: RuntimeError"
    )
    assert (verdict.ranks, verdict.node) == ((1,), "n1")


def test_last_rank_of_finished_gang_is_named() -> None:
    """The last rank of a gang whose others are finished is named itself."""
    story = Story(4)
    story.run()
    story.hear(*(story.exited(rank, code=0) for rank in (0, 1, 2)))
    story.hear(story.exited(3, failure=VICTIM))
    verdict = only(story.wait(2.0), d.Judge).verdict
    assert (verdict.ranks, verdict.node) == ((3,), "n3")
    assert verdict.summary.startswith("ranks 0-2 ended with code 0 before the others were done: rank 3 on n3")


def test_slow_start_names_node_that_is_not_ready() -> None:
    """A start that takes too long is reported with the node that is not ready."""
    story = Story(3)
    story.hear(story.up(0), story.up(1), story.up(2), story.prepared(0), story.prepared(2))
    verdict = only(story.wait(61.0), d.Judge).verdict
    assert verdict.kind is d.VerdictKind.START_TIMEOUT
    assert verdict.summary == "not all ranks were started within 60 s; n1: its setup has not ended"
    ready = tuple(f"n{node}: its ranks were not started" for node in (0, 2))
    assert verdict.evidence == ("n1: its setup has not ended", *ready)
