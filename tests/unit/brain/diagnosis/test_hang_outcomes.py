"""What states, last words and limits say of a hang, what follows from it, and how it reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.brain.diagnosis import hang_report
from orchestrator.brain.diagnosis.suspects import current_suspicion
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import observations, text
from orchestrator.core.errors import Fault
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from orchestrator.journal.journal_file import unwrap_message
from tests.support.brain_story import Story, given, look, none_of, notices, only
from tests.support.frames import frame
from tests.support.hang_story import (
    ALL,
    BLOCKED,
    SPINS,
    STOPPED,
    WAITS,
    WORKS,
    beat,
    beats,
    entered,
    gang_of,
    judged,
    silence,
    stood,
)

AT = ("train.py:1 <module>",)

# States, ends, limits


def test_state_t_hangs_after_six_seconds() -> None:
    """A pause of 3 s in state T is no hang, and one of 6 s is."""
    story = gang_of(2, hang_timeout_s=30.0)
    story.hear(beat(0, 9, "T"))
    story.now_s += 3.0
    assert {type(unwrap_message(one)) for one in story.hear(beat(0, 9, "T"))} == {orders.Inspect}
    answers = story.looked(look(0, observations.Activity.STOPPED, state="T"), look(1, WAITS))
    assert none_of(story.hear(*answers), d.Judge)
    story.now_s += 3.0
    verdict = only(story.hear(beat(0, 9, "T")), d.Judge).verdict
    assert verdict.culprit == "rank 0 on n0 is stopped (state T) for 6 s" and verdict.ranks == (0,)


def test_all_ranks_that_were_stopped_together_are_named() -> None:
    story = gang_of(4, hang_timeout_s=30.0)
    story.hear(beat(1, 9, "T"))
    story.now_s += 0.5
    story.hear(beat(2, 9, "T"))
    story.now_s += 3.0
    story.hear(beat(3, 9, "T"), beat(2, 9, "T"), beat(1, 9, "T"))
    stopped = [look(rank, observations.Activity.STOPPED, state="T") for rank in (1, 2, 3)]
    story.hear(*story.looked(look(0, WAITS), *stopped))
    story.now_s += 2.0
    verdict = only(story.hear(beat(1, 9, "T")), d.Judge).verdict
    assert verdict.culprit == "ranks 1-2 on n1, n2 are stopped (state T) for 6 s" and verdict.ranks == (1, 2)


def test_waits_are_known_before_judging_stopped_rank() -> None:
    story = gang_of(2, hang_timeout_s=30.0)
    looks = []
    for _ in range(5):
        looks += given(story.hear(beat(0, 9, "T")), orders.Inspect)
        story.hear(*story.looked(look(0, observations.Activity.STOPPED, state="T"), look(1, WAITS)))
        story.now_s += 1.0
    assert [one.inspection for node, one in looks if node == "n1"] == [1, 2]
    assert only(story.hear(beat(0, 9, "T")), d.Judge).verdict.ranks == (0,)


def test_stopped_rank_is_hang_with_timeout_off() -> None:
    """A stopped rank is a hang even where silence is not."""
    story = gang_of(2, hang_timeout_s=None)
    story.hear(beat(0, 9, "T"))
    story.now_s += 6.0
    assert not none_of(story.hear(beat(0, 9, "T")), orders.Inspect)


def test_last_remaining_rank_is_named() -> None:
    """A rank that alone is left behind is named."""
    story = gang_of(2, hang_timeout_s=20.0)
    story.hear(story.exited(1, 0, None, count=9), beat(0, 9))
    verdict = judged(story, look(0, BLOCKED, why="waits for its other threads to end"), for_s=30.0)
    assert (verdict.ranks, verdict.culprit) == ((0,), "rank 0 on n0: waits for its other threads to end")


def test_rank_that_does_not_exit_is_ended() -> None:
    def left(**limits: Any) -> Story:
        story = gang_of(2, **limits)
        story.hear(story.exited(1, 0, None, count=9), beat(0, 9, exiting=True))
        return story

    stays = look(0, observations.Activity.EXITING, why="has finished its script and has not exited")
    assert none_of(silence(left(), stays, for_s=1790.0), d.Judge)
    assert "rank 0 on n0: has finished its script" in judged(left(), stays, for_s=1900.0).summary
    assert not none_of(silence(left(hang_timeout_s=20.0), stays, for_s=25.0), d.Judge)


def test_missing_first_step_within_user_limit_is_hang() -> None:
    """No first step within the user's limit is a hang, whatever the ranks do."""
    story = gang_of(2, steps=0, first_step_timeout_s=100.0)
    found = [look(0, WAITS), look(1, WORKS, where="train.py:3 build")]
    assert none_of(silence(story, *found, for_s=99.0), d.Judge)
    said = story.wait(1.5)
    judged = only(story.hear(*story.looked(*found)) + said, d.Judge).verdict
    assert "no first step within 100 s" in judged.summary and judged.ranks == (1,)


