"""An agent whose ranks write checkpoints to memory: what it opens before an attempt, what it reports, and how it leaves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.process import agent as agent_module
from orchestrator.agent.process import departure
from orchestrator.agent.process.agent import Agent
from orchestrator.agent.process.attempt import NodeAttempt
from orchestrator.agent.process.lost_supervisor import NO_CONTACT_S_MAX
from orchestrator.agent.ranks import step_counter
from orchestrator.agent.ranks.hook.layout import STEP_FILE
from orchestrator.agent.ranks.processes import NodeRanks, RankProcess, RanksGoal
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointFile,
    CheckpointState,
    CopyTarget,
    FileLocation,
)
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.log_index import LogIndex
from orchestrator.core.settings import rank_env
from orchestrator.core.wire import orders, reports
from tests.support import fake_host
from tests.support.fake_memory import FakeMemory, fake_memory
from tests.support.saved_files import SAVED_NS, saved, write

PREPARE = fake_host.prepare(2, memory_bytes=1 << 30, memory_dir="/dev/shm", env={"OUT": "{checkpoint_dir}/out"})
WAIT_S_MAX = 20.0


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    made = fake_memory(tmp_path / "job")
    monkeypatch.setattr(agent_module, "CheckpointMemory", lambda *_: made)
    return made


def _agent(memory: FakeMemory, **config: object) -> Agent:
    root = str(memory.on_disk.parent)
    usual: dict[str, Any] = {"root": root, "ships": False, "memory_bytes": 1 << 30, "memory_dir": "/dev/shm"}
    return Agent(fake_host.config(**{**usual, **config}), {})


def _reports(agent: Agent) -> list[reports.ReliableReport]:
    return [report for _, report in agent._link._outbox.pending()]


def _prepared(memory: FakeMemory, order: orders.PrepareNode) -> tuple[reports.ReliableReport, dict[str, str]]:
    """Return what an agent reports of an order to prepare, and the environment of its rank."""

    async def play() -> tuple[reports.ReliableReport, dict[str, str]]:
        agent = _agent(memory)
        agent._obey(order)
        while not _reports(agent):
            await asyncio.sleep(0)
        at = agent._preparation.environment("", Path("evidence")).at
        agent._preparation.close()
        agent._scanner.close()
        return _reports(agent)[0], {**agent._preparation.layers.given, **rank_env.rank_env(at, at.ranks[0], ("h", 1))}

    return asyncio.run(asyncio.wait_for(play(), WAIT_S_MAX))


def _checkpoint(folder: Path, name: str = "step_5/a.pt", **change: object) -> Checkpoint:
    write(folder / name, b"weights", SAVED_NS)
    usual: dict[str, Any] = {
        "main": name.partition("/")[0],
        "files": (CheckpointFile(name, 7, SAVED_NS),),
        "locations": (FileLocation("", str(folder)),),
    }
    return saved(1, **{**usual, **change})


def test_ranks_write_to_memory_and_resume_from_it(memory: FakeMemory) -> None:
    """The supervisor sends where a checkpoint is on disk, or that it is in the node's memory."""
    found = _checkpoint(memory.on_disk)
    for place in (found.locations[0], FileLocation("node-0", "", ("step_5/a.pt",), True)):
        checkpoint = replace(found, locations=(place,))
        order = replace(PREPARE, resume=ResumePoint(checkpoint.path, 5, 1), checkpoint=checkpoint)
        report, env = _prepared(memory, order)
        assert report == reports.Prepared(2, "", 0, ()) and memory.asked == [("open", checkpoint)]
        names = ("ORCH_CHECKPOINT_DIR", "OUT", "ORCH_RESUME_FROM")
        assert [env[name] for name in names] == [str(memory.folder / name) for name in ("", "out", "step_5")]
        memory.asked.clear()


