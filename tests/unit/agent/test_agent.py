"""An agent's own decisions, without processes: the fence, stale orders, and what it says before an attempt is over."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.agent import Agent
from orchestrator.agent.checks.launch import Gathering
from orchestrator.agent.evidence import inspector
from orchestrator.agent.start.processes import NodeRanks, RanksGoal
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.settings.rank_settings import RankRequest
from orchestrator.core.wire import messages as m
from orchestrator.supervisor import allocation_claim
from tests.support import fake_host
from tests.unit.agent.test_lost_supervisor import ENVIRON

FENCE_S = 30.0
PREPARE = m.Prepare(2, {}, False, (), (), False, False, None, ())


class Gone(NodeRanks):
    """Ranks that have no process: a stop finds nothing to end."""

    def push(self, spared: set[int]) -> bool:
        return True


@dataclass
class Open:
    """A line that only remembers what was sent over it."""

    sent: list[object] = field(default_factory=list)

    def send(self, message: object, seq: int, raw: bytes) -> None:
        self.sent.append(message)


def _agent(folder: Path, environ: dict[str, str] | None = None, **config: Any) -> Agent:
    folder.mkdir(exist_ok=True)
    return Agent(fake_host.config(**{"root": str(folder), "fence_s": FENCE_S, **config}), environ or {})


def _running(agent: Agent, folder: Path) -> NodeRanks:
    """Let an agent have the ranks of attempt 2."""
    ranks = Gone(2, JobDir(folder), "node-0")
    ranks.begin()
    agent._ranks, agent._latest = ranks, 2
    return ranks


def _reports(agent: Agent) -> list[m.ReliableReport]:
    return [report for _, report in agent._link._outbox.pending()]


def test_ranks_are_stopped_after_the_time_of_the_fence_without_contact_and_without_a_step(
    tmp_path: Path,
) -> None:
    agent = _agent(tmp_path)
    ranks, now_s = _running(agent, tmp_path), time.monotonic()
    agent._tick(now_s + FENCE_S - 1.0)
    agent._link.proved_at = now_s + 20.0
    agent._tick(now_s + FENCE_S + 19.0)
    ranks.progress_at = now_s + 40.0
    agent._tick(now_s + FENCE_S + 39.0)
    assert (ranks.want, _reports(agent)) == (RanksGoal.RUN, [])
    agent._tick(now_s + FENCE_S + 41.0)
    assert ranks.want is RanksGoal.STOP and m.Stopped(2, "ended") in _reports(agent)


def test_an_agent_goes_by_itself_for_as_long_as_it_was_told(tmp_path: Path) -> None:
    agent = _agent(tmp_path)
    ranks, now_s = _running(agent, tmp_path), time.monotonic()
    agent._obey(m.Fence(2, 2 * FENCE_S, 3 * FENCE_S))
    wants = []
    for after_s in (-1.0, 1.0):
        agent._tick(now_s + 3 * FENCE_S + after_s)
        wants.append(ranks.want)
    assert wants == [RanksGoal.RUN, RanksGoal.STOP]


def test_ranks_that_make_steps_are_not_left_alone_as_long_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = _agent(tmp_path)
    ranks, now_s = _running(agent, tmp_path), time.monotonic()
    monkeypatch.setattr(Gone, "last_step_ns", lambda _: 1)
    agent._obey(m.Fence(2, 2 * FENCE_S, 3 * FENCE_S))
    agent._obey(m.Fence(1, 9 * FENCE_S, 9 * FENCE_S))
    agent._tick(now_s + 2 * FENCE_S + 1.0)
    assert ranks.want is RanksGoal.STOP


def test_on_the_machine_of_the_supervisor_there_is_no_fence(tmp_path: Path) -> None:
    agent = _agent(tmp_path, fence_s=None)
    ranks = _running(agent, tmp_path)
    agent._tick(time.monotonic() + 1e6)
    assert ranks.want is RanksGoal.RUN


def test_an_order_of_a_stale_attempt_is_not_obeyed(tmp_path: Path) -> None:
    agent = _agent(tmp_path)
    agent._obey(m.Stop(3, 0.0))
    agent._obey(PREPARE)
    assert _reports(agent) == [m.Stopped(3, "asked")]
    agent._obey(replace(PREPARE, attempt=4))
    assert _reports(agent)[1:] == [m.Prepared(4, "", 0, ())]


def test_a_node_that_is_ready_waits_for_the_facts_about_it_and_goes_on_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited = [True, True, False]
    monkeypatch.setattr(Gathering, "is_awaited", property(lambda gathering: awaited.pop(0)))
    agent = _agent(tmp_path)
    agent._obey(PREPARE)
    agent._tick(time.monotonic())
    assert _reports(agent) == []
    agent._tick(time.monotonic())
    assert _reports(agent) == [m.Prepared(2, "", 0, ())]


def test_ranks_are_started_only_in_the_attempt_that_was_prepared(tmp_path: Path) -> None:
    agent = _agent(tmp_path)
    agent._obey(PREPARE)
    agent._obey(m.Start(3, ("/no/such/program",), RankRequest(), (m.RankStart(0, 0, {}),)))
    assert _reports(agent) == [m.Prepared(2, "", 0, ())]


def test_a_stop_leaves_ranks_the_grace_that_it_names(tmp_path: Path) -> None:
    agent = _agent(tmp_path)
    ranks, now_s = _running(agent, tmp_path), time.monotonic()
    agent._obey(m.Stop(2, 7.0))
    assert (ranks.want, ranks.how) == (RanksGoal.STOP, "asked")
    assert now_s + 7.0 <= ranks.kill_at <= time.monotonic() + 7.0


def test_a_look_is_taken_and_answered_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # GPUs are not asked for
    agent = _agent(tmp_path)
    agent._inspector = inspector.Inspector(_running(agent, tmp_path), {})
    agent._obey(m.Inspect(2, 5))
    agent._tick(time.monotonic())
    assert _reports(agent) == [m.Inspected(2, 5, ())]


def test_the_last_checkpoint_is_told_before_the_word_that_the_attempt_is_over(tmp_path: Path) -> None:
    agent = _agent(tmp_path, ships=False, finds_checkpoints=True)
    job = JobDir(tmp_path)
    job.checkpoints.mkdir()
    (job.checkpoints / "old.pt").write_bytes(b"of an attempt before")
    run = job.rank_run("node-0", 2, 0)
    run.mkdir(parents=True)
    (run / "error-4711.json").write_text('{"message": "no access with hf_0123456789abcdef"}')
    _running(agent, tmp_path)
    agent._scanner.begin()
    (job.checkpoints / "last.pt").write_bytes(b"weights")
    agent._obey(m.Stop(2, 0.0))
    agent._tick(time.monotonic())
    last = m.CheckpointFound(2, str(job.checkpoints / "last.pt"), 0)
    assert _reports(agent) == [last, m.Stopped(2, "asked")]
    assert list(run.iterdir()) == [], "errors were reported masked, and are not masked here"


def test_the_last_lines_of_a_log_go_before_the_word_that_the_attempt_is_over(tmp_path: Path) -> None:
    agent, line = _agent(tmp_path), Open()
    job = JobDir(tmp_path)
    for folder in (job.rank_run("node-0", 2, 0), job.attempt_logs(2), job.checkpoints):
        folder.mkdir(parents=True)
    agent._link._line, agent._link._is_caught_up = line, True  # type: ignore[assignment]
    _running(agent, tmp_path)
    agent._obey(m.ResumeOffsets({}))
    job.rank_log(2, 0).write_text("last words\n")
    agent._obey(m.Stop(2, 0.0))
    agent._tick(time.monotonic())
    last = m.Chunk("logs/attempt-002/rank-00000.log", 0)
    assert line.sent.index(last) < line.sent.index(m.Stopped(2, "asked"))


def test_an_agent_whose_job_goes_on_in_another_allocation_leaves_with_its_ranks(tmp_path: Path) -> None:
    agent = _agent(tmp_path, {**ENVIRON, "SLURM_NODEID": "999"}, allocated=True)
    ranks, unheard_s = _running(agent, tmp_path), time.monotonic() + FENCE_S + 1.0
    ranks.progress_at = unheard_s
    allocation_claim.claim(JobDir(tmp_path), "8.2")
    agent._tick(unheard_s)
    assert agent._lost_supervisor is not None
    fake_host.wait_for(agent._lost_supervisor._newer_allocation.check, "the name of the other allocation")
    agent._tick(unheard_s)
    assert agent._leaving and ranks.want is RanksGoal.STOP


def test_a_checkpoint_that_is_not_whole_here_is_not_started_from(tmp_path: Path) -> None:
    async def play() -> None:
        agent = _agent(tmp_path)
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "a.pt").write_bytes(b"weights")
        whole = m.ManifestEntry("a.pt", 7, 0, hashlib.sha256(b"weights").hexdigest())
        for attempt, piece in ((2, whole), (3, replace(whole, sha256="0" * 64))):
            agent._obey(replace(PREPARE, attempt=attempt, resume=(piece,)))
            while len(_reports(agent)) < attempt - 1:
                await asyncio.sleep(0.001)
        agent._hasher.close()
        ready, failed = _reports(agent)
        assert ready == m.Prepared(2, "", 0, ())
        assert isinstance(failed, m.PrepareFailed) and "a.pt has another sha256" in failed.reason

    asyncio.run(asyncio.wait_for(play(), 20.0))


def test_ranks_see_the_gpus_that_were_leased_unless_the_user_has_chosen_some(tmp_path: Path) -> None:
    agent = _agent(tmp_path, gpus=("GPU-b", "GPU-a"))
    agent._obey(PREPARE)
    assert agent._preparation.env["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    agent._obey(replace(PREPARE, attempt=3, env={"CUDA_VISIBLE_DEVICES": "7"}))
    assert agent._preparation.env["CUDA_VISIBLE_DEVICES"] == "7"