def test_rank_missing_from_rendezvous_is_named_after_limit() -> None:
    """A rank that has not come to the rendezvous is named after the user's limit."""
    story = gang_of(steps=0, rendezvous_timeout_s=100.0)
    came = [look(rank, WAITS, phase="rendezvous", stack=AT) for rank in (0, 1, 3)]
    late = look(2, SPINS, phase="import", where="train.py:1 <module>", stack=AT)
    assert none_of(silence(story, *came, late, for_s=99.0), d.Judge)
    verdict = judged(story, *came, late, for_s=8.0)
    assert verdict.kind is d.VerdictKind.RENDEZVOUS and verdict.ranks == (2,)
    assert verdict.waiting == "ranks 0-1,3 at the rendezvous" and "train.py:1 <module>" in verdict.culprit


def test_rank_at_other_address_is_blamed_for_rendezvous() -> None:
    """A rank that meets others at another address is blamed for those that gave up."""
    apart = observations.Failure("", "MASTER_ADDR is n7.lan by the script, orch gave 127.0.0.1", "", None)
    found = [look(rank, WAITS, phase="rendezvous", stack=AT) for rank in (0, 2, 3)]
    story = gang_of(steps=0, rendezvous_timeout_s=900.0)
    silence(story, *found, look(1, WAITS, phase="rendezvous", stack=AT, raised=apart), for_s=60.0)
    seen = current_suspicion(story.brain.facts, story.now_s)
    assert seen and seen.ranks == [1] and "ranks 0,2-3 at the rendezvous" in seen.what
    assert seen.in_s == 840.0, "that a rank is named ends it no sooner"
    text = "wait timeout after 60000ms, keys: /default_pg/0//cpu//0/0"
    gave_up = observations.Failure("torch.distributed.DistStoreError", text, "", None)
    story.hear(story.exited(2, failure=gave_up), story.exited(0, failure=gave_up))
    verdict = only(story.wait(6.0), d.Judge).verdict
    assert (verdict.kind, verdict.ranks) == (d.VerdictKind.RENDEZVOUS, (1,))


def test_all_ranks_at_other_address_are_named() -> None:
    story = gang_of(2, steps=0, rendezvous_timeout_s=900.0)
    ports = [observations.Failure("", f"MASTER_PORT is {port} by the script", "", None) for port in (1, 2)]
    silence(
        story,
        *(look(rank, WAITS, phase="rendezvous", stack=AT, raised=ports[rank]) for rank in (0, 1)),
        for_s=60.0,
    )
    seen = current_suspicion(story.brain.facts, story.now_s)
    assert seen and seen.what.endswith(
        "rank 0 at the rendezvous (MASTER_PORT is 1 by the script); "
        "rank 1 at the rendezvous (MASTER_PORT is 2 by the script)"
    )


