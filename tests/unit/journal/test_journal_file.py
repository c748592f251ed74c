"""The journal gives back what was written, and the job clock continues where the last supervisor's stopped."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core import observations
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.wire import reports
from orchestrator.core.wire.reports import RankHeartbeat, SignTimes
from orchestrator.journal.journal_file import ClockStamp, JobClock, Journal, read
from orchestrator.journal.journal_integrity import JournalError
from tests.support.fake_disk import FakeDisk
from tests.support.frames import frame

NEWS: tuple[News, ...] = (
    e.SupervisorStarted(0.0, 1),
    e.FromNode(1.0, "node-0", reports.Prepared(1, "127.0.0.1", 20_000, ())),
    d.BeginAttempt(2.0, "submitted", 1, ResumePoint("/a", None)),
    e.FromNode(
        3.0,
        "node-0",
        reports.Exited(1, 0, None, 9, 5, observations.Failure("E", "m", "t", frame("w:1 f")), False, False),
    ),
    e.FromNode(
        4.0,
        "node-0",
        reports.Heartbeat(1, (RankHeartbeat(0, 5, "S", 10, 0.5, seen=SignTimes(1.0, 2.0, 3.0, 4.0)),)),
    ),
)


def test_entries_are_read_in_order_across_writers(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert list(read(path)) == []
    first = Journal(path, "machine", 0)
    for news in NEWS[:3]:
        first.write(news)
    first.close()
    with path.open("a") as file:
        file.write('{"torn')
    second = Journal(path, "machine", 3)
    second.write(NEWS[3], "boot", 7)
    second.write(NEWS[4])
    second.close()
    entries = list(read(path))
    assert tuple(entry.news for entry in entries) == NEWS
    assert [entry.n for entry in entries] == [1, 2, 3, 4, 5]
    assert [(entry.incarnation, entry.seq) for entry in entries] == [("", 0)] * 3 + [("boot", 7), ("", 0)]
    assert {entry.machine for entry in entries} == {"machine"}


def test_events_wait_for_disk_space_in_order(disk: FakeDisk, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, "machine", 0)
    journal.write(NEWS[0])
    journal.sync()
    disk.room_bytes = 10  # half a line
    seen: list[list[int]] = []
    disk.at_wait = lambda: seen.append([entry.n for entry in read(path)])
    for news in NEWS[1:]:
        journal.write(news)
    journal.close()
    assert seen and all(numbers == [1] for numbers in seen)
    entries = list(read(path))
    assert tuple(entry.news for entry in entries) == NEWS
    assert [entry.n for entry in entries] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [(1, r".*\n", ""), (2, r".*\n", ""), (2, "Prepared", "Unheard"), (2, '"n":2', '"n":"2"'), (2, ".*", "{"),
     (2, '"format":[0-9]+', '"format":1')],
)  # fmt: skip
def test_missing_or_damaged_line_is_named(tmp_path: Path, number: int, before: str, after: str) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, "machine", 0)
    for news in NEWS:
        journal.write(news)
    journal.close()
    lines = path.read_text().splitlines(keepends=True)
    lines[number - 1] = re.sub(before, after, lines[number - 1], count=1)
    path.write_text("".join(lines))
    with pytest.raises(JournalError) as caught:
        list(read(path))
    assert caught.value.where == f"{path}:{number}"
    assert ("version" in caught.value.what) == ("format" in before)


def test_clock_of_new_job_starts_at_zero() -> None:
    assert 0.0 <= JobClock("machine", None).now_s() < 5.0


def test_gap_uses_monotonic_clock_within_boot_else_wall() -> None:
    """Within a boot the monotonic clock bridges the gap, and across boots the wall clock."""
    latest = ClockStamp(100.0, time.time() - 500, time.monotonic() - 50, "machine")
    assert 150.0 <= JobClock("machine", latest).now_s() < 160.0
    assert 600.0 <= JobClock("another boot", latest).now_s() < 610.0


def test_the_clock_never_runs_backwards() -> None:
    future = ClockStamp(100.0, time.time() + 500, time.monotonic() + 500, "machine")
    for machine in ("machine", "another boot"):
        assert 100.0 <= JobClock(machine, future).now_s() < 105.0
