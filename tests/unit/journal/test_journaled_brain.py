"""The journaled brain: no decision or acknowledgement before it is on disk, also when the disk is full."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.status_types import ReportedNumber, Training, Usage
from orchestrator.core.wire.reports import Heartbeat
from orchestrator.journal import journal_file
from orchestrator.journal.journaled_brain import JournaledBrain
from tests.support import jobs
from tests.support.fake_disk import FakeDisk
from tests.support.saved_files import saved

USAGE, TRAINING = Usage(1.5, 1 << 30, 0.9, 1 << 33), Training(ReportedNumber(1.25), None, 0.5, 60.0, 100)


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return JobDir(tmp_path)


def _begun(job: JobDir) -> JournaledBrain:
    memory = JournaledBrain(job, "machine")
    memory.learn(jobs.planned(jobs.plan()))
    memory.learn(e.SupervisorStarted(0.0, 1))
    return memory


def _written(job: JobDir) -> list[str]:
    return [type(journal_file.unwrap_message(entry.news)).__name__ for entry in journal_file.read(job.journal)]


def test_report_is_acknowledged_once_on_disk(job: JobDir) -> None:
    memory = _begun(job)
    memory.learn_reliable([e.AgentDisconnected(1.0, "node-0")], "boot", 7)
    assert memory.has_report("boot", 7) and memory.acked_seq("boot") == 0
    memory.sync()
    assert memory.acked_seq("boot") == 7
    assert JournaledBrain(job, "machine").acked_seq("boot") == 7, "and it is still known after a crash"


def test_acknowledgement_belongs_to_sending_agent(job: JobDir) -> None:
    """A report is acknowledged for the agent that sent it, whichever node it is about."""
    memory = _begun(job)
    memory.learn_reliable([e.AgentDisconnected(1.0, "node-1")], "boot-of-node-1", 3)
    memory.learn_reliable([e.CheckpointChanged(2.0, saved(1))], "boot-of-node-0", 7)
    memory.sync()
    for known in (memory, JournaledBrain(job, "machine")):
        assert (known.acked_seq("boot-of-node-0"), known.acked_seq("boot-of-node-1")) == (7, 3)


def test_steps_do_not_grow_the_journal(
    job: JobDir,
) -> None:
    """Steps and numbers do not make the journal longer and are known to the next supervisor."""
    memory = _begun(job)
    for news in [d.BeginAttempt(0.1, "submitted", 1, None), *jobs.running(1, 1.0)]:
        memory.learn(news)
    for count in range(10):
        told: dict[str, Any] = {"usage": USAGE, "training": TRAINING} if count == 5 else {}
        for beat in jobs.beats(1, 5.0 + count, count):
            assert isinstance(beat, e.FromNode) and isinstance(beat.report, Heartbeat)
            ranks = tuple(replace(rank, **told) for rank in beat.report.ranks)
            memory.learn(replace(beat, report=replace(beat.report, ranks=ranks)))
    lines = _written(job)
    assert lines.count("Heartbeat") == 2, "the first step has its moment"
    memory.learn(jobs.saved(20.0))
    memory.close()
    assert _written(job).count("Heartbeat") == 2
    again = JournaledBrain(job, "machine")
    assert again.facts == memory.facts and again.facts.step == 9
    assert (again.facts.ranks[3].usage, again.facts.ranks[3].training) == (USAGE, TRAINING)
    again.learn(e.SupervisorStarted(21.0, 2))
    again.close()
    job.facts.unlink()
    assert JournaledBrain(job, "machine").facts == again.facts, (
        "the journal tells by itself what was known when it went on"
    )


def test_decisions_on_full_disk_are_returned_once_written(disk: FakeDisk, job: JobDir) -> None:
    memory = _begun(job)
    memory.sync()
    disk.late, disk.room_bytes = True, 0
    seen: list[list[str]] = []
    disk.at_wait = lambda: seen.append(_written(job))
    decisions, _ = memory.decide()
    assert seen and not any("BeginAttempt" in lines for lines in seen)
    assert isinstance(decisions[0], d.BeginAttempt) and _written(job).count("BeginAttempt") == 1
    assert decisions[0] not in memory.decide()[0]


def test_decided_requeue_is_known_until_next_allocation(
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