def test_rank_with_late_stack_is_inspected_again() -> None:
    """A rank whose stack comes late is inspected again before it is named."""
    came = [look(rank, WAITS, phase="rendezvous", stack=AT) for rank in (0, 1)]
    late = look(2, WORKS, phase="import", stack=AT)
    unseen = look(3, observations.Activity.UNKNOWN, why="it did not answer")
    story = gang_of(steps=0, rendezvous_timeout_s=100.0)
    assert none_of(silence(story, *came, late, unseen, for_s=130.0), d.Judge)
    seen = look(3, WAITS, phase="rendezvous", stack=AT)
    assert judged(story, *came, late, seen).ranks == (2,)


def test_rank_without_stack_is_not_waited_for_forever() -> None:
    """A rank that shows no stack is not waited for without end."""
    came = [look(rank, WAITS, phase="rendezvous", stack=AT) for rank in (0, 1, 2)]
    unseen = look(3, observations.Activity.UNKNOWN, why="it did not answer")
    verdict = judged(gang_of(steps=0, rendezvous_timeout_s=100.0), *came, unseen, for_s=150.0)
    assert verdict.ranks == (3,) and "it did not answer" in verdict.culprit


def test_rendezvous_limit_ends_with_rendezvous() -> None:
    """Long after the rendezvous its limit does not matter."""
    story = gang_of(steps=0, rendezvous_timeout_s=100.0)
    found = [look(rank, WORKS, phase="train") for rank in ALL]
    assert none_of(silence(story, *found, for_s=400.0), d.Judge)


# What follows


def test_notify_reports_hang_once_and_withdraws_it() -> None:
    """With notify a hang is reported once, inspections continue, and it is withdrawn when the job moves."""
    story = gang_of(2, on_hang="notify")
    found = [look(0, WAITS), look(1, STOPPED, state="T", where="train.py:5 f")]
    assert notices(silence(story, *found), d.NoticeTopic.HANG)
    looks = len([one for one in story.said if isinstance(unwrap_message(one), orders.Inspect)])
    said = []
    for _ in range(100):
        said += story.wait(0.5)
    assert not notices(said, d.NoticeTopic.HANG) and none_of(story.said, orders.Stop)
    assert len([one for one in story.said if isinstance(unwrap_message(one), orders.Inspect)]) > looks
    (withdrawn,) = notices(beats(story, 10), d.NoticeTopic.HANG)
    assert withdrawn.withdrawn and withdrawn.why == "the job makes progress again"
    assert notices(silence(story, *found), d.NoticeTopic.HANG), "another hang is told anew"


def test_logging_thread_neither_hides_nor_withdraws_hang() -> None:
    """A thread that logs forever neither hides a hang nor withdraws it again and again."""
    story = gang_of(2, on_hang="notify")
    found = [look(0, WAITS), look(1, STOPPED, state="T", where="train.py:5 f")]
    for second in range(1, 300):
        story.hear(beat(0, 9, log_bytes=second))
        story.wait(1.0)
        asked = [one for one in story.said if isinstance(unwrap_message(one), orders.Inspect)]
        if asked:
            story.hear(*story.looked(*(stood(one, story.now_s - asked[0].at) for one in found)))
    assert [one.withdrawn for one in notices(story.said, d.NoticeTopic.HANG)] == [False]


def test_on_hang_fail_ends_the_job() -> None:
    story = gang_of(2, on_hang="fail")
    judged(story, look(0, WAITS), look(1, STOPPED, state="T"))
    assert only(story.stop_all(), d.EndJob).end is d.JobEnd.FAILED


LOOK_WAITS_MAX = 200
"""So many half seconds without a look mean that there will be none."""