def test_variables_of_setup_follow_memory_to_next_folder(memory: FakeMemory, tmp_path: Path) -> None:
    """Setup lines run once; the folder for checkpoints is another one in the next attempt."""

    async def play() -> list[str]:
        agent, seen, lines = _agent(memory), list[str](), ("module load torch",)
        agent._preparation._setup_env = {lines: {"OUT": f"{memory.folder}/out"}}
        for attempt in (2, 3):
            env = {"OUT": "{checkpoint_dir}/out"}
            agent._obey(fake_host.prepare(attempt, setup=lines, memory_bytes=1, env=env))
            while len(_reports(agent)) < attempt - 1:
                await asyncio.sleep(0)
            at = agent._preparation.environment("", Path("evidence")).at
            seen.append({**agent._preparation.layers.given, **rank_env.rank_env(at, at.ranks[0], ("h", 1))}["OUT"])
            memory.next_folder = tmp_path / "staging", "no memory"
        agent._preparation.close()
        agent._scanner.close()
        assert _reports(agent)[1] == reports.Prepared(3, "", 0, (), memory_fault="no memory")
        return seen

    expected = [f"{memory.folder}/out", f"{tmp_path}/staging/out"]
    assert asyncio.run(asyncio.wait_for(play(), WAIT_S_MAX)) == expected


@pytest.mark.parametrize("folder", ["job/code/out", "elsewhere", "job/checkpoints/.kept/1"])
def test_checkpoint_elsewhere_is_resumed_in_its_place(memory: FakeMemory, tmp_path: Path, folder: str) -> None:
    is_in_code = folder.startswith("job/code")
    found = _checkpoint(tmp_path / folder, **({"key": "./out/step_5"} if is_in_code else {}))
    order = replace(PREPARE, resume=ResumePoint(found.path, 5, 1), checkpoint=found)
    report, env = _prepared(memory, order)
    assert isinstance(report, reports.Prepared) and memory.asked == [("open", None if is_in_code else found)]
    assert env["ORCH_RESUME_FROM"] == found.path and env["ORCH_CHECKPOINT_DIR"] == str(memory.folder)


@pytest.mark.parametrize("is_there", [True, False])
def test_checkpoint_in_memory_is_compared_there(memory: FakeMemory, is_there: bool) -> None:
    """One whose files were not brought here is not at fault; the bytes of one that is here are."""
    digest = "0" * 64
    found = _checkpoint(
        memory.folder if is_there else memory.folder.parent / "other", files=(CheckpointFile("step_5/a.pt", 7, SAVED_NS, digest),),
        locations=(FileLocation("node-1", "/dev/shm/orch-other/checkpoints", (), True),),
    )  # fmt: skip
    order = replace(PREPARE, resume=ResumePoint(found.path, 5, 1), checkpoint=found)
    report, _ = _prepared(memory, replace(order, deep=True))
    assert isinstance(report, reports.PrepareFailed) and report.save == (1 if is_there else 0)
    assert ("sha256" if is_there else "is gone") in report.reason
    if is_there:
        (memory.folder / "step_7").mkdir()
        report, env = _prepared(memory, order)
        assert isinstance(report, reports.Prepared) and env["ORCH_RESUME_FROM"] == str(memory.folder / "step_5")
        assert sorted(path.name for path in memory.folder.iterdir()) == [".step_7.torn-attempt-1", "step_5"]


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_torn_checkpoints_are_moved_before_memory_is_opened(memory: FakeMemory, is_on_disk: bool) -> None:
    """An agent that has left since may have brought it to the disk."""
    place = FileLocation("node-0", str(memory.folder), ("step_6/a.pt",), True)
    torn = _checkpoint(
        memory.on_disk if is_on_disk else memory.folder, "step_6/a.pt", state=CheckpointState.TORN, locations=(place,)
    )
    report, _ = _prepared(memory, replace(PREPARE, torn=(torn,)))
    assert isinstance(report, reports.Prepared)
    moved = [path.name for folder in (memory.folder, memory.on_disk) for path in folder.iterdir()]
    assert moved == [".step_6.torn-attempt-1"]


