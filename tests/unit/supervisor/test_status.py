"""Does the status say what the contract promises, in every state, and does the post-mortem tell the tale?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.brain.fold_events import fold
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts, News
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.core.jobdir import status_file
from orchestrator.supervisor import status as status_object
from orchestrator.supervisor.journal.planned import planned
from tests.support import jobs

NUMBER = (int, float)
MAYBE = type(None)
STATUS: dict[str, Any] = {
    "id": str, "name": str, "backend": str, "state": str, "attempt": int, "restarts": int, "step": (int, MAYBE),
    "steps_per_s": (float, MAYBE), "world_size": int, "reason": str, "created_at": str, "started_at": (str, MAYBE),
    "ended_at": (str, MAYBE), "checkpoint": (dict, MAYBE), "nodes": list, "ranks": list,
}  # fmt: skip
NODE: dict[str, Any] = {"name": str, "host": str, "state": str, "seen_s": (*NUMBER, MAYBE)}
RANK: dict[str, Any] = {
    "rank": int, "local_rank": int, "node": str, "pid": (int, MAYBE), "state": str, "step": (int, MAYBE),
    "beat_s": (*NUMBER, MAYBE), "exit": (int, MAYBE),
}  # fmt: skip
WHY: dict[str, Any] = {"id": str, "state": str, "attempts": list}
ATTEMPT: dict[str, Any] = {
    "attempt": int, "started_at": str, "ended_at": (str, MAYBE), "first_step": (int, MAYBE), "last_step": (int, MAYBE),
    "resumed_from": (str, MAYBE), "verdict": (dict, MAYBE), "restart_s": (*NUMBER, MAYBE),
}  # fmt: skip
VERDICT: dict[str, Any] = {
    "kind": str, "ranks": list, "node": str, "summary": str, "evidence": list, "detected_s": NUMBER,
}  # fmt: skip

CANCELLED: list[News] = [*jobs.submitted(), *jobs.running(1, 1.0, 7), e.CancelRequested(5.0, 1)]
CRASHED: list[News] = [*jobs.submitted(), *jobs.running(1, 1.0, 7), *jobs.crash(1, 5.0, 8, 8)]
TALES: dict[str, list[News]] = {
    "STARTING": jobs.submitted(),
    "RUNNING": [*jobs.submitted(), *jobs.running(1, 1.0, 7)],
    "RESTARTING": CRASHED,
    "STOPPING": [*CANCELLED, d.Finish(5.1, "cancelled by the user", 1)],
    "SUCCEEDED": [
        *jobs.submitted(),
        *jobs.running(1, 1.0, 7),
        jobs.end(1, 9.0, d.JobEnd.SUCCEEDED, "all well"),
    ],
    "FAILED": [*CRASHED, jobs.end(1, 6.0, d.JobEnd.FAILED, "crash: no more restarts")],
    "CANCELLED": [*CANCELLED, jobs.end(1, 6.0, d.JobEnd.CANCELLED, "cancelled by the user")],
}


def _status(news: list[News], at: float = 10.0, rates: dict[int, float] | None = None) -> status_file.Status:
    facts = Facts()
    for one in news:
        fold(facts, one)
    return status_object.status(jobs.plan(total_steps=100), facts, jobs.moment(at), rates or {})


def _has(value: Mapping[str, Any], contract: dict[str, Any]) -> None:
    for key, kinds in contract.items():
        assert isinstance(value[key], kinds), f"{key} is {value[key]!r}"
        assert not isinstance(value[key], bool)


@pytest.mark.parametrize("state", TALES)
def test_a_status_has_every_key_of_the_contract_with_its_type_in_each_state(state: str) -> None:
    status = _status(TALES[state])
    assert status["state"] == state
    _has(status, STATUS)
    assert [node["name"] for node in status["nodes"]] == ["node-0", "node-1"]
    assert [(rank["rank"], rank["local_rank"], rank["node"]) for rank in status["ranks"]] == [
        (0, 0, "node-0"), (1, 1, "node-0"), (2, 0, "node-1"), (3, 1, "node-1"),
    ]  # fmt: skip
    for node in status["nodes"]:
        _has(node, NODE)
    for rank in status["ranks"]:
        _has(rank, RANK)
    assert json.loads(json.dumps(status)) == status


@pytest.mark.parametrize("state", TALES)
def test_a_post_mortem_has_every_key_of_the_contract_with_its_type_in_each_state(state: str) -> None:
    told = jobs.told(TALES[state])
    assert told["state"] == state
    _has(told, WHY)
    for attempt in told["attempts"]:
        _has(attempt, ATTEMPT)
        if attempt["verdict"] is not None:
            _has(attempt["verdict"], VERDICT)
    assert json.loads(json.dumps(told)) == told


def test_a_job_of_which_nothing_was_heard_is_starting() -> None:
    status = _status([])
    assert (status["state"], status["attempt"], status["restarts"], status["nodes"]) == ("STARTING", 1, 0, [])
    assert jobs.told([])["attempts"] == []


def test_a_node_that_has_never_spoken_was_never_seen() -> None:
    assert [node["seen_s"] for node in _status(TALES["STARTING"])["nodes"]] == [None, None]
    assert _status(TALES["STARTING"])["reason"] == "waiting for node-0 (absent), node-1 (absent)"


def test_a_running_job_tells_steps_pace_pids_and_ages() -> None:
    status = _status(TALES["RUNNING"], at=6.5, rates={0: 2.5, 1: 2.4, 2: 2.5, 3: 2.6})
    assert (status["step"], status["steps_per_s"], status["total_steps"]) == (7, 2.4, 100)
    rank = status["ranks"][3]
    assert (rank["pid"], rank["state"], rank["step"], rank["beat_s"]) == (5003, "running", 7, 2.5)
    told = {"name": "node-0", "host": "host-1", "state": "up", "seen_s": 2.5}
    assert status["nodes"][0] == {**told, "role": "placed", "ranks": [0, 1], "note": ""}
    assert status["created_at"] == "2026-11-18T11:06:40.000Z"
    assert status["started_at"] == "2026-11-18T11:06:40.100Z"


def test_steps_go_on_from_the_checkpoint_after_a_restart() -> None:
    status = _status(jobs.crashed_once(), at=12.0)
    assert (status["state"], status["attempt"], status["restarts"], status["step"]) == ("RUNNING", 2, 1, 25)
    assert status["checkpoint"] == {"path": jobs.CKPT, "step": 20}


def test_the_exit_of_a_rank_is_its_code_or_its_signal_below_zero() -> None:
    news = TALES["RUNNING"] + [
        e.Exited(6.0, "node-0", 1, 0, 3, None, 7, None, False, False),
        e.Exited(6.0, "node-1", 1, 2, None, 9, 7, None, False, False),
    ]
    assert [rank["exit"] for rank in _status(news)["ranks"]] == [3, None, -9, None]


def test_a_stopped_rank_is_named_as_the_reason() -> None:
    beat = e.Heartbeat(
        6.0, "node-0", 1, (e.RankHeartbeat(0, 7, "S", 1, 1.0), e.RankHeartbeat(1, 7, "T", 1, 1.0))
    )
    status = _status([*TALES["RUNNING"], beat])
    assert status["ranks"][1]["state"] == "stopped"
    assert status["reason"] == "rank 1 stands still (state T or Z)"


def test_what_a_restart_waits_for_when_a_node_is_silent_is_said() -> None:
    facts = Facts()
    for one in CRASHED[:-1]:  # nothing was heard of what is left on node-1
        fold(facts, one)
    assert "none is started" not in status_object.reason(facts)
    facts.nodes["node-1"].agent_state = AgentState.SILENT
    assert status_object.reason(facts).endswith("; until no rank is left on node-1, none is started")
    assert facts.limits is not None
    facts.limits = dataclasses.replace(facts.limits, fence_s=36.0)
    facts.nodes["node-1"].fence_s = 72.0
    assert status_object.reason(facts).endswith(
        "; until ranks left on node-1 have surely ended, up to 120 s, none is started"
    )


def test_what_is_read_before_a_restart_is_said() -> None:
    status = _status([*CRASHED, jobs.saved(4.0), d.CompareSave(6.0, "why", 1, 1, True)])
    assert status["reason"].endswith("; step-20.pt is being read first, to see that it is what was written")


def test_many_missing_nodes_are_counted_and_not_all_named() -> None:
    plan = jobs.plan(nodes=9)
    facts = Facts()
    for one in (planned(plan, 0.0), d.BeginAttempt(0.1, "submitted", 1, None)):
        fold(facts, one)
    assert status_object.reason(facts).endswith("node-3 (absent) and 5 more")


def test_the_post_mortem_tells_what_a_crash_cost() -> None:
    told = jobs.told(jobs.crashed_once())
    first, second = told["attempts"]
    assert (first["first_step"], first["last_step"], first["repeated_steps"]) == (1, 23, 3)
    assert first["verdict"]["detected_s"] == 0.2
    assert first["restart_s"] == pytest.approx(10.1 - 5.7)
    assert first["ended_at"] == "2026-11-18T11:06:46.200Z"
    assert (second["resumed_from"], second["first_step"], second["last_step"]) == (jobs.CKPT, 21, 25)
    assert (second["ended_at"], second["verdict"]) == (None, None)
    assert told["checkpoint"] == {"path": jobs.CKPT, "step": 20}


def test_a_job_without_steps_restarts_when_its_ranks_run() -> None:
    news = [*jobs.submitted(), *jobs.running(1, 1.0), *jobs.crash(1, 5.0, 0, 0), jobs.again(2, 7.0, None)]
    first = jobs.told([*news, *jobs.running(2, 7.1)])["attempts"][0]
    assert (first["first_step"], first["last_step"], first["repeated_steps"]) == (None, None, None)
    assert first["restart_s"] == pytest.approx(7.6 - 5.2)


def test_a_suspicion_that_nothing_was_done_about_is_told() -> None:
    verdict = d.Verdict(d.Kind.HANG, (), "", "no progress for 60 s", (), "hang", 7, 4.0, True)
    told = jobs.told([*TALES["RUNNING"], d.Alert(64.0, "hang", 1, verdict)])
    assert told["attempts"][0]["notices"] == ["no progress for 60 s"]


def test_ranks_that_are_slow_by_themselves_are_told_while_they_run() -> None:
    facts = Facts()
    for one in [*jobs.submitted(), *jobs.running(1, 1.0, 20)]:
        fold(facts, one)
    assert status_object.status(jobs.plan(), facts, jobs.moment(5.0), {})["stragglers"] == []
    for number in range(1, 5):
        for node in (0, 1):
            beats = tuple(
                e.RankHeartbeat(
                    r, 20 + number, "S", 0, 0.0, own_work_s=(0.18 if r == 3 else 0.1) + number * 1e-6
                )
                for r in (2 * node, 2 * node + 1)
            )
            fold(facts, e.Heartbeat(10.0 * number, f"node-{node}", 1, beats))
    slow = status_object.status(jobs.plan(), facts, jobs.moment(41.0), {})["stragglers"]
    assert [(one["rank"], one["node"], one["factor"], one["since_step"]) for one in slow] == [
        (3, "node-1", 1.8, 21)
    ]
    assert (slow[0]["own_s"], slow[0]["peers_s"]) == (0.18, 0.1)
    fold(facts, jobs.end(1, 42.0, d.JobEnd.SUCCEEDED, "every rank exited with code 0"))
    assert status_object.status(jobs.plan(), facts, jobs.moment(43.0), {})["stragglers"] == []


@pytest.mark.parametrize("wall_s", [0.0, 1_795_000_000.123, 4_000_000_000.999])
def test_times_of_day_are_read_as_they_are_written(wall_s: float) -> None:
    assert status_file.seconds(status_file.iso(wall_s)) == pytest.approx(wall_s, abs=0.001)


def test_ages_grow_while_nobody_writes_and_stand_still_when_the_job_is_over() -> None:
    now_s = jobs.BEGAN_S + 10.0
    running = status_file.refreshed(_status(TALES["RUNNING"], at=10.0), now_s + 7)
    assert (running["nodes"][0]["seen_s"], running["ranks"][0]["beat_s"], running["written_s"]) == (
        13.0,
        13.0,
        7.0,
    )
    ended = _status(TALES["FAILED"], at=10.0)
    assert status_file.refreshed(ended, now_s + 7) == ended


def test_a_clock_that_was_set_back_makes_no_age_negative() -> None:
    status = _status(TALES["RUNNING"], at=10.0)
    assert status_file.refreshed(status, jobs.BEGAN_S - 5000)["nodes"] == status["nodes"]