def hang_at(story: Story, attempt: int, *, proven: bool) -> tuple[d.Verdict, float]:
    """Let rank 0 of two stand at one place after step 9 until it is judged; return the verdict, and after how long."""
    story.run(attempt)
    for rank in (0, 1):
        made = RankHeartbeat(rank, 9, "S", 0, 0.0, median_step_s=0.1)
        story.hear(e.FromNode(0.0, f"n{rank}", reports.Heartbeat(attempt, (made,))))
    began_s, first_s = story.now_s, 0.0
    for _ in range(3000):
        if none_of(story.wait(0.5), orders.Inspect):
            continue
        first_s = first_s or story.now_s
        stood_s = story.now_s - first_s
        blocked = look(
            0,
            STOPPED if proven else BLOCKED,
            state="T" if proven else "S",
            where="train.py:5 f",
            still_s=stood_s,
        )
        found = story.hear(*story.looked(blocked, stood(entered(1, 7), stood_s), attempt=attempt))
        if not none_of(found, d.Judge):
            return only(found, d.Judge).verdict, story.now_s - began_s
    raise AssertionError("no verdict")


def test_returning_hang_at_same_step_is_no_progress() -> None:
    """A hang that returns at the same step and location is no progress, whichever rank it hits."""
    story = gang_of(2, steps=0)
    kinds = []
    for attempt in (1, 2):
        kinds.append(hang_at(story, attempt, proven=True)[0].kind)
        story.stop_all(attempt)
        story.wait(5.0)
    assert kinds == [d.VerdictKind.HANG, d.VerdictKind.NO_PROGRESS]


def test_returning_hang_without_proof_is_no_progress() -> None:
    story = gang_of(2, steps=0)
    found = []
    for attempt in (1, 2):
        found.append(hang_at(story, attempt, proven=False))
        story.stop_all(attempt)
        story.wait(20.0)
    assert [one.kind for one, _ in found] == [d.VerdictKind.HANG, d.VerdictKind.NO_PROGRESS]
    assert all(took_s > one.stall_timeout_s - 5.0 == 595.0 for one, took_s in found)


def test_torch_timeout_names_rank_it_waited_for() -> None:
    """Where torch gives up first, the rank that it waited for is named."""
    story = gang_of()
    away = look(2, SPINS, where="train.py:34 evaluate", why="computes at one place")
    assert none_of(silence(story, entered(0, 7), entered(1, 7), away, entered(3, 7), for_s=60.0), d.Judge)
    late = "[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation to complete"
    story.hear(
        story.exited(0, count=9, failure=observations.Failure("RuntimeError", late, "", frame("train.py:40 sync")))
    )
    story.hear(*(beat(rank, 9) for rank in (1, 2, 3)))
    verdict = only(story.wait(2.0), d.Judge).verdict
    assert (verdict.kind, verdict.ranks) == (d.VerdictKind.CRASH, (2,))
    assert verdict.culprit == "rank 2 on n2: computes at one place, train.py:34 evaluate"


def hang_of_rank_1(story: Story, attempt: int, step: int, *nodes: int) -> d.Verdict:
    """Let two ranks run on these nodes, rank 1 hang after a step, and all stop until the next attempt is placed."""
    story.run_on(*nodes, attempt=attempt)
    for rank, node in enumerate(nodes):
        made = RankHeartbeat(rank, step, "S", 0, 0.0, median_step_s=0.1)
        story.hear(e.FromNode(0.0, f"n{node}", reports.Heartbeat(attempt, (made,))))
    said: list[d.Decision] = []
    for stood_s in (0.0, 3.0, 7.0):
        assert any(not none_of(story.wait(0.5), orders.Inspect) for _ in range(LOOK_WAITS_MAX))
        waits = look(0, WAITS, still_s=stood_s)
        blocked = look(1, STOPPED, state="T", where="a.py:1 f", still_s=stood_s)
        looked = story.looked(waits, blocked, attempt=attempt)
        said += story.hear(*(replace(one, node=f"n{node}") for one, node in zip(looked, nodes, strict=True)))
    story.hear(*(story.stopped(node, attempt) for node in nodes))
    story.wait(20.0)
    away = [name for name, node in story.brain.facts.nodes.items() if node.agent_state.value != "up"]
    story.hear(*(story.up(int(name[1:])) for name in away))
    return only([one for one in said if isinstance(one, d.Judge)], d.Judge).verdict


