"""The facts file: with the rest of the journal it gives the same record as the whole, and one that does not fit is ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core import observations
from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import reports
from orchestrator.journal import facts_file, journal_file
from orchestrator.journal.job_record import Record
from orchestrator.journal.journal_file import Journal, read_kinds
from orchestrator.journal.journal_integrity import JournalError
from tests.support import jobs
from tests.support.frames import frame

_LOOK = observations.RankInspection(
    0, 7, "S", observations.Activity.WAITING_FOR_RANKS, 3.0, frame("train.py:8 step"), "in all_reduce", "train", ("a:1 f",),
    (observations.Collective("0", "default", (0, 1), 3, "all_reduce", "float32[4]", 2.0, earlier=(observations.EnteredCollective(2, "x", ""),)),),
    ("0",), (observations.CollectiveCounts(3, 0, 3, (9,)),), ("gpu: none",), mixed=("0",),
)  # fmt: skip
TALE: tuple[News, ...] = (
    *jobs.crashed_once(),
    jobs.saved(11.0, number=2, main="last.pt", attempt=2, state=CheckpointState.OPEN),
    e.ResumedElsewhere(11.1, 2, 0, "last.pt", 15),
    jobs.saved(11.1, number=2, main="last.pt", attempt=2, step=15, stated=15),
    e.FromNode(11.2, "node-0", reports.Inspected(2, 1, (_LOOK,))),
    d.Notice(11.3, "slow", 2, d.NoticeTopic.SLOW, "3"),
    d.Notice(11.4, "it moves", 2, d.NoticeTopic.HANG, withdrawn=True),
    *jobs.crash(2, 12.0, 30, 50),
    d.CompareCheckpoint(12.6, "before attempt 3: last.pt", 2, 2, False),
    e.CheckpointCompared(12.7, 2, 2, "last.pt is gone"),
    d.DistrustCheckpoint(12.8, "attempts 1 and 2 ended alike", 2, 2, is_certain=False),
    jobs.end(2, 13.0, d.JobEnd.FAILED, "crash"),
    jobs.submitted(14.0)[0],
    e.SupervisorStarted(14.1, 9),
    e.ResumeRequested(14.2, 1, 1),  # tells of the attempt that is filed by now
    jobs.again(3, 14.3, ResumePoint(jobs.CKPT, 20, 1)),
    *jobs.running(3, 14.4, 2),
)


def _write(job: JobDir, news: tuple[News, ...], kept_after: int) -> Record:
    """Journal the news, write down what it comes to after so many, and return what all of it comes to."""
    record, log = Record(), Journal(job.journal, "machine", 0)
    for number, one in enumerate(news, start=1):
        record.learn(log.write(one, *(() if number % 5 else ("boot", number))))
        if number == kept_after:
            log.sync()
            facts_file.write(job, record, log.safe_bytes)
    log.close()
    return record


@pytest.mark.slow
@pytest.mark.parametrize("kept_after", range(1, len(TALE) + 1))
def test_facts_are_the_same_from_any_snapshot_point(tmp_path: Path, kept_after: int) -> None:
    """Wherever the facts were written down, reading gives the same."""
    job = JobDir(tmp_path)
    record = _write(job, TALE, kept_after)
    assert facts_file._read_facts(job) is not None and facts_file.read(job) == record
    job.facts.unlink()
    assert facts_file.read(job) == record


def test_journal_before_snapshot_is_not_read_again(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    _write(job, TALE, len(TALE) - 3)
    text = job.journal.read_text()
    job.journal.write_text(text.replace("Planned", "Unknown", 1))
    assert len(facts_file.read(job).attempts) == 3
    job.journal.write_text(text[: -len('"}}\n')] + "x\n")
    with pytest.raises(JournalError) as caught:
        facts_file.read(job)
    assert caught.value.where == f"{job.journal}:{len(TALE)}"


def test_impossible_events_are_damage(tmp_path: Path) -> None:
    """Events that cannot have happened are damage."""
    job = JobDir(tmp_path)
    log = Journal(job.journal, "machine", 0)
    for news in TALE[1:]:
        log.write(news)
    log.close()
    with pytest.raises(JournalError, match="its entries contradict each other"):
        facts_file.read(job)


def _cut_journal(job: JobDir) -> None:
    job.journal.write_bytes(b"".join(job.journal.read_bytes().splitlines(keepends=True)[:3]))


def _other_journal(job: JobDir) -> None:
    job.journal.write_text(job.journal.read_text().replace("needed", "wanted"))


def _other_version(job: JobDir) -> None:
    job.facts.write_text(job.facts.read_text().replace('"version":"', '"version":"9.', 1))


def _torn(job: JobDir) -> None:
    job.facts.write_bytes(job.facts.read_bytes()[:-9])


@pytest.mark.parametrize("harm", [_cut_journal, _other_journal, _other_version, _torn])
def test_unsuitable_snapshot_is_ignored(tmp_path: Path, harm: Callable[[JobDir], None]) -> None:
    """A snapshot that does not fit is ignored."""
    job, whole = JobDir(tmp_path), JobDir(tmp_path / "whole")
    whole.root.mkdir()
    _write(job, TALE[:12], 10)
    harm(job)
    whole.journal.write_bytes(job.journal.read_bytes())
    assert facts_file._read_facts(job) is None
    assert facts_file.read(job) == facts_file.read(whole)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 10_000), put=st.binary(max_size=3), gone=st.integers(0, 40))
def test_damaged_snapshot_still_gives_journal_result(
    tmp_path_factory: pytest.TempPathFactory, at: int, put: bytes, gone: int
) -> None:
    """The journal gives the same result, however the snapshot is damaged."""
    job = JobDir(tmp_path_factory.mktemp("job"))
    record = _write(job, TALE[:14], 10)
    data = job.facts.read_bytes()
    at %= len(data)
    job.facts.write_bytes(data[:at] + put + data[at + gone :])
    assert facts_file.read(job) == record


def test_selected_event_kinds_are_found(tmp_path: Path) -> None:
    """A few kinds of events are found among all."""
    job = JobDir(tmp_path)
    assert list(read_kinds(job.journal, d.Launch)) == []
    _write(job, TALE, 1)
    kinds = (d.Launch, reports.Exited)
    assert list(read_kinds(job.journal, *kinds)) == [
        one for one in TALE if isinstance(journal_file.unwrap_message(one), kinds)
    ]
    assert len(list(journal_file.read(job.journal))) == len(TALE)