def test_memory_that_cannot_be_opened_fails_preparation(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise OSError(28, "No space left on device", "/dev/shm/a")

    monkeypatch.setattr(memory, "open", refuse)

    async def play() -> reports.ReliableReport:
        agent = _agent(memory)
        agent._obey(PREPARE)
        while not _reports(agent):
            await asyncio.sleep(0)
        agent._scanner.close()
        return _reports(agent)[0]

    report = asyncio.run(asyncio.wait_for(play(), WAIT_S_MAX))
    assert report == reports.PrepareFailed(
        2, "checkpoints cannot be put into memory: No space left on device: /dev/shm/a", ""
    )


def test_hello_names_addresses_and_whether_memory_is_empty(memory: FakeMemory) -> None:
    hello = _agent(memory)._hello(0)
    assert (hello.memory_addresses, hello.is_memory_empty) == (memory.addresses, True)
    memory.is_empty = False
    assert not _agent(memory)._hello(0).is_memory_empty


def test_copies_are_ordered_and_polled(memory: FakeMemory) -> None:
    agent, order = _agent(memory), orders.CopyCheckpoint(1, (), CopyTarget.DISK)
    agent._obey(order)
    agent._tick(time.monotonic())
    assert memory.asked == [order, "poll"]


@pytest.mark.parametrize(
    ("why", "drains"), [("dismissed", True), ("signal", True), ("over", True), ("elsewhere", False)]
)
def test_leaving_agent_stores_what_is_in_memory(
    memory: FakeMemory, monkeypatch: pytest.MonkeyPatch, why: str, drains: bool
) -> None:
    """A job that runs in another allocation may have newer checkpoints there."""
    agent = _agent(memory)
    match why:
        case "dismissed":
            agent._obey(orders.Dismiss(1))
        case "signal":
            agent._end_by_signal(15)
        case "over":
            agent._job.ended.touch()
            agent._tick(time.monotonic())
        case _:
            agent._leave(0.0)
    assert agent._leaving and agent._departure.is_urgent is not drains
    assert agent._departure.is_ready(()) is not drains and memory.asked.count("drain") == drains
    memory.is_drained = True
    assert agent._departure.is_ready(())
    memory.is_drained = False
    monkeypatch.setattr(departure, "SIGNALLED_S_MAX", -1.0)
    if why == "signal":
        agent._departure._drain_by_s = float("-inf")
        agent._end_by_signal(15)
        assert agent._departure.is_ready(())
    agent._departure.finish()
    assert memory.asked[-2:] == ["poll", "close"]


@pytest.mark.parametrize("ships", [True, False])
def test_abandoned_agent_stores_only_on_disk_of_its_own(memory: FakeMemory, ships: bool) -> None:
    agent = _agent(memory, ships=ships)
    agent._tick(time.monotonic() + 2 * NO_CONTACT_S_MAX)
    assert agent._leaving and agent._departure.is_ready(()) is not ships


@pytest.mark.parametrize(("ended", "ordered", "said"), [(1, False, True), (0, False, False), (1, True, False)])
def test_failed_rank_is_reported_with_full_memory(
    memory: FakeMemory, tmp_path: Path, ended: int, ordered: bool, said: bool
) -> None:
    memory.full = "64.0 of 64.0 GB used"
    agent, job = _agent(memory), JobDir(tmp_path / "job")
    folder = job.rank_run("node-0", 2, 0)
    for made in (folder, job.attempt_logs(2)):
        made.mkdir(parents=True)
    step_counter.create_step_file(folder / STEP_FILE)
    counter = step_counter.StepCounter(folder / STEP_FILE)
    process = RankProcess(0, 0, 7, folder, job.rank_log(2, 0), LogIndex(job.rank_index(2, 0)), counter)
    ranks = NodeRanks(2, job, "node-0", [process], goal=RanksGoal.STOP if ordered else RanksGoal.RUN)
    attempt = NodeAttempt(ranks, agent._scanner, agent._link.report, agent._note)
    attempt.note_exit(7, ended << 8, is_reported=True)
    (report,) = _reports(agent)
    assert isinstance(report, reports.Exited) and report.memory_full == (memory.full if said else "")


def test_without_memory_nothing_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    agent = Agent(fake_host.config(root=str(folder), ships=False), {})
    agent._end_by_signal(15)
    assert agent._memory is None and agent._departure.is_ready(()) and agent._departure.is_urgent
    at = agent._preparation._node_plan(fake_host.prepare(2))
    assert at.checkpoint_dir == "" and at.placeholder_values()["checkpoint_dir"] == str(JobDir(folder).checkpoints)