@pytest.mark.parametrize("later", [9, 18])
def test_host_with_two_hangs_is_excluded_if_possible(later: int) -> None:
    """A host on which ranks hung twice is excluded where there is another."""
    story = Story(2, hosts=3, spares=1, hang_timeout_s=0.0, node_timeout_s=5000.0)
    story.hear(story.up(0), story.up(1), story.up(2))
    verdicts = [hang_of_rank_1(story, 1, 9, 0, 1), hang_of_rank_1(story, 2, later, 0, 1)]
    assert [one.kind for one in verdicts] == [d.VerdictKind.HANG, d.VerdictKind.HANG]
    assert story.brain.facts.nodes["n1"].excluded == Fault("n1", "excluded: ranks hung on it in attempts 1 and 2")
    places = [one for one in story.said if isinstance(one, d.Place)]
    assert [name for name, _ in places[-1].nodes] == ["n0", "n2"]


def test_hang_returning_on_replacement_host_is_no_progress() -> None:
    """A hang that returns on the host that took over is no progress."""
    story = Story(2, hosts=4, spares=1, hang_timeout_s=0.0, node_timeout_s=5000.0)
    story.hear(*(story.up(node) for node in range(4)))
    verdicts = [hang_of_rank_1(story, number, 9, 0, 1 if number < 3 else 2) for number in (1, 2, 3)]
    assert [one.kind for one in verdicts] == [
        d.VerdictKind.HANG,
        d.VerdictKind.HANG,
        d.VerdictKind.NO_PROGRESS,
    ]


def test_hang_returning_on_only_host_is_no_progress() -> None:
    story = Story(2, hosts=2, hang_timeout_s=0.0, node_timeout_s=5000.0)
    story.hear(story.up(0), story.up(1))
    verdicts = [hang_of_rank_1(story, number, 9, 0, 1) for number in (1, 2)]
    assert [one.kind for one in verdicts] == [d.VerdictKind.HANG, d.VerdictKind.NO_PROGRESS]


# In words


def test_rank_ranges_are_written_compactly() -> None:
    assert text.ranks_text([7, 0, 1, 3, 4, 5, 6]) == "0-1,3-7"
    assert text.ranks_label([2]) == "rank 2" and text.ranks_label([1, 2]) == "ranks 1-2"


def test_stacks_are_grouped_with_outliers_first() -> None:
    """Stacks are grouped, the outliers and the user's frames first."""
    alike = [look(rank, WAITS, where="t.py:9 step", stack=("c10d.py:5 all_reduce", "t.py:9 step")) for rank in range(7)]
    odd = look(7, BLOCKED, why="in read()", where="t.py:3 load", stack=("t.py:3 load", "t.py:9 step"), state="D")
    assert [str(line) for line in hang_report.stack_lines([*alike, odd])] == [
        "rank 7 (state D; blocked, in read()): t.py:9 step > t.py:3 load",
        "ranks 0-6 (state S; waiting for ranks): t.py:9 step > c10d.py:5 all_reduce",
    ]


def test_many_different_stacks_are_truncated() -> None:
    many = [look(rank, BLOCKED, stack=(f"t.py:{rank} f",)) for rank in range(100)]
    lines = hang_report.stack_lines(many)
    assert len(lines) == hang_report.STACKS_SHOWN + 1 and str(lines[-1]) == "88 more ranks, each at another place"


def test_ranks_that_could_not_be_inspected_are_reported() -> None:
    lack = "no flight recorder there"
    found = [
        entered(
            rank,
            6 + (rank > 0),
            activity=WAITS if rank else STOPPED,
            state="S" if rank else "T",
            unavailable=(lack,),
        )
        for rank in ALL
    ]
    assert f"not inspected (ranks 0-3): {lack}" in judged(gang_of(), *found).evidence
