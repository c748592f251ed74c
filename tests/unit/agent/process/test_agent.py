"""An agent's own decisions, without processes: the fence, stale orders, and what it says before an attempt is over."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.hang import inspector
from orchestrator.agent.process.agent import Agent
from orchestrator.agent.process.attempt import NodeAttempt
from orchestrator.agent.ranks.processes import NodeRanks, RankProcess, RanksGoal
from orchestrator.core.checkpoints.checkpoint import CheckpointFile, CheckpointState, FileLocation
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.log_index import LogIndex
from orchestrator.core.jobdir.plan import PlannedSlurm
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.settings.rank_settings import EnvLayers
from orchestrator.core.wire import orders, reports
from orchestrator.supervisor import allocation_claim
from tests.support import fake_host
from tests.support.saved_files import SAVED_NS, saved, write
from tests.unit.agent.process.test_lost_supervisor import ENVIRON
from tests.unit.agent.ranks.test_step_counter import written

FENCE_S = 30.0
PREPARE = fake_host.prepare(2)
START = orders.Start(2, "127.0.0.1", 29400)


class Gone(NodeRanks):
    """Ranks that have no process: a stop finds nothing to end."""

    def continue_stop(self, spared: set[int]) -> bool:
        return True


@dataclass
class Open:
    """A line that only remembers what was sent over it."""

    sent: list[object] = field(default_factory=list)

    def send(self, message: object, seq: int, raw: bytes) -> None:
        self.sent.append(message)


def _agent(folder: Path, environ: dict[str, str] | None = None, **config: Any) -> Agent:
    """Make an agent; one that looks for saves needs a loop."""
    folder.mkdir(exist_ok=True)
    usual = {"root": str(folder), "fence_s": FENCE_S, "ships": False}
    return Agent(fake_host.config(**{**usual, **config}), environ or {})


def _running(agent: Agent, folder: Path) -> NodeRanks:
    """Let an agent have the ranks of attempt 2."""
    ranks = Gone(2, JobDir(folder), "node-0")
    ranks.begin()
    agent._attempt, agent._latest_attempt = (
        NodeAttempt(ranks, agent._scanner, agent._link.report, agent._note),
        2,
    )
    return ranks


def _reports(agent: Agent) -> list[reports.ReliableReport]:
    return [report for _, report in agent._link._outbox.pending()]


def test_monitor_learns_of_each_agent_loop_round(tmp_path: Path) -> None:
    rounds: list[int] = []
    agent = Agent(fake_host.config(root=str(tmp_path), ships=False), {}, lambda: rounds.append(1))
    agent._tick(time.monotonic())
    assert rounds == [1]


def test_ranks_stop_after_fence_time_without_contact(
    tmp_path: Path,
) -> None:
    agent = _agent(tmp_path)
    ranks, now_s = _running(agent, tmp_path), time.monotonic()
    agent._tick(now_s + FENCE_S - 1.0)
    agent._link.proved_at = now_s + 20.0
    agent._tick(now_s + FENCE_S + 19.0)
    ranks.progress_at = now_s + 40.0
    agent._tick(now_s + FENCE_S + 39.0)
    assert (ranks.goal, _reports(agent)) == (RanksGoal.RUN, [])
    agent._tick(now_s + FENCE_S + 41.0)
    assert ranks.goal is RanksGoal.STOP and reports.Stopped(2, "ended") in _reports(agent)


def test_agent_runs_alone_until_its_fence_time(tmp_path: Path) -> None:
    agent = _agent(tmp_path)
    ranks, now_s = _running(agent, tmp_path), time.monotonic()
    agent._obey(orders.Fence(2, 2 * FENCE_S, 3 * FENCE_S))
    wants = []
    for after_s in (-1.0, 1.0):
        agent._tick(now_s + 3 * FENCE_S + after_s)
        wants.append(ranks.goal)
    assert wants == [RanksGoal.RUN, RanksGoal.STOP]


def test_stopped_attempt_starts_neither_script_nor_ranks(tmp_path: Path) -> None:
    """Setup lines may end, or the order to start come, after the order to stop."""
    agent = _agent(tmp_path)
    agent._obey(orders.Stop(2, 1.0))
    agent._launch(NodePlan(PREPARE.plan, agent._job, "node-0", 2, PREPARE.nodes), EnvLayers({}, {}, {}))
    agent._preparation.ready = reports.Prepared(2, "", 29400, (), 1)
    agent._obey(START)
    assert agent._ranks is None and _reports(agent) == [reports.Stopped(2, "asked")]


def test_stepping_ranks_are_fenced_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = _agent(tmp_path)
    ranks, now_s = _running(agent, tmp_path), time.monotonic()
    monkeypatch.setattr(Gone, "last_step_ns", lambda _: 1)
    agent._obey(orders.Fence(2, 2 * FENCE_S, 3 * FENCE_S))
    agent._obey(orders.Fence(1, 9 * FENCE_S, 9 * FENCE_S))
    agent._tick(now_s + 2 * FENCE_S + 1.0)
    assert ranks.goal is RanksGoal.STOP


def test_ranks_stepping_long_without_supervisor_are_fenced_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gone, "last_step_ns", lambda _: 1)
    wants = []
    for stepped_s, connected_s, quiet_s in (
        (80.0, 0.0, 1.2),
        (100.0, 0.0, 2.8),
        (100.0, 20.0, 1.2),
        (100.0, 0.0, 3.2),
    ):
        agent = _agent(tmp_path, disconnected_timeout_s=3 * FENCE_S)
        ranks, now_s = _running(agent, tmp_path), time.monotonic()
        ranks.progress_at = now_s + stepped_s
        agent._link.connected_at = now_s + connected_s
        agent._tick(now_s + stepped_s + quiet_s * FENCE_S)
        wants.append(ranks.goal)
    assert wants == [RanksGoal.STOP, RanksGoal.RUN, RanksGoal.STOP, RanksGoal.STOP]


def test_step_proves_the_previous_one(tmp_path: Path) -> None:
    ranks, file = _running(_agent(tmp_path), tmp_path), tmp_path / "steps"
    rank = RankProcess(0, 0, os.getpid(), tmp_path, tmp_path / "log", LogIndex(tmp_path / "index"), written(file, [1]))
    ranks.processes.append(rank)
    proved = []
    for count in (1, 2, 2, 3, 5):
        rank.counter = written(file, list(range(1, count + 1)))
        ranks.heartbeats()
        proved.append((rank.stepped_at, ranks.progress_at))
    (first, at), (second, before), _, (_, last), (both, now) = proved
    assert (at, before, last, now) == (first, first, second, both)


def test_supervisor_machine_has_no_fence(tmp_path: Path) -> None:
    agent = _agent(tmp_path, fence_s=None)
    ranks = _running(agent, tmp_path)
    agent._tick(time.monotonic() + 1e6)
    assert ranks.goal is RanksGoal.RUN


def test_order_of_stale_attempt_is_ignored(tmp_path: Path) -> None:
    agent = _agent(tmp_path)
    agent._obey(orders.Stop(3, 0.0))
    agent._obey(PREPARE)
    assert _reports(agent) == [reports.Stopped(3, "asked")]
    agent._obey(replace(PREPARE, attempt=4))
    assert _reports(agent)[1:] == [reports.Prepared(4, "", 0, ())]


def test_ranks_start_only_in_prepared_attempt(tmp_path: Path) -> None:
    agent = _agent(tmp_path)
    agent._obey(PREPARE)
    agent._obey(replace(START, attempt=3))
    assert _reports(agent) == [reports.Prepared(2, "", 0, ())]


@pytest.mark.slow
def test_read_only_disk_is_awaited_but_program_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(folder: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    agent = _agent(tmp_path)
    JobDir(tmp_path).code.mkdir()
    program = tmp_path / "program"
    program.touch(0o700)
    agent._obey(fake_host.prepare(2, argv=(str(program),)))
    program.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        agent._obey(START)
        agent._tick(time.monotonic())
        assert _reports(agent) == [reports.Prepared(2, "", 0, ())]
    agent._tick(time.monotonic())
    failed = reports.PrepareFailed(2, f"{program} cannot be started: No such file or directory", "")
    assert _reports(agent)[1:] == [failed]


@pytest.mark.parametrize(("saves", "signum"), [(False, signal.SIGTERM), (True, signal.SIGUSR1)])
def test_stop_gives_ranks_the_grace_it_names(tmp_path: Path, saves: bool, signum: int) -> None:
    agent = _agent(tmp_path)
    agent._obey(fake_host.prepare(2, slurm=PlannedSlurm((), "USR1")))
    ranks, now_s = _running(agent, tmp_path), time.monotonic()
    agent._obey(orders.Stop(2, 7.0, saves))
    assert (ranks.goal, ranks.how, ranks.signum) == (RanksGoal.STOP, "asked", signum)
    assert now_s + 7.0 <= ranks.kill_at <= time.monotonic() + 7.0


def test_stack_request_is_answered_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # GPUs are not asked for
    agent = _agent(tmp_path)
    ranks = _running(agent, tmp_path)
    assert agent._attempt is not None
    agent._attempt._inspector = inspector.Inspector(ranks, {})
    agent._obey(orders.Inspect(2, 5))
    agent._tick(time.monotonic())
    assert _reports(agent) == [reports.Inspected(2, 5, ())]


async def _until(agent: Agent, report: reports.ReliableReport) -> list[reports.ReliableReport]:
    """Let an agent go on until it has made a report; return all that it has made."""
    while report not in (answers := _reports(agent)):
        agent._wake.clear()
        agent._tick(time.monotonic())
        if report not in _reports(agent):
            await asyncio.wait_for(agent._wake.wait(), 20.0)
    return answers


def test_last_checkpoint_is_reported_before_attempt_end(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    run = job.rank_run("node-0", 2, 0)
    for folder in (run, job.checkpoints):
        folder.mkdir(parents=True)
    (job.checkpoints / "old.pt").write_bytes(b"of an attempt before")
    (run / "error-4711.json").write_text('{"message": "no access with hf_0123456789abcdef"}')

    async def play() -> list[reports.ReliableReport]:
        agent = _agent(tmp_path, finds_checkpoints=True)
        ranks = _running(agent, tmp_path)
        agent._scanner.begin(2)
        while agent._scanner._begin_future is not None:
            agent._wake.clear()
            agent._scanner.scan(ranks, 0.0)
            if agent._scanner._begin_future is not None:
                await asyncio.wait_for(agent._wake.wait(), 20.0)
        (job.checkpoints / "last.pt").write_bytes(b"weights")
        agent._obey(orders.Stop(2, 0.0))
        answers = await _until(agent, reports.Stopped(2, "asked"))
        agent._scanner.close()
        return answers

    last, *rest = [one for one in asyncio.run(play()) if not isinstance(one, reports.CheckpointHashed)]
    assert isinstance(last, reports.CheckpointSeen) and (last.attempt, last.main) == (2, "last.pt")
    assert rest == [reports.Stopped(2, "asked")]
    assert list(run.iterdir()) == [], "errors were reported masked, and are not masked here"


def test_heartbeat_carries_number_of_scans(tmp_path: Path) -> None:

    async def play() -> list[reports.Heartbeat]:
        agent, line = _agent(tmp_path, finds_checkpoints=True), Open()
        agent._link._line, agent._link._is_caught_up = line, True  # type: ignore[assignment]
        ranks = _running(agent, tmp_path)
        agent._scanner.begin(2)
        while agent._scanner.scan_count < 1:
            agent._wake.clear()
            agent._scanner.scan(ranks, 1e9)
            if agent._scanner.scan_count < 1:
                await asyncio.wait_for(agent._wake.wait(), 20.0)
        agent._beat_due_s = 0.0
        agent._tick(0.0)
        agent._scanner.close()
        return [sent for sent in line.sent if isinstance(sent, reports.Heartbeat)]

    (beat,) = asyncio.run(play())
    assert (beat.attempt, beat.scans, beat.has_unfinished) == (2, 1, False)


def test_last_log_lines_precede_attempt_end(tmp_path: Path) -> None:
    job, line = JobDir(tmp_path), Open()
    for folder in (job.rank_run("node-0", 2, 0), job.attempt_logs(2), job.checkpoints):
        folder.mkdir(parents=True)

    async def play() -> None:
        agent = _agent(tmp_path, ships=True)
        agent._link._line, agent._link._is_caught_up = line, True  # type: ignore[assignment]
        agent._shipper.poll = lambda attempts: None  # type: ignore[method-assign]  # no look comes in between
        _running(agent, tmp_path)
        agent._obey(orders.ResumeOffsets({}))
        job.rank_log(2, 0).write_text("last words\n")
        agent._obey(orders.Stop(2, 0.0))
        await _until(agent, reports.Stopped(2, "asked"))
        agent._scanner.close()

    asyncio.run(play())
    last = reports.Chunk("logs/attempt-002/rank-00000.log", 0)
    assert line.sent.index(last) < line.sent.index(reports.Stopped(2, "asked"))


def test_agent_of_moved_job_exits_with_ranks(tmp_path: Path) -> None:
    agent = _agent(tmp_path, {**ENVIRON, "SLURM_NODEID": "999"}, allocated=True)
    ranks, unheard_s = _running(agent, tmp_path), time.monotonic() + FENCE_S + 1.0
    ranks.progress_at = unheard_s
    allocation_claim.claim(JobDir(tmp_path), "8.2")
    agent._tick(unheard_s)
    assert agent._lost_supervisor is not None
    fake_host.wait_for(agent._lost_supervisor._newer_allocation.check, "the name of the other allocation")
    agent._tick(unheard_s)
    assert agent._leaving and ranks.goal is RanksGoal.STOP


def _prepared(folder: Path, order: orders.PrepareNode) -> reports.ReliableReport:
    """Return what an agent reports of an order to prepare."""

    async def play() -> reports.ReliableReport:
        agent = _agent(folder)
        agent._obey(order)
        while not _reports(agent):
            await asyncio.sleep(0)
        agent._preparation.close()
        agent._scanner.close()
        return _reports(agent)[0]

    return asyncio.run(asyncio.wait_for(play(), 20.0))


def test_only_first_node_of_gang_probes_port(tmp_path: Path) -> None:
    ports = []
    for nodes in (("node-0", "node-1"), ("node-1", "node-0"), ("node-1",)):
        found = _prepared(tmp_path, replace(PREPARE, nodes=nodes))
        assert isinstance(found, reports.Prepared)
        ports.append(found.port > 0)
    assert ports == [True, False, False]


@pytest.mark.parametrize("deep", [True, False])
def test_changed_checkpoint_on_host_is_not_resumed(tmp_path: Path, deep: bool) -> None:
    path = write(tmp_path / "checkpoints/a.pt", b"weights", SAVED_NS)
    piece = CheckpointFile("a.pt", 7, SAVED_NS, hashlib.sha256(b"weights").hexdigest())
    save = saved(1, main="a.pt", files=(piece,), locations=(FileLocation("node-0", str(path.parent)),))
    order = replace(PREPARE, checkpoint=save, deep=deep)
    assert _prepared(tmp_path, order) == reports.Prepared(2, "", 0, ())
    write(path, b"wrights", SAVED_NS)
    found = _prepared(tmp_path, order)
    if deep:
        assert isinstance(found, reports.PrepareFailed)
        assert "not complete on this host: a.pt differs from what was saved (sha256)" in found.reason
        assert not path.exists(), "it is a copy, to be brought here again"
    else:
        assert found == reports.Prepared(2, "", 0, ())
        path.unlink()
    found = _prepared(tmp_path, order)
    assert isinstance(found, reports.PrepareFailed) and "not complete on this host: a.pt is gone" in found.reason


def test_torn_checkpoints_are_moved_before_attempt(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints/step_5/a.pt", b"wei", SAVED_NS)
    torn = saved(
        1, main="step_5", files=(CheckpointFile("step_5/a.pt", 3, SAVED_NS),), why="a.pt is cut off", state=CheckpointState.TORN,
        locations=(FileLocation("node-0", f"{tmp_path}/checkpoints"),),
    )  # fmt: skip
    assert _prepared(tmp_path, replace(PREPARE, torn=(torn,))) == reports.Prepared(2, "", 0, ())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".step_5.torn-attempt-1"]
    log = JobDir(tmp_path).node_log(2, "node-0").read_text()
    assert "step_5 is torn (a.pt is cut off): moved to .step_5.torn-attempt-1" in log


@pytest.mark.parametrize("is_own", [True, False])
def test_newer_own_folder_than_resumed_is_moved(tmp_path: Path, is_own: bool) -> None:
    place = tmp_path / "job/out" if is_own else tmp_path / "shared"
    write(place / "step_5/a.pt", b"weights", SAVED_NS)
    os.utime(place / "step_5", ns=(0, 0))
    (place / "step_6").mkdir()
    pieces = (CheckpointFile("step_5/a.pt", 7, SAVED_NS),)
    save = saved(1, main="step_5", files=pieces, locations=(FileLocation("", str(place)),))
    assert _prepared(tmp_path / "job", replace(PREPARE, checkpoint=save)) == reports.Prepared(2, "", 0, ())
    left = sorted(path.name for path in place.iterdir())
    assert left == ([".step_6.torn-attempt-1", "step_5"] if is_own else ["step_5", "step_6"])


def test_ranks_see_leased_gpus_unless_user_chose_some(tmp_path: Path) -> None:
    agent = _agent(tmp_path, gpus=("GPU-b", "GPU-a"))
    agent._obey(PREPARE)
    assert agent._preparation.layers.given["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    agent._obey(fake_host.prepare(3, env={"CUDA_VISIBLE_DEVICES": "7"}))
    assert agent._preparation.layers.given["CUDA_VISIBLE_DEVICES"] == "7"
