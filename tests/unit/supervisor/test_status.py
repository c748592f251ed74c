"""Does the status say what the contract promises, in every state, and does the post-mortem tell the tale?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.brain.fold_events import fold
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts, News
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.scheduling import fence
from orchestrator.core.checkpoints.resume_choice import ResumePoint, SkippedCheckpoint
from orchestrator.core.codec import Json
from orchestrator.core.jobdir import status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.locks import LockHolder
from orchestrator.core.jobdir.status_file import time_of_day
from orchestrator.core.status_types import NextAction, ReportedNumber, Suspicion, Training, Usage
from orchestrator.core.wire import reports
from orchestrator.core.wire.reports import RankHeartbeat
from orchestrator.supervisor import status as status_object
from tests.support import golden, jobs

NUMBER = (int, float)
MAYBE = type(None)
STATUS: dict[str, Any] = {
    "id": str, "name": str, "backend": str, "state": str, "attempt": int, "restarts": int, "step": (int, MAYBE),
    "steps_per_s": (float, MAYBE), "world_size": int, "reason": str, "created_at": str, "started_at": (str, MAYBE),
    "ended_at": (str, MAYBE), "checkpoint": (dict, MAYBE), "nodes": list, "ranks": list,
    **dict.fromkeys(("loss", "learning_rate"), (float, str, MAYBE)), **dict.fromkeys(("percent", "eta_s"), (*NUMBER, MAYBE)),
}  # fmt: skip
NODE: dict[str, Any] = {"name": str, "host": str, "state": str, "seen_s": (*NUMBER, MAYBE)}
RANK: dict[str, Any] = {
    "rank": int, "local_rank": int, "node": str, "pid": (int, MAYBE), "state": str, "step": (int, MAYBE),
    "beat_s": (*NUMBER, MAYBE), "exit": (int, MAYBE),
    **dict.fromkeys(("loss", "learning_rate"), (float, str, MAYBE)), "total_steps": (int, MAYBE),
    **dict.fromkeys(("percent", "eta_s", "cpu_share", "gpu_share"), (*NUMBER, MAYBE)),
    **dict.fromkeys(("memory_bytes", "gpu_memory_bytes"), (int, MAYBE)),
}  # fmt: skip
WHY: dict[str, Any] = {"id": str, "state": str, "attempts": list}
ATTEMPT: dict[str, Any] = {
    "attempt": int, "started_at": str, "ended_at": (str, MAYBE), "first_step": (int, MAYBE), "last_step": (int, MAYBE),
    "resumed_from": (str, MAYBE), "verdict": (dict, MAYBE), "restart_s": (*NUMBER, MAYBE), "restart_parts": (dict, MAYBE),
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


@pytest.mark.parametrize(
    ("news", "reason"),
    [
        (
            [
                *TALES["RUNNING"],
                e.RestartRequested(5.0, 1),
                d.Finish(5.1, "a restart", 1, d.AttemptEnd.RESTART),
            ],
            "a restart requested by the user",
        ),
        (
            [
                *TALES["STOPPING"],
                jobs.end(1, 6.0, d.JobEnd.CANCELLED, "cancelled"),
                e.ResumeRequested(20.0, 2),
            ],
            "resumed by the user",
        ),
    ],
)
def test_requested_attempt_shows_job_as_restarting(news: list[News], reason: str) -> None:
    status = _typed(news)
    assert (status.state, status.reason) == ("RESTARTING", reason)


def _typed(news: list[News], at: float = 10.0) -> status_file.Status:
    facts = Facts()
    for one in news:
        fold(facts, one)
    return status_object.status(jobs.plan(total_steps=100), facts, jobs.moment(at))


def _status(news: list[News], at: float = 10.0) -> Json:
    return status_file.to_json(_typed(news, at))


def _has(value: Mapping[str, Any], contract: dict[str, Any]) -> None:
    for key, kinds in contract.items():
        assert isinstance(value[key], kinds), f"{key} is {value[key]!r}"
        assert not isinstance(value[key], bool)


@pytest.mark.parametrize("state", TALES)
def test_status_has_every_documented_key(state: str) -> None:
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
def test_post_mortem_has_every_documented_key(state: str) -> None:
    told = jobs.told(TALES[state])
    assert told["state"] == state
    _has(told, WHY)
    for attempt in told["attempts"]:
        _has(attempt, ATTEMPT)
        if attempt["verdict"] is not None:
            _has(attempt["verdict"], VERDICT)
    assert json.loads(json.dumps(told)) == told


def test_job_without_reports_is_starting() -> None:
    status = _status([])
    assert (status["state"], status["attempt"], status["restarts"], status["nodes"]) == ("STARTING", 1, 0, [])
    assert jobs.told([])["attempts"] == []


def test_node_without_reports_was_never_seen() -> None:
    assert [node["seen_s"] for node in _status(TALES["STARTING"])["nodes"]] == [None, None]
    assert _status(TALES["STARTING"])["reason"] == "waiting for node-0 (not started yet), node-1 (not started yet)"


def test_running_job_shows_steps_speed_pids_and_ages() -> None:
    rates = (2.5, 2.4, 2.5, 2.6)
    beats = [RankHeartbeat(rank, 7, "S", 100, 1.0, rate_per_s=rate_per_s) for rank, rate_per_s in enumerate(rates)]
    heard = [e.FromNode(4.0, f"node-{beat.rank // 2}", reports.Heartbeat(1, (beat,))) for beat in beats]
    status = _status([*TALES["RUNNING"], *heard], at=6.5)
    assert (status["step"], status["steps_per_s"], status["total_steps"]) == (7, 2.4, 100)
    rank = status["ranks"][3]
    assert (rank["pid"], rank["state"], rank["step"], rank["beat_s"]) == (5003, "running", 7, 2.5)
    told = {"name": "node-0", "host": "host-1", "state": "up", "seen_s": 2.5}
    assert status["nodes"][0] == {**told, "role": "placed", "ranks": [0, 1], "note": "", "fix": ""}
    assert status["created_at"] == "2026-11-18T11:06:40.000Z"
    assert status["started_at"] == "2026-11-18T11:06:40.100Z"


FOR_THE_BRAIN = {"nonfinite_losses", "gradient_norms", "parameter_sums",
    "log_bytes", "cpu_s", "io_bytes", "median_step_s", "own_work_s", "exiting", "groups", "collective_counts",
    "optimizer_steps", "alone", "seen", "median_pass_s", "has_group",
}  # fmt: skip
"""Fields of a heartbeat from which the brain judges; what it finds is shown, and not the field."""


OTHER: dict[str, Any] = {
    "rank": 1, "steps": 8, "state": "T", "progress": "37/1200 (tqdm)", "passes": 16, "rate_per_s": 2.0, "usage": Usage(1.5), "training": Training(ReportedNumber(1.25)),
}  # fmt: skip


def test_every_heartbeat_field_is_shown_or_for_brain() -> None:
    fields = {field.name for field in dataclasses.fields(RankHeartbeat)}
    assert fields == FOR_THE_BRAIN | OTHER.keys(), "show it in RankStatus and add it to OTHER, or to FOR_THE_BRAIN"
    plain = RankHeartbeat(0, 7, "S", 100, 1.0)

    def shown(beat: RankHeartbeat) -> object:
        return _status([*TALES["RUNNING"], e.FromNode(4.5, "node-0", reports.Heartbeat(1, (beat,)))], at=6.5)["ranks"]

    for name, value in OTHER.items():
        assert shown(dataclasses.replace(plain, **{name: value})) != shown(plain), name


def test_steps_continue_from_checkpoint_after_restart() -> None:
    status = _status(jobs.crashed_once(), at=12.0)
    assert (status["state"], status["attempt"], status["restarts"], status["step"]) == ("RUNNING", 2, 1, 25)
    assert status["checkpoint"] == {"path": jobs.CKPT, "step": 20, "safe": True, "bytes": 0, "safe_bytes": 0}


def test_resume_is_no_restart() -> None:
    ended = jobs.end(1, 7.0, d.JobEnd.CANCELLED, "cancelled by the user")
    news = [*TALES["RUNNING"], e.CancelRequested(6.0, 1), ended, e.ResumeRequested(8.0, 2)]
    status = _status([*news, jobs.again(2, 9.0, ResumePoint(jobs.CKPT, 20))], at=9.5)
    assert (status["attempt"], status["restarts"]) == (2, 0)


def test_rank_exit_is_code_or_negative_signal() -> None:
    news = TALES["RUNNING"] + [
        e.FromNode(6.0, "node-0", reports.Exited(1, 0, 3, None, 7, None, False, False)),
        e.FromNode(6.0, "node-1", reports.Exited(1, 2, None, 9, 7, None, False, False)),
    ]
    assert [rank["exit"] for rank in _status(news)["ranks"]] == [3, None, -9, None]


def test_stopped_rank_is_named_as_reason() -> None:
    beat = e.FromNode(
        6.0,
        "node-0",
        reports.Heartbeat(1, (RankHeartbeat(0, 7, "S", 1, 1.0), RankHeartbeat(1, 7, "T", 1, 1.0))),
    )
    status = _status([*TALES["RUNNING"], beat])
    assert status["ranks"][1]["state"] == "stopped"
    assert status["reason"] == "rank 1 is stopped or a zombie (state T or Z)"


def test_restart_waiting_for_silent_node_says_so() -> None:
    facts = Facts()
    for one in CRASHED[:-1]:  # nothing was heard of what is left on node-1
        fold(facts, one)
    assert "waiting for the end" not in status_object.reason(facts)
    facts.nodes["node-1"].agent_state = AgentState.SILENT
    assert status_object.reason(facts).endswith("; waiting for the end of ranks on node-1")
    assert facts.limits is not None
    facts.limits = dataclasses.replace(facts.limits, fence_s=36.0)
    facts.nodes["node-1"].fence_s = 72.0
    now = jobs.moment(6.0)
    assert facts.attempt is not None
    due = time_of_day(now.iso(fence.clear_at(facts, facts.attempt, facts.nodes["node-1"], 6.0)) or "")
    said = status_object.reason(facts, now)
    assert said.endswith(f"; waiting for the end of ranks on node-1, until {due} at the latest")


def test_skipped_checkpoints_and_ignoring_script_are_notices() -> None:
    torn = SkippedCheckpoint(3, "step-22.pt", 22, "torn: the attempt ended while it was written")
    begin = d.BeginAttempt(7.0, "why", 2, ResumePoint(jobs.CKPT, 20, 1), (torn,))
    news = [*CRASHED, begin, *jobs.running(2, 7.1, 5), e.ResumedElsewhere(12.0, 2, 0, "step-5.pt", 5)]
    ignored, passed = _status(news)["notices"]
    assert "from scratch" in ignored and "ORCH_RESUME_FROM" in ignored
    assert passed == f"attempt 2 did not resume from step-22.pt (step 22): {torn.why}"


def test_reading_before_restart_is_shown() -> None:
    status = _status([*CRASHED, jobs.saved(4.0), d.CompareCheckpoint(6.0, "why", 1, 1, True)])
    assert status["reason"].endswith("; step-20.pt is verified first")


def test_many_missing_nodes_are_counted() -> None:
    plan = jobs.plan(nodes=9)
    facts = Facts()
    for one in (jobs.planned(plan), d.BeginAttempt(0.1, "submitted", 1, None)):
        fold(facts, one)
    assert status_object.reason(facts).endswith("node-3 (not started yet) and 5 more")


def test_post_mortem_shows_cost_of_crash() -> None:
    told = jobs.told(jobs.crashed_once())
    first, second = told["attempts"]
    assert (first["first_step"], first["last_step"], first["repeated_steps"]) == (1, 23, 3)
    assert first["verdict"]["detected_s"] == 0.2
    assert first["restart_s"] == pytest.approx(10.1 - 5.7)
    assert sum(first["restart_parts"].values()) == pytest.approx(first["restart_s"])
    assert list(first["restart_parts"]) == ["end_s", "start_s", "first_step_s"], "no heartbeat tells of a process group"
    assert first["ended_at"] == "2026-11-18T11:06:46.200Z"
    assert (second["resumed_from"], second["first_step"], second["last_step"]) == (jobs.CKPT, 21, 25)
    assert (second["ended_at"], second["verdict"]) == (None, None)
    assert told["checkpoint"] == {"path": jobs.CKPT, "step": 20}


def test_stepless_job_recovers_when_ranks_run() -> None:
    news = [*jobs.submitted(), *jobs.running(1, 1.0), *jobs.crash(1, 5.0, 0, 0), jobs.again(2, 7.0, None)]
    first = jobs.told([*news, *jobs.running(2, 7.1)])["attempts"][0]
    assert (first["first_step"], first["last_step"], first["repeated_steps"]) == (None, None, None)
    assert first["restart_s"] == pytest.approx(7.6 - 5.2)


def test_suspicion_without_action_is_shown() -> None:
    verdict = d.Verdict(
        d.VerdictKind.HANG,
        (),
        "",
        "no progress for 60 s",
        (),
        d.FailureSignature(d.VerdictKind.HANG),
        7,
        4.0,
        True,
    )
    told = jobs.told([*TALES["RUNNING"], d.Notice(64.0, "hang", 1, d.NoticeTopic.HANG, verdict=verdict)])
    assert told["attempts"][0]["notices"] == ["no progress for 60 s"]


def test_stragglers_are_shown_while_running() -> None:
    facts = Facts()
    for one in [*jobs.submitted(), *jobs.running(1, 1.0, 20)]:
        fold(facts, one)
    assert status_object.status(jobs.plan(), facts, jobs.moment(5.0)).stragglers == ()
    for number in range(1, 5):
        for node in (0, 1):
            beats = tuple(
                RankHeartbeat(r, 20 + number, "S", 0, 0.0, own_work_s=(0.18 if r == 3 else 0.1) + number * 1e-6)
                for r in (2 * node, 2 * node + 1)
            )
            fold(facts, e.FromNode(10.0 * number, f"node-{node}", reports.Heartbeat(1, beats)))
    slow = status_object.status(jobs.plan(), facts, jobs.moment(41.0)).stragglers
    assert [(one.rank, one.node, one.factor, one.since_step) for one in slow] == [(3, "node-1", 1.8, 21)]
    assert (slow[0].own_s, slow[0].peers_s) == (0.18, 0.1)
    fold(facts, jobs.end(1, 42.0, d.JobEnd.SUCCEEDED, "every rank exited with code 0"))
    assert status_object.status(jobs.plan(), facts, jobs.moment(43.0)).stragglers == ()


@pytest.mark.parametrize("wall_s", [0.0, 1_795_000_000.123, 4_000_000_000.999])
def test_times_of_day_round_trip(wall_s: float) -> None:
    assert status_file.parse_iso(status_file.iso(wall_s)) == pytest.approx(wall_s, abs=0.001)


def test_ages_grow_until_the_job_is_over() -> None:
    now_s = jobs.BEGAN_S + 10.0
    running = status_file.refresh_ages(_typed(TALES["RUNNING"], at=10.0), now_s + 7)
    assert (running.nodes[0].seen_s, running.ranks[0].beat_s, running.written_s) == (13.0, 13.0, 7.0)
    ended = _typed(TALES["FAILED"], at=10.0)
    assert status_file.refresh_ages(ended, now_s + 7) == ended
    here = status_file.stamp(_typed(TALES["RUNNING"], at=10.0), "a boot")
    assert status_file.refresh_ages(here, now_s + 3600.0, "a boot").written_s == pytest.approx(0.0, abs=1.0), (
        "the clock was set"
    )


def test_clock_set_back_makes_no_age_negative() -> None:
    status = _typed(TALES["RUNNING"], at=10.0)
    assert status_file.refresh_ages(status, jobs.BEGAN_S - 5000).nodes == status.nodes


def _in_full() -> status_file.Status:
    """Return a status that has every key."""
    beats = (RankHeartbeat(0, 7, "S", 100, 1.0, progress="37/1200 (tqdm)", rate_per_s=2.5),)
    notice = d.Notice(4.6, "4 ranks train alone", 1, d.NoticeTopic.ALONE, fix="form one")
    known = _typed(
        [*TALES["RUNNING"], e.FromNode(4.5, "node-0", reports.Heartbeat(1, beats)), jobs.saved(4.6), notice],
        at=6.5,
    )
    return dataclasses.replace(
        status_file.refresh_ages(known, jobs.BEGAN_S + 26.5),
        nodes=known.nodes[:1],
        ranks=known.ranks[:2],
        stragglers=(status_file.StragglerStatus(1, "node-0", 1.8, 0.18, 0.1, 21),),
        suspected=Suspicion("rank 1 is stopped", [1], "node-0", 2.0, NextAction.ENDS, 3.0, "node-1"),
        travels=(status_file.TransferStatus("step-20.pt", "node-0", "fetch", 40, None),),
        effective_batch=64,
        supervisor=LockHolder(4711, "gpu-03"),
        full_disk=jobs.ROOT,
        queue=status_file.QueueStatus("7", "RUNNING", "", None, "node[1-2]", "", "it runs", "", 0.5),
        dir=jobs.ROOT,
    )


def test_status_keys_and_order_match_golden_file() -> None:
    full = status_file.to_json(_in_full())
    golden.check("status-object.json", json.dumps(full, indent=1) + "\n")


def test_all_ranks_of_large_node_are_listed() -> None:
    full = _in_full()
    many = dataclasses.replace(full.nodes[0], ranks=list(range(1000)))
    told = status_file.to_json(dataclasses.replace(full, nodes=(many,)))
    assert told["nodes"][0]["ranks"] == list(range(1000))


def test_empty_keys_are_omitted() -> None:
    full = _in_full()
    only_some = {"suspected", "effective_batch", "written_s", "supervisor", "full_disk", "queue", "dir"}
    assert status_file.to_json(full).keys() - _status(TALES["RUNNING"]).keys() == only_some
    assert status_file.to_json(dataclasses.replace(full, supervisor=None))["supervisor"] is None
    fresh = dataclasses.replace(full, supervisor=None, written_s=0.0)
    assert "supervisor" not in status_file.to_json(fresh) and "written_s" in status_file.to_json(fresh)


def test_status_round_trips_with_its_folder(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    ended = dataclasses.replace(_typed(TALES["FAILED"]), effective_batch=64)
    status_file.write(job, ended, durable=False)
    assert status_file.read(job, 0.0) == dataclasses.replace(ended, dir=str(tmp_path))
