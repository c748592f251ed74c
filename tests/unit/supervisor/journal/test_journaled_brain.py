"""The journaled brain: no decision or acknowledgement before it is on disk, also when the disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.supervisor.journal import journal_file
from orchestrator.supervisor.journal.journaled_brain import JournaledBrain
from orchestrator.supervisor.journal.planned import planned
from tests.support import jobs
from tests.support.fake_disk import FakeDisk
from tests.support.saved_files import saved


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> JobDir:
    monkeypatch.setattr(full_disk, "RETRY_S", 0.0)
    return JobDir(tmp_path)


def _begun(job: JobDir) -> JournaledBrain:
    memory = JournaledBrain(job, "machine")
    memory.learn(planned(jobs.plan(), 0.0))
    memory.learn(e.SupervisorStarted(0.0, 1))
    return memory


def _written(job: JobDir) -> list[str]:
    return [type(entry.news).__name__ for entry in journal_file.read(job.journal)]


def test_a_report_is_acknowledged_when_there_is_room_for_it(disk: FakeDisk, job: JobDir) -> None:
    memory = _begun(job)
    disk.room_bytes = 0
    memory.learn_kept([e.AgentDisconnected(1.0, "node-0")], "boot", 7)
    assert not memory.sync() and memory.is_full
    assert memory.has("boot", 7) and memory.acked("boot") == 0
    disk.room_bytes = None
    assert memory.sync() and not memory.is_full
    assert memory.acked("boot") == 7
    assert JournaledBrain(job, "machine").acked("boot") == 7, "and it is still known after a crash"


def test_what_is_received_is_known_of_the_agent_that_sent_it_whoever_it_tells_of(job: JobDir) -> None:
    memory = _begun(job)
    memory.learn_kept([e.AgentDisconnected(1.0, "node-1")], "boot-of-node-1", 3)
    memory.learn_kept([e.SaveChanged(2.0, saved(1))], "boot-of-node-0", 7)
    memory.sync()
    for known in (memory, JournaledBrain(job, "machine")):
        assert (known.acked("boot-of-node-0"), known.acked("boot-of-node-1")) == (7, 3)


def test_steps_alone_do_not_make_the_journal_longer_and_are_known_to_the_next_supervisor(job: JobDir) -> None:
    memory = _begun(job)
    for news in [d.BeginAttempt(0.1, "submitted", 1, None), *jobs.running(1, 1.0)]:
        memory.learn(news)
    for count in range(10):
        for beat in jobs.beats(1, 5.0 + count, count):
            memory.learn(beat)
    lines = _written(job)
    assert lines.count("Heartbeat") == 2, "the first step has its moment"
    memory.learn(jobs.saved(20.0))
    memory.close()
    assert _written(job).count("Heartbeat") == 2
    again = JournaledBrain(job, "machine")
    assert again.facts == memory.facts and again.facts.step == 9
    again.learn(e.SupervisorStarted(21.0, 2))
    again.close()
    job.facts.unlink()
    assert JournaledBrain(job, "machine").facts == again.facts, (
        "the journal tells by itself what was known when it went on"
    )


def test_nothing_is_decided_while_the_disk_is_full(disk: FakeDisk, job: JobDir) -> None:
    memory = JournaledBrain(job, "machine")
    disk.room_bytes = 0
    memory.learn(planned(jobs.plan(), 0.0))
    memory.learn(e.SupervisorStarted(0.0, 1))
    assert memory.decide()[0] == [] == _written(job)
    disk.room_bytes = None
    assert memory.decide()[0] == [], "first somebody may want to know that time has passed"
    assert d.BeginAttempt in [type(decision) for decision in memory.decide()[0]]


def test_what_was_decided_when_the_disk_became_full_is_done_once_it_is_written(
    disk: FakeDisk, job: JobDir
) -> None:
    memory = _begun(job)
    assert memory.sync()
    disk.room_bytes = 10
    assert memory.decide()[0] == []
    assert memory.facts.attempt is not None, "it is decided, and not done"
    assert "BeginAttempt" not in _written(job)
    disk.room_bytes = None
    memory.decide()
    held = memory.decide()[0]
    assert isinstance(held[0], d.BeginAttempt)
    assert _written(job).count("BeginAttempt") == 1
    assert held[0] not in memory.decide()[0]


def test_it_is_said_once_that_the_disk_is_full_and_that_it_is_not(
    disk: FakeDisk, job: JobDir, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = _begun(job)
    disk.room_bytes = 0
    memory.learn(e.AgentDisconnected(1.0, "node-0"))
    assert not any(memory.sync() for _ in range(3))
    assert not memory.waited(0.0)
    disk.room_bytes = None
    assert all(memory.sync() for _ in range(3))
    assert [words in line for words, line in zip(
        ("the disk is full", "there is room"), capsys.readouterr().out.splitlines(), strict=True,
    )] == [True, True]  # fmt: skip
    assert memory.waited(0.0) and not memory.waited(0.0)


def test_a_requeue_that_was_decided_is_known_to_the_next_supervisor_until_there_is_another_allocation(
    job: JobDir,
) -> None:
    memory = _begun(job)
    memory.learn(d.Requeue(1.0, "preempted", 1, {"n3": "its disk is full"}))
    memory.close()
    again = JournaledBrain(job, "machine")
    assert again.requeue is not None and again.requeue.avoid == {"n3": "its disk is full"}
    again.learn(e.AllocationBegan(2.0, "8.1"))
    again.close()
    assert JournaledBrain(job, "machine").requeue is None
